"""`small`: an independent causal LM. Where the recipe allows, the stored signals teach and no target is loaded."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from ...data.batches import Batch, moved
from ...data.conversation import Split
from ...data.store import Capture
from ...data.teacher_logprobs import Signals
from ...errors import InputError
from ...specdec.drafts.small import SmallDraft
from ...specdec.loading import checked_config, load_model, load_tokenizer
from ...specdec.targets import Target, snapshot, tokenizer_digest
from ...storage import expanded
from ..losses.expected_length import chains_of_runs
from ..losses.linear_head import Head, LossSettings, Rows, head_of
from ..losses.objectives import StoredDistribution, stored_entries
from ..settings import SmallSettings
from .base import Family, Inputs, LoadTarget, Start, check_same_tokenizer
from .initial_weights import (
    add_lora,
    check_layers,
    checkpoint_activations,
    evenly_spaced_layers,
    layers_prefix,
    merged_weights,
    prune,
    prune_config,
    without_weights,
)
from .on_policy import OwnAnswers
from .target_features import FeatureSource, LiveTeacher, check_live


@dataclass(frozen=True)
class StoredTeacher:
    """Stored teacher: the signals that the capture stored, at temperature 1."""

    signals: Signals
    live = False

    def at(self, rows: slice, temperatures: Sequence[float]) -> StoredDistribution:
        """Top k and tail draws of the positions `rows`. Raises ValueError for temperatures other than 1."""
        if tuple(temperatures) != (1.0,):
            raise ValueError(f"{temperatures=}: stored signals are of temperature 1")
        return StoredDistribution(*stored_entries(Signals(*(tensor[rows] for tensor in self.signals))))


class SmallFamily(Family[SmallSettings, SmallDraft]):
    """Small family: a causal LM that predicts the next token at every supervised position."""

    name = "small"
    draft_class = SmallDraft

    def __init__(self, draft: SmallDraft, settings: SmallSettings, loss: LossSettings, target: Target | None) -> None:
        super().__init__(draft, settings, loss, target)
        # The teacher: stored signals, or the target where it is loaded.
        self._lora, self._target, self._draft_tokens = settings.lora, target, settings.draft_tokens
        self.needs_signals = target is None
        if target is not None:
            # Nothing is cached: a sample's answer may be another one each time.
            self._features = FeatureSource(target, None, 0, loss.logits_bytes, loss.dtype, summarised=False)

        # On-policy: the draft answers some prompts itself.
        self._own_answers: OwnAnswers | None = None
        if settings.on_policy is not None:
            assert target is not None
            self._own_answers = OwnAnswers(draft, target.stop_ids, settings.on_policy, settings.row_tokens)

        draft.model.eval()
        self.freeze(draft, settings)
        if settings.activation_checkpointing:
            checkpoint_activations(draft.model)

    @classmethod
    def start(cls, settings: SmallSettings, seed: int, capture: Capture, load_target: LoadTarget) -> Start:
        """Fresh draft: the target with fewer layers, or another model with the target's tokenizer."""
        # Another model, whose context must hold the captured samples.
        if settings.from_model is not None:
            model, tokenizer = _other_model(settings, settings.from_model, capture)
            draft = SmallDraft(model)
            cls.check_capture(draft, capture, f"draft.from_model: {settings.from_model}")
            return Start(draft, {"from_model": settings.from_model}, tokenizer)

        # The target, pruned.
        target = load_target()
        capture.check_target(target)
        layers = _kept_layers(settings, target.num_layers)
        return Start(SmallDraft(prune(target, layers)), {"layers": layers}, target.tokenizer)

    @classmethod
    def needs_target(cls, settings: SmallSettings) -> bool:
        """Whether the recipe has an objective that stored signals do not hold, or answers of the draft's own."""
        return settings.needs_whole_distribution or settings.on_policy is not None

    @classmethod
    def incompatibility(cls, settings: SmallSettings, draft: SmallDraft, source: str) -> str | None:
        """Compare the number of layers."""
        wanted, found = settings.layers, draft.lm.num_layers
        if wanted is not None and (wanted if isinstance(wanted, int) else len(wanted)) != found:
            return f"layers = {wanted}: {source} has {found} layers"
        return None

    @classmethod
    def check(cls, settings: SmallSettings, load_target: LoadTarget) -> SmallDraft:
        """Check that the target has the layers that are kept, or that the other model has its tokenizer; and that the
        draft has the adapted modules."""
        target = load_target()
        if settings.from_model is not None:
            _other_tokenizer(settings, settings.from_model, target)
            folder, code = _folder(settings, settings.from_model), settings.trust_remote_code
            config = checked_config(folder, f"draft.from_model: {settings.from_model}", code)
        else:
            layers_prefix(target.model, target.num_layers)
            config = prune_config(target.config, _kept_layers(settings, target.num_layers))
        return SmallDraft(without_weights(config, torch.float32, settings.trust_remote_code))

    @classmethod
    def freeze(cls, draft: SmallDraft, settings: SmallSettings) -> None:
        """Train all weights, or adapters alone, which are put in here."""
        draft.requires_grad_(True)
        if settings.lora is not None:
            add_lora(draft.model, settings.lora, "draft.lora")

    @classmethod
    def check_capture(cls, draft: SmallDraft, capture: Capture, where: str) -> None:
        """Check that the draft's context holds every captured prompt with its answer."""
        samples = [sample for split in get_args(Split) for sample in capture.samples(split)]
        longest = max((len(sample.prompt_ids) + len(sample.answer_ids) for sample in samples), default=0)
        if draft.lm.max_positions < longest:
            raise InputError(
                f"{where}: its context of {draft.lm.max_positions} tokens (max_position_embeddings) must hold the "
                f"longest captured prompt and answer, {longest} tokens"
            )

    @torch.no_grad()
    def inputs(self, batch: Batch, samples: Sequence[int]) -> Inputs:
        """Batch with the draft's own answers, and the target's features of it; without a target, the batch alone."""
        if self._target is None:
            return Inputs(batch)
        if self._own_answers is not None:
            batch = self._own_answers(batch, samples, self.step)
        return Inputs(batch, None, self._features(batch, samples))

    def rows(self, inputs: Inputs) -> Rows:
        """Rows: hidden states of the supervised positions only, so that the head never sees a prompt."""
        # One row a supervised position.
        batch = inputs.batch
        hidden_BTH = self.draft(batch.ids_BT, batch.documents)
        states_NH = hidden_BTH.flatten(0, 1)[batch.positions_N]

        # Stored signals; a rank may have an empty batch, without any.
        if self._target is None:
            signals = batch.signals if batch.signals is not None else _no_signals(states_NH.device)
            return Rows(states_NH[None], None, StoredTeacher(signals))

        # The loaded target. Chains are runs of neighbours, as each row is on the true prefix.
        assert inputs.features is not None
        teacher = LiveTeacher(head_of(self._target), inputs.features, None)
        chains_KN = moved(chains_of_runs(batch.offsets, self._draft_tokens), states_NH.device)
        return Rows(states_NH[None], None, teacher, chains_KM=chains_KN)

    def head(self) -> Head:
        """Head of the draft model, with its scale and soft-cap."""
        return head_of(self.draft.lm)

    def check_teacher(self, batch: Batch) -> None:
        """Compare a live head with the stored top-k. Raises StaleInputError where they differ."""
        assert self._target is not None
        check_live(self._target, batch)

    def export(self) -> SmallDraft:
        """The draft itself, or a copy with the adapters merged: training goes on unrounded."""
        return self.draft if self._lora is None else merge_adapters(self.draft)


