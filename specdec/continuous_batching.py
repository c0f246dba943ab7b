"""Plain decoding of many requests at speed: a stream of answers, drawn exactly as `decoder.generate` draws them.

Shapes: S slots, R rows of one pass, T prompt tokens, V vocabulary.

The host never waits for the step that it just started. Tokens, lengths, stops and what a listener keeps of each token
stay on the device; the host learns which answers ended one step late, gives their slots to waiting requests, and drops
what they said past their end. Active slots are kept in the first rows, so that the tail runs in smaller passes.

Counter-based random numbers (`sampling.uniforms`) make an answer free of its slot, its neighbours and its time.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import record_function

from .cache import KVCache, reads_lengths
from .cuda_graphs import Replays, Shapes, running, send
from .memory_fit import fitting_capacity, probe_pass, takes_graphs
from .models import CausalModel
from .requests import Request, check_requests
from .sampling import Purpose, SamplingSettings, categorical, penalised, probabilities, uniforms

Listen = Callable[[Tensor, Tensor, Tensor, Tensor], dict[str, Tensor]]
"""(logits_RV, tokens_R, seeds_R, emitted_R) -> what is kept of each token, [R, ...] under a name of its own.

The logits are the raw ones that the tokens were drawn from, `seeds` the listener's own of each request, `emitted` the
tokens before. It must not wait for the device."""

TOKENS = "tokens"
SettingRows = list[tuple[SamplingSettings, Tensor | None]]


class Number(IntEnum):
    """Columns of a slot's numbers."""

    LAST = 0
    """The token that was emitted last."""
    PAST = 1
    """Tokens whose keys are in the cache: the position of `LAST`."""
    EMITTED = 2
    BUDGET = 3
    """Tokens that the answer may have."""
    SEED = 4
    LISTENER_SEED = 5


