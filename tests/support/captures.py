"""Conversations to be answered, and captures that should be one and the same."""

from collections.abc import Callable

import torch

from draftforge.data.conversation import SPLITS, Conversation, Message
from draftforge.data.settings import CaptureSettings
from draftforge.data.store import Capture
from draftforge.specdec.sampling_settings import SamplingSettings


def orders(
    count: int, sampling: Callable[[int], SamplingSettings | None], domain: Callable[[int], str] = lambda i: "d"
) -> list[Conversation]:
    """So many, half of them train; every fourth has two turns."""
    return [
        Conversation(
            id=f"c{i}",
            domain=domain(i),
            messages=[Message(role="user", content=f"Where is order {i}?")] * (1 + (i % 4 == 0)),
            turn_by_turn=True,
            cluster=f"c{i}",
            split=("train", "train", "selection", "holdout")[i % 4],
            sampling=sampling(i),
        )
        for i in range(count)
    ]


def assert_same_answers(found: Capture, expected: Capture, logp: float, signals: float) -> None:
    """The same tokens and draws to the id; log-probs of answers and of signals within these tolerances."""
    for split in SPLITS:
        assert found.samples(split) == expected.samples(split)
        for sample in expected.samples(split):
            torch.testing.assert_close(found.logp(sample), expected.logp(sample), atol=logp, rtol=logp)
            if split == "train":
                ours, theirs = found.signals(sample), expected.signals(sample)
                assert torch.equal(ours.topk_ids_nk, theirs.topk_ids_nk)
                assert torch.equal(ours.tail_ids_nM, theirs.tail_ids_nM)
                torch.testing.assert_close(ours.topk_logp_nk, theirs.topk_logp_nk, atol=signals, rtol=signals)


SMALL = CaptureSettings(max_new_tokens=8, batch_size=3, top_k=4, tail_samples=2, shard_samples=3)
SCORED = [SamplingSettings(), SamplingSettings(temperature=0.8)]
MIX = orders(24, lambda i: SamplingSettings(temperature=0.9) if i % 3 else None, lambda i: f"d{i % 2}")
"""What parts and ranks capture together."""
