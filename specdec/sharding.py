"""Sharding of a model larger than one device: decoder layers are spread over the ranks of a training.

Every rank keeps 1/N of each weight, rows of its first dimension. They are gathered just before a layer runs, while the
layer before it computes, and dropped after it. That is ZeRO-3 (Rajbhandari et al. 2020, arXiv 1910.02054) for a model
that is only read, by torch's `fully_shard`. Embeddings, final norm and head stay whole on each rank: heads and teachers
read them.

Nothing is ever whole in one place: parameters are made without memory, and each rank reads its own rows from the files.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from ..errors import FormatError, InputError
from .loading import refused
from .model_folder import check_size, weight_paths

_BASE = "model."  # files of a bare decoder name its tensors without it
_ELSEWHERE = (
    "target.shard = true: its layers run in a training alone, on all of its ranks together; capture with "
    "capture.backend vllm and signals engine, or give capture.answers; score where the target is whole, without shard"
)


class Weights(Protocol):
    """Source of a model's tensors."""

    def rows(self, name: str, shape: torch.Size, rows: slice) -> Tensor:
        """Read some rows of a tensor of this shape (all of one without dimensions), on any device, in any type."""


class FileWeights:
    """Weights of a folder's safetensors. Of a tensor only the rows that are asked for are read."""

    def __init__(self, folder: Path, where: str) -> None:
        """`where` begins the line of an error."""
        self._where = where
        self._files: dict[str, Any] = {}
        for path in weight_paths(folder, where):
            with refused(where):
                file: Any = safe_open(path, framework="pt")
                self._files |= dict.fromkeys(file.keys(), file)

    def rows(self, name: str, shape: torch.Size, rows: slice) -> Tensor:
        """Read rows of a tensor. Raises FormatError where the files have none of this name and shape."""
        # Files of a bare decoder lack the prefix, and a bare decoder's names may lack what the files have.
        known = next((one for one in (name, name.removeprefix(_BASE), _BASE + name) if one in self._files), None)
        if known is None:
            raise FormatError(
                f"{self._where}: target.shard = true: its files have no tensor {name}; a model whose tensors are "
                "rewritten as it is loaded, such as a mixture of experts, cannot be sharded"
            )
        # The shape must be the model's, as a wrong slice would go unnoticed. Scalars have no rows to slice.
        with refused(self._where):
            tensor = self._files[known].get_slice(known)
            found = tuple(tensor.get_shape())
            if found != tuple(shape):
                raise FormatError(f"{self._where}: {known}: shape {found}, must be {tuple(shape)} as config.json says")
            read: Tensor = tensor[rows] if shape else self._files[known].get_tensor(known)
            return read


def skeleton(config: Any, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    """Make a model without memory for its parameters; buffers that it computes (rotary frequencies) are there."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
    model.tie_weights()
    return model.requires_grad_(False).eval()


def load_skeleton(folder: Path, where: str, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    """Load the skeleton of a model folder. Raises InputError for quantised weights, FormatError for other failures."""
    with refused(where):
        check_size(folder, where, **options)
        config = AutoConfig.from_pretrained(folder, **options)
        if getattr(config, "quantization_config", None) is not None:
            raise InputError(f"{where}: is quantised; target.shard = true needs plain weights")
        model = skeleton(config, dtype, **options)
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def fill_unsharded(model: PreTrainedModel, layers: nn.Module, weights: Weights, device: torch.device) -> None:
    """Give memory to all but the layers' parameters: embeddings, final norm, head, and every buffer."""
    # Parameters outside the layers are read whole.
    inside = {id(parameter) for parameter in layers.parameters()}
    for name, parameter in list(model.named_parameters()):
        if id(parameter) not in inside:
            owner, leaf = _owner(model, name)
            tensor = weights.rows(name, parameter.shape, slice(None)).to(device, parameter.dtype)
            setattr(owner, leaf, nn.Parameter(tensor, requires_grad=False))
    # Filling replaced the parameters, so a tied head is tied again.
    model.tie_weights()
    # Saved buffers come from the files; others were computed when the model was made.
    saved = model.state_dict().keys()
    for name, buffer in list(model.named_buffers()):
        owner, leaf = _owner(model, name)
        tensor = weights.rows(name, buffer.shape, slice(None)) if name in saved else buffer
        owner._buffers[leaf] = tensor.to(device, buffer.dtype)


def shard_layers(model: PreTrainedModel, decoder: Any, weights: Weights, device: torch.device) -> None:
    """Give each rank its share of every layer; the decoder gathers them as it runs. All ranks call this together.

    A lone process, which has no process group, holds all of each layer.
    """
    # Layers are cut first, while they have no memory, so that no rank ever holds a whole one.
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if world > 1 else 0
    if world > 1:
        _fully_shard(decoder, device, world)
    prefix = prefix_of(model, decoder)
    # Memory for this rank's rows of each parameter, read from the files; buffers are whole on every rank.
    # `to_empty` drops what buffers held, so they are put back.
    for number, layer in enumerate(decoder.layers):
        buffers = {name: buffer.clone() for name, buffer in layer.named_buffers()}
        layer.to_empty(device=device)
        for name, buffer in layer.named_buffers():
            buffer.copy_(buffers[name])
        for name, parameter in layer.named_parameters():
            mine = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            first = rank * -(-parameter.shape[0] // world)  # as fully_shard cuts: even chunks, the last ones shorter
            if len(mine):
                mine.copy_(weights.rows(f"{prefix}{number}.{name}", parameter.shape, slice(first, first + len(mine))))


def _fully_shard(decoder: Any, device: torch.device, world: int) -> None:
    """Shard the layers by torch's `fully_shard`: each is gathered as a whole, while the one before it computes."""
    mesh = init_device_mesh(device.type, (world,))
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh)
    # Embeddings and final norm are not sharded.
    inside = {id(parameter) for parameter in decoder.layers.parameters()}
    ends = {parameter for parameter in decoder.parameters() if id(parameter) not in inside}
    fully_shard(decoder, mesh=mesh, ignored_params=ends)  # the root: one set of streams for all layers
    # Gather the next layer while this one computes.
    for layer, after in zip(decoder.layers, decoder.layers[1:]):
        layer.set_modules_to_forward_prefetch([after])


@contextmanager
def unsharded(layer: nn.Module) -> Iterator[None]:
    """Inside, the layer's weights are whole. All ranks enter together."""
    if not isinstance(layer, FSDPModule):
        yield
        return
    layer.unshard()
    try:
        yield
    finally:
        layer.reshard()


def layer_weights(model: PreTrainedModel, decoder: Any, weights: Weights, number: int) -> Mapping[str, Tensor]:
    """Weights of one whole layer by their names in it, read anew from the files on this rank; in the model's type."""
    layer, start = decoder.layers[number], f"{prefix_of(model, decoder)}{number}."
    names = layer.state_dict().keys()
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    return {
        name: weights.rows(start + name, tensor.shape, slice(None)).to(tensor.dtype)
        for name, tensor in tensors
        if name in names
    }


def prefix_of(model: PreTrainedModel, decoder: nn.Module) -> str:
    """Prefix of the names of the layers' tensors, such as `model.layers.`."""
    return next(f"{name}.layers." for name, module in model.named_modules() if module is decoder)


def refuse_pass(*call: object) -> NoReturn:
    """Forward pre-hook of a decoder that must not run: raises InputError."""
    raise InputError(_ELSEWHERE)


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    owner, _, leaf = name.rpartition(".")
    return model.get_submodule(owner), leaf
