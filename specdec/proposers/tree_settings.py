"""Tree settings of a recipe, by kind. A chain needs none: it is K tokens long."""

import re
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ...errors import InputError, MissingFileError
from ...fingerprint import file_digests, of_json
from .tree_shape import Drawn, TreeShape

MOST_LEVELS = 64  # of a round; far beyond what pays, and a round's memory grows with it
MOST_NODES = 1024
DRAFT_NAME = r"^[a-z0-9][a-z0-9._-]*$"
"""Pattern of the names of drafts in a recipe."""


class _Tree(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class StaticTree(_Tree):
    """The same shape in every round: a node's children are the draft's likeliest tokens there, or draws from it."""

    kind: Literal["static"]
    widths: list[int] | None = Field(default=None, min_length=1, max_length=MOST_LEVELS)
    """Children of every node, level by level."""
    choices: list[list[int]] | None = Field(default=None, min_length=1, max_length=MOST_NODES)
    """Nodes by their way from the root, as Medusa writes them: [0, 2] is the third choice below the first one."""
    file: Path | None = None
    """JSON file of such choices; read with the recipe, which keeps what it holds."""
    drawn: Drawn = "deterministic"
    """Above temperature 0: deterministic (the likeliest tokens), iid, or without_replacement."""

    @model_validator(mode="before")
    @classmethod
    def _file_read(cls, raw: Any) -> Any:
        # Nothing to read, or a wrong type, which pydantic reports.
        if not isinstance(raw, dict) or raw.get("file") is None or not isinstance(raw["file"], str | Path):
            return raw
        if raw.get("choices") is not None:
            raise ValueError("choices and file: give one of widths, choices or file")

        # The choices replace the file, so that the recipe keeps what it held.
        try:
            shape = TreeShape.read(Path(raw["file"]))
        except (InputError, MissingFileError) as error:
            raise ValueError(str(error)) from None
        return {**raw, "file": None, "choices": [list(choice) for choice in shape.choices]}

    @model_validator(mode="after")
    def _one_shape(self) -> "StaticTree":
        # Exactly one way of naming the shape; `file` has become `choices` before.
        given = [name for name in ("widths", "choices") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"{' and '.join(given) or 'no shape'}: give one of widths, choices or file")

        # Widths give a bounded tree in which every node has children.
        if self.widths is not None:
            if min(self.widths) < 1:
                raise ValueError(f"widths {self.widths}: every node must have at least 1 child")
            nodes = sum(accumulate(self.widths, mul))  # counted before the tree is built: widths multiply
            if nodes > MOST_NODES:
                raise ValueError(f"widths {self.widths}: {nodes} nodes: at most {MOST_NODES} may be drafted")

        # Building the tree checks its choices.
        try:
            levels = self.levels
        except InputError as error:
            raise ValueError(str(error).removeprefix("tree: ")) from None
        if levels > MOST_LEVELS:
            raise ValueError(f"choices: {levels} levels: at most {MOST_LEVELS} may be drafted")
        return self

    @property
    def shape(self) -> TreeShape:
        return TreeShape.branching(self.widths) if self.widths is not None else TreeShape(self.choices or [])

    @property
    def levels(self) -> int:
        return self.shape.depth


class MeasuredTree(_Tree):
    """A static tree of the choices that are most often right, as measured on answers that drafts were trained on."""

    kind: Literal["measured"]
    nodes: int = Field(default=24, ge=1, le=MOST_NODES)
    """Nodes of the tree."""
    levels: int = Field(default=4, ge=1, le=MOST_LEVELS)
    """Most levels."""
    ranks: int = Field(default=10, ge=1, le=MOST_NODES)
    """Most children of a node."""


class DynamicTree(_Tree):
    """EAGLE-2's: the draft's own confidence gives each round its shape."""

    kind: Literal["dynamic"]
    levels: int = Field(default=5, ge=1, le=MOST_LEVELS)
    """Levels of the tree."""
    top_k: int = Field(default=8, ge=1, le=MOST_NODES)
    """Nodes read on each level, and children that each of them offers."""
    nodes: int = Field(default=24, ge=1, le=MOST_NODES)
    """Nodes that are drafted, the best of all that were offered."""


class ConfidentChain(_Tree):
    """DSpark's: a chain that ends before the first token that the draft's confidence head would not trust. Drafts
    without such a head are scored without it."""

    kind: Literal["confident"]
    levels: int = Field(default=4, ge=1, le=MOST_LEVELS)
    """Most tokens of the chain."""
    confidence_threshold: float = Field(default=0.5, gt=0, lt=1)
    """Probability of being accepted, given that the tokens before it are, below which a token ends the chain."""


class MergedTree(_Tree):
    """SpecInfer's (Miao et al. 2024, arXiv 2305.09781): chains of several drafts in one tree."""

    kind: Literal["merged"]
    drafts: list[Annotated[str, Field(pattern=DRAFT_NAME)] | Path] = Field(min_length=1, max_length=MOST_LEVELS)
    """Drafts of the recipe by name: each is scored with the last checkpoints of the others. Folders or files of drafts
    for the same target: beside these, or, where there are no names, beside every draft of the recipe."""
    levels: int = Field(default=4, ge=1, le=MOST_LEVELS)
    """Tokens of each chain."""
    digests: list[str] = []
    """Of the folders and files; read with the recipe, which keeps them: with other weights it is another tree."""

    @property
    def names(self) -> list[str]:
        """Drafts of the recipe; none once the tree is a draft's own, which names where the others lie."""
        return [one for one in self.drafts if isinstance(one, str)]

    @property
    def places(self) -> list[Path]:
        """Folders and files of drafts."""
        return [one for one in self.drafts if isinstance(one, Path)]

    def beside(self, others: Sequence[Path]) -> "MergedTree":
        """The tree of a draft that is named: with the places of the other drafts instead of all names."""
        return MergedTree.model_validate({"kind": self.kind, "drafts": [*others, *self.places], "levels": self.levels})

    @model_validator(mode="before")
    @classmethod
    def _digests_read(cls, raw: Any) -> Any:
        # Digests that are there belong to a recipe that was read before.
        if not isinstance(raw, dict) or raw.get("digests") or not isinstance(raw.get("drafts"), list):
            return raw

        # Digest the files of each draft that is no name.
        texts = [str(path) for path in raw["drafts"] if isinstance(path, str | Path)]
        paths = [Path(text) for text in texts if not re.fullmatch(DRAFT_NAME, text)]
        missing = [path for path in paths if not path.exists()]
        if missing:
            raise ValueError(f"drafts: {missing[0]}: no such draft folder or file")
        return {**raw, "digests": [of_json(file_digests(path)) for path in paths]}


OwnTree = StaticTree | DynamicTree | ConfidentChain
"""A tree of one draft, or a chain that it ends by itself."""
Tree = Annotated[StaticTree | DynamicTree | ConfidentChain | MergedTree, Field(discriminator="kind")]
TreeSettings = Annotated[
    StaticTree | DynamicTree | ConfidentChain | MergedTree | MeasuredTree, Field(discriminator="kind")
]
"""What a recipe may ask for: `measured` becomes a static tree of one draft, names in a `merged` one become places."""


def is_fixed(tree: TreeSettings) -> TypeGuard[StaticTree | DynamicTree | ConfidentChain | MergedTree]:
    """Whether a tree is known before answers are captured and drafts are trained."""
    return not isinstance(tree, MeasuredTree) and not (isinstance(tree, MergedTree) and tree.names)


def is_tree_of(tree: TreeSettings, draft: str | None) -> bool:
    """Whether a tree of the recipe is for its draft of that name: a merged one that names drafts is for these alone."""
    return not isinstance(tree, MergedTree) or not tree.names or draft in tree.names


def tree_identity(tree: Tree | None) -> dict[str, Any] | None:
    """What makes a tree another one: of a merged one the content of its drafts, wherever they lie. None: a chain."""
    return None if tree is None else tree.model_dump(mode="json", exclude={"drafts"})
