"""Ways of drafting for the decoder's tests, by name."""

import copy
import functools
from collections.abc import Callable

from heads import DSPARK
from stand_ins import (
    near_copy,
    parallel_eagle3,
    target,
    taught_dflash,
    taught_eagle,
    taught_eagle3,
    taught_medusa,
)

from draftforge.specdec.drafts import DraftModule
from draftforge.specdec.drafts.layer_skip import SkippedDraft, SkippedLayers
from draftforge.specdec.models import CausalModel
from draftforge.specdec.proposers.base import Proposer
from draftforge.specdec.proposers.cascade import CascadeProposer, LookupHelper, SmallHelper
from draftforge.specdec.proposers.dynamic_tree import DynamicProposer
from draftforge.specdec.proposers.factory import make_drafter, make_proposer
from draftforge.specdec.proposers.lookahead import JacobiProposer, LookaheadOnDevice, LookaheadProposer
from draftforge.specdec.proposers.merged import MergedProposer
from draftforge.specdec.proposers.prompt_lookup import PromptLookup
from draftforge.specdec.proposers.static_tree import StaticProposer
from draftforge.specdec.proposers.suffix import SuffixOnDevice, SuffixProposer
from draftforge.specdec.proposers.tree_settings import ConfidentChain
from draftforge.specdec.proposers.tree_shape import Drawn, TreeShape

CHAINS = (
    "small", "skipped", "eagle", "eagle3", "eagle3-reduced", "eagle3-deep", "medusa", "dflash",
    "dflash-reduced", "dspark-reduced", "dspark-confident", "peagle", "lookup", "jacobi", "cascade", "cascade-small",
)  # fmt: skip
TREES = (
    "small-tree", "small-dynamic", "small-merged", "skipped-tree", "eagle-dynamic", "eagle3-tree", "eagle3-dynamic",
    "eagle3-deep-dynamic", "medusa-tree", "dflash-tree", "dflash-dynamic", "dspark-dynamic", "peagle-dynamic",
    "suffix", "lookahead",
)  # fmt: skip
TRAINING_FREE: dict[str, Callable[[], Proposer]] = {
    "lookup": PromptLookup,
    "jacobi": JacobiProposer,
    "suffix": lambda: SuffixProposer(nodes=9),
    "lookahead": lambda: LookaheadProposer(window=4, guesses=2),
}
WAITING = ("suffix", "lookahead", "small-elsewhere", "eagle3-elsewhere")
"""What reads tokens on the host, or waits for a device."""
DECODED = ("jacobi", "lookahead")
"""What no recorded answer tells the rounds of."""
CASCADES = ("cascade", "cascade-small")
COPIES = ("lookup", "suffix")
"""What drafts nothing but what was said before, which need not come again."""
DRAWN_TREES = (
    "small-sampled",
    "eagle3-sampled",
    "small-distinct",
    "skipped-sampled",
    "eagle-distinct",
    "medusa-distinct",
    "dflash-distinct",
)
SHAPE = TreeShape([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 0, 0, 0]])


ON_DEVICE: dict[str, Callable[[], Proposer]] = {
    "suffix-here": lambda: SuffixOnDevice(nodes=9),
    "lookahead-here": lambda: LookaheadOnDevice(window=4, guesses=2),
}
"""The same where only kernels draft."""


def takes(rule: str, name: str) -> bool:
    """Whether the rule may judge above temperature 0 what that proposer drafts; `greedy`: at temperature 0."""
    kind = name.rpartition("-")[2]
    chosen: dict[str, Drawn] = dict.fromkeys(("tree", "dynamic", "confident"), "deterministic")
    drawn: dict[str, Drawn] = {**chosen, "distinct": "without_replacement"}
    draws = "deterministic" if name in TRAINING_FREE else drawn.get(kind, "iid")
    match rule:
        case "greedy" | "match" | "onehot" | "typical":  # onehot has the likeliest tokens drafted instead
            return True
        case "token" | "block":
            return name in CHAINS and draws == "iid"
        case "multiround":
            return draws == "iid"
        case "recursive":
            return draws == "without_replacement"
        case _:
            return rule == "traversal" and draws != "deterministic"


@functools.cache
def taught(family: str, draft_vocab: int | None = None, deep: bool = False) -> DraftModule:
    """Taught once a process, on the one target of these tests."""
    if deep:
        return taught_eagle3(target(), deep=True)
    if family == "peagle":
        return parallel_eagle3(target())
    if family == "dspark":
        return taught_dflash(target(), draft_vocab, **DSPARK, block_size=3)
    if family in ("dflash", "eagle3"):
        return (taught_dflash if family == "dflash" else taught_eagle3)(target(), draft_vocab)
    return taught_eagle(target()) if family == "eagle" else taught_medusa(target())


def proposer_named(name: str, model: CausalModel, noise: float = 0.05) -> Proposer:
    """A fresh proposer; drafts agree with the target now and then."""
    if name in TRAINING_FREE or name in ON_DEVICE:
        return (TRAINING_FREE | ON_DEVICE)[name]()
    if name.startswith("cascade"):
        helper = LookupHelper() if name == "cascade" else SmallHelper(near_copy(model, 2 * noise, seed=7), most=2)
        return CascadeProposer(near_copy(model, noise), helper)
    family, _, kind = name.partition("-")
    deep, kind = kind.startswith("deep"), kind.removeprefix("deep").removeprefix("-")
    drafts: dict[str, Callable[[], DraftModule]] = {
        "small": lambda: near_copy(model, noise),
        "skipped": lambda: SkippedDraft(model, SkippedLayers(mlp=(0,))),
        "eagle": lambda: taught("eagle"),
        "eagle3": lambda: taught("eagle3", 40 if kind == "reduced" else None, deep),
        "medusa": lambda: taught("medusa"),
        "peagle": lambda: taught("peagle"),
        "dflash": lambda: taught("dflash", 40 if kind == "reduced" else None),
        "dspark": lambda: taught("dspark", 40 if kind == "reduced" else None),
    }
    if kind == "elsewhere":  # a CPU, seen from a GPU; on a CPU another precision stands in for another device
        away = copy.deepcopy(drafts[family]()).cpu()
        return make_proposer(away.double() if model.device.type == "cpu" else away, model)
    draft = drafts[family]()
    if model.device.type != "cpu":
        draft = (draft if family == "skipped" else copy.deepcopy(draft)).to(model.device)
    if kind in ("", "reduced"):
        return make_proposer(draft, model)
    if kind == "confident":
        return make_proposer(draft, model, ConfidentChain(kind="confident", confidence_threshold=0.4))
    drafter = make_drafter(draft, model)
    if kind == "dynamic":
        return DynamicProposer(drafter, top_k=3, nodes=9)
    if kind == "merged":
        return MergedProposer([make_proposer(draft, model), make_proposer(near_copy(model, noise, seed=5), model)])
    if kind == "sampled":
        return StaticProposer(drafter, TreeShape.branching([2, 2, 1]))
    if kind == "distinct":
        return StaticProposer(drafter, TreeShape.branching([3, 2, 1]), drawn="without_replacement")
    return StaticProposer(drafter, SHAPE, drawn="deterministic")
