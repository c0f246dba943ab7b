"""Causal language models of transformers, run on our own key-value cache and attention.

Shapes: B rows, T tokens, H hidden size, A features of all captured layers side by side, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..errors import FormatError
from .cuda_graphs import current
from .kernels.attention import NAME, attend
from .kernels.document_mask import Documents
from .kv_cache import CacheStep, KVCache, runs_triton
from .served_context import longest_context, rotates

PROBE = "draftforge-probe"

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_FEW_IDS = 16  # whose embeddings torch reads one after another on a GPU
_HARMLESS = {"position_ids", "position_embeddings", "cache_position"}
_FEATURES = {
    "attention_mask": "an attention mask of its own",
    "indices": "sparse attention",
    "position_bias": "position biases",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
}


class Call(NamedTuple):
    """Call of the attention function by one layer."""

    layer: int
    causal: bool
    window: int | None
    extras: tuple[str, ...]  # names of tensors beside query, key and value


class Probe(NamedTuple):
    """Findings of one pass of the decoder stack."""

    calls: list[Call]
    hidden_BTH: Tensor  # after the final norm


def _probe(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    kv_step: CacheStep | None = None,
    calls: list[Call] | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Attention of a probe: `attend`, which also appends the call to `calls`."""
    # Any other tensor is an input that our attention would ignore. A layer without an index does not use our cache.
    tensors = {"attention_mask": attention_mask, **options}
    extras = [name for name, value in tensors.items() if isinstance(value, Tensor) and name not in _HARMLESS]
    causal = getattr(module, "is_causal", True) is not False and options.get("is_causal") is not False
    layer = int(getattr(module, "layer_idx", -1))
    if calls is not None:
        calls.append(Call(layer, causal, sliding_window, tuple(extras)))
    step = kv_step if layer >= 0 else None
    return attend(
        module, query, key, value, None, scaling, sliding_window=sliding_window, softcap=softcap, kv_step=step
    )


AttentionInterface.register(PROBE, _probe)


@torch.no_grad()
def probe(decoder: nn.Module, ids_BT: Tensor, step: CacheStep) -> Probe:
    """Probe a decoder stack by one prefill; the model's attention implementation must be PROBE."""
    calls: list[Call] = []
    positions_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
    output = decoder(input_ids=ids_BT, position_ids=positions_BT, use_cache=False, kv_step=step, calls=calls)
    return Probe(calls, output.last_hidden_state)


def find_decoder(model: PreTrainedModel, config: Any) -> nn.Module:
    """Find the stack of decoder layers. Raises FormatError where it is not one of plain attention layers."""
    for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in _LAYER_TYPES:
            raise FormatError(f"{named(model)}: layer {layer} is {kind}: must be full_attention or sliding_attention")
    decoder, layers = model.get_decoder(), config.num_hidden_layers
    if not isinstance(decoder, nn.Module) or len(getattr(decoder, "layers", ())) != layers:
        raise FormatError(f"{named(model)}: has no decoder with {layers} `layers`; not supported")
    return decoder


def check_layers(model: PreTrainedModel, config: Any, calls: Sequence[Call]) -> None:
    """Check probed layers. Raises FormatError unless each runs plain causal attention, windowed as the config says."""
    # Every layer must call our attention exactly once.
    ran = [call.layer for call in calls]
    for layer in range(config.num_hidden_layers):
        if ran.count(layer) != 1:
            raise FormatError(
                f"{named(model)}: layer {layer} takes our key-value cache {ran.count(layer)} times, must be once; "
                "recurrent, convolutional and cross-attention layers are not supported"
            )
    # No input may be ignored, and no later token seen.
    for call in calls:
        if call.extras:
            what = _FEATURES.get(call.extras[0], f"the attention input {call.extras[0]}")
            raise FormatError(f"{named(model)}: layer {call.layer} uses {what}; not supported")
        if not call.causal:
            raise FormatError(f"{named(model)}: layer {call.layer} attends to later tokens; must be causal")
        _check_window(model, config, call)


