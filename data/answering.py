"""Draws the answers of one shard from the target and takes the teacher signals off its logits on the way.

Shapes: B rows of a decoding step, V vocabulary, M tail draws, N emitted tokens of the shard.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from ..specdec.decoder import Generation, Request, generate
from ..specdec.sampling import Purpose, uniforms
from ..specdec.targets import Target
from .capture_settings import CaptureSettings
from .requests import Planned, Prompts, ShardPlan, seed_of
from .signals import emitted_logp, teacher_signals
from .store import Sample

Advance = Callable[[int, int], None]
"""(amount, tokens): new tokens, and budget that will not be spent; the amounts add up to the budgets."""


Columns = dict[str, Tensor]


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


def answer_shard(
    target: Target, shard: ShardPlan, prompts: Prompts, settings: CaptureSettings, advance: Advance
) -> Answers:
    """Answer a shard in waves: all whose context is known, then those that waited for them, and so on.

    Raises InputError where the target's logits are not finite.
    """
    recorder = _Recorder(shard.split == "train", settings)
    done: dict[str, Sample] = {}
    skipped: dict[str, Skipped] = {}
    wave = [answer for answer in shard.answers if answer.waits_for is None]
    while wave:
        asked: list[tuple[Planned, Request]] = []
        for answer in wave:
            request = _request(target, answer, prompts, done)
            if isinstance(request, Skipped):
                skipped[answer.id] = request
                advance(answer.max_new_tokens, 0)
            else:
                asked.append((answer, request))
        for answer, request, generation in _decode(target, asked, recorder, settings.batch_size, advance):
            done[answer.id] = _sample(answer, request, generation)
            advance(answer.max_new_tokens - len(generation.tokens), 0)
        known = done.keys() | skipped.keys()
        wave = [a for a in shard.answers if a.waits_for in known and a.id not in known]
    samples = [done[answer.id] for answer in shard.answers if answer.id in done]
    return Answers(samples, recorder.columns(samples), [skipped[a.id] for a in shard.answers if a.id in skipped])


def _request(target: Target, answer: Planned, prompts: Prompts, done: dict[str, Sample]) -> Request | Skipped:
    if answer.waits_for is not None and answer.waits_for not in done:
        return Skipped(answer.id, "an earlier turn was skipped")
    prompt = prompts.of(answer, _earlier_texts(target, answer, done))
    room = prompts.room(answer, prompt)
    if room == 0:
        return Skipped(answer.id, f"prompt of {len(prompt)} tokens, context of {target.max_positions}")
    return Request(prompt, answer.sampling, answer.seed, room, target.stop_ids)


def _earlier_texts(target: Target, answer: Planned, done: dict[str, Sample]) -> list[str]:
    """What the target answered in this dialogue so far, as a chat client would send it back."""
    if answer.waits_for is None:
        return []
    before = [
        done[f"{answer.conversation.id}/{turn}/{answer.sampling.key}"].answer_ids for turn in range(answer.turn.index)
    ]
    return [target.tokenizer.decode(ids, skip_special_tokens=True) for ids in before]


def _decode(
    target: Target,
    asked: Sequence[tuple[Planned, Request]],
    recorder: "_Recorder",
    batch_size: int,
    advance: Advance,
) -> Iterator[tuple[Planned, Request, Generation]]:
    """Plain decoding with the recorder listening. Longest prompts first: like lengths meet, and memory peaks early."""
    asked = sorted(asked, key=lambda pair: -len(pair[1].prompt_ids))
    if not asked:
        return

    def listen(indexes: list[int], logits_BV: Tensor, tokens_B: Tensor) -> None:
        recorder([asked[index][0] for index in indexes], logits_BV, tokens_B)
        advance(len(indexes), len(indexes))

    requests = [request for _, request in asked]
    for index, generation in generate(target, None, requests, batch_size=batch_size, on_logits=listen):
        yield (*asked[index], generation)


def _sample(answer: Planned, request: Request, generation: Generation) -> Sample:
    return Sample(
        id=answer.id,
        conversation=answer.conversation.id,
        turn=answer.turn.index,
        cluster=answer.conversation.cluster,
        domain=answer.conversation.domain,
        split=answer.conversation.split,
        sampling=answer.sampling,
        max_new_tokens=request.max_new_tokens,
        finish=generation.finish,
        prompt_ids=request.prompt_ids,
        answer_ids=generation.tokens,
    )


class _Recorder:
    """Keeps the signals of every emitted token on the target's device, in the order in which they come."""

    def __init__(self, full: bool, settings: CaptureSettings) -> None:
        self._full, self._settings = full, settings
        self._steps: list[Columns] = []
        self._rows: dict[str, list[int]] = {}
        self._tail_seeds: dict[str, int] = {}
        self._count = 0

    def __call__(self, answers: Sequence[Planned], logits_BV: Tensor, tokens_B: Tensor) -> None:
        """Take the signals of one token of each of these answers."""
        if self._full:
            u_BM = self._uniforms(answers, logits_BV.device)
            columns = teacher_signals(logits_BV, tokens_B, u_BM, self._settings.top_k)._asdict()
            columns |= {name: columns[name].to(self._store_dtype) for name in ("topk_logp_nk", "tail_logp_nM")}
        else:
            columns = {"logp_n": emitted_logp(logits_BV, tokens_B)}
        self._steps.append(columns)
        for answer in answers:
            self._rows.setdefault(answer.id, []).append(self._count)
            self._count += 1

    def columns(self, samples: Sequence[Sample]) -> Columns:
        """All signals, put in the order of the samples' tokens, on the CPU."""
        for sample in samples:
            if len(self._rows[sample.id]) != len(sample.answer_ids):
                raise RuntimeError(f"{sample.id}: the decoder reported logits for another number of tokens")
        if not samples:
            return {}
        order_N = torch.tensor([row for sample in samples for row in self._rows[sample.id]])
        joined = {name: torch.cat([step[name] for step in self._steps]).cpu()[order_N] for name in self._steps[0]}
        finite_N = joined["logp_n"].isfinite()
        if not finite_N.all():
            owner = [sample.id for sample in samples for _ in sample.answer_ids][int((~finite_N).nonzero()[0])]
            raise InputError(f"{owner}: the target's logits are not finite")
        return joined

    @property
    def _store_dtype(self) -> torch.dtype:
        return getattr(torch, self._settings.store_dtype)  # type: ignore[no-any-return]

    def _uniforms(self, answers: Sequence[Planned], device: torch.device) -> Tensor:
        """Tail draws have seeds of their own: never the numbers that drew the token."""
        for answer in answers:
            if answer.id not in self._tail_seeds:
                self._tail_seeds[answer.id] = seed_of(self._settings.seed, f"{answer.id}/tail")
        seeds = [self._tail_seeds[answer.id] for answer in answers]
        emitted = [len(self._rows.get(answer.id, ())) for answer in answers]
        seed_B, emitted_B = torch.tensor([seeds, emitted], device=device)
        return uniforms(seed_B, emitted_B, Purpose.FINAL, self._settings.tail_samples)
