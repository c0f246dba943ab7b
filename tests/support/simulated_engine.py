"""A serving engine that takes planted times: its clock moves only when its counters are read."""

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from draftforge.errors import EngineError
from draftforge.eval.vllm_server import EngineReading
from draftforge.specdec.sampling_settings import SamplingSettings

Seconds = Callable[[int, int, float], float]
"""Of a round, by batch size, K and mean context."""


@dataclass
class _Asked:
    prompt: int
    tokens: int
    answer: Future[list[int]]
    emitted: int = 0
    begun: float = 0.0
    last: float = 0.0


@dataclass
class SimulatedEngine:
    """One server that drafts `K` tokens, in a share of a request's rounds; one prompt is read in a step."""

    round_seconds: Seconds
    prompt_seconds: Callable[[int, int], float]
    """Of a prompt, by its tokens and K."""
    K: int = 0
    share: float = 1.0
    drafted: int | None = None
    """Tokens of a draft; None: K."""
    most: int = 256
    """Requests that run at once."""
    steps_a_look: int = 3
    trouble: str = ""
    name: str = "engine"

    def __post_init__(self) -> None:
        self.clock, self.draw = 0.0, random.Random(0)
        self.running, self.waiting = list[_Asked](), list[_Asked]()
        self.longest, self.batches = 0, list[int]()
        names = ("first_tokens", "finished", "preempted", "rounds", "round_seconds", "prefill_seconds")
        self.counts = dict.fromkeys([*names, "inference_seconds", "drafts", "drafted"], 0.0)

    def begin(
        self, prompts: Sequence[Sequence[int]], tokens: int, sampling: SamplingSettings
    ) -> list[Future[list[int]]]:
        assert sampling.greedy and len({tuple(prompt) for prompt in prompts}) == len(prompts)
        self.longest = max([self.longest, *(len(prompt) + tokens for prompt in prompts)])
        if self.trouble == "dies":
            raise EngineError("it ended")
        asked = [_Asked(len(prompt), tokens, Future()) for prompt in prompts]
        self.waiting += asked
        if self.trouble == "others":
            self.waiting.append(_Asked(9, 2, Future()))
        if self.trouble == "stops":
            self.counts["preempted"] += 1
        # Rounds of a single request are not looked at.
        while len(prompts) == 1 and not asked[0].answer.done():
            self.step()
        return [one.answer for one in asked]

    def read(self) -> EngineReading:
        for _ in range(self.steps_a_look):
            self.step()
        engines = 2 if self.trouble == "replicas" else 1
        return EngineReading(len(self.running), len(self.waiting), engines, **self.counts)

    def step(self) -> None:
        """Read a prompt, or make a round of all requests; both where there are both."""
        fresh = self.waiting.pop(0) if self.waiting and len(self.running) < self.most else None
        if fresh is None and not self.running:
            return
        begun = self.clock
        if self.running:
            drafting = [self.K > 0 and self.draw.random() < self.share for _ in self.running]
            context = sum(one.prompt + one.emitted for one in self.running) / len(self.running)
            self.batches.append(len(self.running))
            self.clock += self.round_seconds(len(self.running), self.K if any(drafting) else 0, context)
        if fresh is not None:
            self.clock += self.prompt_seconds(fresh.prompt, self.K)
        for one, drafts in zip(list(self.running), drafting if self.running else []):
            self._emit(one, drafts)
        if fresh is not None:
            fresh.begun, fresh.last, fresh.emitted = begun, self.clock, 1
            self.counts["first_tokens"] += 1
            self.counts["prefill_seconds"] += self.clock - begun
            self.running.append(fresh)

    def _emit(self, one: _Asked, drafts: bool) -> None:
        size = self.K if self.drafted is None else self.drafted
        accepted = self.draw.randint(0, size) if drafts else 0
        one.emitted += 1 + accepted
        self.counts["rounds"] += 1
        self.counts["round_seconds"] += self.clock - one.last
        self.counts["drafts"] += drafts
        self.counts["drafted"] += size * drafts
        one.last = self.clock
        if one.emitted >= one.tokens:
            self.counts["finished"] += 1
            self.counts["inference_seconds"] += self.clock - one.begun
            self.running.remove(one)
            one.answer.set_result([0] * one.tokens)


@dataclass
class SimulatedServers:
    """Servers of the same planted times, as `engine_costs.EngineServers` has them."""

    round_seconds: Seconds
    prompt_seconds: Callable[[int, int], float]
    ks: Sequence[int] = (1, 2, 4)
    plain_change: dict[str, Any] = field(default_factory=dict)
    draft_change: dict[str, Any] = field(default_factory=dict)
    hardware: str = "1 card"
    engine: str = "vLLM 0.99"
    software: str = "vLLM 0.99 --flag"

    def __post_init__(self) -> None:
        self.started = list[str]()
        self.engines = list[SimulatedEngine]()

    def check(self, families: Sequence[str]) -> None:
        self.started.append(f"check {' '.join(families)}")

    def depths(self, draft: Any, spec: Any) -> list[int]:
        return list(self.ks)

    @contextmanager
    def plain(self) -> Iterator[SimulatedEngine]:
        self.started.append("plain")
        yield self._made(**self.plain_change)

    @contextmanager
    def drafting(self, draft: Any, K: int, rule: str) -> Iterator[SimulatedEngine]:
        self.started.append(f"{draft.family} {K} {rule}")
        yield self._made(**{"K": K, **self.draft_change})

    def _made(self, **changes: Any) -> SimulatedEngine:
        self.engines.append(SimulatedEngine(self.round_seconds, self.prompt_seconds, **changes))
        return self.engines[-1]