class SlotState:
    """Numbers, stop tokens, repetition marks and kept columns of every slot."""

    def __init__(self, slots: int, budget: int, device: torch.device) -> None:
        self._budget = budget
        self.numbers_SX = torch.zeros(slots + 1, len(Number), dtype=torch.long, device=device)
        self._stops_SK = torch.full((slots + 1, 1), -1, device=device)
        self._seen_SV: Tensor | None = None
        self._kept: dict[str, Tensor] = {}

    def of(self, number: Number) -> Tensor:
        """A view of one number of all slots."""
        return self.numbers_SX[:, number]

    def admit(self, rows_R: Tensor, asked: Sequence[tuple[Request, int]], ids_RT: Tensor, vocab_size: int) -> None:
        """Put requests and their listener's seeds into slots. `ids`: their prompts, padded with tokens of their own;
        rows past the requests are padding."""
        numbers = [[0, len(r.prompt_ids), 0, r.max_new_tokens, r.seed, seed] for r, seed in asked]
        numbers += [[0] * len(Number)] * (len(rows_R) - len(asked))
        self.numbers_SX[rows_R] = send(torch.tensor(numbers), rows_R.device)
        self._admit_stops(rows_R, [request.stop_ids for request, _ in asked])
        if self._seen_SV is None and any(request.sampling.repetition_penalty != 1.0 for request, _ in asked):
            shape = (len(self.numbers_SX), vocab_size)
            self._seen_SV = torch.zeros(shape, dtype=torch.bool, device=rows_R.device)
        if self._seen_SV is not None:
            seen_RV = self._seen_SV.new_zeros(len(rows_R), vocab_size).scatter_(1, ids_RT, True)
            self._seen_SV[rows_R] = seen_RV

    def _admit_stops(self, rows_R: Tensor, stops: Sequence[frozenset[int]]) -> None:
        most = max(map(len, stops))
        if most > self._stops_SK.shape[1]:
            self._stops_SK = F.pad(self._stops_SK, (0, most - self._stops_SK.shape[1]), value=-1)
        width = self._stops_SK.shape[1]
        filled = [[*ids, *[-1] * (width - len(ids))] for ids in stops] + [[-1] * width] * (len(rows_R) - len(stops))
        self._stops_SK[rows_R] = send(torch.tensor(filled), rows_R.device)

    def seen(self, rows_R: Tensor) -> Tensor | None:
        """Marks of the tokens that each slot knows; None where no request had a use for them."""
        return None if self._seen_SV is None else self._seen_SV[rows_R]

    def emit(self, rows_R: Tensor, tokens_R: Tensor, kept: dict[str, Tensor]) -> Tensor:
        """Note each slot's new token and what is kept of it. [R]: the answer's tokens where it ended, else 0.

        A slot that ended goes on until it is freed; what it then says goes past the answer's end.
        """
        numbers_RX = self.numbers_SX[rows_R]
        at_R = numbers_RX[:, Number.EMITTED].clamp(max=self._budget)
        for name, value in {TOKENS: tokens_R.int(), **kept}.items():
            if name not in self._kept:
                shape = (len(self.numbers_SX), self._budget + 1, *value.shape[1:])
                self._kept[name] = value.new_zeros(shape)
            self._kept[name][rows_R, at_R] = value
        if self._seen_SV is not None:
            self._seen_SV[rows_R, tokens_R] = torch.ones_like(tokens_R, dtype=torch.bool)
        numbers_RX[:, Number.LAST] = tokens_R
        numbers_RX[:, Number.EMITTED] += 1
        self.numbers_SX[rows_R] = numbers_RX
        emitted_R = numbers_RX[:, Number.EMITTED]
        ends_R = (self._stops_SK[rows_R] == tokens_R[:, None]).any(1) | (emitted_R >= numbers_RX[:, Number.BUDGET])
        return torch.where(ends_R, emitted_R, 0)

    def gather(self, slots: Sequence[int], counts: Sequence[int]) -> dict[str, Tensor]:
        """What was kept of the first `counts` tokens of some slots, end to end [n, ...], on its way to the CPU."""
        width = self._budget + 1
        places = [torch.arange(slot * width, slot * width + count) for slot, count in zip(slots, counts)]
        at_n = send(torch.cat(places), self.numbers_SX.device)
        return {
            name: kept.flatten(0, 1).index_select(0, at_n).to("cpu", non_blocking=True)
            for name, kept in self._kept.items()
        }

    def free(self, slots: Sequence[int]) -> None:
        """Freed slots have no past, so attention over them costs nothing."""
        self.of(Number.PAST).index_fill_(0, send(torch.tensor(slots), self.numbers_SX.device), 0)

    def move(self, from_R: Tensor, to_R: Tensor) -> None:
        """Copy slots onto others."""
        state = [self.numbers_SX, self._stops_SK, *self._kept.values()]
        for part in state if self._seen_SV is None else [*state, self._seen_SV]:
            part[to_R] = part[from_R]


def rows_by_setting(sampling: Sequence[SamplingSettings], device: torch.device) -> SettingRows:
    """The rows that each setting draws; None: all of them."""
    found: dict[SamplingSettings, list[int]] = {}
    for row, setting in enumerate(sampling):
        found.setdefault(setting, []).append(row)
    if len(found) == 1:
        return [(sampling[0], None)]
    return [(setting, send(torch.tensor(rows), device)) for setting, rows in found.items()]


def draw(logits_RV: Tensor, settings: SettingRows, seen_RV: Tensor | None, u_R: Tensor) -> Tensor:
    """The next token of each row, through its setting's processors."""
    tokens_R = torch.zeros_like(u_R, dtype=torch.long)
    for setting, rows in settings:
        some_RV, some_seen_RV, some_u_R = logits_RV, seen_RV, u_R
        if rows is not None:
            some_RV, some_u_R = logits_RV[rows], u_R[rows]
            some_seen_RV = None if seen_RV is None or setting.repetition_penalty == 1.0 else seen_RV[rows]
        if setting.greedy:
            drawn = penalised(some_RV, setting, some_seen_RV).argmax(-1)
        else:
            drawn = categorical(probabilities(some_RV, setting, some_seen_RV), some_u_R)
        if rows is None:
            return drawn
        tokens_R[rows] = drawn
    return tokens_R


