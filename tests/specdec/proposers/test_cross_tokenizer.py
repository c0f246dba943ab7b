"""Texts whose ends are taken back, against a fresh pass over each."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_ins import VOCAB, prompts, target
from torch import Tensor

from draftforge.specdec.kv_cache import CacheStep
from draftforge.specdec.models import CausalModel, States
from draftforge.specdec.proposers import cross_tokenizer as texts_of_draft
from draftforge.specdec.proposers.cross_tokenizer import TextReader

tokens = st.lists(st.integers(0, 3), max_size=5)
MODEL = target()


def fresh(model: CausalModel, ids: list[int], tail: int) -> Tensor:
    """Logits [tail, V] after the last tokens of a text."""
    with torch.no_grad():
        return model.logits(model.states(torch.tensor([ids])).hidden_BTH[0, len(ids) - tail :])


def agree(texts: TextReader, known: list[list[int]], tails: list[int]) -> None:
    with torch.no_grad():
        logits_BRV = texts.logits(tails)
    assert logits_BRV.shape == (len(known), max(tails), VOCAB)
    for slot, (ids, tail) in enumerate(zip(known, tails)):
        assert texts.length(slot) == len(ids)
        torch.testing.assert_close(logits_BRV[slot, :tail], fresh(MODEL, ids, tail), atol=1e-4, rtol=1e-4)


@settings(max_examples=25)
@given(
    start=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=3, max_size=3),
    steps=st.lists(st.lists(st.tuples(st.booleans(), tokens), min_size=3, max_size=3), max_size=4),
    room=st.sampled_from([2, 40]),
    few_widths=st.booleans(),
    data=st.data(),
)
def test_logits_are_those_of_the_texts_as_they_stand(
    start: list[list[int]], steps: list[list[tuple[bool, list[int]]]], room: int, few_widths: bool, data: st.DataObject
) -> None:
    """However often ends were replaced, whichever slot grew, and where the first room was too small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts_of_draft, "reads_lengths", lambda device: few_widths)
        check_texts(start, steps, room, data)


def check_texts(
    start: list[list[int]], steps: list[list[tuple[bool, list[int]]]], room: int, data: st.DataObject
) -> None:
    texts, settled = TextReader(MODEL), [list(row) for row in start]
    texts.reserve(3, room)
    texts.begin([0, 1, 2], start)
    agree(texts, settled, [1, 1, 1])
    for step in steps:
        known = []
        for slot, (settles, new) in enumerate(step):
            (texts.extend if settles else texts.append_text)(slot, new)
            settled[slot] += new if settles else []
            known.append(settled[slot] if settles else settled[slot] + new)
        agree(texts, known, [data.draw(st.integers(1, len(ids))) for ids in known])


@pytest.mark.parametrize(("few_widths", "widths"), [(False, [6, 3, 1, 2]), (True, [6, 4, 1, 2])])
def test_only_what_changed_is_read_again(few_widths: bool, widths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Or little more, where a pass of few widths is cheaper."""
    monkeypatch.setattr(texts_of_draft, "reads_lengths", lambda device: few_widths)
    texts, read = TextReader(MODEL), list[int]()
    states = MODEL.states

    def listening(ids_BN: Tensor, step: CacheStep) -> States:
        read.append(ids_BN.shape[1])
        return states(ids_BN, step)

    monkeypatch.setattr(MODEL, "states", listening)
    texts.reserve(2, 40)
    with torch.no_grad():
        texts.begin([0, 1], [[1, 2, 3, 4, 5, 6], [3, 4]])
        texts.append_text(0, [7, 8, 9])
        texts.logits([1, 1])
        texts.extend(0, [7, 8])
        texts.append_text(0, [5])
        texts.logits([1, 1])
        texts.logits([2, 1])
    assert read == widths


def test_what_is_replaced_by_as_many_others_is_read_again() -> None:
    texts = TextReader(MODEL)
    texts.reserve(1, 40)
    texts.begin([0], [[1, 2, 3]])
    for ahead in ([4, 5, 6], [7, 8, 6], [7, 9, 6]):
        texts.append_text(0, ahead)
        agree(texts, [[1, 2, 3, *ahead]], [1])


def test_slots_move_are_refilled_and_shortened() -> None:
    texts, rows = TextReader(MODEL), prompts(3)
    texts.reserve(3, 40)
    texts.begin([0, 1, 2], rows)
    texts.move(2, 0)
    texts.extend(0, [5, 6])
    agree(texts, [[*rows[2], 5, 6], rows[1]], [2, 1])
    texts.begin([2], [[9, 9, 1]])
    texts.truncate(0, 3)
    agree(texts, [[*rows[2], 5, 6][-3:], rows[1], [9, 9, 1]], [1, 1, 3])
    texts.append_text(0, [4])
    texts.truncate(0, 2)
    texts.extend(0, [4, 8])
    agree(texts, [[6, 4, 8], rows[1], [9, 9, 1]], [1, 1, 1])


@pytest.mark.parametrize("tails", [[0, 1], [1, 1]])
def test_an_empty_text_is_idle(tails: list[int]) -> None:
    """As a slot is that is free, whatever is asked of it."""
    texts = TextReader(MODEL)
    texts.reserve(2, 8)
    texts.begin([0, 1], [[], [4, 5]])
    with torch.no_grad():
        after = texts.logits(tails)[1]
    torch.testing.assert_close(after, fresh(MODEL, [4, 5], 1), atol=1e-4, rtol=1e-4)
    texts.extend(0, [7])
    agree(texts, [[7], [4, 5]], [1, 1])
