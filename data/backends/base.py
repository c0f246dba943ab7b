"""Engines that answer in the target's stead, behind what the stream of answers knows of a decoder."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, Protocol

import torch

from ...specdec.continuous_batching import DecodedAnswer, QueuedRequest
from ...specdec.requests import Request
from ...specdec.targets import Target
from ..conversation import Prompts, TurnRequest
from ..settings import CaptureSettings
from .vllm import LogprobRequest, check_sampling


class CaptureBackend(Protocol):
    """Something that answers many requests at once."""

    about: dict[str, Any]
    """What a manifest says of it."""

    def submit(self, asked: QueuedRequest) -> None:
        """Ask it."""

    def collect(self) -> list[DecodedAnswer]:
        """Wait for an answer; give those that are there. Raises EngineError, InputError."""

    def close(self) -> None:
        """Ask no more, and forget what was asked."""


class EngineDecoder:
    """An engine as a decoder (see `specdec.plain.PlainDecoder`): it is told so many requests at once at most."""

    def __init__(self, engine: CaptureBackend, slots: int, advance: Callable[[int], None]) -> None:
        self._engine, self._slots, self._advance = engine, slots, advance
        self._waiting = 0

    @property
    def wants_more(self) -> bool:
        """Whether it could do with more requests."""
        return self._waiting < 2 * self._slots

    @property
    def idle(self) -> bool:
        """Whether all that was asked is answered."""
        return self._waiting == 0

    def fits(self, request: Request) -> bool:
        """Always: the engine's context was compared with the longest request before."""
        return True

    def submit(self, requests: Sequence[QueuedRequest]) -> None:
        """Pass requests on."""
        for queued in requests:
            self._engine.submit(queued)
        self._waiting += len(requests)

    def step(self) -> list[DecodedAnswer]:
        """Wait for answers."""
        answers = self._engine.collect()
        self._waiting -= len(answers)
        self._advance(sum(len(answer.tokens) for answer in answers))
        return answers


@contextmanager
def open_engine(
    target: Target, answers: Sequence[TurnRequest], prompts: Prompts, settings: CaptureSettings
) -> Iterator[CaptureBackend | None]:
    """The engine of the recipe, checked against the target and what it will be asked; None: the target answers.

    Raises InputError, EngineError.
    """
    backend = settings.engine
    if backend is None:
        yield None
        return
    check_sampling(answer.sampling for answer in answers)
    longest = max((prompts.most(answer) + answer.max_new_tokens for answer in answers), default=1)
    if backend.url is None and any(answer.waits_for for answer in answers):
        longest *= 2  # an answer that is read again may take more tokens than it was given in
    longest = min(longest, target.max_positions)
    top_k = min(settings.top_k, target.vocab_size) if backend.signals == "engine" else 0
    wanted = LogprobRequest(top_k, target.vocab_size, getattr(torch, settings.store_dtype))
    engine: CaptureBackend
    if backend.url is not None:
        from .vllm import VllmServer

        engine = VllmServer(backend, backend.url, target, wanted, longest, settings.batch_size)
    else:
        from .vllm import LocalVllm

        engine = LocalVllm(backend, target, wanted, longest, settings.batch_size)
    with closing(engine):
        yield engine
