"""Drafts leave the work folder here: copied, read back, and scored again before anyone may use them."""

import shutil
from pathlib import Path

from .. import fingerprint
from ..errors import FormatError, InputError
from ..eval.score import spread
from ..specdec.replay import replay_sample
from ..storage import new_folder
from .scoring import Scorer

_CHECKED_CONVERSATIONS = 4


def export_draft(scorer: Scorer, folder: Path, out: Path) -> None:
    """Copy a draft (without its trainer's state) to `out`, which must not exist or be empty.

    The copy is loaded again and must give the same counts on recorded answers. Raises FormatError otherwise, and
    leaves nothing behind.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out}: exists and is not empty; name a new folder")
    with new_folder(out) as beside:
        for path in sorted(folder.iterdir()):
            if path.is_file():
                shutil.copyfile(path, beside / path.name)
        if not same_counts(scorer, folder, beside):
            raise FormatError(f"{out}: the exported draft does not score as the checkpoint {folder} does")


def is_copy(out: Path, folder: Path) -> bool:
    """Whether `out` holds exactly the files that `export_draft` copies from `folder`."""
    one, other = (
        {path.name: fingerprint.of_file(path) for path in place.glob("*") if path.is_file()} for place in (folder, out)
    )
    return one == other


def same_counts(scorer: Scorer, one: Path, other: Path) -> bool:
    """Whether two draft folders give equal replay counts on a few recorded answers."""
    chosen = spread(scorer.samples, _CHECKED_CONVERSATIONS)
    samples = [sample for sample in scorer.samples if sample.conversation in chosen]
    settings = scorer.settings
    seen = []
    for folder in (one, other):
        proposer, _ = scorer.proposer(folder)
        seen.append(
            [
                replay_sample(
                    proposer,
                    scorer.traces.of(sample, proposer),
                    sample.prompt_ids,
                    sample.answer_ids,
                    sample.sampling,
                    ["greedy"] if sample.sampling.greedy else settings.sampled_rules,
                    settings.draft_tokens,
                    sample.max_new_tokens,
                )
                for sample in samples
            ]
        )
    return seen[0] == seen[1]
