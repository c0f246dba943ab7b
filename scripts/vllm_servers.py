"""vLLM's servers with and without drafts for `bench_served.py`, and what they count and take."""

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from draftforge.errors import EngineError
from draftforge.eval.engine_metrics import Counters, parse
from draftforge.eval.vllm_server import VllmClient
from draftforge.specdec.formats.layouts import NATIVE
from draftforge.specdec.serve_commands import ServeCommand, lookup_command, plain_command, serve_command
from draftforge.specdec.serving_plan import ServingPlan
from draftforge.specdec.target_settings import TargetSettings

PLAIN = "plain"
_WARM_TOKENS = 16
_SETTLE_SECONDS = 0.5
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

    @property
    def key(self) -> str:
        return PLAIN if self.draft is None else f"{self.draft.key}-K{self.draft_tokens}"

    def command(self, target: TargetSettings) -> ServeCommand:
        """vLLM's command by draftforge's own words."""
        if self.draft is None:
            return plain_command("vllm", target)
        if self.draft.folder is None:
            return lookup_command("vllm", self.draft_tokens, target)
        plan = ServingPlan.chain(self.draft_tokens)
        return serve_command(NATIVE, self.draft.family, plan, str(self.draft.folder), target)


class Prompt(NamedTuple):
    """A prompt with its domain."""

    ids: list[int]
    domain: str


def counters(client: VllmClient) -> Counters:
    """The engine's counts once nothing is added any more."""
    found, before = _counted(client), None
    while found != before:
        time.sleep(_SETTLE_SECONDS)
        found, before = _counted(client), found
    return found


def _counted(client: VllmClient) -> Counters:
    return parse(client.metrics(), f"{client.name}/metrics")


def timed_answer(client: VllmClient, prompt: Prompt, tokens: int) -> tuple[list[int], float]:
    """Ids of a greedy answer of exactly so many tokens, and its seconds. Raises EngineError."""
    begun = time.monotonic()
    return client.answer(prompt.ids, tokens), time.monotonic() - begun


def measure(
    client: VllmClient, setup: Setup, prompts: Sequence[Prompt], concurrency: int, tokens: int, waves: int
) -> tuple[Json, list[tuple[int, list[int]]]]:
    """Figures of one server at one concurrency, and its answers by number of the prompt."""
    # Whole passes over the prompts, so that each counts alike, and at least so many waves of requests.
    passes = math.ceil(waves * concurrency / len(prompts))
    order = [number for _ in range(passes) for number in range(len(prompts))]
    with ThreadPoolExecutor(concurrency) as pool:
        list(
            pool.map(
                lambda number: timed_answer(client, prompts[number], min(_WARM_TOKENS, tokens)), order[:concurrency]
            )
        )
        before = None if setup.draft is None else counters(client)
        begun = time.monotonic()
        replies = list(pool.map(lambda number: timed_answer(client, prompts[number], tokens), order))
        seconds = time.monotonic() - begun
    figures: Json = {"requests": len(order), "tokens": len(order) * tokens, "seconds": seconds}
    figures["tokens_per_second"] = figures["tokens"] / seconds
    figures["slots"] = sum(each for _, each in replies) / seconds
    if before is not None:
        added = counters(client).since(before)
        if not added.rounds:
            raise EngineError("its counters tell no draft")
        figures |= {"drafts": added.rounds, "drafted": added.drafted, "accepted": added.accepted, "tau": added.tau}
        figures["accepted_at"] = [count / added.rounds for count in added.accepted_at]
    return figures, [(number, ids) for number, (ids, _) in zip(order, replies, strict=True)]
