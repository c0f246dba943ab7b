"""A causal language model of transformers, run on our own key-value cache.

Shapes: B rows, T tokens, H hidden size, A features of all captured layers side by side, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import FormatError
from .architecture import PROBE, check_layers, find_decoder, fix_rope, named, probe
from .attention import NAME
from .cache import KVCache, Step
from .documents import Documents
from .passes import current

_CHECKED = 8  # tokens that every model is compared on when it is loaded


class States(NamedTuple):
    """What one forward pass leaves behind."""

    hidden_BTH: Tensor  # after the final norm: what the head reads
    aux_BTA: Tensor | None  # outputs of the captured layers, concatenated in the order asked for


class CausalModel:
    """A transformers causal LM without its cache, masks and head: `states`, then `logits` where wanted.

    `context` is the longest sequence that is served; None: the longest that the config allows. Raises FormatError for
    a model that does more than we know of, found by comparing both on a few tokens (see architecture.py).
    """

    def __init__(self, model: PreTrainedModel, context: int | None = None, there: bool = True) -> None:
        """`there` False: the layers have no memory yet; `check` is to be called when they have."""
        self.model = model
        config = model.config.get_text_config()
        self.config = config
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.hidden_size: int = config.hidden_size
        self.num_layers: int = config.num_hidden_layers
        longest: int = getattr(config, "max_position_embeddings", 1 << 30)
        self.max_positions = longest if context is None else min(context, longest)
        self._decoder = find_decoder(model, config)
        self._embedding: nn.Module = model.get_input_embeddings()
        self._head: nn.Module = model.get_output_embeddings()
        self._scale, self._softcap = head_arithmetic(config)
        fix_rope(model, self._decoder, self.max_positions)
        if there:
            self.check()

    @property
    def device(self) -> torch.device:
        return self._head.weight.device  # type: ignore[return-value]

    @property
    def dtype(self) -> torch.dtype:
        return self._head.weight.dtype  # type: ignore[return-value]

    @property
    def collective(self) -> bool:
        """Whether a pass is one of all ranks together, which must run equally many."""
        return False

    @property
    def stack(self) -> nn.Module:
        """The decoder: embeddings, `layers` and the final norm."""
        return self._decoder

    def layer_weights(self, layer: int) -> Mapping[str, Tensor]:
        """All weights of one decoder layer by their names in it."""
        return self._decoder.layers[layer].state_dict()  # type: ignore[index,no-any-return,union-attr]

    def with_stack(self, stack: nn.Module) -> "CausalModel":
        """The same model, its weights shared, with another stack of as many layers. Nothing is checked again."""
        other = CausalModel.__new__(CausalModel)
        other.__dict__.update(self.__dict__, _decoder=stack)
        return other

    def states(
        self,
        ids_BT: Tensor,
        step: Step | None = None,
        aux_layers: Sequence[int] = (),
        documents: Documents | None = None,
    ) -> States:
        """Run the decoder stack. `aux_layers` count as transformers' hidden_states do: i is the output of layer i-1.

        The last one, i = num_layers, is taken before the final norm, as engines do; transformers gives it after.

        Without a step: a causal pass over right-padded rows, or over rows of packed `documents`; what stands at padded
        positions means nothing.
        With a step: the new tokens of cached rows (see cache.py).
        """
        positions_BT = step.positions_BN if step is not None else None
        if documents is not None:
            positions_BT = documents.positions_BT
        if positions_BT is None:
            positions_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
        with current(self.device), self._capture(aux_layers) as captured:
            output = self._decoder(
                input_ids=ids_BT, position_ids=positions_BT, use_cache=False, kv_step=step, documents=documents
            )
        aux = torch.cat([captured[layer] for layer in aux_layers], dim=-1) if aux_layers else None
        return States(output.last_hidden_state, aux)

    def logits(self, hidden: Tensor) -> Tensor:
        """The model's own logits of post-norm hidden states [..., H] -> [..., V], scale and soft-cap applied."""
        logits: Tensor = self._head(hidden)
        if self._scale != 1.0:
            logits = logits * self._scale
        if self._softcap is not None:
            logits = self._softcap * torch.tanh(logits / self._softcap)
        return logits

    def embed(self, ids: Tensor) -> Tensor:
        """Rows of the embedding table for token ids, [...] -> [..., H]: what a head reads that has none of its own.

        That is the bare table, which engines lend to heads: a target that scales what its first layer reads (Gemma by
        sqrt(H), Granite by its multiplier) does so after the table.
        """
        table: Tensor = self._embedding.weight  # type: ignore[assignment]
        size = table.shape[-1]
        if size != self.hidden_size:
            raise FormatError(f"{named(self.model)}: its embeddings have size {size}, must be {self.hidden_size}")
        return F.embedding(ids, table)

    @contextmanager
    def _capture(self, aux_layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        captured: dict[int, Tensor] = {}
        layers = self._decoder.layers
        wrong = [layer for layer in aux_layers if not 1 <= layer <= self.num_layers]
        if wrong:
            raise FormatError(f"captured layer {wrong[0]}: must be between 1 and {self.num_layers}")

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
        """Compare ourselves with transformers on a few tokens spread over the vocabulary.

        Drafts too: run by an attention that is not its own, a draft would be trained and scored as another model than
        the one that engines serve, and as verification mends what it says, nothing but its acceptance would suffer.
        Three passes over a few tokens are a small part of what loading takes.
        """
        if self.device.type == "meta":
            self.model.set_attn_implementation(NAME)
            return
        with current(self.device):
            self._compare()

    def _compare(self) -> None:
        ids = (11 + 7919 * torch.arange(_CHECKED, device=self.device))[None] % self.vocab_size
        first, second = ids[:, : _CHECKED // 2], ids[:, _CHECKED // 2 :]
        cache = KVCache(1, _CHECKED, self.device)
        slots_R, lengths_R = torch.tensor([[0], [first.shape[1]]], device=self.device)
        self.model.set_attn_implementation(PROBE)
        seen = probe(self._decoder, first, cache.prefill(slots_R, lengths_R))
        check_layers(self.model, self.config, seen.calls)
        self.model.set_attn_implementation("eager")
        plain = self._plain_logits(ids)
        self.model.set_attn_implementation(NAME)
        rest_BTH = self.states(second, cache.extend(*second.shape)).hidden_BTH
        self._check_cached(self.logits(torch.cat([seen.hidden_BTH, rest_BTH], dim=1)).float(), plain)

    def _plain_logits(self, ids: Tensor) -> Tensor:
        """The model's own, which must be `logits` of what its decoder stack gives."""
        hidden: list[Tensor] = []
        handle = self._decoder.register_forward_hook(lambda *call: hidden.append(call[-1].last_hidden_state))
        try:
            theirs: Tensor = self.model(input_ids=ids, use_cache=False).logits.float()
        finally:
            handle.remove()
        if not bool(theirs.isfinite().all()):
            raise FormatError(f"{named(self.model)}: its logits are not finite; the weights are damaged")
        if not torch.allclose(self.logits(hidden[0]).float(), theirs, atol=1e-2 * float(theirs.abs().max()) + 1e-3):
            raise FormatError(f"{named(self.model)}: its logits are not head(final norm(x)); not supported")
        return theirs

    def _check_cached(self, ours: Tensor, plain: Tensor) -> None:
        """A cached pass in two pieces must give what transformers' own attention gives in one."""
        error = ours - plain
        limit = 0.01 if self.dtype == torch.float32 else 0.3  # in half precision a rounding can change an expert
        if not float(error.norm()) <= limit * float(plain.norm()) + 1e-3:
            share = float(error.norm() / plain.norm())
            raise FormatError(
                f"{named(self.model)}: with our key-value cache its logits are off by {share:.0%}, must be below "
                f"{limit:.0%}; not supported"
            )


def head_arithmetic(config: Any) -> tuple[float, float | None]:
    """Scale and soft-cap of the logits (Cohere multiplies, Granite divides, Gemma 2 caps)."""
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return scale, getattr(config, "final_logit_softcapping", None)