def _check_window(model: PreTrainedModel, config: Any, call: Call) -> None:
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    slides = types[call.layer] == "sliding_attention" if types else getattr(config, "use_sliding_window", True)
    if window is not None and slides and call.window is None:
        raise FormatError(
            f"{named(model)}: layer {call.layer} has a sliding window of {window} that it does not tell its attention; "
            "not supported"
        )


def fix_rope(model: PreTrainedModel, decoder: nn.Module, context: int) -> None:
    """Fix rotary frequencies that would follow the longest row of a pass: a cached key is rotated once, for good.

    Long rope (Ding et al. 2024, arXiv 2402.13753) takes its long factors where `context`, the longest sequence that is
    served, exceeds the original one; its short factors otherwise. Dynamic scaling takes the frequencies of the whole
    scaled context. So does vLLM. Raises FormatError where layers have rope types of their own that grow.
    """
    rotary: Any
    for rotary in decoder.modules():
        kind = getattr(rotary, "rope_type", None)
        if isinstance(kind, dict):
            for name, one in kind.items():
                if _grows(one):
                    raise FormatError(f"{named(model)}: rope type {one} of {name} layers; not supported")
        elif _grows(kind):
            # Put back the original frequencies, or those that a length of served texts needs, and stop later changes.
            rotary.inv_freq.copy_(rotary.original_inv_freq)
            original = rotary.config.rope_parameters.get("original_max_position_embeddings")
            length = longest_context(rotary.config.to_dict()) if kind == "dynamic" else None
            if kind == "longrope" and context > original:
                length = original + 1
            if length is not None:
                longer, _ = ROPE_INIT_FUNCTIONS[kind](rotary.config, rotary.inv_freq.device, seq_len=length)
                rotary.inv_freq.copy_(longer)
            rotary.rope_type = "default"


def _grows(rope_type: object) -> bool:
    return rope_type == "longrope" or "dynamic" in str(rope_type)


def named(model: PreTrainedModel) -> str:
    """Name of a model in errors: its folder or hub id where known, and its class."""
    return " ".join(filter(None, (model.name_or_path, type(model).__name__)))


_CHECKED = 8  # tokens that every model is compared on when it is loaded


class States(NamedTuple):
    """States of one forward pass, which heads and drafts read."""

    hidden_BTH: Tensor  # after the final norm: what the head reads
    aux_BTA: Tensor | None  # outputs of the captured layers, concatenated in the order asked for


