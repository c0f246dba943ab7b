"""Requests and generations of a decoding run, the record and the seconds of every round."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

import torch

from ..errors import ContextLengthError, InputError
from .accept_rules import check_rule, known_rule
from .models import CausalModel
from .proposers.base import Proposer
from .sampling_settings import SamplingSettings

Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class Request:
    """Request: one prompt to answer, and how."""

    prompt_ids: list[int]
    sampling: SamplingSettings
    seed: int
    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    """Stop strings: texts that end the answer with the token that completes them; they need `DecodeRun.decode`."""


class Round(NamedTuple):
    """Round of one request: one target pass."""

    drafted: int
    """Drafted nodes that might have been accepted: candidates."""
    accepted: int
    """Drafted tokens that were accepted and emitted."""
    emitted: int
    """Tokens that the round added to the answer: accepted ones and, unless a stop came first, the target's own."""
    reached: int
    """Levels at which a drafted token was judged: in a chain one more than accepted, unless it ended there."""


class RoundSeconds(NamedTuple):
    """Seconds of wall time of one round of the whole batch."""

    draft: float
    """Seconds of drafting, with what the proposer does after the verdict."""
    verify: float
    """Seconds of the target's pass."""
    rest: float
    """Seconds of everything else."""
    drafted: int
    """Drafted nodes of each slot, padding included."""
    batch: int
    """Active slots."""

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.rest


class Lap:
    """One round under a timer. On a GPU the parts of a round are timed by events there, without waiting."""

    def __init__(self, on_gpu: bool) -> None:
        self.began, self._on_gpu = time.perf_counter(), on_gpu
        self.marks: list[float | torch.cuda.Event] = []
        self.mark()

    def mark(self) -> None:
        """Mark the end of a part: drafting, the target's pass, the verdict, what the proposer makes of it."""
        if not self._on_gpu:
            self.marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self.marks.append(event)


class RoundTimer:
    """Timer of rounds: their parts by their laps, the whole of each by the host's clock.

    A round that was launched before the one in front of it had ended takes from that end to its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._rounds: list[tuple[list[float | torch.cuda.Event], float, int, int]] = []
        self._ended = 0.0

    def start(self) -> Lap:
        """Begin a round."""
        return Lap(self._on_gpu)

    def end(self, lap: Lap, drafted: int, batch: int) -> None:
        """End the round of a lap, for the host; rounds end in the order in which they began."""
        before, self._ended = max(lap.began, self._ended), time.perf_counter()
        self._rounds.append((lap.marks, self._ended - before, drafted, batch))

    @property
    def rounds(self) -> list[RoundSeconds]:
        """Seconds of every round that has ended. Waits for the device."""
        if self._on_gpu:
            torch.cuda.synchronize()
        return [_seconds(*one) for one in self._rounds]


def _seconds(marks: "list[float | torch.cuda.Event]", total: float, drafted: int, batch: int) -> RoundSeconds:
    draft, verify, _, observe = [_between(one, other) for one, other in pairwise(marks)]
    draft += observe  # what it does prepares the next draft
    return RoundSeconds(draft, verify, max(total - draft - verify, 0.0), drafted, batch)


def _between(one: "float | torch.cuda.Event", other: "float | torch.cuda.Event") -> float:
    if isinstance(one, float) and isinstance(other, float):
        return other - one
    milliseconds: float = one.elapsed_time(other)  # type: ignore[union-attr,arg-type]
    return milliseconds / 1e3


@dataclass
class Generation:
    """Generated answer and how it came about. `tokens` includes the token that stopped it, where one did."""

    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish: Literal["stop", "length"] = "length"
    seconds: float = 0.0
    begun: float = 0.0
    """Time by `time.perf_counter` at which the request's turn came, before its prompt was read."""
    arrivals: list[float] = field(default_factory=list)
    """Times by that clock at which the first token was known, and then the tokens of each round."""


@dataclass(frozen=True)
class DecodeRun:
    """Decoding run: the requests, and how they are answered.

    Raises ContextLengthError for a request that does not fit the target, InputError for one that cannot be answered or
    a rule that does not suit it or the proposer.
    """

    target: CausalModel
    """Target model, which gives the answers."""
    proposer: Proposer | None
    """Proposer that drafts; None: plain decoding."""
    requests: Sequence[Request]
    """Requests to answer; answers come in the order in which they end."""
    rule: str = "greedy"
    """Accept rule, by its name in `accept_rules.py`; requests at temperature 0 are judged greedily under every rule."""
    draft_tokens: int = 4
    """Draft length K: most levels of a round's draft."""
    batch_size: int = 1
    """Requests answered side by side; a finished one is replaced at once."""
    decode: Decode | None = None
    """Function from token ids to text, for requests with stop strings."""
    timer: RoundTimer | None = None
    """Timer that takes the seconds of every round."""
    barriers: frozenset[int] = frozenset()
    """Numbers of the requests that are begun only when all before them are answered."""

    def __post_init__(self) -> None:
        known_rule(self.rule)
        if self.batch_size < 1:
            raise InputError(f"batch_size {self.batch_size}: must be >= 1")
        check_requests(self.target, self.requests, self.decode)
        # The rule must take this proposer's drafts at every request's sampling setting.
        if self.proposer is not None:
            for request in self.requests:
                check_rule(self.rule, self.proposer, request.sampling)


def check_requests(target: CausalModel, requests: Sequence[Request], decode: Decode | None) -> None:
    """Check requests. Raises InputError or ContextLengthError, which names the first that cannot be answered."""
    for number, request in enumerate(requests):
        if not request.prompt_ids:
            raise InputError(f"request {number}: empty prompt")
        if request.max_new_tokens < 1:
            raise InputError(f"request {number}: max_new_tokens {request.max_new_tokens}: must be >= 1")
        if request.stop_strings and decode is None:
            raise InputError(f"request {number}: stop_strings {list(request.stop_strings)}: need `decode`")
        if "" in request.stop_strings:
            raise InputError(f"request {number}: stop_strings {list(request.stop_strings)}: none may be empty")
        # Prompt and answer together must fit the target's context.
        need = len(request.prompt_ids) + request.max_new_tokens
        if need > target.max_positions:
            raise ContextLengthError(
                f"request {number}: prompt of {len(request.prompt_ids)} + {request.max_new_tokens} new tokens: "
                f"must fit the context of {target.max_positions}"
            )


def until_stop(known: Sequence[int], new: list[int], request: Request, decode: Decode | None) -> tuple[list[int], bool]:
    """Cut new tokens after the first that stops the answer; returns them, and whether one does.

    `known`: the answer's tokens before them.
    """
    for index, token in enumerate(new):
        # A stop token ends the answer by its id.
        if token in request.stop_ids:
            return new[: index + 1], True
        # A stop string may span tokens, so the ending is decoded as far back as the longest one reaches.
        if request.stop_strings and decode is not None:
            text = _decode_ending([*known, *new[: index + 1]], max(len(text) for text in request.stop_strings), decode)
            if any(stop in text for stop in request.stop_strings):
                return new[: index + 1], True
    return new, False


def _decode_ending(tokens: list[int], reach: int, decode: Decode) -> str:
    """Decode an ending: the last token and at least `reach` characters before it.

    Some tokens spell a single byte or nothing, so the number of tokens is doubled until the text is long enough.
    """
    # A token spells one character or more as a rule, so start with as many.
    count = reach + 1
    while count < len(tokens) and len(decode(tokens[-count:-1])) < reach:
        count *= 2
    return decode(tokens[-count:])