def _kept_layers(settings: SmallSettings, total: int) -> list[int]:
    if isinstance(settings.layers, int):
        return evenly_spaced_layers(settings.layers, total)
    assert settings.layers is not None
    check_layers(settings.layers, total)
    return settings.layers


def _folder(settings: SmallSettings, name: str) -> Path:
    """Folder of another model: a local one, or the hub's files of it."""
    path = expanded(name)
    return path if path.is_dir() else snapshot(name, settings.revision, "draft.from_model")


def _other_tokenizer(settings: SmallSettings, name: str, fits: Target | Capture) -> PreTrainedTokenizerBase:
    """Tokenizer of another model, which must be the target's."""
    folder, code = _folder(settings, name), settings.trust_remote_code
    tokenizer = load_tokenizer(folder, f"draft.from_model: {name}", trust_remote_code=code)
    check_same_tokenizer("draft.from_model", name, tokenizer_digest(tokenizer), fits)
    return tokenizer


def _other_model(
    settings: SmallSettings, name: str, capture: Capture
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    # The tokenizer is checked before the weights are loaded.
    tokenizer = _other_tokenizer(settings, name, capture)
    options: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code, "use_safetensors": True}
    model = load_model(_folder(settings, name), f"draft.from_model: {name}", dtype=torch.float32, **options)
    if model.get_output_embeddings().weight.shape[0] != capture.vocab_size:
        model.resize_token_embeddings(capture.vocab_size)  # rows past the tokenizer's last id are padding
    return model, tokenizer


@torch.no_grad()
def merge_adapters(draft: SmallDraft) -> SmallDraft:
    """A copy of a draft with its LoRA adapters merged into plain weights."""
    # A model of the same configuration without adapters, filled with the merged weights.
    weights = merged_weights(draft.model)
    config = copy.deepcopy(draft.model.config)
    plain = AutoModelForCausalLM.from_config(config, dtype=next(iter(weights.values())).dtype)
    plain.load_state_dict(weights)
    plain.tie_weights()
    plain.generation_config = copy.deepcopy(draft.model.generation_config)
    return SmallDraft(plain.to(draft.lm.device).eval())


def _no_signals(device: torch.device) -> Signals:
    empty, ids = torch.zeros(0, 1, device=device), torch.zeros(0, 1, dtype=torch.int32, device=device)
    return Signals(empty[:, 0], ids, empty, empty[:, 0], ids, empty)
