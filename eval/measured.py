"""Static trees of the choices that are most often right (Medusa, Cai et al. 2024, arXiv 2401.10774, section 2.3.3)."""

from collections.abc import Iterator, Sequence

from ..data.store import Sample
from ..errors import InputError
from ..specdec.models import CausalModel
from ..specdec.packs import Pack
from ..specdec.passes import running
from ..specdec.proposers.base import Proposer, Trace
from ..specdec.proposers.shape import TreeShape
from ..specdec.proposers.trees import MeasuredTree, StaticTree
from ..specdec.replay import rank_accuracies
from .traces import TraceCache


def measured_tree(target: CausalModel, proposer: Proposer, samples: Sequence[Sample], tree: MeasuredTree) -> StaticTree:
    """The tree of one draft, by what it gets right along recorded answers: those that it was trained on, so that the
    answers which pick a draft do not also shape it. Raises InputError where there are none."""

    def traces() -> Iterator[tuple[Pack, Trace]]:
        for traced in TraceCache(target, 0).along(samples, proposer):
            yield traced.pack, proposer.trace(traced.pack, tree.levels, traced.sampling, traced.states)

    with running(target.device):
        shape = TreeShape.of_accuracies(rank_accuracies(traces(), tree.ranks), tree.nodes)
    if not shape.choices:
        raise InputError("measured tree: no answers of two tokens or more in the train split to measure it on")
    return StaticTree(kind="static", choices=[list(choice) for choice in shape.choices])
