"""What the plain decoder keeps of its slots on the device, and how their next tokens are drawn there.

Shapes: S slots, R rows of one pass, X numbers a slot, K stop tokens, V vocabulary, n tokens of several answers.

Nothing here waits for the device. One slot more than asked for takes what padding rows write.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from .requests import Request
from .sampling import SamplingSettings, categorical, penalised, probabilities
from .transfer import send

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
