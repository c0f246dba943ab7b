"""The stream decoder answers as `generate` does, whatever its passes look like."""

import importlib
from collections.abc import Iterator
from itertools import cycle

import pytest
import torch
from families import SUPPORTED, tiny
from stand_ins import prompts, target
from torch import Tensor

from draftforge.errors import ContextLengthError, InputError
from draftforge.specdec import kv_cache
from draftforge.specdec.continuous_batching import DecodedAnswer, PlainDecoder, QueuedRequest
from draftforge.specdec.cuda_graphs import OpCounter, Shapes
from draftforge.specdec.decoder import generate
from draftforge.specdec.models import CausalModel
from draftforge.specdec.requests import Generation, Request
from draftforge.specdec.sampling_settings import SamplingSettings

STOPS = [frozenset({5, 17}), frozenset({3}), frozenset[int]()]
SETTINGS = [
    SamplingSettings(),
    SamplingSettings(temperature=0.9),
    SamplingSettings(temperature=1.3, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.3),
    SamplingSettings(repetition_penalty=1.5),
    SamplingSettings(temperature=0.7, top_p=0.8),
]
CAPACITY, BUDGET = 45, 30


def requests(count: int, settings: list[SamplingSettings] = SETTINGS, most: int = BUDGET) -> list[Request]:
    """Requests whose answers have at most `most` tokens."""
    budgets = cycle([30, 1, 23, 7, 16])
    return [
        Request(ids, setting, seed, min(budget, most), stops)
        for seed, (ids, setting, budget, stops) in enumerate(
            zip(prompts(count), cycle(settings), budgets, cycle(STOPS))
        )
    ]


def stream(
    model: CausalModel, asked: list[Request], slots: int, fixed: bool = False, **options: object
) -> list[DecodedAnswer]:
    """Answers in the order of the requests, which are asked a few at a time."""
    options |= {"shapes": lambda slots, capacity, graphed: Shapes(slots, capacity, fixed)}
    decoder = PlainDecoder(model, slots, CAPACITY, BUDGET, **options)  # type: ignore[arg-type]
    left: Iterator[QueuedRequest] = iter([QueuedRequest(str(index), request) for index, request in enumerate(asked)])
    found: dict[str, DecodedAnswer] = {}
    more = next(left, None)
    while more is not None or not decoder.idle:
        while more is not None and decoder.wants_more:
            decoder.submit([more])
            more = next(left, None)
        for answer in decoder.step():
            assert answer.name not in found
            found[answer.name] = answer
    return [found[str(index)] for index in range(len(asked))]


def expected(model: CausalModel, asked: list[Request]) -> list[Generation]:
    answers = dict(generate(model, None, asked, batch_size=16))
    return [answers[index] for index in range(len(asked))]


def equal(found: list[DecodedAnswer], answers: list[Generation]) -> bool:
    return [(f.tokens, f.finish) for f in found] == [(a.tokens, a.finish) for a in answers]


@pytest.fixture
def lengths_on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps as on a GPU: the attention kernel, in Triton's interpreter."""
    pytest.importorskip("triton")
    importlib.import_module("draftforge.specdec.kernels.flash_decoding")
    monkeypatch.setattr(kv_cache, "reads_lengths", lambda device: True)


