"""vLLM's servers with and without drafts for `bench_served.py`, and what they count and take."""

import math
import time
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from draftforge import storage
from draftforge.errors import EngineError
from draftforge.eval.cost_measurement import Grid
from draftforge.eval.cost_table import CostKey, CostTable, hardware_name, kept_table
from draftforge.eval.engine_costs import EngineMeasurement, answer_lengths, synthetic
from draftforge.eval.engine_metrics import Counters, parse
from draftforge.eval.settings import CostSettings, LoadSettings, ScoreSettings
from draftforge.eval.vllm_server import TimedAnswer, VllmClient
from draftforge.specdec.formats.layouts import NATIVE
from draftforge.specdec.serve_commands import ServeCommand, lookup_command, plain_command, serve_command
from draftforge.specdec.serving_plan import ServingPlan
from draftforge.specdec.target_settings import TargetSettings

PLAIN = "plain"
_SETTLE_SECONDS = 0.2
"""The engine's process tells its server a step later: counters are read until two readings so far apart are equal."""
Json = dict[str, Any]


class Draft(NamedTuple):
    """What a server drafts with; `folder` None: prompt lookup."""

    name: str
    step: int
    family: str
    folder: Path | None
    digest: str

    @property
    def key(self) -> str:
        return self.name if self.folder is None else f"{self.name}-step-{self.step}"


class Setup(NamedTuple):
    """One server: a draft at one K, or (None) no draft."""

    draft: Draft | None
    draft_tokens: int
    accept: float | None = None
    """Each draft token after accepted ones is accepted with this probability, whatever the target says."""

    @property
    def key(self) -> str:
        return PLAIN if self.draft is None else f"{self.draft.key}-K{self.draft_tokens}"

    @property
    def table(self) -> str:
        """Name of the table that its times are in."""
        return PLAIN if self.draft is None else self.draft.key

    def command(self, target: TargetSettings) -> ServeCommand:
        """vLLM's command by draftforge's own words."""
        if self.draft is None:
            return plain_command("vllm", target)
        if self.accept is not None:
            return synthetic(self._replace(accept=None).command(target), self.draft_tokens, self.accept)
        if self.draft.folder is None:
            return lookup_command("vllm", self.draft_tokens, target)
        plan = ServingPlan.chain(self.draft_tokens)
        return serve_command(NATIVE, self.draft.family, plan, str(self.draft.folder), target)


class Prompt(NamedTuple):
    """A prompt with its domain."""

    ids: list[int]
    domain: str


class Measured(NamedTuple):
    """One server at one concurrency."""

    figures: Json
    answers: list[tuple[int, list[int]]]
    """By number of the prompt."""


def counters(client: VllmClient) -> Counters:
    """The engine's counts once nothing is added any more."""
    found, before = _counted(client), None
    while found != before:
        time.sleep(_SETTLE_SECONDS)
        found, before = _counted(client), found
    return found


def _counted(client: VllmClient) -> Counters:
    return parse(client.metrics(), f"{client.name}/metrics")


