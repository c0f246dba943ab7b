"""Capture scheduler: draws the answers of many shards as one stream, and takes teacher signals while decoding.

The last answers of a shard would leave most slots idle, so answers of later shards are begun meanwhile. A shard is
yielded as soon as all its answers are there. A turn becomes ready once the turn that it waits for is answered.

Shapes: B rows of a decoding step, V vocabulary.
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
from ..settings import CaptureSettings
from ..store import Sample
from ..teacher_logprobs import emitted_logp, stored_signals
from .plan import Prompts, ShardPlan, TurnRequest, tail_seed_of
from .reuse import ReusableAnswers, forced_signals

Columns = dict[str, Tensor]

_USUAL = 0.95  # share of the answers that all slots must have room for; longer ones wait for larger slots
_HELD = 4  # times the slots, or a shard: finished answers that wait for others of their shards


class Progress(Protocol):
    """Counts answers as they come, and decides whether more are begun."""

    def may_open(self, shard: ShardPlan) -> bool:
        """Whether the answers of another shard may be begun. Called again whenever there is room for them."""

    def emitted(self, tokens: int) -> None:
        """Count answer tokens."""

    def ended(self, turn: TurnRequest, sample: Sample | None) -> None:
        """Count a complete answer; None: it was left out."""


class Decoder(Protocol):
    """The part of `PlainDecoder` that the scheduler drives."""

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


class ShardAnswers(NamedTuple):
    """The answers of one shard, in the order of its plan."""

    samples: list[Sample]
    columns: Columns
    """The signals of all answer tokens in order; outside the train split `logp_n` alone."""
    skipped: list[Skipped]
    logp_difference: float | None = None
    """Mean distance (nats) of an engine's log-probs from the target's, where both are known."""


@dataclass
class _OpenShard:
    """A shard whose answers are being drawn."""

    number: int
    plan: ShardPlan
    done: dict[str, Sample] = field(default_factory=dict)
    skipped: dict[str, Skipped] = field(default_factory=dict)
    columns: dict[str, Columns] = field(default_factory=dict)
    """Signals of the samples in `done`, by id."""
    without_signals: list[Sample] = field(default_factory=list)
    """Samples of `done` that the target did not draw here: one pass over them will give their signals."""
    engine_logp: dict[str, Tensor] = field(default_factory=dict)
    """Log-probs that the engine gave to the tokens of samples without signals, by id."""

    @property
    def complete(self) -> bool:
        return len(self.done) + len(self.skipped) == len(self.plan.answers)

    def answers(self) -> ShardAnswers:
        """The shard's samples, columns and skipped answers, in the order of the plan."""
        # Answers came in any order; the plan's order makes the file the same every time.
        ids = [turn.id for turn in self.plan.answers]
        drawn = [id for id in ids if id in self.done]
        names = self.columns[drawn[0]] if drawn else ()
        columns = {name: torch.cat([self.columns[id][name] for id in drawn]) for name in names}
        skipped = [self.skipped[id] for id in ids if id in self.skipped]
        return ShardAnswers([self.done[id] for id in drawn], columns, skipped, self.logp_difference())

    def logp_difference(self) -> float | None:
        """Mean distance (nats) over the tokens that both the engine and the target gave a log-prob."""
        apart = [(self.columns[id]["logp_n"].float() - logp_n).abs() for id, logp_n in self.engine_logp.items()]
        return float(torch.cat(apart).mean()) if apart else None


def answer_shards(
    target: Target,
    shards: Sequence[ShardPlan],
    prompts: Prompts,
    settings: CaptureSettings,
    progress: Progress,
    reusable: ReusableAnswers | None = None,
    engine: CaptureBackend | None = None,
) -> Iterator[tuple[ShardPlan, ShardAnswers]]:
    """Answer shards, about in their order; yields each once all its answers are there.

    Answers in `reusable` are not drawn anew; `engine` answers in the target's stead. Ends before the last shard where
    `progress` allows no further one to be begun.
    Raises InputError where the target's logits are not finite, or where `batch_size` answers do not fit a GPU.
    """
    turns = [turn for shard in shards for turn in shard.answers]
    slots = min(settings.batch_size, max(1, len(turns)))
    scheduler = _Scheduler(target, shards, prompts, settings, progress, reusable, slots)

    # 1) An engine answers, or nobody does where a sharded target cannot decode.
    if engine is not None:
        yield from scheduler.run(EngineDecoder(engine, slots, progress.emitted))
        return
    if target.collective:
        yield from scheduler.run(_NoDecoder())
        return

    # 2) The target decodes in slots that have room for nearly all answers, and for the longest where memory allows.
    def decoder(slots: int, capacity: int, wanted: int) -> PlainDecoder:
        listener, budget = scheduler.listener, settings.max_new_tokens
        return PlainDecoder(target, slots, capacity, budget, listener, progress.emitted, wanted=wanted)

    # Slots hold the usual length at first: nearly all answers fit, and more slots do.
    limit = target.max_positions
    lengths = sorted(
        prompts.known_tokens(turn) + turn.max_new_tokens for turn in turns if prompts.known_tokens(turn) < limit
    )
    usual = lengths[int(_USUAL * (len(lengths) - 1))] if lengths else 0
    longest = max((prompts.most_tokens(turn) + turn.max_new_tokens for turn in turns), default=0)
    yield from scheduler.run(decoder(slots, min(usual, limit), min(longest, limit)))

    # 3) What is longer gets fewer, larger slots.
    while scheduler.ready:
        capacity = max(len(queued.request.prompt_ids) + queued.request.max_new_tokens for queued in scheduler.ready)
        slots = fitting_slots(target, min(settings.batch_size, len(turns), len(scheduler.ready)), capacity)
        yield from scheduler.run(decoder(slots, capacity, capacity))


