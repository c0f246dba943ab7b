"""Draws the answers of many shards from the target as one stream, and takes the teacher signals on the way.

A shard's last answers would leave most slots idle, so answers of later shards are begun while they finish; a shard is
handed over as soon as its own are there. A turn becomes ready once the turn before it is answered.

Shapes: B rows of a decoding step, V vocabulary, M tail draws.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...errors import InputError, StaleInputError
from ...specdec.continuous_batching import DecodedAnswer, PlainDecoder, QueuedRequest
from ...specdec.memory_fit import fitting_slots
from ...specdec.requests import Request
from ...specdec.targets import Target
from ..backends.base import CaptureBackend, EngineDecoder
from ..conversation import Prompts, ShardPlan, TurnRequest, tail_seed_of
from ..settings import CaptureSettings
from ..store import Sample
from ..teacher_logprobs import emitted_logp, stored_signals
from .reuse import RecordedAnswer, RecordedAnswers, forced_signals

Columns = dict[str, Tensor]

_USUAL = 0.95  # share of the answers that all slots must have room for; longer ones wait for larger slots
_HELD = 4  # times the slots, or a shard: finished answers that wait for others of their shards


class Progress(Protocol):
    """Who is told how the answers come, and decides whether more are begun."""

    def may_open(self, shard: ShardPlan) -> bool:
        """Whether the answers of another shard may be begun. Asked again whenever there is room for them."""

    def emitted(self, tokens: int) -> None:
        """So many answer tokens more are there."""

    def ended(self, answer: TurnRequest, sample: Sample | None) -> None:
        """An answer is complete; None: it was left out."""


class Decoder(Protocol):
    """What the stream asks (see PlainDecoder)."""

    @property
    def wants_more(self) -> bool: ...
    @property
    def idle(self) -> bool: ...
    def fits(self, request: Request) -> bool: ...
    def submit(self, requests: Sequence[QueuedRequest]) -> None: ...
    def step(self) -> list[DecodedAnswer]: ...


class Skipped(NamedTuple):
    """An answer that was not drawn, and why."""

    id: str
    reason: str


class Answers(NamedTuple):
    """One shard's worth."""

    samples: list[Sample]
    columns: Columns
    """The signals of all answer tokens in order; outside the train split `logp_n` alone."""
    skipped: list[Skipped]
    logp_difference: float | None = None
    """Mean distance (nats) of an engine's log-probs from the target's, where both are known."""


@dataclass
class _Open:
    """A shard whose answers are being drawn."""

    number: int
    plan: ShardPlan
    done: dict[str, Sample] = field(default_factory=dict)
    recorded: list[Sample] = field(default_factory=list)
    """Those of `done` that were not drawn here: their columns are still to be made."""
    claimed: dict[str, Tensor] = field(default_factory=dict)
    """Of these, the log-probs that the engine gave to their tokens."""
    columns: dict[str, Columns] = field(default_factory=dict)
    skipped: dict[str, Skipped] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.done) + len(self.skipped) == len(self.plan.answers)

    def answers(self) -> Answers:
        """All of it, in the order of the plan."""
        ids = [answer.id for answer in self.plan.answers]
        drawn = [id for id in ids if id in self.done]
        names = self.columns[drawn[0]] if drawn else ()
        columns = {name: torch.cat([self.columns[id][name] for id in drawn]) for name in names}
        skipped = [self.skipped[id] for id in ids if id in self.skipped]
        return Answers([self.done[id] for id in drawn], columns, skipped, self.difference())

    def difference(self) -> float | None:
        """Mean over the tokens that both the engine and the target gave a log-prob."""
        apart = [(self.columns[id]["logp_n"].float() - logp_n).abs() for id, logp_n in self.claimed.items()]
        return float(torch.cat(apart).mean()) if apart else None


def answer_shards(
    target: Target,
    shards: Sequence[ShardPlan],
    prompts: Prompts,
    settings: CaptureSettings,
    progress: Progress,
    recorded: RecordedAnswers | None = None,
    engine: CaptureBackend | None = None,
) -> Iterator[tuple[ShardPlan, Answers]]:
    """Answer shards, about in their order; yields each once all of it is there. What is `recorded` is not drawn anew.

    `engine` answers in the target's stead.

    Ends before the last shard where `progress` lets none be begun any more. Raises InputError where the target's logits
    are not finite, or where `batch_size` answers do not fit a GPU.
    """
    return _Stream(target, shards, prompts, settings, progress, recorded, engine).run()


