"""Costs from the engine: planted times are recovered, and servers that cannot tell them are refused."""

import itertools
import json
import math
import random
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from simulated_engine import SimulatedEngine, SimulatedServers
from trained import Trained

from draftforge import fingerprint
from draftforge.errors import CorruptDataError, DraftforgeError, EngineError, InputError
from draftforge.eval import engine_costs
from draftforge.eval.cost_measurement import Grid
from draftforge.eval.cost_table import (
    ClosedLoop,
    CostKey,
    CostTable,
    MeasuredRound,
    cached_costs,
    read_tables,
    timed_rule,
    write_tables,
)
from draftforge.eval.draft_configs import DraftConfig, ProposerSpec
from draftforge.eval.engine_costs import (
    EngineMeasurement,
    EngineServers,
    answer_lengths,
    full_round,
    plain_key,
    prompt_lengths,
)
from draftforge.eval.serving_load import LoadTimes
from draftforge.eval.settings import SERVED_FAMILIES, CostSettings, EngineCostSettings, LoadSettings, ScoreSettings
from draftforge.eval.vllm_server import EngineReading
from draftforge.specdec.formats.layouts import FAMILIES, NATIVE
from draftforge.specdec.proposers.prompt_lookup import PromptLookup
from draftforge.specdec.proposers.training_free import LOOKUP
from draftforge.specdec.sampling_settings import SamplingSettings
from draftforge.specdec.serve_commands import ServeCommand
from draftforge.specdec.target_settings import TargetSettings
from draftforge.storage import write_json

STARTED = EngineCostSettings(engine="vllm", start=True)
LOAD = LoadSettings(
    engine="vllm", batch_sizes={1: 0.5, 6: 0.5}, context_tokens=300, answer_tokens=64, costs=STARTED
)  # fmt: skip
SETTINGS = ScoreSettings(
    draft_tokens=[1, 2, 3, 4], load=LOAD, costs=CostSettings(prompts=4, rounds=16, warmup_rounds=3)
)  # fmt: skip
ROOM = 2048
GRID = Grid.around(LOAD, 1024)
KEY = CostKey(
    hardware="1 card", engine="vLLM 0.99", software="vLLM 0.99 --flag", dtype="bfloat16", target={"class": "T"},
    draft={"class": "D"}, sampling="greedy",
    plans={str(K): {"rule": "greedy", "levels": K, "tree": None} for K in (1, 2, 3, 4)},
)  # fmt: skip
PROMPTS = [list(range(start, start + 90)) for start in (0, 1000, 2000)]
SPEC = ProposerSpec(PromptLookup, (1, 2, 3, 4))


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_costs, "_LOOK_SECONDS", 0)
    monkeypatch.setattr(engine_costs, "_SETTLE_SECONDS", 0.05)


def round_seconds(batch: int, K: int, context: float) -> float:
    """Planted: linear in the context, so that its mean is what counts."""
    return 4e-3 + 1.5e-3 * K + 1e-4 * batch * (K + 1) + 2e-6 * batch * context


def prompt_seconds(tokens: int, K: int) -> float:
    """Of a step: the target's part, and half of it with a draft."""
    return (2e-3 + 2e-5 * tokens) * (1.5 if K else 1.0)


def measured(servers: SimulatedServers, family: str = "eagle3") -> CostTable:
    measurement, draft = EngineMeasurement(PROMPTS, SETTINGS, GRID, ROOM), cast(Any, SimpleNamespace(family=family))
    with servers.plain() as client:
        table = measurement.plain(client, plain_key(KEY))
    for K in servers.depths(draft, SPEC):
        with servers.drafting(draft, K, timed_rule(SPEC, SETTINGS)) as client:
            table = measurement.with_draft(table, client, K, family)
    return table.model_copy(update={"key": KEY})


