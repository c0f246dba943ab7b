"""The reduced draft vocabulary: which tokens a draft can say at all, and how far that can take it."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from ..data.store import Capture
from ..errors import InputError


def reduced(size: int | None, capture: Capture) -> tuple[Tensor | None, dict[str, Any]]:
    """Token ids of a fresh draft's vocabulary of `size`, and the entry of its lineage that says how much they cover.

    None and no entry where `size` is None: the draft has all of the target's tokens.
    """
    if size is None:
        return None, {}
    counts_V = count_tokens(capture)
    draft_ids = choose(counts_V, size, capture.special_ids | capture.stop_ids)
    return draft_ids, {"coverage": coverage(counts_V, draft_ids)}


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
