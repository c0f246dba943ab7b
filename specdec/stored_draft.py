"""Stored drafts: a draft that was loaded for a target, its lineage, and the proposers that draft with it."""

from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Self

import torch

from .. import fingerprint
from ..errors import InputError
from ..progress import say
from .drafts.base import DraftModule
from .drafts.small import SmallDraft
from .formats import detect, load_draft, meta_file, read_draft, read_meta
from .formats.checkpoint import ORIGINAL_TARGET, OWN_TARGET, DraftMeta
from .formats.layer_skip import is_skip_file, read_skipped
from .kernels.fused import can_fuse, fuse
from .loading import load_tokenizer
from .proposers.base import Proposer
from .proposers.cascade import CascadeProposer, Helper, SmallHelper
from .proposers.factory import make_proposer
from .proposers.merged import MergedProposer
from .proposers.other_device import DraftDevice, device_of
from .proposers.training_free import HELPERS, TRAINING_FREE
from .proposers.tree_settings import MOST_LEVELS, ConfidentChain, MergedTree, Tree, TreeSettings
from .serving_plan import USUAL_TOKENS, FoundPlan, ServingPlan, find_plan
from .targets import Target, resolve_device, tokenizer_digest
from .tokenizer_bridge import ForeignDraft

TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True)
class StoredDraft:
    """Draft of one target: a module that was loaded and fits, or a training-free method."""

    target: Target
    family: str
    """Family of the draft's module, or the name of the training-free method."""
    module: DraftModule | None = None
    path: Path | None = None
    """Folder or file of the draft."""
    meta: DraftMeta | None = None
    """Lineage of the draft; None where its files do not record one."""
    device: str | None = None
    """Device that the recipe names for the draft; None: the target's."""
    _others: dict[Path, "StoredDraft"] = field(default_factory=dict, repr=False)

    @classmethod
    def load(cls, path: Path, target: Target, device: str | None = None, other_tokenizer: bool = False) -> Self:
        """Load a draft in any layout: a folder, a .gguf file, or a .json file of skipped layers.

        `device`: None for the target's, in its precision. `other_tokenizer`: accept a model with another tokenizer than
        the target's, whose drafts go over as text. Raises InputError, FormatError or StaleInputError where the draft
        does not fit the target.
        """
        # Each layout is recognised by its files, and checked against the target before it is accepted.
        there = draft_device(target, device)
        loaded = partial(cls, target, path=path, device=device)

        # 1) layers of the target itself
        if is_skip_file(path):
            if there != device_of(target):
                raise InputError(
                    f"score.draft_device {device}: {path} drafts with the target's own layers, which stay there"
                )
            skipped = read_skipped(path, target)
            return loaded(skipped.family, skipped)

        # 2) a model with a tokenizer of its own
        meta = read_meta(path) if meta_file(path).is_file() else None
        if other_tokenizer and (foreign := _read_foreign(path, target, meta)) is not None:
            return loaded(foreign.family, foreign.to(*there).eval(), meta=meta)

        # 3) a draft that was made here, or somebody else's
        # Lineage tells tokenizer and target; without one the tokenizer file has to.
        if meta is not None:
            module = load_draft(path, *there).draft
            _check_lineage(path, meta, target)
        else:
            module = read_draft(path, target.num_layers).to(*there).eval()
            if (path / TOKENIZER_FILE).is_file() and _digest_of_tokenizer(path) != target.tokenizer_digest:
                raise InputError(f"{path}: its {TOKENIZER_FILE} is not the target's: drafts with another tokenizer")
        module.check_fits(target, path)
        if can_fuse(there.device):
            fuse(module)
        return loaded(module.family, module, meta=meta)

    @classmethod
    def of_method(cls, name: str, target: Target) -> Self:
        """Draft of a training-free method, such as prompt lookup."""
        return cls(target, name)

    @cached_property
    def found_plan(self) -> FoundPlan:
        """Serving plan of the draft's files, or what is assumed for a draft without one."""
        if self.path is None:
            return FoundPlan(ServingPlan.chain(USUAL_TOKENS), f"{self.family}: K={USUAL_TOKENS} is assumed")
        return find_plan(self.path)

    @property
    def plan(self) -> ServingPlan:
        """Serving plan: K or tree and accept rule."""
        return self.found_plan.plan

    @cached_property
    def own_plan(self) -> ServingPlan:
        """Serving plan, as a chain where the draft drafts no trees; what is assumed of a draft without one is said."""
        if self.found_plan.assumed:
            say(f"{self.path}: {self.found_plan.assumed}" if self.path is not None else self.found_plan.assumed)
        return self.plan if self.drafts_trees else self.plan.as_chain

    def plan_for(self, draft_tokens: int | None = None) -> ServingPlan:
        """Plan to decode by: the draft's own, or chains of `draft_tokens`, which is said if it is another plan.

        Raises InputError for more or fewer tokens than a round may have.
        """
        if draft_tokens is None:
            return self.own_plan
        if not 1 <= draft_tokens <= MOST_LEVELS:
            raise InputError(f"draft_tokens {draft_tokens}: must be 1 to {MOST_LEVELS}")
        found = self.found_plan
        if not found.assumed and (found.plan.tree is not None or found.plan.draft_tokens != draft_tokens):
            say(f"{self.path}: drafts K={draft_tokens}, as asked, not the {found.plan} of its plan")
        return ServingPlan.chain(draft_tokens, found.plan.rule)

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: number of token ids that the draft reads."""
        return self.target.vocab_size if self.module is None else self.module.vocab_size

    @property
    def max_positions(self) -> int | None:
        """Longest text that the draft was made for, in tokens; None: texts of any length."""
        return None if self.module is None else self.module.max_positions

    @property
    def same_tokenizer(self) -> bool:
        """Whether the draft uses the target's tokenizer."""
        return self.module is None or self.module.same_tokenizer

    @property
    def drafts_trees(self) -> bool:
        """Whether the draft can draft trees; false: chains only."""
        return self.module is not None and self.module.drafts_trees

    def can_draft(self, tree: TreeSettings) -> bool:
        """Whether the draft can draft a tree: a chain that confidence ends needs a head that tells it."""
        if self.module is None or not self.module.drafts_trees:
            return False
        return self.module.has_confidence or not isinstance(tree, ConfidentChain)

    @property
    def parameters(self) -> int:
        """Number of parameters of the draft's own weights."""
        return 0 if self.module is None else sum(one.numel() for one in self.module.parameters())

    @property
    def digest(self) -> str:
        """Digest of the draft's files, and of its device where the recipe names one."""
        if self.path is None:
            return self.family
        files = fingerprint.file_digests(self.path)
        return fingerprint.of_json(files if self.device is None else [files, self.device])

    def check_context(self, longest: int) -> None:
        """Raise InputError for a draft that was made for shorter texts than the `longest` of these, in tokens."""
        if self.module is not None:
            self.module.check_context(longest, str(self.path))

    def proposer(self, tree: Tree | None = None, helper: Helper | None = None) -> Proposer:
        """Make the proposer: of chains or of this tree; with a helper, of chains in fewer passes of a small draft."""
        # Several drafts in one tree; a method; a small draft with a helper; else the family's own proposer.
        if isinstance(tree, MergedTree):
            others = [self._beside(path) for path in tree.places]
            return MergedProposer([self.proposer(), *(other.proposer() for other in others)])
        if self.module is None:
            return TRAINING_FREE[self.family](self.target)
        if helper is not None:
            return CascadeProposer(self._small(), helper, self.target.device)
        return make_proposer(self.module, self.target, tree)

    def new_helper(self) -> Helper:
        """Make the helper of a small draft, which drafts for it: this small draft, or this training-free method."""
        return HELPERS[self.family]() if self.module is None else SmallHelper(self._small())

    def _beside(self, path: Path) -> "StoredDraft":
        """Another draft of the same target, for a merged tree; loaded once."""
        if path not in self._others:
            self._others[path] = StoredDraft.load(path, self.target, self.device)
        return self._others[path]

    def _small(self) -> SmallDraft:
        assert isinstance(self.module, SmallDraft), self.family
        return self.module


