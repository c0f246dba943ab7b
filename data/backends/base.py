"""Capture backends: engines that answer in the target's stead, behind the interface of a decoder."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, Protocol

import torch

from ...specdec.continuous_batching import DecodedAnswer, QueuedRequest
from ...specdec.requests import Request
from ...specdec.sampling_settings import SamplingSettings
from ...specdec.targets import Target
from ..capture.plan import Prompts, TurnRequest
from ..settings import CaptureSettings
from .vllm import LocalVllm, LogprobRequest, VllmServer, check_local, check_sampling


class CaptureBackend(Protocol):
    """An engine that answers many requests at once."""

    about: dict[str, Any]
    """The engine's name, version and settings, for the manifest."""

    def submit(self, queued: QueuedRequest) -> None:
        """Send a request."""

    def collect(self) -> list[DecodedAnswer]:
        """Block until at least one answer is there, and return all that are. Raises EngineError, InputError."""

    def close(self) -> None:
        """Send no more requests, and forget those in flight."""


class EngineDecoder:
    """An engine behind the interface of `PlainDecoder`, with up to twice `slots` requests in flight."""

    def __init__(self, engine: CaptureBackend, slots: int, advance: Callable[[int], None]) -> None:
        self._engine, self._slots, self._advance = engine, slots, advance
        self._waiting = 0

    @property
    def wants_more(self) -> bool:
        """Whether fewer requests are in flight than the engine should have."""
        return self._waiting < 2 * self._slots

    @property
    def idle(self) -> bool:
        """Whether all requests are answered."""
        return self._waiting == 0

    def fits(self, request: Request) -> bool:
        """Always true: `open_engine` has compared the engine's context with the longest request."""
        return True

    def submit(self, requests: Sequence[QueuedRequest]) -> None:
        """Pass requests on to the engine."""
        for queued in requests:
            self._engine.submit(queued)
        self._waiting += len(requests)

    def step(self) -> list[DecodedAnswer]:
        """Wait for answers."""
        answers = self._engine.collect()
        self._waiting -= len(answers)
        self._advance(sum(len(answer.tokens) for answer in answers))
        return answers


def check_backend(target: Target, settings: CaptureSettings, scored: Sequence[SamplingSettings]) -> None:
    """Check the recipe's engine before there is anything to ask it: a server is reached and compared with the target,
    vLLM for this process can be imported. Raises InputError, EngineError."""
    backend = settings.engine
    if backend is None:
        return
    check_sampling([settings.sampling, *scored])
    if backend.url is None:
        check_local(target)
        return
    # Any context will do as long as no prompt is known.
    with closing(VllmServer(backend, backend.url, target, _wanted(target, settings), longest=0, slots=0)):
        pass


def _wanted(target: Target, settings: CaptureSettings) -> LogprobRequest:
    """The log-probs that the engine returns: with signals of its own, those of the likeliest tokens too."""
    assert settings.engine is not None
    top_k = min(settings.top_k, target.vocab_size) if settings.engine.signals == "engine" else 0
    return LogprobRequest(top_k, target.vocab_size, getattr(torch, settings.store_dtype))


@contextmanager
def open_engine(
    target: Target, turns: Sequence[TurnRequest], prompts: Prompts, settings: CaptureSettings
) -> Iterator[CaptureBackend | None]:
    """Open the engine of the recipe, checked against the target and the turns to answer; None: the target answers.

    Raises InputError, EngineError.
    """
    backend = settings.engine
    if backend is None:
        yield None
        return
    check_sampling(turn.sampling for turn in turns)

    # The context that the engine needs: a prompt and its answer, as long as they may get.
    longest = max((prompts.most_tokens(turn) + turn.max_new_tokens for turn in turns), default=1)
    if backend.url is None and any(turn.waits_for for turn in turns):
        longest *= 2  # an answer that is read again may take more tokens than it was given in
    longest = min(longest, target.max_positions)

    # Start it: a server that is checked over HTTP, or vLLM in this process; either is closed on leaving.
    wanted = _wanted(target, settings)
    engine: CaptureBackend
    if backend.url is not None:
        engine = VllmServer(backend, backend.url, target, wanted, longest, settings.batch_size)
    else:
        engine = LocalVllm(backend, target, wanted, longest, settings.batch_size)
    with closing(engine):
        yield engine
