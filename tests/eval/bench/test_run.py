"""Runs of a benchmark: real decoding, kept run by run; what cannot run does not stop the others."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import stand_ins
import torch

from draftforge.errors import InputError
from draftforge.eval.bench import run
from draftforge.eval.bench.draft_memory import draft_bytes
from draftforge.eval.bench.latency import Timeline
from draftforge.eval.bench.run import (
    BenchEntry,
    BenchPrompt,
    BenchRun,
    RunFolder,
    Setting,
    run_all,
    run_once,
    warm_up,
)
from draftforge.eval.bench.table import bench_rows
from draftforge.specdec.decoder import decode_rounds
from draftforge.specdec.models import CausalModel
from draftforge.specdec.proposers.factory import make_proposer
from draftforge.specdec.proposers.prompt_lookup import PromptLookup
from draftforge.specdec.requests import DecodeRun
from draftforge.specdec.sampling_settings import SamplingSettings

PLAIN = BenchEntry(Setting(method="plain", levels=0, batch_size=1), None)


@pytest.fixture(scope="module")
def target() -> CausalModel:
    return stand_ins.target()


@pytest.fixture
def work(target: CausalModel) -> BenchRun:
    prompts = [BenchPrompt(f"p{i}", "ab"[i % 2], ids) for i, ids in enumerate(stand_ins.prompts(5))]
    return BenchRun(target, prompts, 6, SamplingSettings(), frozenset({7}))


def ways(target: CausalModel) -> list[BenchEntry]:
    draft = stand_ins.near_copy(target)
    return [
        PLAIN,
        BenchEntry(Setting(method="small", levels=3, batch_size=1), lambda: make_proposer(draft, target)),
        BenchEntry(Setting(method="lookup", levels=2, batch_size=1), PromptLookup),
    ]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Method, batch size and repeat of every run that was really made."""
    made: list[tuple[str, int, int]] = []

    def listening(work: BenchRun, way: BenchEntry, batch_size: int, repeat: int, *rest: Any) -> Any:
        made.append((way.setting.method, batch_size, repeat))
        return run_once(work, way, batch_size, repeat, *rest)

    monkeypatch.setattr(run, "run_once", listening)
    return made


def test_methods_take_turns_and_say_what_plain_decoding_says(
    work: BenchRun, tmp_path: Path, started: list[tuple[str, int, int]]
) -> None:
    records, failures = run_all(work, ways(work.target), [1, 2], 2, RunFolder(tmp_path))
    assert not failures
    methods = ("plain", "small", "lookup")
    assert started == [(method, size, repeat) for size in (1, 2) for repeat in (0, 1) for method in methods]
    assert [(one.setting.method, one.setting.batch_size, one.repeat) for one in records] == started
    rows = bench_rows(records, work.prompts, 0.95, greedy=True)
    assert all(row.equal_answers == 1.0 for row in rows)
    small = next(row for row in rows if row.setting.method == "small")
    assert small.tau.value > 1.2 and small.setting.levels == len(small.alphas) == 3
    for record in records:
        line = Timeline(record.answers, record.seconds)
        assert [one.prompt for one in record.answers] == [0, 1, 2, 3, 4]
        assert 0 < line.prompt_seconds < record.seconds
        assert max(one.arrivals[-1] for one in record.answers) <= record.seconds
        assert line.slots <= record.setting.batch_size + 1e-6
        moments = {at for one in record.answers for at in one.arrivals[1:]}
        rounds = sum(len(one.arrivals) - 1 for one in record.answers)
        assert len(moments) == rounds if record.setting.batch_size == 1 else len(moments) < rounds  # slots share them
        assert record.parts.verify_seconds > 0
    drafting = {record.setting.method: record.parts.draft_seconds for record in records}
    assert drafting["small"] > 5 * drafting["plain"]