@pytest.mark.parametrize(("slots", "fixed"), [(1, False), (5, False), (5, True), (40, True)])
def test_answers_are_those_of_generate(slots: int, fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftforge.specdec.cuda_graphs._FEWEST", 2)
    monkeypatch.setattr("draftforge.specdec.cuda_graphs._PREFILL_TOKENS", 96)
    model, asked = target(), requests(15)
    answers = expected(model, asked)
    assert {answer.finish for answer in answers} == {"stop", "length"}
    assert equal(stream(model, asked, slots, fixed), answers)


def test_a_finished_row_is_replaced_before_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step runs with a free slot while a request waits, and none computes more than its answers need: a token less
    than they have, as the first one comes with the prompt. An answer of that token alone is found out a step later."""
    model, asked, slots = target(), requests(15), 4
    rows: list[int] = []
    decode = PlainDecoder._decode

    def watched(self: PlainDecoder) -> None:
        assert self._active == slots or not self.waiting
        rows.append(self._active)
        decode(self)

    monkeypatch.setattr(PlainDecoder, "_decode", watched)
    answers = stream(model, asked, slots)
    assert sum(rows) == sum(max(1, len(answer.tokens) - 1) for answer in answers)
    assert max(rows) == slots


@pytest.mark.slow  # Triton's interpreter
def test_answers_with_the_kernel_are_the_same(lengths_on_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftforge.specdec.cuda_graphs._FEWEST", 2)
    model, asked = target(), requests(4, most=4)
    assert equal(stream(model, asked, 3, fixed=True), expected(model, asked))


@pytest.mark.slow  # Triton's interpreter
@pytest.mark.parametrize("family", ["gemma2", "gemma3", "qwen3", "mistral"])
def test_every_family_runs_on_the_kernel(family: str, lengths_on_device: None) -> None:
    model, asked = CausalModel(tiny(*SUPPORTED[family])), requests(2, SETTINGS[:2], most=3)
    assert equal(stream(model, asked, 2, fixed=True), expected(model, asked))


def test_the_host_may_look_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot goes on past its answer's end for as many steps as the host lags."""
    model, asked = target(), requests(10)
    init = PlainDecoder.__init__

    def late(self: PlainDecoder, *args: object, **options: object) -> None:
        init(self, *args, **options)  # type: ignore[arg-type]
        self._lag = 1

    monkeypatch.setattr(PlainDecoder, "__init__", late)
    assert equal(stream(model, asked, 3, fixed=True), expected(model, asked))


def test_the_listener_sees_what_each_token_was_drawn_from() -> None:
    model, asked = target(), requests(12, SETTINGS[:1])
    ticks: list[int] = []

    def listen(logits_RV: Tensor, tokens_R: Tensor, seeds_R: Tensor, emitted_R: Tensor) -> dict[str, Tensor]:
        return {"best": logits_RV.argmax(-1), "pair": torch.stack([logits_RV.amax(-1), emitted_R.float()], 1)}

    found = stream(model, asked, 3, fixed=True, listen=listen, advance=ticks.append)
    for answer in found:
        assert answer.columns["best"].tolist() == answer.tokens
        assert answer.columns["pair"][:, 1].tolist() == list(range(len(answer.tokens)))
    assert sum(ticks) == sum(len(answer.tokens) for answer in found)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3", "phi3"])
def test_a_step_waits_for_nothing(family: str, lengths_on_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = CausalModel(tiny(*SUPPORTED[family])), requests(5)
    monkeypatch.setattr(PlainDecoder, "_read_later", lambda *ignored: None)
    monkeypatch.setattr("draftforge.specdec.kernels.flash_decoding.attend_cached", lambda query, *ignored: query)
    decoder = PlainDecoder(
        model, 5, CAPACITY, BUDGET, shapes=lambda slots, capacity, graphed: Shapes(slots, capacity, True)
    )
    decoder.submit([QueuedRequest(str(index), request) for index, request in enumerate(asked)])
    with OpCounter() as watch:
        decoder.step()
        decoder.step()
    assert not watch.waiting


def test_waiting_is_seen() -> None:
    with OpCounter() as watch:
        CausalModel(tiny(*SUPPORTED["mixtral"])).states(torch.tensor([[1, 2]]))
    assert watch.waiting


def test_what_cannot_be_answered_is_refused() -> None:
    decoder = PlainDecoder(target(), 2, CAPACITY, BUDGET)
    with pytest.raises(InputError, match="empty prompt"):
        decoder.submit([QueuedRequest("a", Request([], SETTINGS[0], 0, 4))])
    with pytest.raises(InputError, match="stop_strings"):
        decoder.submit([QueuedRequest("a", Request([1], SETTINGS[0], 0, 4, stop_strings=("x",)))])
    with pytest.raises(ContextLengthError):
        decoder.submit([QueuedRequest("a", Request([1] * 300, SETTINGS[0], 0, 4))])
    assert not decoder.fits(Request([1] * 40, SETTINGS[0], 0, 6))
    assert not decoder.fits(Request([1], SETTINGS[0], 0, 31))
    assert decoder.fits(Request([1] * 15, SETTINGS[0], 0, 30))