@pytest.mark.parametrize("counted", [{"rounds": 0.0}, {"round_seconds": 0.0}])
def test_a_server_that_counts_no_time_is_refused(counted: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    servers = SimulatedServers(round_seconds, prompt_seconds)
    with servers.plain() as client:
        read = client.read
        monkeypatch.setattr(client, "read", lambda: read()._replace(**counted))  # type: ignore[arg-type]
        with pytest.raises(EngineError, match=r"counts .* s for .* that it answered$"):
            EngineMeasurement(PROMPTS, SETTINGS, GRID, ROOM).plain(client, plain_key(KEY))


@pytest.mark.parametrize(
    ("factors", "said"),
    [
        ({"rounds": 1e-12}, "verify_seconds = .*: "),
        ({"rounds": 1e15, "round_seconds": 1e15}, "rounds = .*: "),
        ({"drafts": 1e-20, "drafted": 1e-20}, "too small a share of its"),
    ],
)
def test_counts_that_make_no_times_are_one_line(
    factors: dict[str, float], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = SimulatedServers(round_seconds, prompt_seconds)
    made = servers._made

    def counting(**changes: Any) -> SimulatedEngine:
        engine = made(**changes)
        read = engine.read

        def scaled() -> EngineReading:
            found = read()
            return found._replace(**{name: getattr(found, name) * factor for name, factor in factors.items()})

        monkeypatch.setattr(engine, "read", scaled)
        return engine

    monkeypatch.setattr(servers, "_made", counting)
    with pytest.raises(EngineError, match=rf"^engine: .*{said}"):
        measured(servers, LOOKUP)


def test_planted_times_are_recovered() -> None:
    servers = SimulatedServers(round_seconds, prompt_seconds)
    table = measured(servers)
    assert servers.started == ["plain", "eagle3 1 greedy", "eagle3 2 greedy", "eagle3 4 greedy"]
    assert [(row.levels, *row.place) for row in table.points] == [(K, *at) for K in (0, 1, 2, 4) for at in GRID.places]
    for row in table.points:
        planted = round_seconds(row.batch_size, row.levels, row.context_tokens)
        assert row.verify_seconds == pytest.approx(planted, rel=0.01)
        assert (row.draft_seconds, row.rest_seconds, row.tokens) == (0, 0, row.levels + 1) and row.rounds >= 13
    assert [(loop.levels, loop.batch_size) for loop in table.closed_loops] == [
        (K, size) for K in (0, 1, 2, 4) for size in GRID.batch_sizes
    ]
    for loop in table.closed_loops:
        assert (loop.prompt_tokens, loop.answer_tokens) == (268, 64) and loop.prompts >= 2 * loop.batch_size
        assert loop.rounds == pytest.approx(63 / (1 + loop.levels / 2), rel=0.2)
    assert [(row.levels, row.place) for row in table.again] == [(K, GRID.places[-1]) for K in (0, 1, 2, 4)]
    assert table.drift < 0.01
    # Nothing outgrows the target's context, and the batch was reached.
    assert all(engine.longest < ROOM and max(engine.batches) == 6 for engine in servers.engines)
    # Scores at the load say whose times these are.
    times = LoadTimes(table, LOAD)
    assert times.fit.hardware == f"vLLM 0.99 on 1 card, bfloat16, measured {table.measured}"
    assert "times of vLLM 0.99 on 1 card, bfloat16, measured 20" in times.description
    assert "verify ms, the whole round," in times.description
    ratio = times.fit.round(DraftConfig(3), 6, 300).seconds / times.fit.plain(6, 300)
    assert ratio == pytest.approx(round_seconds(6, 3, 300) / round_seconds(6, 0, 300), rel=0.03)


def test_an_engine_that_slows_down_is_said_to_be_unsteady(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    factor, loop = 1.0, engine_costs._Probe.closed_loop

    def slower(probe: Any, size: int) -> Any:
        nonlocal factor
        factor = 1.5 if probe.K == 2 else factor
        return loop(probe, size)

    monkeypatch.setattr(engine_costs._Probe, "closed_loop", slower)
    servers = SimulatedServers(lambda *place: factor * round_seconds(*place), prompt_seconds, (1, 2))
    table = measured(servers)
    assert [one.levels for one in table.again] == [0, 1, 2]
    assert table.drift == pytest.approx(0.5, abs=0.01)
    assert table.whose.endswith("; timed again, its rounds differed by 50%")
    said = [line for line in capsys.readouterr().err.splitlines() if "as uncertain" in line]
    assert len(said) == 1 and "a round at batch 1 took" in said[0]


BESIDE: dict[str, Any] = {"budget": 512, "mixed_seconds": 1e-3, "gap_seconds": 5e-4}
"""Two prompts fit a step, and are read beside rounds, which then take longer."""


def served(size: int, K: int, acceptance: float) -> tuple[float, float]:
    """Seconds that 64 tokens take each of those in flight, and tau, in a long service of requests of many lengths."""
    engine = SimulatedEngine(round_seconds, prompt_seconds, K, acceptance=acceptance, **BESIDE)
    draw, count = random.Random(1), 40 * size
    prompts = [[number, *[0] * draw.randint(133, 401)] for number in range(count)]
    tokens = [draw.randint(32, 96) for _ in range(count)]
    asked = engine.begin(prompts, size, tokens, SamplingSettings())
    while engine.unsent:
        engine.step()
    # Tokens until the last request is sent, those of answers that have not ended yet among them.
    emitted = sum(length for length, one in zip(tokens, asked) if one.done())
    emitted += sum(one.emitted for one in engine.running)
    later = emitted - engine.counts["first_tokens"]
    return 64 * size * engine.clock / emitted, later / engine.counts["rounds"]


def test_what_is_promised_is_served_where_prompts_are_read_beside_rounds() -> None:
    """Batch sizes and K between measured ones, and drafts of another acceptance than the measured."""
    times = LoadTimes(measured(SimulatedServers(round_seconds, prompt_seconds, (1, 4), BESIDE, BESIDE)), LOAD)
    for size in (1, 3, 6):
        plain, _ = served(size, 0, 0.0)
        assert times.plain_goodput_at(size) == pytest.approx(size * 64 / plain, rel=0.02)
        for K, acceptance in ((1, 0.8), (3, 0.5), (4, 0.3)):
            seconds, tau = served(size, K, acceptance)
            promised = times.gain_at(size, DraftConfig(K)).speedup(tau)
            assert promised == pytest.approx(plain / seconds, rel=0.02)


def test_full_batches_hold_for_drafts_of_another_acceptance() -> None:
    """Steps that read prompts are slower however many they read: fewer rounds have fewer of them."""
    mixed, each, sizes, later = 4e-3, 2e-4, (1, 2, 4, 8, 16, 32, 64), LOAD.answer_tokens - 1
    round_of = {0: 2e-3, 2: 4e-3}

    def seconds(size: int, K: int, n: float) -> float:
        return n * round_of[K] + mixed * n * (1 - math.exp(-size / n)) + each * size

    points = [
        MeasuredRound(
            way="chain" if K else "plain", batch_size=size, levels=K, tokens=K + 1, context_tokens=300,
            draft_seconds=0, verify_seconds=a_round, rest_seconds=0, rounds=9,
        )
        for K, a_round in round_of.items() for size in sizes
    ]  # fmt: skip
    loops = [
        ClosedLoop(
            batch_size=size, levels=K, prompt_tokens=LOAD.prompt_tokens, answer_tokens=LOAD.answer_tokens,
            seconds=seconds(size, K, n), rounds=n, drafted_share=float(K > 0), prompts=9,
        )
        for K, n in ((0, later), (2, later / 1.5)) for size in sizes
    ]  # fmt: skip
    times = LoadTimes(CostTable(key=KEY, points=points, closed_loops=loops), LOAD)
    for size, tau in itertools.product(sizes, (1.3, 1.5, 2.0)):
        served = seconds(size, 0, later) / seconds(size, 2, later / tau)
        assert times.gain_at(size, DraftConfig(2)).speedup(tau) == pytest.approx(served, rel=0.03)


def test_tables_of_prompts_that_were_read_alone_are_measured_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = SimulatedServers(round_seconds, prompt_seconds, ks=(2,))
    table, path = measured(servers), tmp_path / "old.json"
    old = table.model_dump(mode="json") | {"prompt_points": [{"tokens": 9, "plain_seconds": 1, "draft_seconds": 0}]}
    write_json(path, old | {"closed_loops": []})
    assert cached_costs(path, KEY, lambda: table) == cached_costs(path, KEY, pytest.fail) == table
    says = r"closed_loops: an engine's times must have them at every K and batch size"
    assert re.search(rf"old\.json: .*{says}.*; measuring again", " ".join(capsys.readouterr().err.split()))
    # A file of another machine is refused; its prompts' length is the only one that is known.
    write_json(path, {"fits": [old | {"closed_loops": []}]})
    with pytest.raises(CorruptDataError, match=rf"old\.json: fits\.0: .*{says}"):
        read_tables(path)
    write_tables(path, [table])
    assert read_tables(path) == [table]
    with pytest.raises(InputError, match="prompt 269 is not within the measured range of 268 to 268"):
        LoadTimes(table, LOAD.model_copy(update={"context_tokens": 301}))


def test_answers_under_load_have_many_lengths_of_one_mean() -> None:
    for count, mean, most in ((64, 128, 999), (7, 16, 20), (8, 2, 9), (6, 40, 40)):
        found = answer_lengths(count, mean, most)
        width = min(mean // 2, most - mean, mean - 2)
        assert len(found) == count and sum(found[: count // 2 * 2]) == mean * (count // 2 * 2)
        assert mean - width <= min(found) <= max(found) <= mean + width
        assert len(set(found)) > min(width, count / 2)


def test_traffic_is_made_again_where_slow_first_answers_made_it_short() -> None:
    rounds = itertools.count()

    def warming(batch: int, K: int, context: float) -> float:
        return round_seconds(batch, K, context) + (1.0 if next(rounds) < LOAD.answer_tokens else 0.0)

    engine = SimulatedEngine(warming, prompt_seconds)
    loop, _ = engine_costs._Probe(engine, PROMPTS, SETTINGS, ROOM, 0).closed_loop(1)
    assert loop.prompts >= 5 and loop.seconds < 1


def test_prompts_under_load_are_as_unlike_as_real_ones() -> None:
    known = [10, 20, 30, 40, 300]
    found = prompt_lengths(known, 50, 160, 500)
    assert set(found) == {20, 40, 60, 80, 500} and all(8 <= found.count(one) <= 12 for one in set(found))
    assert prompt_lengths([7, 7], 3, 20, 999) == [20, 20, 20] and min(prompt_lengths([1, 999], 4, 2, 9)) == 1


def test_prompt_lookup_is_timed_by_its_full_rounds() -> None:
    """Rounds in which no request drafts cost plain ones; they are taken out again."""
    servers = SimulatedServers(round_seconds, prompt_seconds, ks=(4,), draft_change={"share": 0.6})
    table = measured(servers, "lookup")
    for row in table.points:
        planted = round_seconds(row.batch_size, row.levels, row.context_tokens)
        assert row.verify_seconds == pytest.approx(planted, rel=0.03)
    assert full_round(0.9 * 3.0 + 0.1 * 1.0, 1.0, 0.9, 1) == pytest.approx(3.0)
    assert full_round(0.75 * 3.0 + 0.25 * 1.0, 1.0, 0.5, 2) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("where", "change", "says"),
    [
        ("plain_change", {"K": 2}, "engine: drafts; must be a server without a draft"),
        ("plain_change", {"trouble": "others"}, "engine: answered 7 requests where 6 were sent; it must serve nothing"),
        ("plain_change", {"trouble": "replicas"}, "engine: has 2 replicas; times are of one"),
        ("plain_change", {"trouble": "stops"}, "engine: stopped 1 requests; batch 6 at context 600 needs a larger"),
        ("plain_change", {"most": 3}, "engine: did not run 6 requests at once; batch 6 at context 600 needs a larger"),
        ("plain_change", {"trouble": "dies"}, "it ended"),
        ("draft_change", {"drafted": 2}, "engine: drafts 2.0 tokens in 100% of its rounds; must draft 1 in every one"),
        ("draft_change", {"share": 0.5}, r"engine: drafts 1.0 tokens in [45]\d% of its rounds; must draft 1 in every"),
        ("draft_change", {"K": 0}, "engine: drafts 0.0 tokens in 0% of its rounds; must draft 1 in every one"),
    ],
)
def test_servers_that_cannot_tell_are_refused(where: str, change: dict[str, Any], says: str) -> None:
    arguments: dict[str, Any] = {where: change}
    with pytest.raises(DraftforgeError, match=says):
        measured(SimulatedServers(round_seconds, prompt_seconds, **arguments))


def servers_of(settings: EngineCostSettings, gpu: bool = False, **target: Any) -> EngineServers:
    return EngineServers(settings, TargetSettings(model="TARGET", **target), "bfloat16", "1 card", gpu, Path("logs"))


class FakeLauncher:
    """Tells a version, and keeps the commands that it is to start."""

    def __init__(self, version: str) -> None:
        self.found, self.commands = version, list[ServeCommand]()

    def version(self) -> str:
        return self.found

    @contextmanager
    def serving(self, command: ServeCommand, dtype: str, log: Path) -> Iterator[str]:
        self.commands.append(command)
        yield "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("version", "gpu", "rule", "synthetic"),
    [
        ("0.23.0", True, "greedy", True),
        ("0.32.0", True, "token", True),
        ("1.0", True, "greedy", True),
        ("0.22.1", True, "greedy", False),
        ("0.32.0", False, "greedy", False),
        ("0.32.0", True, "block", True),
    ],
)
def test_started_servers_accept_synthetically_where_they_can(
    trained_drafts: Trained, version: str, gpu: bool, rule: str, synthetic: bool
) -> None:
    servers = servers_of(STARTED, gpu)
    launcher = FakeLauncher(version)
    servers.__dict__["_launcher"] = launcher
    draft: Any = SimpleNamespace(family="eagle3", path=trained_drafts.draft_folders["eagle3"], same_tokenizer=True)
    with servers.plain(), servers.drafting(draft, 3, rule):
        pass
    plain, drafting = (shlex.split(command.text) for command in launcher.commands)
    assert plain == ["vllm", "serve", "TARGET"]
    config = json.loads(drafting[drafting.index("--speculative-config") + 1])
    assert (config["method"], config["model"], config["num_speculative_tokens"]) == ("eagle3", str(draft.path), 3)
    assert config.get("synthetic_acceptance_rates") == ([0.5, 0.25, 0.125] if synthetic else None)
    assert (config.get("rejection_sample_method") == "synthetic") == synthetic
    said = " with synthetic acceptance" if synthetic else ""
    assert (servers.engine, servers.software) == (f"vLLM {version}", f"vLLM {version}{said}")


def test_drafts_that_vllm_cannot_read_are_refused(tmp_path: Path) -> None:
    servers = servers_of(STARTED)
    servers.__dict__["_launcher"] = FakeLauncher("0.32.0")
    (tmp_path / "config.json").write_text('{"speculators_model_type": "eagle3"}')
    save_file({"fc.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    drafts = [
        (SimpleNamespace(family="suffix", path=None, same_tokenizer=True), "suffix: vLLM serves no such draft"),
        (SimpleNamespace(family="small", path=tmp_path, same_tokenizer=False), "vLLM serves no such draft with this"),
        (SimpleNamespace(family="eagle3", path=tmp_path, same_tokenizer=True), "has format speculators; must be as"),
    ]
    for draft, says in drafts:
        found: Any = draft
        with pytest.raises(InputError, match=rf"^score\.load\.costs: .*{says}"), servers.drafting(found, 2, "greedy"):
            raise AssertionError
    with pytest.raises(InputError, match=r"^score\.load\.costs\.start: the target's adapter lora is merged here"):
        servers_of(STARTED, adapter="lora")


def test_running_servers_are_asked_for_what_they_must_have() -> None:
    urls = {"lookup": {1: "http://a:1"}, "eagle3": {1: "http://a:2", 3: "http://a:3/v1/", 6: "http://a:4"}}
    settings = EngineCostSettings(engine="vllm", plain_url="http://a:0", draft_urls=urls, hardware="2 cards")
    assert settings.draft_urls["eagle3"][3] == "http://a:3"
    servers = servers_of(settings)
    assert servers.hardware == "2 cards"
    spec, draft = ProposerSpec(PromptLookup, (1, 2, 4)), SimpleNamespace(family="eagle3")
    found: Any = draft
    assert servers.depths(found, spec) == [1, 3, 6]
    servers.__dict__["engine"] = "vLLM 0.32.0"
    servers.check(["eagle3", "lookup"])
    assert (*FAMILIES[NATIVE], LOOKUP) == SERVED_FAMILIES
    with pytest.raises(InputError, match=r"draft_urls\.eagle3: are servers of one draft; 2 drafts of that family"):
        servers.check(["eagle3", "eagle3"])
    with pytest.raises(InputError, match=r"^score\.load\.costs\.draft_urls\.small: required: a draft of that family"):
        servers.check(["small"])


def test_the_engine_is_part_of_the_key_and_our_own_keys_stay() -> None:
    own = KEY.model_copy(update={"engine": ""})
    dumped = own.model_dump(mode="json")
    del dumped["engine"]
    assert own.digest == fingerprint.of_json(dumped) != KEY.digest
    assert KEY.model_copy(update={"software": "vLLM 0.99 --other"}).digest != KEY.digest
    assert plain_key(KEY).digest not in (KEY.digest, own.digest)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"engine": "sglang", "start": True}, "costs.engine\n.*Input should be 'vllm'"),
        ({"engine": "vllm", "start": True, "plain_url": "http://a"}, "plain_url: is of running servers"),
        ({"engine": "vllm", "start": True, "api_key_env": "KEY"}, "api_key_env: is of running servers"),
        ({"engine": "vllm", "plain_url": "ftp://a"}, "must be an address such as http"),
        ({"engine": "vllm", "plain_url": "http://me:secret@a"}, "must hold no user name or password"),
        ({"engine": "vllm", "draft_urls": {"lookup": {0: "http://a"}}}, "lookup: K = 0: must be 1 to 64"),
        ({"engine": "vllm", "draft_urls": {"lookup": {2: "a:80"}}}, r"lookup\.2: must be an address"),
        ({"engine": "vllm", "draft_urls": {"lookup": {}}}, "lookup: K = none: must be 1 to 64"),
        ({"engine": "vllm", "start": True, "start_seconds": 0}, "greater than 0"),
    ],
)
def test_wrong_settings_are_refused(fields: dict[str, Any], says: str) -> None:
    load = {"engine": "vllm", "context_tokens": 300, "answer_tokens": 64}
    with pytest.raises(ValidationError, match=says):
        LoadSettings.model_validate(load | {"costs": fields})


def test_engine_costs_go_with_their_engine_and_with_chains() -> None:
    started = {"engine": "vllm", "start": True}
    running = {"engine": "vllm", "plain_url": "http://a", "draft_urls": {"lookup": {1: "http://b"}}, "hardware": "h"}
    load = {"engine": "vllm", "context_tokens": 300, "answer_tokens": 64, "costs": started}
    with pytest.raises(ValidationError, match="flags: is of servers that are started here; set start: true"):
        LoadSettings.model_validate(load | {"costs": running | {"flags": ["--x"]}})
    with pytest.raises(ValidationError, match=r"costs\.engine vllm: must be the load's engine, which is draftforge"):
        LoadSettings.model_validate(load | {"engine": "draftforge"})
    with pytest.raises(ValidationError, match=r"costs\.fit times.json: load\.costs measures in vllm; give one of them"):
        ScoreSettings.model_validate({"load": load, "costs": {"fit": "times.json"}})
    with pytest.raises(ValidationError, match="trees wide: vllm drafts chains only"):
        ScoreSettings.model_validate({"load": load, "trees": {"wide": {"kind": "static", "widths": [2]}}})
