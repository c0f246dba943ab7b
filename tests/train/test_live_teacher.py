"""The frozen target's head as a teacher: normalisers of all temperatures, in no more memory than the draft's logits."""

import pytest
import torch
from torch import Tensor

from draftforge.train.families.target_features import Features, LiveTeacher
from draftforge.train.losses.linear_head import Head

N, H, V = 12, 6, 50


@pytest.mark.parametrize("draft", [5, 20, 50])
def test_what_a_reduced_vocabulary_leaves_out_keeps_its_share(draft: int) -> None:
    torch.manual_seed(0)
    hidden_NH, ids = torch.randn(N, H), torch.arange(draft)
    seen: list[int] = []

    def finish(logits: Tensor) -> Tensor:
        seen.append(logits.numel())
        return 3.0 * torch.tanh(logits / 3.0)

    whole = Head(torch.randn(V, H), None, finish)
    logits_NV = whole.logits(hidden_NH)
    features = Features(hidden_NH[None], hidden_NH, logits_NV.logsumexp(-1), logits_NV.argmax(-1))
    part = draft < V
    teacher = LiveTeacher(whole.only(ids) if part else whole, features, ids if part else None, whole)
    seen.clear()
    found = teacher.at(slice(1, 11), (1.0, 2.0, 0.5))
    for lse_C, temperature in zip(found.lse_TC, (1.0, 2.0, 0.5), strict=True):
        torch.testing.assert_close(lse_C, (logits_NV[1:11] / temperature).logsumexp(-1))
    assert max(seen) <= 10 * draft
    assert teacher.at(slice(0, 0), (1.0, 2.0)).lse_TC.shape == (2, 0)


def test_what_nobody_summarised_is_read_off_the_logits() -> None:
    torch.manual_seed(0)
    head, hidden_NH = Head(torch.randn(V, H)), torch.randn(N, H)
    logits_NV = head.logits(hidden_NH)
    told = Features(hidden_NH[None], hidden_NH, logits_NV.logsumexp(-1), logits_NV.argmax(-1))
    ours, theirs = (
        LiveTeacher(head, features, None).at(slice(2, 9), (1.0, 2.0))
        for features in (told._replace(lse_N=None, best_N=None), told)
    )
    torch.testing.assert_close(ours.lse_TC, theirs.lse_TC)
    assert torch.equal(ours.best_C, theirs.best_C) and torch.equal(ours.logits_CV, theirs.logits_CV)