def draft_device(target: Target, device: str | None) -> DraftDevice:
    """Device and precision of a draft: the target's, or those of the device that the recipe names.

    Between GPUs the precision is the target's; between a GPU and a CPU it is the usual one of the draft's device.
    """
    here = device_of(target)
    if device is None:
        return here
    found, usual = resolve_device(device, "auto", "score.draft_device")
    found = torch.empty(0, device=found).device  # with its number: cuda alone is the current one
    if found == here.device:
        return here
    return DraftDevice(found, usual if "cpu" in (found.type, here.device.type) else here.dtype)


def trained_for(path: Path, target_fingerprint: str) -> str:
    """Short fingerprint, 12 hex digits, of another target that a draft was made for; "" for this one or none."""
    if not meta_file(path).is_file():
        return ""
    theirs = read_meta(path).target_fingerprint
    return "" if theirs == target_fingerprint else fingerprint.short(theirs)


def _read_foreign(path: Path, target: Target, meta: DraftMeta | None) -> ForeignDraft | None:
    """Load a foreign draft, a model folder whose own tokenizer is not the target's; None for everything else."""
    # Neither lineage nor tokenizer digest may be the target's, and only transformers models can bridge.
    ours = meta is not None and meta.tokenizer_digest == target.tokenizer_digest
    if ours or not (path / TOKENIZER_FILE).is_file() or detect(path) != "hf":
        return None
    theirs = load_tokenizer(path, str(path), trust_remote_code=False)
    if tokenizer_digest(theirs) == target.tokenizer_digest:
        return None
    small = read_draft(path)
    assert isinstance(small, SmallDraft)
    say(f"{path}: has another tokenizer than the target's; what it drafts goes over as text")
    return ForeignDraft.from_tokenizers(small, theirs, target.tokenizer, target.vocab_size)


def _digest_of_tokenizer(path: Path) -> str:
    return tokenizer_digest(load_tokenizer(path, str(path), trust_remote_code=False))


def _check_lineage(path: Path, meta: DraftMeta, target: Target) -> None:
    """Check lineage. Raises InputError for a draft of another tokenizer, or trained together with another target."""
    if meta.tokenizer_digest != target.tokenizer_digest:
        raise InputError(f"{path}: drafts with another tokenizer than the target's")
    if ORIGINAL_TARGET in meta.extra and meta.target_fingerprint != target.fingerprint:
        raise InputError(
            f"{path}: was trained together with target {fingerprint.short(meta.target_fingerprint)} and drafts for "
            f"no other; set target.model={path / OWN_TARGET}"
        )