class _Scheduler:
    """Opens shards as a decoder has room, submits what is ready, and collects what comes."""

    def __init__(
        self,
        target: Target,
        shards: Sequence[ShardPlan],
        prompts: Prompts,
        settings: CaptureSettings,
        progress: Progress,
        reusable: ReusableAnswers | None,
        slots: int,
    ) -> None:
        self._target, self._prompts, self._settings, self._progress = target, prompts, settings, progress
        self._reusable = reusable
        # With signals of the target, every answer of an engine gets a pass of the target, which also checks the engine.
        self._engine_checked = settings.engine is not None and settings.engine.signals == "target"
        self._most_held = _HELD * max(slots, settings.shard_samples)
        # Turns by state: in shards not opened, in open shards, submitted, waiting for another turn, ready.
        self._unopened = deque(enumerate(shards))
        self._open: dict[str, _OpenShard] = {}  # by the shard's name
        self._submitted: dict[str, tuple[_OpenShard, TurnRequest, Request]] = {}  # by the turn's id; also ready ones
        self._followers: dict[str, list[TurnRequest]] = defaultdict(list)  # by the turn that they wait for
        self.ready: list[QueuedRequest] = []
        """Requests that no decoder has got yet."""
        self.listener = _SignalListener(settings)

    def run(self, decoder: Decoder) -> Iterator[tuple[ShardPlan, ShardAnswers]]:
        """Draw all answers that fit the decoder and are ready or become so; yields each shard once it is complete."""
        while True:
            # 1) Open shards while the decoder has room for them, and submit what is ready.
            while self._unopened and self._has_room(decoder) and self._progress.may_open(self._unopened[0][1]):
                self._open_shard(*self._unopened.popleft())
                self._submit(decoder)
            self._submit(decoder)
            # 2) Hand over what is complete.
            for shard in [shard for shard in self._open.values() if shard.complete]:
                del self._open[shard.plan.name]
                if shard.without_signals:
                    self._add_signals(shard)
                yield shard.plan, shard.answers()
            # 3) Decode a token of every slot.
            if decoder.idle:
                return
            for answer in decoder.step():
                self._receive(answer)

    def _has_room(self, decoder: Decoder) -> bool:
        """Whether to open another shard: the decoder wants requests, and few finished answers wait for a slow shard."""
        held = sum(len(shard.done) for shard in self._open.values())
        return decoder.wants_more and (decoder.idle or held < self._most_held)

    def _open_shard(self, number: int, plan: ShardPlan) -> None:
        shard = self._open[plan.name] = _OpenShard(number, plan)
        # Note who waits for whom first: a turn that is skipped or reused ends at once and prepares its followers.
        for turn in plan.answers:
            if turn.waits_for is not None:
                self._followers[turn.waits_for].append(turn)
        for turn in plan.answers:
            if turn.waits_for is None:
                self._prepare(shard, turn)

    def _prepare(self, shard: _OpenShard, turn: TurnRequest) -> None:
        """Make a turn's request ready, or end the turn at once where it is skipped or answered before."""
        # A skipped turn ends here.
        request = self._request(shard, turn)
        if isinstance(request, Skipped):
            self._end(shard, turn, request)
            return
        # A recorded answer replaces the decoder's; it still needs its signals.
        given = None
        if self._reusable is not None:
            given = self._reusable.find(turn, request.prompt_ids, request.max_new_tokens)
        if given is None:
            self._submitted[turn.id] = (shard, turn, request)
            self.ready.append(QueuedRequest(turn.id, request, tail_seed_of(self._settings.seed, turn.id), shard.number))
            return
        sample = _sample(turn, request, given)
        shard.without_signals.append(sample)
        self._progress.emitted(len(given.tokens))
        self._end(shard, turn, sample)

    def _request(self, shard: _OpenShard, turn: TurnRequest) -> Request | Skipped:
        if turn.waits_for is not None and turn.waits_for not in shard.done:
            return Skipped(turn.id, "an earlier turn was skipped")
        # The context of a dialogue holds what the target answered so far, as a chat client would send it back.
        earlier: list[str] = []
        if turn.waits_for is not None:
            before = [f"{turn.conversation.id}/{i}/{turn.sampling.key}" for i in range(turn.turn.index)]
            decode = self._target.tokenizer.decode
            earlier = [decode(shard.done[id].answer_ids, skip_special_tokens=True) for id in before]
        # The answer gets what the prompt leaves of the context.
        prompt = self._prompts.ids(turn, earlier)
        if isinstance(prompt, str):
            return Skipped(turn.id, prompt)
        room = self._prompts.room(turn, prompt)
        if room == 0:
            return Skipped(turn.id, f"prompt of {len(prompt)} tokens, context of {self._target.max_positions}")
        return Request(prompt, turn.sampling, turn.seed, room, self._target.stop_ids)

    def _submit(self, decoder: Decoder) -> None:
        """Submit what is ready and fits; the rest stays."""
        # The listener must know of train answers before their first token is drawn.
        fitting = [queued for queued in self.ready if decoder.fits(queued.request)]
        if fitting:
            self.ready = [queued for queued in self.ready if not decoder.fits(queued.request)]
            self.listener.train_answers += sum(
                self._submitted[queued.name][0].plan.split == "train" for queued in fitting
            )
            decoder.submit(fitting)

    def _receive(self, answer: DecodedAnswer) -> None:
        """Put an answer into its shard."""
        # 1) NaN or inf would poison the store.
        shard, turn, request = self._submitted.pop(answer.name)
        columns = answer.columns
        if not columns["logp_n"].isfinite().all():
            raise InputError(f"{turn.id}: the target's logits are not finite")

        # 2) While any train answer is in flight, all rows come with all signals; other splits keep log p alone.
        if shard.plan.split == "train":
            self.listener.train_answers -= 1
        else:
            columns = {"logp_n": columns["logp_n"]}

        # 3) An engine's answer waits for the target's pass, and its log-probs for the comparison.
        sample = _sample(turn, request, answer)
        if self._engine_checked:
            shard.without_signals.append(sample)
            shard.engine_logp[turn.id] = columns["logp_n"]
        else:
            shard.columns[turn.id] = columns
        self._end(shard, turn, sample)

    def _end(self, shard: _OpenShard, turn: TurnRequest, result: Sample | Skipped) -> None:
        """Note a turn's result, and prepare the turns that waited for it."""
        if isinstance(result, Skipped):
            shard.skipped[turn.id] = result
            self._progress.ended(turn, None)
        else:
            shard.done[turn.id] = result
            self._progress.ended(turn, result)
        for follower in self._followers.pop(turn.id, ()):
            self._prepare(shard, follower)

    def _add_signals(self, shard: _OpenShard) -> None:
        """Add the signals of answers that the target did not draw here, from one pass over them.

        Raises InputError for logits that are not finite, StaleInputError where the engine serves another model.
        """
        # One pass for all of them; without top-k and without an engine to check, log p stays NaN.
        columns = forced_signals(self._target, shard.without_signals, self._settings)
        unknown = "logp_n" in columns and not columns["logp_n"].isfinite().all()
        if unknown and self._settings.reads_given:
            raise InputError(f"{shard.plan.name}: the target's logits of recorded answers are not finite")

        # Deal the columns out to the samples.
        counts = [len(sample.answer_ids) for sample in shard.without_signals]
        parts = {name: torch.split(column, counts) for name, column in columns.items()}
        for index, sample in enumerate(shard.without_signals):
            shard.columns[sample.id] = {name: part[index] for name, part in parts.items()}

        # The engine's log-probs of the same tokens tell whether it serves the target.
        difference, backend = shard.logp_difference(), self._settings.engine
        if difference is not None and backend is not None and difference > backend.tolerance:
            raise StaleInputError(
                f"capture.backend: {shard.plan.name}: the engine's log-probs are {difference:.3g} away from the "
                f"target's on average, must be within {backend.tolerance:g}; it serves another model or quantisation"
            )