def test_a_killed_benchmark_goes_on(
    work: BenchRun, tmp_path: Path, started: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(Exception):
        pass

    real = run.run_once

    def dies(work: BenchRun, way: BenchEntry, batch_size: int, repeat: int, *rest: Any) -> Any:
        if (way.setting.method, repeat) == ("small", 1):
            raise KilledError
        return real(work, way, batch_size, repeat, *rest)

    monkeypatch.setattr(run, "run_once", dies)
    with pytest.raises(KilledError):
        run_all(work, ways(work.target), [1], 2, RunFolder(tmp_path))
    before = list(started)
    monkeypatch.setattr(run, "run_once", real)
    records, _ = run_all(work, ways(work.target), [1], 2, RunFolder(tmp_path))
    assert started[len(before) :] == [("small", 1, 1), ("lookup", 1, 1)]
    assert len(records) == 6
    again, _ = run_all(work, ways(work.target), [1], 2, RunFolder(tmp_path))
    assert again == records and len(started) == 6


def test_a_damaged_record_is_run_again(
    work: BenchRun, tmp_path: Path, started: list[tuple[str, int, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    run_all(work, ways(work.target)[::2], [1], 1, RunFolder(tmp_path))
    for path in tmp_path.iterdir():
        path.write_text(path.read_text()[:-20])
    run_all(work, ways(work.target)[::2], [1], 1, RunFolder(tmp_path))
    assert len(started) == 4
    assert "running it again" in capsys.readouterr().err


def failing(error: Exception) -> Callable[[], Any]:
    def make() -> Any:
        raise error

    return make


@pytest.mark.parametrize("error", [InputError("no such thing"), torch.OutOfMemoryError("no room\nfor it")])
def test_what_cannot_run_does_not_stop_the_others(
    work: BenchRun, tmp_path: Path, started: list[tuple[str, int, int]], error: Exception
) -> None:
    plain, small, _ = ways(work.target)
    bad = BenchEntry(Setting(method="bad", levels=2, batch_size=1), failing(error))
    records, failures = run_all(work, [plain, bad, small], [1, 2], 1, RunFolder(tmp_path))
    assert {record.setting.method for record in records} == {"plain", "small"} and len(records) == 4
    reason = str(error).splitlines()[0]
    assert [(one.method, one.plan, one.batch_size, one.reason) for one in failures] == [
        ("bad", "2", 1, reason),
        ("bad", "2", 2, reason),
    ]


def test_without_plain_decoding_nothing_is_compared(
    work: BenchRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = run.warm_up

    def no_room(work: BenchRun, way: BenchEntry, batch_size: int) -> Any:
        if way.make is None and batch_size == 4:
            raise torch.OutOfMemoryError("no room")
        return real(work, way, batch_size)

    monkeypatch.setattr(run, "warm_up", no_room)
    records, failures = run_all(work, ways(work.target), [1, 4], 1, RunFolder(tmp_path))
    assert {record.setting.batch_size for record in records} == {1}
    assert [one.method for one in failures] == ["plain", "small", "lookup"]
    assert "nothing to compare with" in failures[1].reason


def test_every_method_gets_the_same_numbers_and_a_prompt_keeps_its_own(work: BenchRun) -> None:
    sampled = replace(work, sampling=SamplingSettings(temperature=0.9))
    seeds = [request.seed for request in sampled.requests()]
    assert len(set(seeds)) == 5
    assert [request.seed for request in replace(sampled, prompts=sampled.prompts[1:]).requests()] == seeds[1:]
    assert [request.seed for request in replace(sampled, seed=1).requests()] != seeds
    assert [request.max_new_tokens for request in sampled.requests(2, 4)] == [4, 4]


def test_parts_are_of_the_fullest_rounds(work: BenchRun) -> None:
    parts = warm_up(work, ways(work.target)[1], 2)
    assert min(parts.draft_seconds, parts.verify_seconds, parts.rest_seconds) > 0


@pytest.mark.parametrize("batch_size", [1, 2])
def test_where_graphs_are_recorded_that_comes_before_what_is_timed(
    work: BenchRun, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole batch of short answers, then one with refills; they are in no figure."""
    way, decoded = ways(work.target)[1], list[DecodeRun]()

    def listening(run: DecodeRun) -> Any:
        decoded.append(run)
        return decode_rounds(run)

    monkeypatch.setattr(run, "decode_rounds", listening)
    parts = warm_up(work, way, batch_size)
    alone = run_once(work, way, batch_size, 0, parts)
    monkeypatch.setattr(run, "takes_graphs", lambda target: True)
    found = run_once(work, way, batch_size, 0, parts)
    *_, plain, settled = decoded
    assert not plain.barriers and settled.barriers == {batch_size, 3 * batch_size}
    assert len(settled.requests) == len(plain.requests) + 3 * batch_size
    assert list(settled.requests[-5:]) == list(plain.requests)
    counts = [[(one.prompt, one.digest, one.rounds) for one in record.answers] for record in (alone, found)]
    assert counts[0] == counts[1]
    assert min(one.begun for one in found.answers) == 0.0
    assert max(one.arrivals[-1] for one in found.answers) <= found.seconds


def memory_of(target: CausalModel, way: BenchEntry, work: BenchRun, batch_size: int) -> tuple[int, int]:
    found = run_once(work, way, batch_size, 0, warm_up(work, way, batch_size)).memory
    return found.weights, found.state


@pytest.mark.slow
def test_memory_counts_what_drafting_adds(work: BenchRun) -> None:
    target = stand_ins.target(4)
    work = replace(work, target=target)

    def tensors(names: Sequence[torch.nn.Module]) -> int:
        return sum(x.nbytes for module in names for x in [*module.parameters(), *module.buffers()])

    small = stand_ins.near_copy(target)
    way = BenchEntry(Setting(method="small", levels=3, batch_size=1), lambda: make_proposer(small, target))
    weights, state = memory_of(target, way, work, 1)
    own = {x.data_ptr(): x.nbytes for x in [*small.parameters(), *small.buffers()]}
    assert weights == sum(own.values())
    longest = max(len(prompt.ids) for prompt in work.prompts) + work.max_new_tokens + 1
    key_and_value = 2 * 4 * 2 * 8 * 4  # both, 4 layers, 2 heads of 8, 4 bytes
    assert longest * key_and_value <= state < 2 * longest * key_and_value
    assert memory_of(target, way, work, 2)[1] == pytest.approx(2 * state, rel=0.2)
    text = 8 * (longest + 2 + 1 + 1)  # lookup: its places, those of a round behind them, and their number
    assert memory_of(target, ways(target)[2], work, 1) == (0, text)
    assert draft_bytes(None, target) == (0, 0)
    head = stand_ins.random_eagle3(target)
    borrowed = tensors([head.lm_head])
    head.lm_head.weight = target.model.get_output_embeddings().weight
    eagle = BenchEntry(Setting(method="eagle3", levels=3, batch_size=1), lambda: make_proposer(head, target))
    assert memory_of(target, eagle, work, 1)[0] == tensors([head]) - borrowed
