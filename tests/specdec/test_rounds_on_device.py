"""Rounds as a GPU runs them, on a CPU: fixed sizes, lengths read by the kernel, parts that graphs can hold.

What runs a second time under a name must not wait for the device, bring numbers to it, or move what it keeps.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from proposing import CHAINS, DRAWN_TREES, ON_DEVICE, TREES, WAITING, proposer_named, takes
from stand_ins import target
from torch import Tensor

from draftforge.specdec import decoder, kv_cache, models, tree, verify_batch
from draftforge.specdec.cuda_graphs import OpCounter, Replays
from draftforge.specdec.decoder import Generation, decode_rounds, generate
from draftforge.specdec.kernels.attention import attention
from draftforge.specdec.proposers import dynamic_tree, logits, prompt_lookup, static_tree
from draftforge.specdec.requests import DecodeRun, Request, RoundTimer
from draftforge.specdec.sampling_settings import SamplingSettings

pytestmark = pytest.mark.slow

GREEDY = SamplingSettings()
WARM = SamplingSettings(temperature=0.9, top_k=12, top_p=0.95)
PENALISED = SamplingSettings(temperature=0.7, repetition_penalty=1.2)
TRAINED = [name for name in (*CHAINS, *TREES) if name not in WAITING]
PROMPTS = [[5, 9, 2], [17, 3, 8, 8, 1, 40], [33], [4, 12, 12, 50]]


def asked(sampling: SamplingSettings, tokens: int = 9) -> list[Request]:
    return [Request(prompt, sampling, 7 + i, tokens - i % 3) for i, prompt in enumerate(PROMPTS)]


def answers(name: str, requests: list[Request], rule: str, batch_size: int) -> list[Generation]:
    model = target()
    proposer = None if name == "plain" else proposer_named(name, model)
    found = dict(generate(model, proposer, requests, rule=rule, draft_tokens=3, batch_size=batch_size))
    return [found[index] for index in range(len(requests))]


@pytest.fixture
def fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of few sizes."""
    monkeypatch.setattr(decoder, "takes_graphs", lambda model: True)
    monkeypatch.setattr("draftforge.specdec.cuda_graphs._FEWEST", 2)


