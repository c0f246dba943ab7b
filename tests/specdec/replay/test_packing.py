"""Recorded texts side by side: each round start looks at its own text, and at no padding."""

import pytest
import torch
from stand_ins import seen_before

from draftforge.specdec.replay.packing import Pack, Text

CPU = torch.device("cpu")
MIX = [Text([5, 6, 7, 8, 9], 2), Text([3, 4], 2), Text([1, 2, 1, 2, 2, 6, 0], 4), Text([7, 0], 1)]
"""Of 3, 0, 3 and 1 round starts."""


def starts() -> list[tuple[Text, int]]:
    """Every round start: its text and the tokens known."""
    return [(text, known) for text in MIX for known in range(text.start, len(text.ids))]


def test_round_starts_come_text_by_text() -> None:
    pack = Pack(MIX, CPU)
    assert pack.rounds == len(starts()) == 7
    assert pack.text_R.tolist() == [0, 0, 0, 2, 2, 2, 3]
    assert pack.known_R.tolist() == [known for _, known in starts()]
    assert pack.left_R.tolist() == [len(text.ids) - known for text, known in starts()]
    assert pack.nth_R.tolist() == [known - text.start for text, known in starts()]


@pytest.mark.parametrize("ahead", range(8))
def test_the_tokens_that_follow(ahead: int) -> None:
    tokens_R, inside_R = Pack(MIX, CPU).next_tokens(ahead)
    for (text, known), token, inside in zip(starts(), tokens_R.tolist(), inside_R.tolist(), strict=True):
        assert inside == (known + ahead < len(text.ids))
        assert not inside or token == text.ids[known + ahead]


@pytest.mark.parametrize("count", [1, 3, 9])
def test_what_is_ahead_ends_with_the_text(count: int) -> None:
    pack = Pack(MIX, CPU)
    ahead_RK = pack.ahead(100 * pack.text_R + pack.known_R, count, -1)
    expected = [
        [100 * MIX.index(text) + known + k if known + k < len(text.ids) else -1 for k in range(count)]
        for text, known in starts()
    ]
    assert ahead_RK.tolist() == expected


def test_places_are_what_is_picked() -> None:
    pack = Pack(MIX, CPU)
    x_BTX = torch.randn(*pack.ids_BT.shape, 3)
    for offset in (-1, 0):
        places_BM = pack.places(offset)
        assert places_BM.shape == (4, 3)
        made_BMX = x_BTX.gather(1, places_BM[..., None].expand(-1, -1, 3))
        assert torch.equal(pack.unplaced(made_BMX), pack.pick(x_BTX, offset))
    assert pack.pick(pack.ids_BT, 0).tolist() == [text.ids[known] for text, known in starts()]


@pytest.mark.parametrize("ahead", [0, 1])
def test_tokens_seen_are_those_before(ahead: int) -> None:
    pack = Pack(MIX, CPU)
    seen_NV = pack.seen(pack.first_places(11), slice(2, 6), ahead)
    for (text, known), seen_V in zip(starts()[2:6], seen_NV, strict=True):
        if known + ahead <= len(text.ids):
            assert torch.equal(seen_V[None], seen_before(text.ids, known + ahead, 11))


def test_groups_hold_all_texts_within_their_pairs() -> None:
    pack = Pack(MIX, CPU)
    assert [len(MIX[some]) for some in pack.groups(pairs=10, most=25)] == [2, 2]
    assert [len(MIX[some]) for some in pack.groups(pairs=10, most=3)] == [1, 1, 1, 1]
    assert [len(MIX[some]) for some in pack.groups(pairs=10, most=1000)] == [4]


def test_texts_without_rounds() -> None:
    pack = Pack([Text([3, 4], 2)], CPU)
    assert pack.rounds == 0 and pack.ahead(torch.zeros(0), 3, 1.0).shape == (0, 3)
    assert pack.next_tokens(0)[0].shape == (0,) and pack.places(-1).shape == (1, 1)
