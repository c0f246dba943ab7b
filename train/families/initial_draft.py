"""Initial draft, made and stored before step 0 as a draft folder, `init/`: a fresh one or a warm start.

A family that trains from stored signals needs the target for this alone.
"""

import tempfile
from pathlib import Path

import torch

from ... import __version__
from ...data.store import Capture
from ...errors import InputError
from ...specdec.formats.checkpoint import META_FILE, DraftMeta, LoadedDraft, load_draft, read_meta, save_draft
from ...specdec.targets import Target
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
        family=settings.draft_family,  # type: ignore[arg-type]
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


def load_start(settings: Settings, source: Path, fits: Target | Capture) -> LoadedDraft:
    """Load the draft of a warm start, on the CPU. `fits`: the target, or the capture of its answers.

    Raises InputError, TokenizerMismatchError where it is of another family, tokenizer, vocabulary or shape.
    """
    # Family and tokenizer are told by the record, before any weights are loaded.
    meta = read_meta(source)
    where = f"draft.init_from: {source}"
    if meta.family != settings.draft_family:
        raise InputError(f"{where}: is of family {meta.family}, but this recipe trains {settings.draft_family}")
    check_same_tokenizer("draft.init_from", str(source), meta.tokenizer_digest, fits)

    # Vocabulary and shape are told by the draft.
    loaded = load_draft(source, torch.device("cpu"), torch.float32)
    if loaded.draft.vocab_size != fits.vocab_size:
        raise InputError(f"{where}: vocabulary {loaded.draft.vocab_size}, the target's is {fits.vocab_size}")
    if (odd := family_of(settings).incompatibility(settings, loaded.draft, f"init_from {source}")) is not None:
        raise InputError(f"draft.{odd}")
    return loaded


def _warm_start(settings: Settings, source: Path, capture: Capture) -> Start:
    # Its context must hold the captured samples too.
    draft, meta = load_start(settings, source, capture)
    family_of(settings).check_capture(draft, capture, f"draft.init_from: {source}")

    # Only a small draft is served on its own, with a tokenizer.
    has_tokenizer = settings.family == "small"
    return Start(draft, {"warm_start_step": meta.step}, source if has_tokenizer else None)