@pytest.fixture
def unread(fixed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """And lengths that only attention reads."""
    pytest.importorskip("triton")
    monkeypatch.setattr(kv_cache, "reads_lengths", lambda device: True)
    monkeypatch.setattr("draftforge.specdec.proposers.base.Texts.cut", lambda texts: texts)


@pytest.fixture
def on_kernels(unread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernels."""
    for module in (dynamic_tree, kv_cache, logits, models, prompt_lookup, static_tree, tree, verify_batch):
        monkeypatch.setattr(module, "runs_triton", lambda device: True)
    monkeypatch.setattr("draftforge.specdec.kernels.flash_decoding._PARTS", 2)  # each takes the interpreter its time


@pytest.fixture
def on_stand_in(unread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By plain operations in place of the kernels, whose interpreter takes its time."""
    monkeypatch.setattr("draftforge.specdec.kernels.flash_decoding.attend_cached", plainly)


def plainly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    past_B: Tensor,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    visible_BNF: Tensor | None = None,
    depth_BF: Tensor | None = None,
) -> Tensor:
    batch, new = query.shape[0], query.shape[2]
    entries = new if visible_BNF is None else visible_BNF.shape[2]
    at_BN = past_B[:, None] + torch.arange(entries - new, entries)
    rows_B1 = torch.arange(batch)[:, None]
    keys[rows_B1, :, at_BN], values[rows_B1, :, at_BN] = key.transpose(1, 2), value.transpose(1, 2)
    key_L = torch.arange(keys.shape[2])
    entry_BL = key_L - past_B[:, None]
    sees_BNL = entry_BL[:, None] <= torch.arange(new)[:, None]
    if visible_BNF is not None:
        inside_BL = (entry_BL >= 0) & (entry_BL < visible_BNF.shape[2])
        at_BNL = entry_BL.clamp(0, visible_BNF.shape[2] - 1)[:, None].expand(-1, new, -1)
        sees_BNL = (entry_BL < 0)[:, None] | (inside_BL[:, None] & visible_BNF.gather(2, at_BNL))
    if window is not None:
        depth_BE = torch.arange(entries).expand(batch, -1) if depth_BF is None else depth_BF
        entry_depth_BL = depth_BE.gather(1, entry_BL.clamp(0, entries - 1))
        key_BL = torch.where(entry_BL < 0, key_L, past_B[:, None] + entry_depth_BL)
        query_BN = past_B[:, None] + depth_BE[:, entries - new :]
        sees_BNL = sees_BNL & (query_BN[..., None] - key_BL[:, None] < window)
    return attention(query, keys[:batch], values[:batch], sees_BNL[:, None], scaling, softcap)


def same(one: list[Generation], other: list[Generation]) -> bool:
    return [(a.tokens, a.rounds, a.finish) for a in one] == [(b.tokens, b.rounds, b.finish) for b in other]


@pytest.mark.parametrize("name", ["plain", *WAITING])
def test_few_sizes_change_no_round(name: str, request: pytest.FixtureRequest) -> None:
    requests = asked(GREEDY)
    expected = answers(name, requests, "greedy", 3)
    request.getfixturevalue("fixed")
    assert same(answers(name, requests, "greedy", 3), expected)


@pytest.mark.parametrize("name", ["plain", "lookup", "small-tree", "cascade"])
def test_a_round_that_ran_ahead_of_a_stop_says_nothing(name: str, fixed: None) -> None:
    """With refills, and slots that move."""
    whole = answers(name, asked(GREEDY), "greedy", 1)
    stops = [frozenset(one.tokens[place : place + 1]) for one, place in zip(whole, (3, 0, 5, 2))]
    requests = [replace(one, stop_ids=stop) for one, stop in zip(asked(GREEDY), stops)]
    alone = [answers(name, [one], "greedy", 1)[0] for one in requests]
    assert [one.finish for one in alone] == ["stop"] * 4
    assert all(one.tokens == two.tokens[: len(one.tokens)] for one, two in zip(alone, whole))
    assert same(answers(name, requests, "greedy", 2), alone)


@pytest.mark.parametrize("name", ["plain", "small", "cascade"])
def test_rounds_run_ahead_under_a_timer_too(name: str, fixed: None) -> None:
    """One lap a round that was read, and none of the one that runs behind the last answer."""
    model, timer = target(), RoundTimer(torch.device("cpu"))
    proposer = None if name == "plain" else proposer_named(name, model)
    run = DecodeRun(model, proposer, asked(GREEDY), draft_tokens=3, batch_size=4, timer=timer)
    steps = list(decode_rounds(run))
    assert len(timer.rounds) == len(steps) - 1  # the first step reads the prompts
    assert all(one.verify > 0 and one.total > 0 for one in timer.rounds)
    found = {index: answer for step in steps for index, answer in step}
    assert same([found[index] for index in range(4)], answers(name, asked(GREEDY), "greedy", 4))


@pytest.mark.slow  # Triton's interpreter
@pytest.mark.parametrize("name", ["suffix", "lookahead"])
def test_on_the_device_rounds_are_those_of_the_host(name: str, request: pytest.FixtureRequest) -> None:
    requests = asked(GREEDY, tokens=7)[:3]
    expected = answers(name, requests, "greedy", 2)
    request.getfixturevalue("on_stand_in")
    assert same(answers(f"{name}-here", requests, "greedy", 2), expected)


@pytest.mark.slow  # Triton's interpreter
@pytest.mark.parametrize("name", ["lookup", "cascade", "eagle3", "eagle3-tree", "eagle3-dynamic"])
def test_the_kernels_change_no_round(name: str, request: pytest.FixtureRequest) -> None:
    requests = asked(GREEDY, tokens=5)[:2]
    expected = answers(name, requests, "greedy", 2)
    request.getfixturevalue("on_kernels")
    assert same(answers(name, requests, "greedy", 2), expected)


def tensors_of(thing: Any, depth: int = 3) -> dict[str, int]:
    """Where the tensors lie that a proposer, its drafters and their caches keep between rounds."""
    found: dict[str, int] = {}
    parts = [
        (f"{name}{n}", part)
        for name, some in vars(thing).items()
        if isinstance(some, tuple)
        for n, part in enumerate(some)
    ]
    for name, value in (*vars(thing).items(), *parts):
        if isinstance(value, Tensor) and "_S" in name:
            found[name] = value.data_ptr()
        elif depth and type(value).__module__.startswith("draftforge.specdec.proposers"):
            found |= {f"{name}.{inner}": place for inner, place in tensors_of(value, depth - 1).items()}
    return found


CASES = [
    *((name, GREEDY, "greedy") for name in (*TRAINED, *ON_DEVICE)),
    ("small-merged", WARM, "multiround"),
    *((name, WARM, rule) for name in DRAWN_TREES for rule in ("multiround", "recursive") if takes(rule, name)),
    *(("small", WARM, rule) for rule in ("token", "block", "onehot", "match", "typical")),
    ("small", PENALISED, "token"),
    ("plain", PENALISED, "greedy"),
    ("small-sampled", WARM, "traversal"),
]


@pytest.mark.parametrize(("name", "sampling", "rule"), CASES)
def test_graphs_can_hold_every_part(
    name: str,
    sampling: SamplingSettings,
    rule: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And no round changes."""
    run, known, places = Replays.run, set[object](), list[dict[str, int]]()

    def watched(self: Replays, part: object, function: Callable[..., Any], *args: Any) -> Any:
        if part not in known:
            known.add(part)
            return run(self, part, function, *args)
        with OpCounter() as watch:
            output = run(self, part, function, *args)
        assert not watch.waiting and not watch.bringing, f"{part}: {watch.waiting} {watch.bringing}"
        if isinstance(part, tuple) and part[0] == "observe":
            places.append(tensors_of(function.__self__.proposer))  # type: ignore[attr-defined]
        return output

    expected = answers(name, asked(sampling, tokens=7)[:3], rule, 2)
    request.getfixturevalue("on_stand_in")
    monkeypatch.setattr(Replays, "run", watched)
    assert same(answers(name, asked(sampling, tokens=7)[:3], rule, 2), expected)
    assert len(known) > 2
    assert all(place == places[0] for place in places)
    assert name == "plain" or (places and places[0])
