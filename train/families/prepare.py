"""The initial draft, made once before step 0: the only place where `small` may need the target's weights.

It is stored as a draft folder, `init/`. Once it is there, training `small` needs no target.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ... import __version__, fingerprint
from ...data.store import Capture
from ...errors import InputError, MissingFileError, TokenizerMismatchError
from ...specdec.drafts.eagle3 import Eagle3Config, Eagle3Draft
from ...specdec.drafts.small import SmallDraft
from ...specdec.formats.checkpoint import META_FILE, DraftMeta, load_draft, read_meta, save_draft
from ...specdec.loading import load_model, load_tokenizer
from ...specdec.models import CausalModel
from ...specdec.targets import Target, tokenizer_digest
from .. import vocabulary
from ..settings import Eagle3Settings, Settings, SmallSettings
from .fit import aux_layers_of, check_context, layers_of, misfit
from .prune import prune
from .rope import rope_fields

LoadTarget = Callable[[], Target]
INIT = "init"


def prepare(settings: Settings, seed: int, capture: Capture, folder: Path, load_target: LoadTarget) -> Path:
    """Store the initial draft in `folder/init` unless it is there already; returns that folder."""
    init = folder / INIT
    if (init / META_FILE).is_file():
        return init
    if settings.init_from is not None:
        _warm(settings, settings.init_from, capture, init)
    elif isinstance(settings, SmallSettings):
        _small(settings, capture, init, load_target)
    else:
        _eagle3(settings, seed, capture, init, load_target())
    return init


def _meta(settings: Settings, capture: Capture, extra: dict[str, Any]) -> DraftMeta:
    return DraftMeta(
        family=settings.family,
        target_fingerprint=capture.target_fingerprint,
        tokenizer_digest=capture.tokenizer_digest,
        step=0,
        draft_tokens=settings.draft_tokens,
        draftforge_version=__version__,
        extra=extra,
    )


def _small(settings: SmallSettings, capture: Capture, init: Path, load_target: LoadTarget) -> None:
    if settings.from_model is None:
        target = load_target()
        capture.check_target(target)
        layers = layers_of(settings, target.num_layers)
        model, tokenizer = prune(target.model, layers), target.tokenizer
        extra: dict[str, Any] = {"layers": layers}
    else:
        options: dict[str, Any] = {"revision": settings.revision, "trust_remote_code": settings.trust_remote_code}
        where = f"draft.from_model: {settings.from_model}"
        if settings.from_model.startswith(("/", ".", "~")) and not Path(settings.from_model).expanduser().is_dir():
            raise MissingFileError(f"{where}: no such folder")
        tokenizer = load_tokenizer(settings.from_model, where, **options)
        _same_tokenizer("draft.from_model", settings.from_model, tokenizer_digest(tokenizer), capture)
        model = load_model(settings.from_model, where, dtype=torch.float32, use_safetensors=True, **options)
        if model.get_output_embeddings().weight.shape[0] != capture.vocab_size:
            model.resize_token_embeddings(capture.vocab_size)  # rows past the tokenizer's last id are padding
        extra = {"from_model": settings.from_model}
    draft = SmallDraft(model)
    if settings.from_model is not None:
        check_context(draft, capture, f"draft.from_model: {settings.from_model}")
    with tempfile.TemporaryDirectory() as files:
        tokenizer.save_pretrained(files)
        save_draft(draft, init, _meta(settings, capture, extra), tokenizer_folder=Path(files))


def _eagle3(settings: Eagle3Settings, seed: int, capture: Capture, init: Path, target: Target) -> None:
    capture.check_target(target)
    draft_ids, extra = None, {}
    if settings.draft_vocabulary is not None:
        counts_V = vocabulary.count_tokens(capture)
        draft_ids = vocabulary.choose(counts_V, settings.draft_vocabulary, capture.special_ids | capture.stop_ids)
        extra["coverage"] = vocabulary.coverage(counts_V, draft_ids)
    config = eagle3_config(settings, target, target.vocab_size if draft_ids is None else len(draft_ids))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(fingerprint.of_json(["eagle3", seed])[:15], 16))
        draft = Eagle3Draft(config, draft_ids, own_embeddings=settings.train_embeddings)
    copy_from_target(draft, target)
    save_draft(draft, init, _meta(settings, capture, extra))


@torch.no_grad()
def copy_from_target(draft: Eagle3Draft, target: Target) -> None:
    """Start the head (and embeddings of the draft's own) from the target's."""
    rows = target.model.get_output_embeddings().weight.float().cpu()
    draft.lm_head.weight.copy_(rows[draft.draft_ids])
    if draft.embed_tokens is not None:
        draft.embed_tokens.weight.copy_(target.model.get_input_embeddings().weight.float().cpu())


def eagle3_config(settings: Eagle3Settings, target: CausalModel, draft_vocabulary: int) -> Eagle3Config:
    """The head's dimensions: the target's own, but one layer."""
    config = target.config
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or target.hidden_size // heads
    return Eagle3Config(
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=settings.intermediate_size or config.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocabulary,
        aux_layers=aux_layers_of(settings, target.num_layers),
        max_position_embeddings=target.max_positions,
        rms_norm_eps=getattr(config, "rms_norm_eps", None) or 1e-6,
        **rope_fields(target, head_dim),
    )


def _warm(settings: Settings, source: Path, capture: Capture, init: Path) -> None:
    meta = read_meta(source)
    if meta.family != settings.family:
        raise InputError(
            f"draft.init_from: {source}: is of family {meta.family}, but draft.family is {settings.family}"
        )
    _same_tokenizer("draft.init_from", str(source), meta.tokenizer_digest, capture)
    draft = load_draft(source, torch.device("cpu"), torch.float32).draft
    if draft.vocab_size != capture.vocab_size:
        raise InputError(
            f"draft.init_from: {source}: vocabulary {draft.vocab_size}, the target's is {capture.vocab_size}"
        )
    if (odd := misfit(settings, draft, f"init_from {source}")) is not None:
        raise InputError(f"draft.{odd}")
    if isinstance(draft, SmallDraft):
        check_context(draft, capture, f"draft.init_from: {source}")
    tokenizer = source if isinstance(draft, SmallDraft) else None
    save_draft(draft, init, _meta(settings, capture, {"warm_start_step": meta.step}), tokenizer_folder=tokenizer)


def _same_tokenizer(field: str, source: str, digest: str, capture: Capture) -> None:
    if digest != capture.tokenizer_digest:
        raise TokenizerMismatchError(
            f"{field}: {source}: tokenizer {fingerprint.short(digest)}, must be the target's "
            f"{fingerprint.short(capture.tokenizer_digest)}"
        )