class _Stream:
    """Opens shards as the decoder has room, asks what is ready, and collects what comes."""

    def __init__(
        self,
        target: Target,
        shards: Sequence[ShardPlan],
        prompts: Prompts,
        settings: CaptureSettings,
        progress: Progress,
        recorded: RecordedAnswers | None,
        engine: CaptureBackend | None,
    ) -> None:
        self._recorded, self._engine = recorded, engine
        self._forced = settings.engine is not None and settings.engine.signals == "target"
        self._target, self._prompts, self._settings, self._progress = target, prompts, settings, progress
        self._unopened = deque(enumerate(shards))
        self._open: dict[str, _Open] = {}  # by the shard's name
        self._asked: dict[str, tuple[_Open, TurnRequest, Request]] = {}  # by the answer's id
        self._followers: dict[str, list[TurnRequest]] = defaultdict(list)
        self._ready: list[QueuedRequest] = []
        self._listener = _Listener(settings)
        self._slots = min(settings.batch_size, max(1, sum(len(shard.answers) for shard in shards)))

    def run(self) -> Iterator[tuple[ShardPlan, Answers]]:
        if self._engine is not None:
            yield from self._drain(EngineDecoder(self._engine, self._slots, self._progress.emitted))
            return
        if self._target.collective:
            yield from self._drain(_NullBackend())
            return
        longest = self._target.max_positions
        answers = [answer for _, shard in self._unopened for answer in shard.answers]
        known = [self._prompts.length(a) + a.max_new_tokens for a in answers if self._prompts.length(a) < longest]
        usual = sorted(known)[int(_USUAL * (len(known) - 1))] if known else 0
        wanted = min(max((self._prompts.most(a) + a.max_new_tokens for a in answers), default=0), longest)
        yield from self._drain(self._decoder(self._slots, min(usual, longest), wanted))
        while self._ready:  # longer than that many slots have room for: fewer, larger ones
            capacity = max(_length(asked.request) for asked in self._ready)
            slots = fitting_slots(self._target, min(self._slots, len(self._ready)), capacity)
            yield from self._drain(self._decoder(slots, capacity, capacity))

    def _decoder(self, slots: int, capacity: int, wanted: int) -> PlainDecoder:
        return PlainDecoder(
            self._target,
            slots,
            capacity,
            self._settings.max_new_tokens,
            self._listener,
            self._progress.emitted,
            wanted=wanted,
        )

    def _drain(self, decoder: Decoder) -> Iterator[tuple[ShardPlan, Answers]]:
        """Answer all that is ready or becomes so and fits this decoder."""
        while True:
            while self._unopened and self._has_room(decoder) and self._progress.may_open(self._unopened[0][1]):
                self._open_shard(*self._unopened.popleft())
                self._ask(decoder)
            self._ask(decoder)
            yield from self._completed()
            if decoder.idle:
                return
            for answered in decoder.step():
                self._take(answered)

    def _has_room(self, decoder: Decoder) -> bool:
        """Whether to begin another shard."""
        return decoder.wants_more and (decoder.idle or not self._full)

    @property
    def _full(self) -> bool:
        held = sum(len(shard.done) for shard in self._open.values())
        return held >= _HELD * max(self._slots, self._settings.shard_samples)

    def _open_shard(self, number: int, plan: ShardPlan) -> None:
        shard = self._open[plan.name] = _Open(number, plan)
        for answer in plan.answers:
            if answer.waits_for is not None:
                self._followers[answer.waits_for].append(answer)
        for answer in plan.answers:
            if answer.waits_for is None:
                self._prepare(shard, answer)

    def _prepare(self, shard: _Open, answer: TurnRequest) -> None:
        """Make an answer's request ready, or skip it and all that wait for it."""
        request = self._request(shard, answer)
        if isinstance(request, Skipped):
            shard.skipped[answer.id] = request
            self._progress.ended(answer, None)
            self._go_on(shard, answer)
        elif kept := self._recorded and self._recorded.find(answer, request.prompt_ids, request.max_new_tokens):
            shard.done[answer.id] = _sample(answer, request, kept)
            shard.recorded.append(shard.done[answer.id])
            self._progress.emitted(len(kept.tokens))
            self._progress.ended(answer, shard.done[answer.id])
            self._go_on(shard, answer)
        else:
            self._asked[answer.id] = (shard, answer, request)
            tail_seed = tail_seed_of(self._settings.seed, answer.id)
            self._ready.append(QueuedRequest(answer.id, request, tail_seed, shard.number))

    def _go_on(self, shard: _Open, answer: TurnRequest) -> None:
        for follower in self._followers.pop(answer.id, ()):
            self._prepare(shard, follower)

    def _request(self, shard: _Open, answer: TurnRequest) -> Request | Skipped:
        if answer.waits_for is not None and answer.waits_for not in shard.done:
            return Skipped(answer.id, "an earlier turn was skipped")
        prompt = self._prompts.of(answer, self._earlier_texts(shard, answer))
        room = self._prompts.room(answer, prompt)
        if room == 0:
            return Skipped(answer.id, f"prompt of {len(prompt)} tokens, context of {self._target.max_positions}")
        return Request(prompt, answer.sampling, answer.seed, room, self._target.stop_ids)

    def _earlier_texts(self, shard: _Open, answer: TurnRequest) -> list[str]:
        """What the target answered in this dialogue so far, as a chat client would send it back."""
        if answer.waits_for is None:
            return []
        before = [
            shard.done[f"{answer.conversation.id}/{turn}/{answer.sampling.key}"].answer_ids
            for turn in range(answer.turn.index)
        ]
        return [self._target.tokenizer.decode(ids, skip_special_tokens=True) for ids in before]

    def _ask(self, decoder: Decoder) -> None:
        """Ask what is ready and fits; the rest stays."""
        fitting = [asked for asked in self._ready if decoder.fits(asked.request)]
        if fitting:
            self._ready = [asked for asked in self._ready if not decoder.fits(asked.request)]
            self._listener.expect(sum(self._asked[asked.name][0].plan.split == "train" for asked in fitting))
            decoder.submit(fitting)

    def _take(self, answered: DecodedAnswer) -> None:
        """Put an answer where it belongs, and make ready what waited for it."""
        shard, answer, request = self._asked.pop(answered.name)
        columns = answered.columns
        if not columns["logp_n"].isfinite().all():
            raise InputError(f"{answer.id}: the target's logits are not finite")
        if shard.plan.split == "train":
            self._listener.expect(-1)
        else:
            columns = {"logp_n": columns["logp_n"]}
        shard.done[answer.id] = _sample(answer, request, answered)
        if self._forced:
            shard.recorded.append(shard.done[answer.id])
            shard.claimed[answer.id] = columns["logp_n"]
        else:
            shard.columns[answer.id] = columns
        self._progress.ended(answer, shard.done[answer.id])
        self._go_on(shard, answer)

    def _completed(self) -> Iterator[tuple[ShardPlan, Answers]]:
        for shard in [shard for shard in self._open.values() if shard.complete]:
            del self._open[shard.plan.name]
            if shard.recorded:
                self._add_columns(shard)
            yield shard.plan, shard.answers()

    def _add_columns(self, shard: _Open) -> None:
        """Signals of the answers that were not drawn here, from one pass over them."""
        columns = forced_signals(self._target, shard.recorded, self._settings)
        unknown = "logp_n" in columns and not columns["logp_n"].isfinite().all()
        if unknown and self._settings.reads_given:
            raise InputError(f"{shard.plan.name}: the target's logits of recorded answers are not finite")
        counts = [len(sample.answer_ids) for sample in shard.recorded]
        parts = {name: torch.split(column, counts) for name, column in columns.items()}
        for place, sample in enumerate(shard.recorded):
            shard.columns[sample.id] = {name: part[place] for name, part in parts.items()}
        difference, backend = shard.difference(), self._settings.engine
        if difference is not None and backend is not None and difference > backend.tolerance:
            raise StaleInputError(
                f"capture.backend: {shard.plan.name}: the engine's log-probs are {difference:.3g} away from the "
                f"target's on average, must be within {backend.tolerance:g}; it serves another model or quantisation"
            )


