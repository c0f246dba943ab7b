"""Serving plan of a draft: K or tree, and accept rule, at which it was chosen. `serve.json` in its folder holds it.

A registered version has its plan among its files, so every copy of it has. Other drafts, which a merged tree drafts
with, lie in its subfolder `parts`, and the plan names them from there.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .. import fingerprint
from ..errors import CorruptDataError, FormatError, MissingFileError
from ..storage import lies_inside, read_object, write_json
from .accept_rules import RuleName
from .proposers.tree_settings import MOST_LEVELS, MergedTree, Tree, tree_identity

PLAN_FILE = "serve.json"
PARTS = "parts"
"""Subfolder of the other drafts of a merged tree, each in a folder named by its number."""
USUAL_TOKENS = 4
"""K of a draft of which nothing says how much it should draft."""
_PLAN, ASSUMED = "plan", "assumed"
_PART_RULE = "must be a file or folder inside the draft's folder, named from there, without links that leave it"


class ServingPlan(BaseModel):
    """K or tree, and accept rule, that a draft is served with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    draft_tokens: int = Field(ge=1, le=MOST_LEVELS)
    """K of the chain, or levels of the tree."""
    tree_name: str = ""
    """The recipe's name of the draft tree; empty: a chain."""
    tree: Tree | None = None
    """The draft tree, with the shape that this draft uses; None: a chain."""
    chain_tokens: int = Field(ge=1, le=MOST_LEVELS)
    """K of the best chain that was measured, for engines that draft chains only; of a chain its own."""
    rule: RuleName = "greedy"
    """Accept rule above temperature 0 under which acceptance was counted; greedy: only temperature 0 was scored."""
    policy: str = ""
    """Name of the file beside the plan that holds K by batch size for one engine's scheduler; empty: there is none."""

    @classmethod
    def chain(cls, draft_tokens: int, rule: RuleName = "greedy") -> "ServingPlan":
        """Plan of chains of so many tokens."""
        return cls(draft_tokens=draft_tokens, chain_tokens=draft_tokens, rule=rule)

    @property
    def as_chain(self) -> "ServingPlan":
        """The plan of an engine that drafts chains only: the best chain that was measured."""
        return ServingPlan.chain(self.chain_tokens, self.rule)

    def prefer(self, rules: Sequence[RuleName]) -> list[RuleName]:
        """Accept rules above temperature 0 in order of preference: the plan's own, then these."""
        return [rule for rule in (self.rule, *rules) if rule != "greedy"]

    @property
    def identity(self) -> dict[str, Any]:
        """What makes a plan another one: all but where the drafts of a merged tree lie."""
        return self.model_dump(mode="json", exclude={"tree"}) | {"tree": tree_identity(self.tree)}

    def __str__(self) -> str:
        return f"tree {self.tree_name}" if self.tree is not None else f"K={self.draft_tokens}"


class FoundPlan(NamedTuple):
    """Plan of a draft's folder or file."""

    plan: ServingPlan
    assumed: str = ""
    """What was assumed, in words without places of this disk, as no plan is there; empty: the plan was read."""


def write_plan(folder: Path, plan: ServingPlan, record: dict[str, Any] | None = None) -> None:
    """Write a plan into a draft's folder, with copies of the other drafts of a merged tree.

    `record`: what else `serve.json` says, for people and scripts; its `assumed` says that the plan is an assumption.
    """
    # A merged tree names its drafts by where they lie here: the folder may go anywhere.
    if isinstance(plan.tree, MergedTree):
        inside = []
        for number, source in enumerate(plan.tree.places):
            part = Path(PARTS) / str(number) / ("" if source.is_dir() else source.name)
            if source.absolute() != (folder / part).absolute():  # not there already
                _copy_part(source, folder / part)
            inside.append(part)
        plan = plan.model_copy(update={"tree": plan.tree.model_copy(update={"drafts": inside})})
    write_json(folder / PLAN_FILE, {_PLAN: plan.model_dump(mode="json"), **(record or {})})


def stored_plan(folder: Path) -> ServingPlan | None:
    """Plan as it stands in a draft's folder: a merged tree names its drafts from there. None: no plan is there.

    Raises FormatError, also where it names files elsewhere: a stranger's plan would have this disk's read or copied.
    """
    path = folder / PLAN_FILE
    try:
        raw = read_object(path)
    except MissingFileError:
        return None
    # First of all, as a tree reads the file of a shape, and without digests the drafts, that it names.
    value = raw.get(_PLAN)
    tree = value.get("tree") if isinstance(value, dict) else None
    try:
        check_named_files(tree)
        _check_parts(folder, tree)
    except ValueError as error:
        raise FormatError(f"{path}: {_PLAN}.{error}") from None
    try:
        return ServingPlan.model_validate(value)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, (_PLAN, *problem["loc"])))
        raise FormatError(f"{path}: {where}: {problem['msg']}") from None


