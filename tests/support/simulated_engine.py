"""A serving engine that takes planted times: its clock moves only when its counters are read."""

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from draftforge.errors import EngineError
from draftforge.eval.vllm_server import EngineReading, TimedAnswer
from draftforge.specdec.sampling_settings import SamplingSettings

Seconds = Callable[[int, int, float], float]
"""Of a round, by batch size, K and mean context."""


@dataclass
class _Asked:
    prompt: int
    tokens: int
    answer: Future[TimedAnswer]
    sent: float
    unread: int
    """Tokens of the prompt that are still to be read."""
    emitted: int = 0
    last: float = 0.0


@dataclass
class SimulatedEngine:
    """One server that drafts `K` tokens, in a share of a request's rounds.

    A step is a round of all requests that are past their prompts; within its budget of tokens it also reads what is
    left of prompts, in chunks.
    """

    round_seconds: Seconds
    prompt_seconds: Callable[[int, int], float]
    """Of what a step reads of prompts, by its tokens and K."""
    K: int = 0
    share: float = 1.0
    drafted: int | None = None
    """Tokens of a draft; None: K."""
    acceptance: float | None = None
    """Of each drafted token after accepted ones; None: half of each draft is accepted, on average."""
    most: int = 256
    """Requests that run at once."""
    budget: int = 2048
    """Tokens of a step."""
    mixed_seconds: float = 0.0
    """What a step takes in addition where it reads prompts and makes a round."""
    gap_seconds: float = 0.0
    """From the end of an answer to the request that follows it."""
    steps_a_look: int = 3
    trouble: str = ""
    name: str = "engine"

    def __post_init__(self) -> None:
        self.clock, self.draw = 0.0, random.Random(0)
        self.running, self.waiting, self.unsent = list[_Asked](), list[_Asked](), list[_Asked]()
        self.longest, self.batches = 0, list[int]()
        names = ("first_tokens", "finished", "preempted", "rounds", "round_seconds", "drafts", "drafted")
        self.counts = dict.fromkeys(names, 0.0)

    def begin(
        self, prompts: Sequence[Sequence[int]], at_once: int, tokens: Sequence[int], sampling: SamplingSettings
    ) -> list[Future[TimedAnswer]]:
        # Those of a burst are distinct; a closed loop may ask again.
        assert sampling.greedy and (len(prompts) > at_once or len({tuple(one) for one in prompts}) == at_once)
        if self.trouble == "dies":
            raise EngineError("it ended")
        asked = [
            _Asked(len(prompt), length, Future(), self.clock, unread=len(prompt))
            for prompt, length in zip(prompts, tokens, strict=True)
        ]
        self.longest = max([self.longest, *(one.prompt + one.tokens for one in asked)])
        self.waiting += asked[:at_once]
        self.unsent += asked[at_once:]
        if self.trouble == "others":
            self.waiting.append(_Asked(9, 2, Future(), self.clock, unread=9))
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
        return EngineReading(len(self.running), len(self.waiting), engines, **self.counts, at=self.clock)

    def step(self) -> None:
        """Make a round, and read what fits of prompts beside it."""
        # 1) Who decodes, and who reads how much.
        if not self.running and self.waiting:
            self.clock = max(self.clock, self.waiting[0].sent)
        while self.waiting and len(self.running) < self.most and self.waiting[0].sent <= self.clock:
            self.running.append(self.waiting.pop(0))
        decoding = [one for one in self.running if not one.unread]
        left, read = self.budget - len(decoding) * (self.K + 1), dict[int, int]()
        for number, one in enumerate(self.running):
            read[number] = min(one.unread, left)
            left -= read[number]
        # 2) The time that it takes.
        drafting = [self.K > 0 and self.draw.random() < self.share for _ in decoding]
        if decoding:
            context = sum(one.prompt + one.emitted for one in decoding) / len(decoding)
            self.batches.append(len(decoding))
            self.clock += self.round_seconds(len(decoding), self.K if any(drafting) else 0, context)
        if tokens := sum(read.values()):
            self.clock += self.prompt_seconds(tokens, self.K) + (self.mixed_seconds if decoding else 0.0)
        # 3) What comes of it.
        for number, one in enumerate(list(self.running)):
            one.unread -= read[number]
            if read[number] and not one.unread:
                one.last, one.emitted = self.clock, 1
                self.counts["first_tokens"] += 1
        for one, drafts in zip(decoding, drafting, strict=True):
            self._emit(one, drafts)

    def _emit(self, one: _Asked, drafts: bool) -> None:
        size = self.K if self.drafted is None else self.drafted
        accepted = self._accepted(size) if drafts else 0
        one.emitted += 1 + accepted
        self.counts["rounds"] += 1
        self.counts["round_seconds"] += self.clock - one.last
        self.counts["drafts"] += drafts
        self.counts["drafted"] += size * drafts
        one.last = self.clock
        if one.emitted >= one.tokens:
            self.counts["finished"] += 1
            self.running.remove(one)
            one.answer.set_result(TimedAnswer([0] * one.tokens, one.sent, self.clock))
            if self.unsent:
                self.waiting.append(self.unsent.pop(0))
                self.waiting[-1].sent = self.clock + self.gap_seconds

    def _accepted(self, size: int) -> int:
        if self.acceptance is None:
            return self.draw.randint(0, size)
        return next((count for count in range(size) if self.draw.random() >= self.acceptance), size)


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