class CausalModel:
    """Causal LM of transformers without its cache, masks and head: `states`, then `logits` where wanted.

    `context` is the longest sequence that is served; None: the longest that the config allows, scaled as its rotary
    embedding says. Raises FormatError for a model that computes anything else, found by comparing both on a few tokens
    (`check`).
    """

    def __init__(self, model: PreTrainedModel, context: int | None = None, loaded: bool = True) -> None:
        """`loaded` False: the layers have no weights yet; call `check` when they have."""
        # Sizes come from the config; the vocabulary from the head, which may be padded.
        self.model = model
        config = model.config.get_text_config()
        self.config = config
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.hidden_size: int = config.hidden_size
        self.num_layers: int = config.num_hidden_layers
        longest = longest_context(config.to_dict()) or 1 << 30
        if context is not None and context > longest and not rotates(config.to_dict()):
            raise FormatError(
                f"{named(model)}: context {context} exceeds its {longest} positions, which are no rotary ones"
            )
        self.max_positions = context or longest
        # The parts that are run on their own, and what the model does between head and logits.
        self._decoder = find_decoder(model, config)
        self._embedding: nn.Module = model.get_input_embeddings()
        self._head: nn.Module = model.get_output_embeddings()
        self._scale, self._softcap = head_arithmetic(config)
        fix_rope(model, self._decoder, self.max_positions)
        if loaded:
            self.check()

    @property
    def device(self) -> torch.device:
        return self._head.weight.device  # type: ignore[return-value]

    @property
    def dtype(self) -> torch.dtype:
        return self._head.weight.dtype  # type: ignore[return-value]

    @property
    def collective(self) -> bool:
        """Whether passes are collective: all ranks run each one together, and equally many."""
        return False

    @property
    def stack(self) -> nn.Module:
        """The decoder: embeddings, `layers` and the final norm."""
        return self._decoder

    @property
    def embedding_rows(self) -> int:
        """Rows of the embedding table: ids from here on cannot be read."""
        table: Tensor = self._embedding.weight  # type: ignore[assignment]
        return table.shape[0]

    def layer_weights(self, layer: int) -> Mapping[str, Tensor]:
        """Weights of one decoder layer by their names in it."""
        return self._decoder.layers[layer].state_dict()  # type: ignore[index,no-any-return,union-attr]

    def with_stack(self, stack: nn.Module) -> "CausalModel":
        """Copy of the model, its weights shared, with another stack of as many layers. Nothing is checked again."""
        other = CausalModel.__new__(CausalModel)
        other.__dict__.update(self.__dict__, _decoder=stack)
        return other

    def states(
        self,
        ids_BT: Tensor,
        step: CacheStep | None = None,
        aux_layers: Sequence[int] = (),
        documents: Documents | None = None,
    ) -> States:
        """Run the decoder stack. `aux_layers` count as transformers' hidden_states do: i is the output of layer i-1.

        The last one, i = num_layers, is taken before the final norm, as engines do; transformers gives it after.

        Without a step: a causal pass over right-padded rows, or over rows of packed `documents`; what stands at padded
        positions means nothing.
        With a step: the new tokens of cached rows (see cache.py).
        """
        # Positions count from 0 in each row or document; those of cached rows come from the step.
        positions_BT = step.positions_BN if step is not None else None
        if documents is not None:
            positions_BT = documents.positions_BT
        if positions_BT is None:
            positions_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
        # Hooks pick the features up, so that transformers need not keep all hidden states.
        with current(self.device), self._capture(aux_layers) as captured:
            output = self._decoder(
                input_ids=ids_BT, position_ids=positions_BT, use_cache=False, kv_step=step, documents=documents
            )
        aux = torch.cat([captured[layer] for layer in aux_layers], dim=-1) if aux_layers else None
        return States(output.last_hidden_state, aux)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of post-norm hidden states, [..., H] -> [..., V], with the model's scale and soft-cap applied."""
        logits: Tensor = self._head(hidden)
        if self._scale != 1.0:
            logits = logits * self._scale
        if self._softcap is not None:
            logits = self._softcap * torch.tanh(logits / self._softcap)
        return logits

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings of token ids, [...] -> [..., H], for a draft head that has no table of its own.

        That is the bare table, which engines lend to heads: a target that scales what its first layer reads (Gemma by
        sqrt(H), Granite by its multiplier) does so after the table.
        """
        table: Tensor = self._embedding.weight  # type: ignore[assignment]
        size = table.shape[-1]
        if size != self.hidden_size:
            raise FormatError(f"{named(self.model)}: its embeddings have size {size}, must be {self.hidden_size}")
        if 0 < ids.numel() <= _FEW_IDS and runs_triton(ids.device) and not torch.is_grad_enabled():
            from .kernels.pointwise import take_rows

            ids_BN = ids if ids.dim() == 2 else ids.reshape(1, -1)
            return take_rows(table.expand(len(ids_BN), -1, -1), ids_BN).view(*ids.shape, size)
        return F.embedding(ids, table)

    @contextmanager
    def _capture(self, aux_layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        captured: dict[int, Tensor] = {}
        layers = self._decoder.layers
        wrong = [layer for layer in aux_layers if not 1 <= layer <= self.num_layers]
        if wrong:
            raise FormatError(f"captured layer {wrong[0]}: must be between 1 and {self.num_layers}")

        # Layers return a tensor or a tuple that begins with it.
        def keep(layer: int) -> Any:
            def hook(module: nn.Module, args: object, output: Any) -> None:
                captured[layer] = output if isinstance(output, Tensor) else output[0]

            return hook

        handles = [layers[layer - 1].register_forward_hook(keep(layer)) for layer in aux_layers]  # type: ignore[index,union-attr]
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def check(self) -> None:
        """Check the model: our cached passes against transformers' own, on a few tokens spread over the vocabulary.

        Drafts are checked too. A draft under an attention that is not its own would be trained and scored as another
        model than engines serve; verification corrects its output, so that only its acceptance would suffer. Three
        passes over a few tokens are a small part of the time of loading. Raises FormatError where the two differ.
        """
        if self.device.type == "meta":
            self.model.set_attn_implementation(NAME)
            return
        with current(self.device):
            self._compare()

    def _compare(self) -> None:
        # Half of the tokens are a prefill, the other half extend it, so that both ways through the cache are run.
        ids = (11 + 7919 * torch.arange(_CHECKED, device=self.device))[None] % self.vocab_size
        first, second = ids[:, : _CHECKED // 2], ids[:, _CHECKED // 2 :]
        cache = KVCache(1, _CHECKED, self.device)
        slots_R, lengths_R = torch.tensor([[0], [first.shape[1]]], device=self.device)
        # 1) Prefill, noting which layers call our attention and with what.
        self.model.set_attn_implementation(PROBE)
        seen = probe(self._decoder, first, cache.prefill(slots_R, lengths_R))
        check_layers(self.model, self.config, seen.calls)
        # 2) The model as transformers runs it.
        self.model.set_attn_implementation("eager")
        plain = self._plain_logits(ids)
        # 3) The second half on our cache, and both halves compared.
        self.model.set_attn_implementation(NAME)
        rest_BTH = self.states(second, cache.extend(*second.shape)).hidden_BTH
        self._check_cached(self.logits(torch.cat([seen.hidden_BTH, rest_BTH], dim=1)).float(), plain)

    def _plain_logits(self, ids: Tensor) -> Tensor:
        """Logits by transformers. Raises FormatError unless `logits` of the decoder stack's states equals them."""
        hidden: list[Tensor] = []
        handle = self._decoder.register_forward_hook(lambda *call: hidden.append(call[-1].last_hidden_state))
        try:
            theirs: Tensor = self.model(input_ids=ids, use_cache=False).logits.float()
        finally:
            handle.remove()
        # Damaged weights would otherwise show as a difference.
        if not bool(theirs.isfinite().all()):
            raise FormatError(f"{named(self.model)}: its logits are not finite; the weights are damaged")
        if not torch.allclose(self.logits(hidden[0]).float(), theirs, atol=1e-2 * float(theirs.abs().max()) + 1e-3):
            raise FormatError(f"{named(self.model)}: its logits are not head(final norm(x)); not supported")
        return theirs

    def _check_cached(self, ours: Tensor, plain: Tensor) -> None:
        """Check cached logits. Raises FormatError unless a cached pass in two pieces gives transformers' own in one."""
        error = ours - plain
        limit = 0.01 if self.dtype == torch.float32 else 0.3  # in half precision a rounding can change an expert
        if not float(error.norm()) <= limit * float(plain.norm()) + 1e-3:
            share = float(error.norm() / plain.norm())
            raise FormatError(
                f"{named(self.model)}: with our key-value cache its logits are off by {share:.0%}, must be below "
                f"{limit:.0%}; not supported"
            )


def head_arithmetic(config: Any) -> tuple[float, float | None]:
    """Scale and soft-cap of the logits by config (Cohere multiplies, Granite divides, Gemma 2 caps)."""
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return scale, getattr(config, "final_logit_softcapping", None)