def measure(
    client: VllmClient,
    setup: Setup,
    concurrency: int,
    prompts: Sequence[Prompt],
    tokens: int,
    seconds: float,
    counts: bool = False,
) -> "Measured":
    """Figures of one server at one concurrency over about so many seconds; `counts`: without its speed."""

    lengths = answer_lengths(len(prompts), tokens, 2 * tokens)

    def ask(order: Sequence[int]) -> list[TimedAnswer]:
        given = [prompts[number].ids for number in order]
        return [one.result() for one in client.begin(given, concurrency, [lengths[number] for number in order])]

    # 1) Warm up at this concurrency, which also says how long an answer takes.
    replies = ask(list(islice(cycle(range(len(prompts))), 2 * concurrency)))
    an_answer = (max(one.ended for one in replies) - replies[0].begun) / 2
    # 2) Whole passes over the prompts, so that each counts alike.
    passes = math.ceil(concurrency * max(seconds / an_answer, 4) / len(prompts))
    order = [number for _ in range(passes) for number in range(len(prompts))]
    before = None if setup.draft is None else counters(client)
    replies = ask(order)
    # 3) The speed is that of the time in which all are in flight: from a second answer of each to the last to begin.
    begun, until = (max(one.begun for one in some) for some in (replies[: 2 * concurrency], replies))
    ended = sum(len(one.ids) for one in replies if begun < one.ended <= until)
    figures: Json = {"requests": len(order)}
    if not counts:
        figures |= {"tokens": ended, "seconds": until - begun, "tokens_per_second": ended / (until - begun)}
    if before is not None:
        added = counters(client).since(before)
        if not added.rounds:
            raise EngineError("its counters tell no draft")
        figures |= {"drafts": added.rounds, "drafted": added.drafted, "accepted": added.accepted, "tau": added.tau}
        figures["accepted_at"] = [count / added.rounds for count in added.accepted_at]
    return Measured(figures, [(number, one.ids) for number, one in zip(order, replies, strict=True)])


def scoring(prompts: Sequence[Prompt], asked: Json) -> ScoreSettings:
    """Settings of scores at the load that is served."""
    tokens: int = asked["new_tokens"]
    context = round(sum(len(one.ids) for one in prompts) / len(prompts)) + tokens // 2
    sizes = dict.fromkeys(asked["concurrency"], 1.0)
    load = LoadSettings(engine="vllm", batch_sizes=sizes, context_tokens=context, answer_tokens=tokens)
    costs = CostSettings(prompts=asked["cost_prompts"], rounds=asked["cost_rounds"])
    return ScoreSettings(draft_tokens=asked["draft_tokens"], decode_conversations=0, load=load, costs=costs)


class EngineTimes:
    """Times of the engine's rounds, by draft, kept in OUT/costs."""

    def __init__(self, folder: Path, target: TargetSettings, prompts: Sequence[Prompt], asked: Json) -> None:
        settings = scoring(prompts, asked)
        assert settings.load is not None
        room = 4 * settings.load.context_tokens
        # At the concurrencies alone, and at the load's context.
        around = Grid.around(settings.load, room)
        grid = around._replace(batch_sizes=sorted(settings.load.batch_sizes), contexts=[around.context])
        self._measurement = EngineMeasurement([one.ids for one in prompts], settings, grid, 2 * room)
        self._folder, self._dtype, self._flags = folder, target.dtype, " ".join(asked["flags"])

    def table(self, name: str) -> CostTable | None:
        """Times of the plain server, with those of a draft; None where they were not measured."""
        return kept_table(self._file(name))

    def known(self, setup: Setup) -> bool:
        """Whether a server's rounds were measured."""
        table = self.table(setup.table)
        return table is not None and any(point.levels == setup.draft_tokens for point in table.points)

    def measure(self, client: VllmClient, setup: Setup) -> None:
        """Add a server's rounds to its draft's table, unless they are there."""
        if self.known(setup):
            return
        if setup.draft is None:
            key = CostKey(
                hardware=hardware(), engine=client.version(), software=f"{client.version()} {self._flags}",
                dtype=self._dtype, target={}, draft={}, sampling="", plans={},
            )  # fmt: skip
            self._keep(PLAIN, self._measurement.plain(client, key))
            return
        table = self.table(setup.table) or self.table(PLAIN)
        if table is None:
            raise EngineError("there are no times of the plain server to set its rounds beside")
        self._keep(setup.table, self._measurement.with_draft(table, client, setup.draft_tokens, setup.draft.family))

    def _keep(self, name: str, table: CostTable) -> None:
        storage.write_bytes(self._file(name), table.model_dump_json().encode())

    def _file(self, name: str) -> Path:
        return self._folder / f"engine-{name}.json"


def hardware() -> str:
    """What this process measures on."""
    return hardware_name(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
