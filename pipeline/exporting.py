"""Drafts leave the work folder here: copied, read back, and scored again before anyone may use them."""

import re
import shutil
from pathlib import Path

from .. import fingerprint
from ..errors import FormatError, InputError
from ..eval.score import spread
from ..specdec.formats import Format, Verifier, convert_draft
from ..specdec.replay import replay_sample
from ..storage import new_folder
from .scoring import Scorer
from .workspace import Workspace

_CHECKED_CONVERSATIONS = 4


def export_draft(
    scorer: Scorer, folder: Path, out: Path, layout: Format | None = None, verifier: Verifier | None = None
) -> None:
    """Copy a draft (without its trainer's state) to `out`, which must not exist or be empty.

    `layout`: write it in this format instead; `verifier` is for those that name the target. What was written is
    loaded again and must give the same counts on recorded answers. Raises FormatError otherwise, and leaves nothing
    behind.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out}: exists and is not empty; name a new folder")
    with new_folder(out) as beside:
        if layout is not None:
            convert_draft(folder, beside, layout, verifier)
        else:
            for path in sorted(path for path in folder.iterdir() if path.is_file()):
                shutil.copyfile(path, beside / path.name)
        if not same_counts(scorer, folder, beside):
            raise FormatError(f"{out}: the exported draft does not score as the checkpoint {folder} does")


def verifier_of(space: Workspace, target_id: str | None) -> Verifier:
    """The target under its hub id: the given one, else the recipe's model where that is one."""
    name = space.recipe.target.model if target_id is None else target_id
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
        raise InputError(f"--target-id {name}: must be the target's hub id (owner/name), which the format names")
    model = space.target.model
    return Verifier(name, list(model.config.architectures or [type(model).__name__]))


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
        proposer = scorer.proposer(scorer.load(folder))
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
