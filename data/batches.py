"""Batching: which samples make up each training step, and how they are packed into tensors.

The samples of a step follow from the samples, the seed and the size alone; ranks and accumulation only deal them out.
Samples of a micro-batch stand side by side in its rows where that saves padding (sequence packing).

Shapes: B rows, T tokens (padded on the right), N supervised tokens of the batch, k top ids, M tail draws.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice, takewhile
from math import ceil
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from .. import fingerprint
from ..errors import InputError
from ..specdec.kernels.document_mask import PADDING, Documents, PackedSpans
from .teacher_logprobs import Signals

MOST_PADDING = 0.05
"""Share of padding above which samples are packed into fewer, longer rows; one row has none."""
WINDOW_STEPS = 16
"""Samples are sorted by length among this many steps' worth of a shuffled epoch: less padding, still well mixed."""
_PART = 64  # rows that turned out too short grow by a 64th of their length; of too many rows, a 64th goes
_PADDING_ID = 0  # always a valid id, and never seen by a loss; many tokenizers have no pad token
_EMPTY_LENGTH = 8


def pack(lengths: Sequence[int], row_tokens: int = 0) -> tuple[list[list[int]], int]:
    """Pack samples into rows: the sample indexes of each row, and the tokens of a row.

    Best fit, longest first, into as many rows of about `row_tokens` tokens (at least the longest sample) as there are
    tokens for, or into fewer where too much of them would be padding.
    """
    # Ask for fewer rows, a 64th at a time, until at most MOST_PADDING of their tokens is padding.
    if not lengths:
        raise ValueError("no samples to pack")
    total, longest = sum(lengths), max(lengths)
    count = max(1, round(total / max(row_tokens, longest)))
    while True:
        rows, tokens = _rows(lengths, count, max(longest, -(-total // count)))
        if total >= (1 - MOST_PADDING) * len(rows) * tokens:
            return rows, tokens
        count = len(rows) - max(1, len(rows) // _PART)


def buckets(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Length buckets: sample indexes, longest first, in groups of similar length.

    Padded to its longest sample, with one sample a row, a group has at most `tokens` tokens, or is a single sample.
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if not groups or (len(groups[-1]) + 1) * lengths[groups[-1][0]] > tokens:
            groups.append([])
        groups[-1].append(index)
    return groups


def _rows(lengths: Sequence[int], count: int, tokens: int) -> tuple[list[list[int]], int]:
    """Best-fit packing into at most `count` rows, which are made longer until all samples have a place.

    Returns the rows, and the tokens of the fullest one.
    """
    while (rows := _best_fit(lengths, count, tokens)) is None:
        tokens += max(1, tokens // _PART)
    return rows, max(sum(lengths[index] for index in row) for row in rows)


def _best_fit(lengths: Sequence[int], count: int, tokens: int) -> list[list[int]] | None:
    """Best-fit decreasing: each sample, longest first, goes into the fullest row with room; None: one does not fit."""
    # `room` lists (free tokens, row) in ascending order, so the first that is large enough is the fullest row.
    rows: list[list[int]] = [[] for _ in range(count)]
    room = [(tokens, row) for row in range(count)]  # ascending
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        best = bisect_left(room, (lengths[index], -1))
        if best == count:
            return None
        left, row = room.pop(best)
        rows[row].append(index)
        insort(room, (left - lengths[index], row))
    return sorted(sorted(row) for row in rows if row)


class TokenizedSample(Protocol):
    """The token ids of a sample: all that batching needs to know of it."""

    @property
    def prompt_ids(self) -> list[int]: ...
    @property
    def answer_ids(self) -> list[int]: ...


class OptimizerStep(NamedTuple):
    """One optimizer step, as one rank sees it."""

    micro_batches: list[list[int]]
    """Sample indexes of each of this rank's micro-batches; as many on every rank, some perhaps empty."""
    samples: list[int]
    """Sample indexes of the whole step, over all ranks."""
    supervised: int
    """Supervised tokens of the whole step: what the loss is divided by."""
    tokens: int
    """Tokens of the whole step, prompts included, padding not."""
    epoch: int
    """Epoch that its middle token belongs to, from 0."""
    after: int
    """Position to resume from once this step is done."""


class BatchPlan:
    """A deterministic, endless stream of steps of about `tokens_per_step` tokens each, at most an epoch.

    Every epoch visits each sample once, in an order seeded by (seed, epoch), and epochs follow each other without a
    gap. The stream's tokens from i S to (i + 1) S, of S a step, are one step: it may take the rest of an epoch and go
    on with the next one. So i is the whole position. A sample longer than a step may leave a position without one.
    """

    def __init__(
        self,
        samples: Sequence[TokenizedSample],
        tokens_per_step: int,
        seed: int,
        world_size: int = 1,
        rank: int = 0,
        accumulation: int = 1,
        row_tokens: int = 0,
    ) -> None:
        """`row_tokens`: see `collate`."""
        if not samples:
            raise InputError("training samples: 0, must be at least 1")
        if tokens_per_step < 1 or world_size < 1 or accumulation < 1 or not 0 <= rank < world_size:
            raise ValueError(f"{tokens_per_step=} {world_size=} {rank=} {accumulation=}")
        # Answer tokens and all tokens of every sample: the plan needs no ids.
        self._answers = np.array([len(sample.answer_ids) for sample in samples])
        self._lengths = self._answers + np.array([len(sample.prompt_ids) for sample in samples])
        self._total = int(self._lengths.sum())
        self.tokens_per_step = min(tokens_per_step, self._total)
        """Tokens of a step, on the average."""
        self._seed = seed
        self._world_size, self._rank, self._accumulation = world_size, rank, accumulation
        self._row_tokens = row_tokens

    def steps(self, position: int = 0) -> Iterator[OptimizerStep]:
        """Steps from a position on, without end."""
        return (self._step(group, at) for at, group in self._stream(position))

    @property
    def steps_per_epoch(self) -> float:
        """Steps of one epoch; the last one may hold samples of the next epoch."""
        return self._total / self.tokens_per_step

    def steps_of_epoch(self, position: int) -> Iterator[OptimizerStep]:
        """Steps that hold samples of the epoch to which a position belongs."""
        first, end = self._positions(self._epoch_at(position))
        return takewhile(lambda step: step.after <= end, self.steps(first))

    @property
    def padding_share(self) -> float:
        """Share of padding in the tensors of about one epoch, over all ranks."""
        groups = [group for _, group in islice(self._stream(0), ceil(self.steps_per_epoch))]
        parts = [self._lengths[part] for group in groups for part in self._deal(group) if len(part)]
        padded = sum(len(rows) * tokens for rows, tokens in (pack(part.tolist(), self._row_tokens) for part in parts))
        return 1.0 - sum(int(part.sum()) for part in parts) / padded

    def _epoch_at(self, position: int) -> int:
        return position * self.tokens_per_step // self._total

    def _positions(self, epoch: int) -> tuple[int, int]:
        """First position that has tokens of an epoch, and the one behind the last."""
        return epoch * self._total // self.tokens_per_step, -(-(epoch + 1) * self._total // self.tokens_per_step)

    def _stream(self, position: int) -> Iterator[tuple[int, np.ndarray]]:
        """Positions from `position` on, each with the samples of its step."""
        group = np.empty(0, dtype=np.int64)
        for epoch in count(self._epoch_at(position)):
            first, end = self._positions(epoch)
            for at, part in zip(range(first, end), self._groups(epoch), strict=True):
                # A step that the epoch's end cuts waits for its samples of the next epoch.
                group = np.concatenate([group, part])
                if (at + 1) * self.tokens_per_step > (epoch + 1) * self._total:
                    break
                if len(group) and at >= position:
                    yield at, group
                group = group[:0]

    def _groups(self, epoch: int) -> list[np.ndarray]:
        """The epoch's samples of each step: shuffle, cut, sort by length in windows, and shuffle the whole steps."""
        # 1) Shuffle the epoch under a seed of its own.
        order_rng = np.random.default_rng(int(fingerprint.of_json(["batches", self._seed, epoch])[:16], 16))
        order = order_rng.permutation(len(self._lengths))
        # 2) Cut at multiples of a step's tokens in the stream; a sample belongs to the step that its middle lies in.
        (first, end), size, begin = self._positions(epoch), self.tokens_per_step, epoch * self._total
        ordered = self._lengths[order]
        at = (2 * (begin + np.cumsum(ordered)) - ordered) // (2 * size)
        groups = np.split(order, np.searchsorted(at, np.arange(first + 1, end)))
        # 3) Sort windows of WINDOW_STEPS whole steps by length, which saves padding, and cut the steps anew. Those that
        # another epoch shares stay as they are.
        whole = range(-(-begin // size) - first, (begin + self._total) // size - first)
        for start in whole[::WINDOW_STEPS]:
            inside = slice(start, min(start + WINDOW_STEPS, whole.stop))
            window = np.concatenate(groups[inside])
            by_length = window[np.argsort(self._lengths[window], kind="stable")]
            groups[inside] = _cut(by_length, self._lengths, inside.stop - inside.start)
        # 4) Shuffle the whole steps, so that the length of samples does not drift along the epoch.
        shuffled = [groups[index] for index in whole.start + order_rng.permutation(len(whole))]
        return [*groups[: whole.start], *shuffled, *groups[whole.stop :]]

    def _deal(self, group: np.ndarray) -> list[np.ndarray]:
        """Micro-batches of one step, alike in tokens; part i goes to rank i % world_size."""
        return [part for run in _cut(group, self._lengths, self._accumulation) for part in self._split_by_rank(run)]

    def _split_by_rank(self, run: np.ndarray) -> list[np.ndarray]:
        """Balance a run over the ranks, in tokens and in supervised tokens (the loss's cost), so that they finish
        together.

        Largest first, each sample goes to the rank with the smallest load along the sample's own two sizes.
        Shapes: S samples, R ranks.
        """
        if self._world_size == 1:
            return [run]
        # Each sample's share of the run's tokens and of its supervised tokens.
        sizes_S2 = np.stack([self._lengths[run], self._answers[run]], axis=1)
        shares_S2 = sizes_S2 / np.maximum(1, sizes_S2.sum(0))
        # Greedy, largest share first: the dot product weighs a rank's loads by what this sample would add.
        loads_R2, ranks_S = np.zeros((self._world_size, 2)), np.zeros(len(run), dtype=np.int64)
        for sample in np.argsort(-shares_S2.sum(1), kind="stable"):
            ranks_S[sample] = rank = int((loads_R2 @ shares_S2[sample]).argmin())
            loads_R2[rank] += shares_S2[sample]
        return [run[ranks_S == rank] for rank in range(self._world_size)]

    def _step(self, group: np.ndarray, at: int) -> OptimizerStep:
        own = self._deal(group)[self._rank :: self._world_size]
        return OptimizerStep(
            micro_batches=[part.tolist() for part in own],
            samples=group.tolist(),
            supervised=int(self._answers[group].sum()),
            tokens=int(self._lengths[group].sum()),
            epoch=(2 * at + 1) * self.tokens_per_step // (2 * self._total),
            after=at + 1,
        )


def _cut(order: np.ndarray, lengths: np.ndarray, parts: int) -> list[np.ndarray]:
    """Cut an order of samples into `parts` runs of about equal tokens; a run may be empty."""
    # A sample belongs to the part that its middle token lies in.
    ordered = lengths[order]
    middle = np.cumsum(ordered) - ordered / 2
    part = np.minimum((middle * parts / max(1, int(ordered.sum()))).astype(np.int64), parts - 1)
    return np.split(order, np.searchsorted(part, np.arange(1, parts)))


class SampleSpan(NamedTuple):
    """Location of a sample's tokens in a batch."""

    row: int
    start: int
    """Index of the sample's first token in the row."""
    length: int
    prompt: int
    """Tokens before the answer."""


def moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to a device; to CUDA from pinned memory, so that the host does not wait for the GPU."""
    if torch.device(device).type == "cuda" and not tensor.is_cuda:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@dataclass(frozen=True)
class Batch:
    """One micro-batch. Signal i of a sample belongs to its answer token i, predicted at len(prompt) - 1 + i."""

    ids_BT: Tensor
    """int64, padded on the right with a valid id that means nothing."""
    documents: Documents
    """The sample of each token, and its position in that sample."""
    spans: list[SampleSpan]
    """Location of each sample, in the samples' order."""
    positions_N: Tensor
    """int64: b * T + t of every t that is trained to predict the answer token at t + 1, sample by sample; entry i goes
    with entry i of the signals."""
    offsets: list[int]
    """Samples + 1 numbers: sample s owns positions and signals offsets[s]:offsets[s+1]."""
    signals: Signals | None
    """Teacher signals of the N supervised tokens, where stored ones were given."""
    empty: bool = False
    """True: one row with nothing supervised, so that every rank runs the same collectives."""

    @property
    def supervised(self) -> int:
        """Supervised tokens."""
        return self.offsets[-1]

    @property
    def padding_share(self) -> float:
        """Share of padding in ids_BT."""
        return 1.0 - sum(span.length for span in self.spans) / self.ids_BT.numel()

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device."""
        # The packing and the list of spans stay on the host; only tensors move.
        return replace(
            self,
            ids_BT=moved(self.ids_BT, device),
            documents=Documents(
                moved(self.documents.document_BT, device),
                moved(self.documents.positions_BT, device),
                self.documents.packed,
                self.documents.runs
                and PackedSpans(moved(self.documents.runs.starts_D, device), self.documents.runs.longest),
            ),
            positions_N=moved(self.positions_N, device),
            signals=self.signals and Signals(*(moved(tensor, device) for tensor in self.signals)),
        )


def collate(samples: Sequence[TokenizedSample], signals: Sequence[Signals] | None = None, row_tokens: int = 0) -> Batch:
    """Pack samples into rows of about `row_tokens` tokens (at least the longest); join their signals in their order."""
    if not samples:
        return _empty_batch()
    if signals is not None and len(signals) != len(samples):
        raise ValueError(f"{len(signals)} signals for {len(samples)} samples")

    # 1) Deal the samples into rows; each is a document of its row.
    lengths = [len(sample.prompt_ids) + len(sample.answer_ids) for sample in samples]
    rows, tokens = pack(lengths, row_tokens)
    spans = _spans(rows, samples)
    document_of = {index: document for members in rows for document, index in enumerate(members)}

    # 2) Fill in tokens, documents and positions; note the positions that predict an answer token.
    ids_BT = torch.full((len(rows), tokens), _PADDING_ID)
    document_BT, position_BT = torch.full_like(ids_BT, PADDING), torch.zeros_like(ids_BT)
    positions, offsets = [], [0]
    for index, (sample, (row, start, length, prompt)) in enumerate(zip(samples, spans, strict=True)):
        at = slice(start, start + length)
        ids_BT[row, at] = torch.tensor(sample.prompt_ids + sample.answer_ids)
        document_BT[row, at] = document_of[index]
        position_BT[row, at] = torch.arange(length)

        # The logits at the prompt's last token predict the first answer token.
        first = row * tokens + start + prompt - 1
        positions.append(torch.arange(first, first + len(sample.answer_ids)))
        offsets.append(offsets[-1] + len(sample.answer_ids))
    return Batch(
        ids_BT=ids_BT,
        documents=Documents(document_BT, position_BT, len(rows) < len(samples), _packed_spans(spans, *ids_BT.shape)),
        spans=spans,
        positions_N=torch.cat(positions),
        offsets=offsets,
        signals=None if signals is None else Signals(*(torch.cat(parts) for parts in zip(*signals, strict=True))),
    )


def _spans(rows: list[list[int]], samples: Sequence[TokenizedSample]) -> list[SampleSpan]:
    # Within a row, samples stand side by side from its start on.
    found = {}
    for row, members in enumerate(rows):
        start = 0
        for index in members:
            prompt = len(samples[index].prompt_ids)
            found[index] = SampleSpan(row, start, prompt + len(samples[index].answer_ids), prompt)
            start += found[index].length
    return [found[index] for index in range(len(samples))]


def _packed_spans(spans: Sequence[SampleSpan], rows: int, tokens: int) -> PackedSpans:
    """Documents, and the padding after them, row by row."""
    # Every start and end of a sample is an edge; what lies between an end and the next row is a run of padding.
    starts = {span.row * tokens + span.start for span in spans}
    ends = {span.row * tokens + span.start + span.length for span in spans}
    edges = torch.tensor(sorted(starts | ends | {rows * tokens}), dtype=torch.int32)
    return PackedSpans(edges, int(edges.diff().max()))


def _empty_batch() -> Batch:
    ids_BT = torch.full((1, _EMPTY_LENGTH), _PADDING_ID)
    return Batch(
        ids_BT=ids_BT,
        documents=Documents.rows(ids_BT),
        spans=[SampleSpan(0, 0, _EMPTY_LENGTH, _EMPTY_LENGTH)],
        positions_N=torch.zeros(0, dtype=torch.int64),
        offsets=[0, 0],
        signals=None,
        empty=True,
    )
