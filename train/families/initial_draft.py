"""Initial draft, made and stored before step 0 as a draft folder, `init/`: a fresh one or a warm start.

A family that trains from stored signals needs the target for this alone.
"""

import tempfile
from pathlib import Path

import torch

from ... import __version__
from ...data.store import Capture
from ...errors import InputError
from ...specdec.formats.checkpoint import META_FILE, DraftMeta, load_draft, read_meta, save_draft
from ..settings import Settings
from . import family_of
from .base import LoadTarget, Start, check_same_tokenizer

INIT = "init"


def store_initial_draft(settings: Settings, seed: int, capture: Capture, folder: Path, load_target: LoadTarget) -> Path:
    """Store the initial draft in `folder/init` unless it is there already; returns that folder."""
    init = folder / INIT
    # 1) a resumed run finds it
    if (init / META_FILE).is_file():
        return init

    # 2) a warm start from another draft, or a fresh one
    if settings.init_from is not None:
        start = _warm_start(settings, settings.init_from, capture)
    else:
        start = family_of(settings).start(settings, seed, capture, load_target)

    # 3) its lineage
    meta = DraftMeta(
        family=settings.family,
        target_fingerprint=capture.target_fingerprint,
        tokenizer_digest=capture.tokenizer_digest,
        step=0,
        draft_tokens=settings.draft_tokens,
        draftforge_version=__version__,
        extra=start.extra,
    )

    # 4) its folder; a tokenizer in memory is written to a temporary folder first, from which it is copied
    with tempfile.TemporaryDirectory() as files:
        tokenizer = start.tokenizer
        if tokenizer is not None and not isinstance(tokenizer, Path):
            tokenizer.save_pretrained(files)
            tokenizer = Path(files)
        save_draft(start.draft, init, meta, tokenizer_folder=tokenizer)
    return init


def _warm_start(settings: Settings, source: Path, capture: Capture) -> Start:
    # Family and tokenizer are told by the record, before any weights are loaded.
    meta = read_meta(source)
    where = f"draft.init_from: {source}"
    if meta.family != settings.family:
        raise InputError(f"{where}: is of family {meta.family}, but draft.family is {settings.family}")
    check_same_tokenizer("draft.init_from", str(source), meta.tokenizer_digest, capture)

    # Vocabulary, shape and context are told by the draft.
    draft = load_draft(source, torch.device("cpu"), torch.float32).draft
    if draft.vocab_size != capture.vocab_size:
        raise InputError(f"{where}: vocabulary {draft.vocab_size}, the target's is {capture.vocab_size}")
    family = family_of(settings)
    if (odd := family.incompatibility(settings, draft, f"init_from {source}")) is not None:
        raise InputError(f"draft.{odd}")
    family.check_capture(draft, capture, where)

    # Only a small draft is served on its own, with a tokenizer.
    has_tokenizer = settings.family == "small"
    return Start(draft, {"warm_start_step": meta.step}, source if has_tokenizer else None)
