"""What a mix keeps the shares of: a conversation's labels, and a table of them for every record that was read.

Lengths are tokens where the log counts them, else about one for four characters. A label never holds text of the
conversation; a system prompt is known by a hash of it.
"""

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from ..specdec.sampling import SamplingSettings
from .conversation import Message
from .records import Record
from .settings import Key

KEYS: tuple[Key, ...] = get_args(Key)
"""In the order in which strata are nested."""
SOURCE, DAY = "source", "day"
NONE, OTHER, UNKNOWN = "none", "other", "unknown"
CHARACTERS_PER_TOKEN = 4
_TURNS = (1, 2, 3, 5, 9)
_TOKENS = (0, 64, 256, 1024, 4096, 16384)
_SYSTEM_DIGITS = 8


class Labels(NamedTuple):
    """One conversation, as shares see it."""

    domain: str
    """Empty: nothing has named it yet."""
    sampling: str
    """Key of its sampling settings; `default`: the capture's."""
    tools: str
    """`with` or `without`."""
    system: str
    """Hash of its system prompt, or `none`."""
    turns: str
    """User messages, such as `3-4`."""
    prompt: str
    """Tokens before the last answer, such as `64-255`."""
    answer: str
    """Tokens of the last answer; `unknown`: the log holds none."""
    source: str
    """Its place in the recipe."""
    day: str
    """When it was asked (UTC), or `unknown`."""


class Lengths(NamedTuple):
    """Tokens of a logged request."""

    prompt: int
    answer: int | None
    """None: the log holds no answer."""
    counted: bool
    """Whether the log counts them; else they are estimated."""


def labels_of(record: Record, sampling: SamplingSettings | None) -> Labels:
    """The labels of a record that is answered under `sampling`."""
    lengths = lengths_of(record)
    system = system_text(record)
    return Labels(
        domain=record.domain,
        sampling="default" if sampling is None else sampling.key,
        tools="with" if record.tools else "without",
        system=hashlib.sha256(system.encode()).hexdigest()[:_SYSTEM_DIGITS] if system else NONE,
        turns=bucket(sum(message.role == "user" for message in record.messages), _TURNS),
        prompt=bucket(lengths.prompt, _TOKENS),
        answer=UNKNOWN if lengths.answer is None else bucket(lengths.answer, _TOKENS),
        source=str(record.source),
        day=UNKNOWN if record.started is None else datetime.fromtimestamp(record.started, UTC).date().isoformat(),
    )


def system_text(record: Record) -> str:
    """The system messages of a record, one a line; empty: it has none."""
    return "\n".join(message.content for message in record.messages if message.role == "system")


def lengths_of(record: Record) -> Lengths:
    """Tokens of the prompt and of the last answer: the log's own counts, or an estimate."""
    messages = list(record.messages)
    last = messages.pop() if messages[-1].role == "assistant" else None
    counted = record.prompt_tokens is not None
    prompt = record.prompt_tokens
    if prompt is None:
        prompt = _estimated([*map(_size, messages), len(json.dumps(record.tools)) if record.tools else 0])
    answer = record.answer_tokens
    if answer is None and last is not None:
        answer = _estimated([_size(last)])
    return Lengths(prompt, answer, counted)


def _size(message: Message) -> int:
    return len(message.content) + (len(json.dumps(message.tool_calls)) if message.tool_calls else 0)


def _estimated(sizes: Iterable[int]) -> int:
    return -(-sum(sizes) // CHARACTERS_PER_TOKEN)


def bucket(value: int, starts: tuple[int, ...]) -> str:
    """The label of the range that holds a value: `3-4`, `2` where it is one number, `9+` for the last."""
    place = max(i for i, start in enumerate(starts) if value >= start or i == 0)
    if place == len(starts) - 1:
        return f"{starts[place]}+"
    low, high = starts[place], starts[place + 1] - 1
    return str(low) if low == high else f"{low}-{high}"


def bucket_order(label: str) -> tuple[int, str]:
    """Sorts labels of ranges by where they begin, and all others by name after them."""
    head = label.rstrip("+").split("-")[0]
    return (int(head), "") if head.isdigit() else (1 << 30, label)


class LogTable:
    """Labels, lengths and times of every record that was read, in columns: about a hundred bytes each."""

    def __init__(self) -> None:
        self._codes = {name: array("I") for name in Labels._fields}
        self._names: dict[str, dict[str, int]] = {name: {} for name in Labels._fields}
        self.prompt_tokens, self.answer_tokens, self.counted = array("q"), array("q"), array("b")
        self.started = array("d")
        self.system_characters: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.started)

    def add(self, record: Record, sampling: SamplingSettings | None) -> int:
        """Keep one record's labels; its row."""
        labels, lengths = labels_of(record, sampling), lengths_of(record)
        for name, label in zip(Labels._fields, labels):
            self._codes[name].append(self._code(name, label))
        self.prompt_tokens.append(lengths.prompt)
        self.answer_tokens.append(-1 if lengths.answer is None else lengths.answer)
        self.counted.append(lengths.counted)
        self.started.append(np.nan if record.started is None else record.started)
        self.system_characters.setdefault(labels.system, len(system_text(record)))
        return len(self) - 1

    def rename(self, row: int, domain: str) -> None:
        """Give a record its domain."""
        self._codes["domain"][row] = self._code("domain", domain)

    def domain(self, row: int) -> str:
        """The domain of a record."""
        return list(self._names["domain"])[self._codes["domain"][row]]

    def column(self, name: str, rows: NDArray[np.int64] | None = None) -> "Column":
        """One label of some records, or of all, as numbers that follow the labels' order."""
        names = sorted(self._names[name], key=bucket_order)
        renumbered = np.empty(max(1, len(names)), dtype=np.int64)
        for number, label in enumerate(names):
            renumbered[self._names[name][label]] = number
        codes = np.frombuffer(self._codes[name], dtype=np.uint32)
        return Column(names, renumbered[codes if rows is None else codes[rows]])

    def _code(self, name: str, label: str) -> int:
        names = self._names[name]
        return names.setdefault(label, len(names))


class Column(NamedTuple):
    """One label of N records."""

    names: list[str]
    codes_N: NDArray[np.int64]
    """Places in `names`."""

    def counts(self) -> dict[str, int]:
        """How many have each label."""
        found = np.bincount(self.codes_N, minlength=len(self.names)).tolist()
        return {name: count for name, count in zip(self.names, found) if count}

    def lumped(self, most: int) -> "Column":
        """The `most` frequent labels; all others are one, `other`."""
        counts = self.counts()
        if len(counts) <= most:
            return self
        kept = sorted(counts, key=lambda name: (-counts[name], name))[: most - 1]
        names = [*sorted(kept, key=bucket_order), OTHER]
        place: Mapping[Any, int] = {name: number for number, name in enumerate(names)}
        codes = np.array([place.get(name, len(names) - 1) for name in self.names], dtype=np.int64)
        return Column(names, codes[self.codes_N])