def _sample(turn: TurnRequest, request: Request, answer: DecodedAnswer) -> Sample:
    return Sample(
        id=turn.id,
        conversation=turn.conversation.id,
        turn=turn.turn.index,
        cluster=turn.conversation.cluster,
        domain=turn.conversation.domain,
        split=turn.conversation.split,
        sampling=turn.sampling,
        max_new_tokens=request.max_new_tokens,
        finish=answer.finish,
        prompt_ids=request.prompt_ids,
        answer_ids=answer.tokens,
        counts=turn.turn.counts,
    )


class _NoDecoder:
    """Stands in for a decoder where a sharded target cannot decode: all answers must have been given before."""

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


class _SignalListener:
    """Decoder listener: stores all signals of each emitted token while train answers are being drawn, else log p."""

    def __init__(self, settings: CaptureSettings) -> None:
        self._settings = settings
        self.train_answers = 0
        """Number of train answers in flight."""

    def __call__(self, logits_BV: Tensor, tokens_B: Tensor, seeds_B: Tensor, emitted_B: Tensor) -> Columns:
        """Columns of one token of each of B answers."""
        if not self.train_answers or not self._settings.top_k:
            return {"logp_n": emitted_logp(logits_BV, tokens_B)}
        return stored_signals(logits_BV, tokens_B, seeds_B, emitted_B, self._settings)