def read_plan(place: Path) -> ServingPlan | None:
    """Plan of a draft's folder, or beside its file, with the drafts of a merged tree where they lie now; None: there is
    none. Raises FormatError."""
    folder = place.parent if place.is_file() else place
    plan = stored_plan(folder)
    if plan is not None and isinstance(plan.tree, MergedTree):
        placed = [folder / part for part in plan.tree.drafts]
        plan = plan.model_copy(update={"tree": plan.tree.model_copy(update={"drafts": placed})})
    return plan


def find_plan(place: Path) -> FoundPlan:
    """Plan of a draft's folder or file, or what is assumed for one without: what its own files say of K, else 4."""
    plan, folder = read_plan(place), place.parent if place.is_file() else place
    if plan is not None:
        assumed = read_object(folder / PLAN_FILE).get(ASSUMED, "")
        if not isinstance(assumed, str) or not assumed.isprintable():
            raise FormatError(f"{folder / PLAN_FILE}: {ASSUMED}: must be one line of text")
        return FoundPlan(plan, assumed)
    K, source = _named_tokens(folder)
    return FoundPlan(ServingPlan.chain(K), f"the draft has no {PLAN_FILE}: K={K} is assumed, {source}")


def holds_plan(folder: Path, plan: ServingPlan) -> bool:
    """Whether a folder holds this plan, and every part of it intact."""
    try:
        found = read_plan(folder)
    except FormatError:
        return False
    if found is None or found.identity != plan.identity:
        return False
    if not isinstance(found.tree, MergedTree):
        return True
    return all(
        part.exists() and fingerprint.of_json(fingerprint.file_digests(part)) == digest
        for part, digest in zip(found.tree.places, found.tree.digests)
    )


def _named_tokens(folder: Path) -> tuple[int, str]:
    """K that a draft's own files name, and in which words; else the usual one."""
    # A config that names K, then what it was trained for, then shapes that bound it.
    config, trained = _read(folder / "config.json"), _read(folder / "draftforge.json")
    speculators = config.get("speculators_config")
    named: list[tuple[Any, str]] = []
    if isinstance(speculators, Mapping):
        methods = speculators.get("proposal_methods")
        first = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], Mapping) else {}
        named.append((first.get("speculative_tokens"), "the speculative_tokens of its config.json"))
    named.append((trained.get("draft_tokens"), "what it was trained for"))
    dspark = "markov_rank" in config
    if (dspark or "dflash_config" in config) and isinstance(block := config.get("block_size"), int):
        anchored = bool(config.get("sample_from_anchor", dspark))
        named.append((block - (not anchored), "its block_size" + " without the anchor" * (not anchored)))
    if config.get("model_type") == "medusa" or "medusa_num_heads" in config:
        named.append((config.get("medusa_num_heads", config.get("num_heads")), "the number of its heads"))
    known = [(K, source) for K, source in named if type(K) is int and 1 <= K <= MOST_LEVELS]
    return known[0] if known else (USUAL_TOKENS, "as nothing in it says how much it should draft")


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one where there is none to be read."""
    try:
        return read_object(path)
    except (MissingFileError, CorruptDataError):
        return {}


def check_named_files(tree: Any) -> None:
    """Raise ValueError for a stored tree that names a file of a shape, in whose place stored ones have the shape, or a
    merged one unless each of its drafts is named from the plan's folder, and has its digest.

    Reads no file. `tree`: as it is stored, whatever that is.
    """
    if not isinstance(tree, Mapping):
        return
    if tree.get("file") is not None:
        raise ValueError(f"tree.file: {str(tree['file'])[:80]!r}: must be absent; a stored tree has its choices")
    if "drafts" not in tree:
        return
    drafts, digests = tree["drafts"], tree.get("digests")
    if not isinstance(drafts, list) or not isinstance(digests, list) or len(drafts) != len(digests) or not drafts:
        raise ValueError("tree: drafts and digests must be two lists of one length")
    for number, name in enumerate(drafts):
        if not isinstance(name, str | Path) or Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"tree.drafts.{number}: {name!r}: {_PART_RULE}")


def _check_parts(folder: Path, tree: Any) -> None:
    """Raise ValueError unless each draft of a stored merged tree lies in the plan's folder."""
    for number, name in enumerate(tree["drafts"] if isinstance(tree, Mapping) and "drafts" in tree else ()):
        part = folder / name
        if not (lies_inside(folder, part) and all(lies_inside(folder, one) for one in part.rglob("*"))):
            raise ValueError(f"tree.drafts.{number}: {name!r}: {_PART_RULE}")


def _copy_part(source: Path, to: Path) -> None:
    """Copy a draft, the files of a folder or one file."""
    pairs = (
        [(path, to / path.name) for path in source.iterdir() if path.is_file()] if source.is_dir() else [(source, to)]
    )
    for path, copy in sorted(pairs):
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
