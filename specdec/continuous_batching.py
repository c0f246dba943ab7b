"""Continuous batching: plain decoding of many requests at speed, drawn exactly as `decoder.generate` draws them.

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
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import record_function

from .cuda_graphs import Replays, Shapes, running, send
from .kv_cache import KVCache
from .memory_fit import fitting_capacity, probe_pass, takes_graphs
from .models import CausalModel
from .proposers.base import Texts
from .requests import Request, check_requests
from .sampling import Purpose, uniforms
from .slot_table import RowsOfSetting, SlotTable, draw, read_prompts, rows_by_setting

Listen = Callable[[Tensor, Tensor, Tensor, Tensor], dict[str, Tensor]]
"""(logits_RV, tokens_R, seeds_R, emitted_R) -> what is kept of each token, [R, ...] under a name of its own.

The logits are the raw ones that the tokens were drawn from, `seeds` the listener's own of each request, `emitted` the
tokens before. It must not wait for the device."""

TOKENS = "tokens"
Columns = dict[str, Tensor]


class AnswerTable(SlotTable):
    """Answer table: a slot table that also has stop tokens, each answer's tokens, and the listener's columns."""

    def __init__(self, slots: int, budget: int, device: torch.device) -> None:
        """Make a table of free slots. `budget`: tokens of the longest answer."""
        super().__init__(slots, device)
        self._budget = budget
        self._stops_SK = torch.full((slots, 1), -1, device=device)
        self._kept: dict[str, Tensor] = {}

    def admit_stops(self, slots_R: Tensor, stops: Sequence[frozenset[int]]) -> None:
        """Put the stop tokens of requests into slots; rows past them are padding."""
        # The table grows to the request with most stop tokens; -1 is no token, so it never matches.
        most = max(map(len, stops))
        if most > self._stops_SK.shape[1]:
            self._stops_SK = F.pad(self._stops_SK, (0, most - self._stops_SK.shape[1]), value=-1)
        width = self._stops_SK.shape[1]
        filled = [[*ids, *[-1] * (width - len(ids))] for ids in stops] + [[-1] * width] * (len(slots_R) - len(stops))
        self._stops_SK[slots_R] = send(torch.tensor(filled), slots_R.device)

    def keep(self, slots_R: Tensor, emitted_R: Tensor, columns: Columns) -> None:
        """Keep the columns of each slot's token number `emitted`.

        A slot whose answer has ended goes on until it is freed; what it then says goes past the answer's end.
        """
        at_R = emitted_R.clamp(max=self._budget)
        for name, value in columns.items():
            # A column's memory is made when it first comes, with one spare place behind the longest answer.
            if name not in self._kept:
                shape = (self.numbers_XS.shape[1], self._budget + 1, *value.shape[1:])
                self._kept[name] = value.new_zeros(shape)
            self._kept[name][slots_R, at_R] = value

    def ended(self, slots_R: Tensor, tokens_R: Tensor, emitted_R: Tensor, budget_R: Tensor) -> Tensor:
        """Number of tokens [R] of each answer that ended with this token, by a stop or its budget; else 0."""
        ends_R = (self._stops_SK[slots_R] == tokens_R[:, None]).any(1) | (emitted_R >= budget_R)
        return torch.where(ends_R, emitted_R, 0)

    def gather(self, slots: Sequence[int], counts: Sequence[int]) -> Columns:
        """Columns of the first `counts` tokens of some slots, end to end [n, ...], on their way to the CPU."""
        width = self._budget + 1
        # Slots and tokens are flattened into one axis, so that one copy a column fetches all answers.
        places = [torch.arange(slot * width, slot * width + count) for slot, count in zip(slots, counts)]
        at_n = send(torch.cat(places), self.numbers_XS.device)
        return {
            name: kept.flatten(0, 1).index_select(0, at_n).to("cpu", non_blocking=True)
            for name, kept in self._kept.items()
        }

    def move(self, source: int | Tensor, destination: int | Tensor) -> None:
        """Copy a slot onto another, or several onto others."""
        super().move(source, destination)
        for part in (self._stops_SK, *self._kept.values()):
            part[destination] = part[source]


class QueuedRequest(NamedTuple):
    """Queued request, under the name that its sender gave it."""

    name: str
    request: Request
    listener_seed: int = 0
    order: int = 0
    """Priority: requests of lower order are begun first; of equals the longest prompts."""


class DecodedAnswer(NamedTuple):
    """Decoded answer. `tokens` includes the token that stopped it, where one did."""

    name: str
    tokens: list[int]
    finish: Literal["stop", "length"]
    columns: Columns
    """Columns that the listener kept, one row a token, on the CPU."""


@dataclass(eq=False)
class _Slot:
    queued: QueuedRequest
    index: int
    begun: int  # the decoding step before which its prompt was read
    ended: bool = False


@dataclass(frozen=True)
class _DeferredAnswers:
    """Deferred work of the host, which waits until the device has passed an event."""

    passed: "torch.cuda.Event | None"
    work: Callable[[], list[DecodedAnswer]]


class PlainDecoder:
    """Plain decoder with continuous batching: answers requests in slots that are refilled as answers end.

    Call `submit`, then `step` until `idle`. `capacity`: tokens of the longest prompt and answer together; `budget`:
    tokens of the longest answer. `wanted`: a larger capacity, taken where memory allows. `listen` is called with the
    logits that each token is drawn from, `advance` with the number of tokens that a step gave. Raises InputError where
    that many slots do not fit the GPU's memory.
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
        # On a GPU the host looks at each step one step late.
        self._lag = 1 if device.type == "cuda" else 0
        self._target, self._listen, self._advance = target, listen, advance
        # Memory: as much capacity as fits, up to what is wanted. One slot more takes what padding rows write.
        probed = probe_pass(target)
        self.capacity = fitting_capacity(target, probed.token_bytes, slots, capacity, max(wanted, capacity))
        self.budget = budget
        graphed = takes_graphs(target)
        self._shapes = shapes(slots, self.capacity + 1, graphed)
        with torch.inference_mode():
            self._cache = KVCache(slots + 1, self.capacity + 1, device)
            self._table = AnswerTable(slots + 1, budget, device)
            self._replays = Replays(graphed)
        # State of the host: queues, slots in use, and work that waits for the device.
        self._waiting: dict[int, list[tuple[int, int, int, QueuedRequest]]] = {}  # heaps by width of the prompt
        self._count = 0
        self._slots: list[_Slot | None] = []  # of the rows that are in use or were
        self._size = slots
        self._late: deque[_DeferredAnswers] = deque()
        self._steps = 0
        self._active = 0
        self._living = 0  # of these, as far as the host has looked
        self._settings: list[RowsOfSetting] | None = None
        self._rows_R = torch.empty(0, dtype=torch.long)

    @property
    def waiting(self) -> int:
        """Requests that have no slot yet."""
        return sum(map(len, self._waiting.values()))

    @property
    def wants_more(self) -> bool:
        """Whether more requests are needed to keep the slots and the passes over prompts full."""
        return self.waiting < self._shapes.ahead + self._size - self._active

    @property
    def idle(self) -> bool:
        """Whether every submitted request is answered."""
        return not (self.waiting or self._active or self._late)

    def fits(self, request: Request) -> bool:
        """Whether a slot has room for the request's prompt and answer."""
        room = self.capacity - len(request.prompt_ids)
        return request.max_new_tokens <= min(self.budget, room)

    def submit(self, requests: Sequence[QueuedRequest]) -> None:
        """Queue requests. Raises InputError, ContextLengthError for one that cannot be answered."""
        check_requests(self._target, [queued.request for queued in requests], None)
        for queued in requests:
            length = len(queued.request.prompt_ids)
            # One heap for each width of prompt, as a pass reads prompts of one width; the count keeps equals in order.
            heap = self._waiting.setdefault(self._shapes.width(length), [])
            heapq.heappush(heap, (queued.order, -length, self._count, queued))
            self._count += 1

    def step(self) -> list[DecodedAnswer]:
        """Step: read waiting prompts into free slots, and decode one token of every active slot.

        Returns the answers that have ended and are on the CPU.
        """
        with running(self._target.device):
            return self._step()

    def _step(self) -> list[DecodedAnswer]:
        # 1) Start work on the device: prompts first, so that their slots join this step.
        started = self._refill()
        if self._active:
            self._compact()
            self._decode()
            started = True
        # 2) Meanwhile look at earlier steps; with nothing started, at all that are left.
        answers: list[DecodedAnswer] = []
        while len(self._late) > (self._lag if started else 0):
            late = self._late.popleft()
            if late.passed is not None:
                late.passed.synchronize()
            answers += late.work()
        return answers

    def _refill(self) -> bool:
        """Read prompts of waiting requests into free slots, full passes first. Returns whether there were any."""
        started = False
        while self.waiting:
            # The width whose first request comes first in order.
            width = min((heap[0], width) for width, heap in self._waiting.items() if heap)[1]
            heap, free = self._waiting[width], self._size - self._active
            wanted = min(len(heap), self._shapes.prompts(width))
            # A full pass waits for enough free slots, unless nothing else is running.
            if free < (wanted if self._shapes.fixed and self._active else 1):
                break
            self._prefill([heapq.heappop(heap)[-1] for _ in range(min(wanted, free))], width)
            started = True
        return started

    def _prefill(self, queued: Sequence[QueuedRequest], width: int) -> None:
        """Prefill requests of one width in one pass, and emit their first tokens."""
        device, vocab_size = self._target.device, self._target.vocab_size
        requests, slots = [each.request for each in queued], self._assign_slots(queued)
        padding = self._shapes.prompts(width) - len(queued) if width else 0
        # 1) Read them into their slots in one pass; padding rows go into the spare slot.
        prompts = Texts.of([*(request.prompt_ids for request in requests), *[[0]] * padding], device).wide(width)
        slots_R = send(torch.tensor([slot.index for slot in slots] + [self._size] * padding), device)
        shape = tuple(prompts.ids_BT.shape)
        with record_function("forward"):
            logits_RV = self._replays.run(("read", *shape), self._read, slots_R, prompts.ids_BT, prompts.counts_B)
        # 2) Draw the first token of each answer.
        self._table.admit(slots_R, requests, prompts, vocab_size, [each.listener_seed for each in queued])
        self._table.admit_stops(slots_R, [request.stop_ids for request in requests])
        sampling = [request.sampling for request in requests]
        ended_R = self._emit(slots_R, logits_RV, rows_by_setting(sampling + sampling[:1] * padding, device))
        # 3) The rows of decoding steps have changed, and the host will look at which answers ended at once.
        self._settings = None
        self._read_later(ended_R, [*slots, *[None] * padding], len(slots))

    def _read(self, slots_R: Tensor, ids_RT: Tensor, counts_R: Tensor) -> Tensor:
        return read_prompts(self._target, self._cache, (), slots_R, ids_RT, counts_R)[1]

    def _assign_slots(self, queued: Sequence[QueuedRequest]) -> list[_Slot]:
        """Give requests the first free slots."""
        free = [index for index, slot in enumerate(self._slots) if slot is None]
        free += range(len(self._slots), self._size)
        slots = [_Slot(each, index, self._steps) for each, index in zip(queued, free)]
        for slot in slots:
            self._slots += [None] * (slot.index + 1 - len(self._slots))
            self._slots[slot.index] = slot
        self._active += len(slots)
        return slots

    def _compact(self) -> None:
        """Move the last active slots into free ones before them where that makes the pass smaller."""
        # 1) Sizes of passes are few: where the next smaller one does not hold the active slots, nothing moves.
        rows = self._shapes.rows(self._active)
        while self._slots[-1] is None:
            self._slots.pop()
        if len(self._slots) <= rows:
            return
        # 2) Slots behind it move into holes before it: cache and table on the device, then the host's list.
        moving = [slot for slot in self._slots[rows:] if slot is not None]
        holes = [index for index, slot in enumerate(self._slots[:rows]) if slot is None]
        from_R, to_R = send(torch.tensor([[slot.index for slot in moving], holes[: len(moving)]]), self._target.device)
        # A slot's length by the host's own count, prompt and one token a step since, so that nothing waits.
        longest = max(len(slot.queued.request.prompt_ids) + self._steps - slot.begun for slot in moving)
        self._cache.move(from_R, to_R, longest)
        self._table.move(from_R, to_R)
        for slot, index in zip(moving, holes):
            self._slots[index], slot.index = slot, index
        del self._slots[rows:]
        self._settings = None

    def _decode(self) -> None:
        """Decode one token of every active slot."""
        rows = self._shapes.rows(len(self._slots))
        # 1) One pass over the first rows; free slots among them compute something that nobody reads.
        slots = [*self._slots, *[None] * (rows - len(self._slots))]
        with record_function("forward"):
            logits_RV = self._replays.run(("decode", rows), self._forward, rows)
        self._steps += 1
        # 2) Which rows each sampling setting draws, kept until slots change. Free rows take any setting that is in use.
        if self._settings is None or rows != self._rows_R.shape[0]:
            idle = next(slot.queued.request.sampling for slot in slots if slot is not None)
            sampling = [idle if slot is None else slot.queued.request.sampling for slot in slots]
            self._settings = rows_by_setting(sampling, self._target.device)
            self._rows_R = torch.arange(rows, device=self._target.device)
        # 3) Draw, keep, and look at the ends later.
        self._read_later(self._emit(self._rows_R, logits_RV, self._settings), slots, 0)

    def _forward(self, rows: int) -> Tensor:
        step = self._cache.extend(rows, 1)
        logits_RV = self._target.logits(self._target.states(self._table.last_S[:rows, None], step).hidden_BTH[:, 0])
        self._cache.lengths_S[:rows].add_(1).clamp_(max=self.capacity)  # a slot goes on past its answer's end
        return logits_RV

    def _emit(self, slots_R: Tensor, logits_RV: Tensor, settings: Sequence[RowsOfSetting]) -> Tensor:
        """Draw each slot's token and keep what the listener takes. [R]: tokens of the answers that ended, else 0."""
        _, emitted_R, budget_R, seed_R, listener_seed_R = self._table.numbers_XS[:, slots_R]
        # Draw with the numbers of the request's seed and count, as the speculative decoder does.
        with record_function("sampling"):
            u_R = uniforms(seed_R, emitted_R, Purpose.FINAL, 1)[:, 0]
            tokens_R = draw(logits_RV, settings, self._table.seen(slots_R), u_R)
        # Keep the token and the listener's columns, then count it and compare with stops and budget.
        with record_function("signals"):
            columns = {} if self._listen is None else self._listen(logits_RV, tokens_R, listener_seed_R, emitted_R)
            self._table.keep(slots_R, emitted_R, {TOKENS: tokens_R.int(), **columns})
            self._table.emit(slots_R, tokens_R)
            return self._table.ended(slots_R, tokens_R, emitted_R + 1, budget_R)

    def _read_later(self, ended_R: Tensor, slots: Sequence[_Slot | None], begun: int) -> None:
        """Defer the host's look at `ended` until the device has computed it; `slots`: the slot of each row now."""
        ended_R = ended_R.to("cpu", non_blocking=True)

        # A slot that ended earlier may be seen again, as it ran on until it was freed: it is skipped.
        def look() -> list[DecodedAnswer]:
            self._living += begun
            self._advance(begun or self._living)
            ended = [(slots[row], int(ended_R[row])) for row in ended_R.nonzero()[:, 0].tolist()]
            self._finish([(slot, count) for slot, count in ended if slot is not None and not slot.ended])
            return []

        self._when_passed(look)

    def _finish(self, ended: Sequence[tuple[_Slot, int]]) -> None:
        """Free the slots of ended answers (slot, number of tokens), and start to fetch their tokens."""
        if not ended:
            return
        slots, counts = [slot for slot, _ in ended], [count for _, count in ended]
        indexes = [slot.index for slot in slots]
        # The copy is queued before anything later may overwrite the slots.
        columns = self._table.gather(indexes, counts)
        self._cache.free(send(torch.tensor(indexes), self._target.device))
        self._living -= len(slots)
        self._active -= len(slots)
        for slot in slots:
            slot.ended = True
            self._slots[slot.index] = None
        self._when_passed(lambda: _answers([slot.queued for slot in slots], counts, columns))

    def _when_passed(self, work: Callable[[], list[DecodedAnswer]]) -> None:
        passed = None
        if self._target.device.type == "cuda":
            passed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            passed.record()
        self._late.append(_DeferredAnswers(passed, work))


def _answers(queued: Sequence[QueuedRequest], counts: list[int], columns: Columns) -> list[DecodedAnswer]:
    parts = {name: torch.split(column.clone(), counts) for name, column in columns.items()}  # pinned ones are reused
    answers: list[DecodedAnswer] = []
    for index, each in enumerate(queued):
        own = {name: part[index] for name, part in parts.items()}
        tokens = own.pop(TOKENS).tolist()
        finish: Literal["stop", "length"] = "stop" if tokens[-1] in each.request.stop_ids else "length"
        answers.append(DecodedAnswer(each.name, tokens, finish, own))
    return answers
