"""The reduced draft vocabulary: which tokens a draft can say at all, how far that can take it, and which size pays."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..data.store import Capture
from ..errors import InputError
from ..eval.cost_measurement import measure_costs
from ..eval.cost_table import cost_key
from ..eval.draft_configs import DraftConfig, ProposerSpec
from ..eval.settings import SELECTION_SPLIT, CostSettings, ScoreSettings
from ..eval.speedup import Gain, chain_tau
from ..progress import say
from ..specdec.drafts.base import DraftModule
from ..specdec.models import CausalModel
from ..specdec.proposers.factory import make_proposer

AUTO = "auto"
"""In place of a size: the one of the highest expected speed-up."""
_ACCEPTED = 0.75
"""Acceptance assumed of a trained draft for tokens that it can say: EAGLE-3's on chat after minutes of training."""
_SMALLEST = 1024
_TIE = 0.01
_COSTS = CostSettings(prompts=2, rounds=12, warmup_rounds=3)


class Tried(NamedTuple):
    """A size of the draft vocabulary: what it covers, and the speed-up to expect of it at batch 1."""

    size: int
    coverage: float
    """Share of the selection split's answer tokens that the draft can say: the ceiling of its acceptance."""
    speedup: float


def reduced(
    size: int | str | None,
    capture: Capture,
    draft_tokens: int,
    make: Callable[[Tensor | None], DraftModule],
    target: CausalModel,
) -> tuple[Tensor | None, dict[str, Any]]:
    """Token ids of a fresh draft's vocabulary of `size`, and the entries of its lineage that say how much they cover.

    None and no entry where `size` is None: the draft has all of the target's tokens. AUTO measures chains of
    `draft_tokens` tokens by untrained drafts of several sizes, which `make` makes from their token ids.
    """
    if size is None:
        return None, {}
    counts_V, always = count_tokens(capture), capture.special_ids | capture.stop_ids
    extra: dict[str, Any] = {}
    if size == AUTO:

        def gain(draft_ids: Tensor | None) -> Gain:
            return chain_gain(make(draft_ids), draft_tokens, capture, target)

        judged = [token for sample in capture.samples(SELECTION_SPLIT) for token in sample.answer_ids]
        judged_V = torch.bincount(torch.tensor(judged), minlength=len(counts_V)).double()
        tried = try_sizes(counts_V, judged_V, always, draft_tokens, gain)
        size = fastest(tried).size
        extra["tried_vocabularies"] = [one._asdict() for one in tried]
        _show(tried, size, draft_tokens)
        if size == len(counts_V):
            return None, extra
    draft_ids = choose(counts_V, int(size), always)
    return draft_ids, extra | {"coverage": coverage(counts_V, draft_ids)}


def try_sizes(
    counts_V: Tensor,
    judged_V: Tensor,
    always: Collection[int],
    draft_tokens: int,
    gain: Callable[[Tensor | None], Gain],
) -> list[Tried]:
    """The whole vocabulary and its halves down to a thousand tokens, by the times of `gain` (token ids -> Gain).

    `judged_V`: counts of other answers than those of `counts_V`, which choose the tokens: a small capture's own answers
    are covered by any size.
    """
    size, found = len(counts_V), list[Tried]()
    while size >= max(_SMALLEST, len(set(always))) or not found:
        ids = choose(counts_V, size, always)
        covered = coverage(judged_V, ids)
        tau = chain_tau(_ACCEPTED * covered, draft_tokens)
        found.append(Tried(size, covered, gain(None if size == len(counts_V) else ids).speedup(tau)))
        size = -(-size // 2)
    return found


def fastest(tried: Sequence[Tried]) -> Tried:
    """The largest size whose expected speed-up is within one per cent of the best."""
    least = max(one.speedup for one in tried) * (1 - _TIE)
    return max((one for one in tried if one.speedup >= least), key=lambda one: one.size)


def chain_gain(draft: DraftModule, draft_tokens: int, capture: Capture, target: CausalModel) -> Gain:
    """Gain of chains of an untrained draft at batch 1, measured on some prompts of the capture."""
    draft = draft.to(target.device, target.dtype).eval()
    specs = [ProposerSpec(lambda: make_proposer(draft, target), (draft_tokens,))]
    settings = ScoreSettings(draft_tokens=[draft_tokens], costs=_COSTS)
    prompts = [sample.prompt_ids for sample in capture.samples("train")[: _COSTS.prompts]]
    table = measure_costs(cost_key(target, draft, specs, settings), target, specs, prompts, settings)
    return table.gain(DraftConfig(draft_tokens))


def _show(tried: Sequence[Tried], size: int, draft_tokens: int) -> None:
    say(f"draft_vocabulary {AUTO}: K={draft_tokens}, {_ACCEPTED:.0%} of the tokens that it can say assumed accepted")
    for one in tried:
        ceiling, mark = chain_tau(one.coverage, draft_tokens), "  <- chosen" if one.size == size else ""
        say(f"  {one.size:,} tokens cover {one.coverage:.2%} (tau at most {ceiling:.2f}): {one.speedup:.2f}x{mark}")


def count_tokens(capture: Capture) -> Tensor:
    """Counts of each token among the supervised ones of the train split, [V] float64.

    Stored top-k probabilities count too, but never as much as one occurrence altogether: they only rank tokens
    that were seen equally often, above all those that were never seen.
    """

    # Supervised occurrences are whole numbers; the probability mass of the stored top k is added up apart.
    samples = capture.samples("train")
    counts_V = torch.zeros(capture.vocab_size, dtype=torch.float64)
    expected_V = torch.zeros_like(counts_V)
    for sample in samples:
        ids_n = torch.tensor(sample.answer_ids, dtype=torch.int64)
        counts_V.index_add_(0, ids_n, torch.ones(len(ids_n), dtype=torch.float64))
        if capture.bare:
            continue
        signals = capture.signals(sample)
        expected_V.index_add_(0, signals.topk_ids_nk.long().flatten(), signals.topk_logp_nk.double().exp().flatten())

    # Scaled to a sum below 1, the mass breaks ties and can be taken off again by `floor`.
    return counts_V + expected_V / (expected_V.sum() + 1.0)


def check_size(size: int, vocabulary: int, always: Collection[int]) -> None:
    """Raise InputError unless a draft vocabulary of `size` is a part of the target's and holds `always`."""
    if size > vocabulary:
        raise InputError(f"draft.draft_vocabulary {size}: must not exceed the target's vocabulary of {vocabulary}")
    if size < len(set(always)):
        raise InputError(f"draft.draft_vocabulary {size}: must hold the {len(set(always))} special and stop tokens")


def choose(counts_V: Tensor, size: int, always: Collection[int]) -> Tensor:
    """Ids of the draft vocabulary, ascending: all of `always`, then the most frequent; ties go to the lower id."""
    check_size(size, len(counts_V), always)

    # Special and stop tokens rank above all others; the sort is stable, so equal counts keep the order of ids.
    ranked_V = counts_V.clone()
    ranked_V[sorted(set(always))] = torch.inf
    chosen = torch.argsort(ranked_V, descending=True, stable=True)[:size]
    return chosen.sort().values


def coverage(counts_V: Tensor, draft_ids: Tensor) -> float:
    """Ceiling of acceptance: the share of supervised tokens that the draft can say."""
    # Whole counts only: the fraction is the share of stored probabilities.
    whole_V = counts_V.floor()
    return float(whole_V[draft_ids].sum() / whole_V.sum().clamp_min(1.0))