def _length(request: Request) -> int:
    return len(request.prompt_ids) + request.max_new_tokens


def _sample(answer: TurnRequest, request: Request, answered: DecodedAnswer | RecordedAnswer) -> Sample:
    return Sample(
        id=answer.id,
        conversation=answer.conversation.id,
        turn=answer.turn.index,
        cluster=answer.conversation.cluster,
        domain=answer.conversation.domain,
        split=answer.conversation.split,
        sampling=answer.sampling,
        max_new_tokens=request.max_new_tokens,
        finish=answered.finish,
        prompt_ids=request.prompt_ids,
        answer_ids=answered.tokens,
        counts=answer.turn.counts,
    )


class _NullBackend:
    """In the place of a decoder, where a spread target cannot decode: all answers must have been recorded."""

    wants_more = idle = True

    def fits(self, request: Request) -> bool:
        return True

    def submit(self, requests: Sequence[QueuedRequest]) -> None:
        raise InputError(
            f"capture.answers: no answer to {requests[0].name}, and target.shard = true: nobody here gives it; set "
            "capture.backend to vllm with signals engine"
        )

    def step(self) -> list[DecodedAnswer]:
        return []


class _Listener:
    """What is kept of every emitted token: all signals as long as train answers are expected, else its log p."""

    def __init__(self, settings: CaptureSettings) -> None:
        self._settings = settings
        self._train = 0

    def expect(self, train: int) -> None:
        """So many train answers more were asked for (or, negative, are there)."""
        self._train += train

    def __call__(self, logits_BV: Tensor, tokens_B: Tensor, seeds_B: Tensor, emitted_B: Tensor) -> Columns:
        """Of one token of each of B answers."""
        if not self._train or not self._settings.top_k:
            return {"logp_n": emitted_logp(logits_BV, tokens_B)}
        return stored_signals(logits_BV, tokens_B, seeds_B, emitted_B, self._settings)