Columns = dict[str, Tensor]


class QueuedRequest(NamedTuple):
    """A request, under its sender's name for it."""

    name: str
    request: Request
    listener_seed: int = 0
    order: int = 0
    """Lower ones are begun first; of equals the longest prompts."""


class DecodedAnswer(NamedTuple):
    """An answer. `tokens` includes the token that stopped it, where one did."""

    name: str
    tokens: list[int]
    finish: Literal["stop", "length"]
    columns: Columns
    """What the listener kept, a row a token, on the CPU."""


@dataclass(eq=False)
class _Slot:
    asked: QueuedRequest
    index: int
    past: int  # tokens in the cache, as far as passes were started
    ended: bool = False


@dataclass(frozen=True)
class _DeferredAnswers:
    """Work that waits until the device has come by."""

    passed: "torch.cuda.Event | None"
    work: Callable[[], list[DecodedAnswer]]


class PlainDecoder:
    """Answers what is asked of it; `step` until `idle`.

    `capacity`: tokens of the longest prompt and answer together; `budget`: of the longest answer. `wanted`: a capacity
    to be had where memory allows. Raises InputError where that many slots do not fit the GPU's memory.
    """

    def __init__(
        self,
        target: CausalModel,
        slots: int,
        capacity: int,
        budget: int,
        listen: Listen | None = None,
        advance: Callable[[int], None] = lambda tokens: None,
        wanted: int = 0,
        shapes: Callable[[int, int, bool], Shapes] = Shapes,
    ) -> None:
        device = target.device
        self._lengths_on_device = reads_lengths(device)
        self._lag = 1 if device.type == "cuda" else 0
        self._target, self._listen, self._advance = target, listen, advance
        one = probe_pass(target)
        self.capacity = fitting_capacity(target, one.token_bytes, slots, capacity, max(wanted, capacity))
        self.budget = budget
        graphed = takes_graphs(target)
        self._shapes = shapes(slots, self.capacity + 1, graphed)
        with torch.inference_mode():
            self._cache = KVCache(slots + 1, self.capacity + 1, device)
            self._state = SlotState(slots, budget, device)
            self._replays = Replays(graphed)
        self._waiting: dict[int, list[tuple[int, int, int, QueuedRequest]]] = {}  # heaps by width of the prompt
        self._count = 0
        self._slots: list[_Slot | None] = []  # of the rows that are in use or were
        self._size = slots
        self._late: deque[_DeferredAnswers] = deque()
        self._active = 0
        self._living = 0  # of these, as far as the host has looked
        self._settings: SettingRows | None = None
        self._rows_R = torch.empty(0, dtype=torch.long)

    @property
    def waiting(self) -> int:
        """Requests that have no slot yet."""
        return sum(map(len, self._waiting.values()))

    @property
    def wants_more(self) -> bool:
        """Whether it could do with more requests."""
        return self.waiting < self._shapes.ahead + self._size - self._active

    @property
    def has_free_slots(self) -> bool:
        """Whether slots stand empty that no waiting request will fill."""
        return self.waiting < self._size - self._active

    @property
    def idle(self) -> bool:
        """Whether all that was asked is answered."""
        return not (self.waiting or self._active or self._late)

    def fits(self, request: Request) -> bool:
        """Whether a slot has room for it."""
        room = self.capacity - len(request.prompt_ids)
        return request.max_new_tokens <= min(self.budget, room)

    def submit(self, requests: Sequence[QueuedRequest]) -> None:
        """Queue requests. Raises InputError, ContextLengthError for one that cannot be answered."""
        check_requests(self._target, [queued.request for queued in requests], None)
        for queued in requests:
            length = len(queued.request.prompt_ids)
            heap = self._waiting.setdefault(self._shapes.width(length), [])
            heapq.heappush(heap, (queued.order, -length, self._count, queued))
            self._count += 1

    def step(self) -> list[DecodedAnswer]:
        """Begin what waits and finds room, decode a token of every active slot; gives the answers that came in."""
        with running(self._target.device):
            return self._step()

    def _step(self) -> list[DecodedAnswer]:
        started = self._refill()
        if self._active:
            self._close_up()
            self._decode()
            started = True
        answers: list[DecodedAnswer] = []
        while len(self._late) > (self._lag if started else 0):
            late = self._late.popleft()
            if late.passed is not None:
                late.passed.synchronize()
            answers += late.work()
        return answers

    def _refill(self) -> bool:
        """Read the prompts of waiting requests into free slots, full passes first; whether there were any."""
        started = False
        while self.waiting:
            width = min((heap[0], width) for width, heap in self._waiting.items() if heap)[1]
            heap, free = self._waiting[width], self._size - self._active
            wanted = min(len(heap), self._shapes.prompts(width))
            if free < (wanted if self._shapes.fixed and self._active else 1):
                break
            self._prefill([heapq.heappop(heap)[-1] for _ in range(min(wanted, free))], width)
            started = True
        return started

    def _prefill(self, asked: Sequence[QueuedRequest], width: int) -> None:
        """Read prompts in one pass and emit their first tokens."""
        prompts = [one.request.prompt_ids for one in asked]
        slots = self._place(asked)
        padding = self._shapes.prompts(width) - len(asked) if width else 0
        width = width or max(map(len, prompts))
        last = [len(prompt) - 1 for prompt in prompts] + [0] * padding
        indexes = [slot.index for slot in slots] + [self._size] * padding
        ids = [[*prompt, *prompt[-1:] * (width - len(prompt))] for prompt in prompts] + [[0] * width] * padding
        device = self._target.device
        ids_RT = send(torch.tensor(ids), device)
        rows_R, last_R = send(torch.tensor([indexes, last]), device)
        with record_function("forward"):
            logits_RV = self._replays.run(("read", *ids_RT.shape), self._read, ids_RT, rows_R, last_R)
        pairs = [(one.request, one.listener_seed) for one in asked]
        self._state.admit(rows_R, pairs, ids_RT, self._target.vocab_size)
        sampling = [one.request.sampling for one in asked] + [asked[0].request.sampling] * padding
        ended_R = self._emit(rows_R, logits_RV, rows_by_setting(sampling, device))
        self._settings = None
        self._read_later(ended_R, [*slots, *[None] * padding], len(slots))

    def _read(self, ids_RT: Tensor, rows_R: Tensor, last_R: Tensor) -> Tensor:
        hidden_RTH = self._target.states(ids_RT, self._cache.fill(rows_R)).hidden_BTH
        return self._target.logits(hidden_RTH[torch.arange(len(last_R), device=last_R.device), last_R])

    def _place(self, asked: Sequence[QueuedRequest]) -> list[_Slot]:
        """Give requests the first free slots."""
        free = [index for index, slot in enumerate(self._slots) if slot is None]
        free += range(len(self._slots), self._size)
        slots = [_Slot(one, index, len(one.request.prompt_ids)) for one, index in zip(asked, free)]
        for slot in slots:
            self._slots += [None] * (slot.index + 1 - len(self._slots))
            self._slots[slot.index] = slot
        self._active += len(slots)
        return slots

    def _close_up(self) -> None:
        """Move the last active slots into free ones before them where that makes the pass smaller."""
        rows = self._shapes.rows(self._active)
        while self._slots[-1] is None:
            self._slots.pop()
        if len(self._slots) <= rows:
            return
        moving = [slot for slot in self._slots[rows:] if slot is not None]
        holes = [index for index, slot in enumerate(self._slots[:rows]) if slot is None]
        from_R, to_R = send(torch.tensor([[slot.index for slot in moving], holes[: len(moving)]]), self._target.device)
        self._cache.move_rows(from_R, to_R, max(slot.past for slot in moving))
        self._state.move(from_R, to_R)
        for slot, index in zip(moving, holes):
            self._slots[index], slot.index = slot, index
        del self._slots[rows:]
        self._settings = None

    def _decode(self) -> None:
        """One token of every active slot."""
        rows = self._shapes.rows(len(self._slots))
        slots = [*self._slots, *[None] * (rows - len(self._slots))]
        active = [slot for slot in slots if slot is not None]
        longest = None if self._lengths_on_device else max(slot.past for slot in active)
        with record_function("forward"):
            logits_RV = self._replays.run(("decode", rows), lambda: self._forward(rows, longest))
        self._state.of(Number.PAST)[:rows].add_(1).clamp_(max=self.capacity)
        for slot in active:
            slot.past += 1
        if self._settings is None or rows != self._rows_R.shape[0]:
            idle = active[0].asked.request.sampling
            sampling = [idle if slot is None else slot.asked.request.sampling for slot in slots]
            self._settings = rows_by_setting(sampling, self._target.device)
            self._rows_R = torch.arange(rows, device=self._target.device)
        self._read_later(self._emit(self._rows_R, logits_RV, self._settings), slots, 0)

    def _forward(self, rows: int, longest: int | None) -> Tensor:
        numbers_RX = self._state.numbers_SX[:rows]
        step = self._cache.follow(numbers_RX[:, Number.PAST].contiguous(), longest)
        hidden_RH = self._target.states(numbers_RX[:, Number.LAST, None], step).hidden_BTH[:, 0]
        return self._target.logits(hidden_RH)

    def _emit(self, rows_R: Tensor, logits_RV: Tensor, settings: SettingRows) -> Tensor:
        """Draw each row's token and keep what the listener takes. [R]: tokens of the answers that ended, else 0."""
        numbers_RX = self._state.numbers_SX[rows_R]
        emitted_R = numbers_RX[:, Number.EMITTED]
        with record_function("sampling"):
            u_R = uniforms(numbers_RX[:, Number.SEED], emitted_R, Purpose.FINAL, 1)[:, 0]
            tokens_R = draw(logits_RV, settings, self._state.seen(rows_R), u_R)
        kept: Columns = {}
        with record_function("signals"):
            if self._listen is not None:
                kept = self._listen(logits_RV, tokens_R, numbers_RX[:, Number.LISTENER_SEED], emitted_R)
            return self._state.emit(rows_R, tokens_R, kept)

    def _read_later(self, ended_R: Tensor, slots: Sequence[_Slot | None], begun: int) -> None:
        """Have the host look at `ended` once the device has passed; `slots` are those of the rows now."""
        ended_R = ended_R.to("cpu", non_blocking=True)

        def look() -> list[DecodedAnswer]:
            self._living += begun
            self._advance(begun or self._living)
            ended = [(slots[row], int(ended_R[row])) for row in ended_R.nonzero()[:, 0].tolist()]
            self._finish([(slot, count) for slot, count in ended if slot is not None and not slot.ended])
            return []

        self._when_passed(look)

    def _finish(self, ended: Sequence[tuple[_Slot, int]]) -> None:
        """Free slots whose answers ended after so many tokens, and fetch these."""
        if not ended:
            return
        slots, counts = [slot for slot, _ in ended], [count for _, count in ended]
        columns = self._state.gather([slot.index for slot in slots], counts)
        self._state.free([slot.index for slot in slots])
        self._living -= len(slots)
        self._active -= len(slots)
        for slot in slots:
            slot.ended = True
            self._slots[slot.index] = None
        self._when_passed(lambda: _answers([slot.asked for slot in slots], counts, columns))

    def _when_passed(self, work: Callable[[], list[DecodedAnswer]]) -> None:
        passed = None
        if self._target.device.type == "cuda":
            passed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            passed.record()
        self._late.append(_DeferredAnswers(passed, work))


def _answers(asked: Sequence[QueuedRequest], counts: list[int], columns: Columns) -> list[DecodedAnswer]:
    parts = {name: torch.split(column.clone(), counts) for name, column in columns.items()}  # pinned ones are reused
    answers: list[DecodedAnswer] = []
    for place, one in enumerate(asked):
        own = {name: part[place] for name, part in parts.items()}
        tokens = own.pop(TOKENS).tolist()
        answers.append(DecodedAnswer(one.name, tokens, "stop" if tokens[-1] in one.request.stop_ids else "length", own))
    return answers
