"""Stratified sampling: which conversations a mix keeps, so that its shares are the log's or those of the recipe.

Shapes: N conversations, S strata (what has all labels alike), V values of one label.

Every conversation has a weight: 1, halved for each half-life of its age, then raked so that the labels that the recipe
names have its shares. Raking (Deming and Stephan, 1940) changes the other labels no more than it must: how they go
together stays as in the log. From the weights follow counts and choices, both by hash:

- A stratum's share is its part of the weight. Shares become whole numbers by one cut through their running sum, shifted
  by the salt. Strata are nested, so the count of every stratum, and of everything that shares its first labels (a
  domain; a domain at a sampling setting; …), lies less than one conversation from its share. Over salts it is right on
  average, so a label that only small strata have does not vanish.
- In a stratum, the conversations with the smallest exponential keys stay (Efraimidis and Spirakis, 2006): the next one
  taken is always any of the rest with a chance in proportion to its weight.

Nothing is doubled: at most as many are kept as leaves the heaviest conversation whole.
"""

import hashlib
import json
import math
from array import array
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..specdec.sampling import SamplingSettings
from .conversation import Message
from .records import Record
from .settings import Key
from .split import unit

KEYS: tuple[Key, ...] = get_args(Key)
"""In the order in which strata are nested."""
SOURCE, DAY = "source", "day"
NONE, OTHER, UNKNOWN = "none", "other", "unknown"
CHARACTERS_PER_TOKEN = 4
_TURNS = (1, 2, 3, 5, 9)
_TOKENS = (0, 64, 256, 1024, 4096, 16384)
_SYSTEM_DIGITS = 8


class Labels(NamedTuple):
    """The labels of one conversation that shares are counted by."""

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
    """Index of the source in the recipe."""
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
    lengths, system = lengths_of(record), system_text(record)
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
    prompt, answer = record.prompt_tokens, record.answer_tokens
    if prompt is None:
        tools = len(json.dumps(record.tools)) if record.tools else 0
        prompt = _estimated_tokens(tools + sum(map(_characters, messages)))
    if answer is None and last is not None:
        answer = _estimated_tokens(_characters(last))
    return Lengths(prompt, answer, counted=record.prompt_tokens is not None)


def _characters(message: Message) -> int:
    return len(message.content) + (len(json.dumps(message.tool_calls)) if message.tool_calls else 0)


def _estimated_tokens(characters: int) -> int:
    return -(-characters // CHARACTERS_PER_TOKEN)


def bucket(value: int, starts: tuple[int, ...]) -> str:
    """The label of the range that holds a value: `3-4`, `2` where it is one number, `9+` for the last."""
    index = max(i for i, start in enumerate(starts) if value >= start or i == 0)
    if index == len(starts) - 1:
        return f"{starts[index]}+"
    low, high = starts[index], starts[index + 1] - 1
    return str(low) if low == high else f"{low}-{high}"


def bucket_order(label: str) -> tuple[int, str]:
    """Sort key of a label: ranges by where they begin, then all others by name."""
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
        """Keep one record's labels. Returns its row."""
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
    """Indexes into `names`."""

    def counts(self) -> dict[str, int]:
        """Number of records with each label."""
        found = np.bincount(self.codes_N, minlength=len(self.names)).tolist()
        return {name: count for name, count in zip(self.names, found) if count}

    def lumped(self, most: int) -> "Column":
        """The `most` frequent labels; all others are one, `other`."""
        counts = self.counts()
        if len(counts) <= most:
            return self
        kept = sorted(counts, key=lambda name: (-counts[name], name))[: most - 1]
        names = [*sorted(kept, key=bucket_order), OTHER]
        code_of = {name: code for code, name in enumerate(names)}
        codes = np.array([code_of.get(name, len(names) - 1) for name in self.names], dtype=np.int64)
        return Column(names, codes[self.codes_N])


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_MOST_ROUNDS, _CLOSE = 2000, 1e-9
_DIGITS = 9  # of running sums: what lies this near a whole number is one
_SECONDS_PER_DAY = 86400.0


class Margin(NamedTuple):
    """Shares that one label must have."""

    key: str
    """As the recipe names it, such as `weights.domain`."""
    column: Column
    shares: Mapping[str, float]
    """In any unit."""


def half_lives(started_N: Floats, half_life_days: float) -> Floats:
    """Weights that halve with each `half_life_days` before the newest; 1 where the time is not known (nan)."""
    if np.isnan(started_N).all():
        return np.ones(len(started_N))
    age_N = (np.nanmax(started_N) - started_N) / _SECONDS_PER_DAY
    weight_N: Floats = np.where(np.isnan(age_N), 1.0, np.exp2(-age_N / half_life_days))
    return weight_N


def rake_weights(weight_N: Floats, margins: Sequence[Margin]) -> Floats:
    """Change weights as little as the margins allow, by iterative proportional fitting (Deming and Stephan, 1940).

    Raises InputError where no weights meet all margins.
    """
    weight_N = weight_N / weight_N.sum()
    wanted = [_wanted_shares(margin, weight_N) for margin in margins]
    for _ in range(_MOST_ROUNDS):
        worst = 0.0
        # Scale the weights to one margin after the other; the later ones disturb the earlier ones less each time.
        for margin, share_V in zip(margins, wanted):
            mass_V = np.bincount(margin.column.codes_N, weight_N, len(share_V))
            factor_V = np.divide(share_V, mass_V, out=np.ones_like(share_V), where=mass_V > 0)
            worst = max(worst, float(np.abs(factor_V - 1).max()))
            weight_N = weight_N * factor_V[margin.column.codes_N]
        if worst < _CLOSE:
            return weight_N
    keys = " and ".join(f"mix.{margin.key}" for margin in margins)
    raise InputError(f"{keys}: no weights of conversations give all these shares; they contradict each other")


def _wanted_shares(margin: Margin, weight_N: Floats) -> Floats:
    """The share of each label; every label that is present must have one, and no other."""
    names, codes_N = margin.column
    mass_V = np.bincount(codes_N, weight_N, len(names))
    present = {name for name, mass in zip(names, mass_V) if mass > 0}
    for name in names:
        if name in present and name not in margin.shares:
            listed = ", ".join(margin.shares)
            raise InputError(f"mix.{margin.key}: {name!r} has no weight; weights name {listed}")
    for name, share in margin.shares.items():
        if name not in present:
            raise InputError(f"mix.{margin.key}.{name}: weight {share}, but no conversation is left for it")
    share_V = np.array([margin.shares.get(name, 0.0) for name in names])
    found: Floats = share_V / share_V.sum()
    return found


def largest_size(weight_N: Floats) -> int:
    """The most conversations that can have these weights without one being kept twice."""
    return math.floor(weight_N.sum() / weight_N.max() * (1 + _CLOSE) + _CLOSE) if len(weight_N) else 0


def allot(mass_S: Floats, total: int, start: float) -> Ints:
    """Whole numbers that add up to `total`, in proportion to the masses (systematic sampling).

    Every run of neighbours lies within one of its share, and is right on average where `start` is even in [0, 1).
    """
    edges = np.concatenate([[0.0], np.cumsum(mass_S) / mass_S.sum() * total])
    edges[-1] = total
    edges = np.round(edges, _DIGITS)
    whole = np.floor(edges)
    counts: Ints = np.diff(whole + (edges - whole + start >= 1)).astype(np.int64)
    return counts


def exponential_keys(ids: Sequence[str], weight_N: Floats, salt: str) -> Floats:
    """Keys whose order is a draw without replacement in proportion to the weights (Efraimidis and Spirakis, 2006)."""
    waiting_N = -np.log1p(-np.array([unit("share", salt, id) for id in ids]))
    key_N: Floats = np.divide(waiting_N, weight_N, out=np.full(len(ids), np.inf), where=weight_N > 0)
    return key_N


def choose(ids: Sequence[str], weight_N: Floats, nested: Sequence[Column], total: int, salt: str) -> NDArray[np.bool_]:
    """Choose `total` of N conversations (their ids sorted), at most `largest_size(weight_N)`; True: it stays."""
    kept_N = np.zeros(len(ids), dtype=np.bool_)
    if total >= len(ids):
        return ~kept_N

    # 1) Order the conversations stratum by stratum, by their keys within each.
    key_N = exponential_keys(ids, weight_N, salt)
    order_N = np.lexsort((key_N, *(column.codes_N for column in reversed(nested))))

    # 2) A stratum begins where any label changes.
    changes_N = np.zeros(len(ids), dtype=np.bool_)
    changes_N[0] = True
    for column in nested:
        changes_N[1:] |= np.diff(column.codes_N[order_N]) != 0
    first_S = np.flatnonzero(changes_N)
    stratum_N = np.cumsum(changes_N) - 1

    # 3) Allot its count to each stratum, and keep that many of its first ones.
    count_S = allot(np.add.reduceat(weight_N[order_N], first_S), total, unit("strata", salt))
    rank_N = np.arange(len(ids)) - first_S[stratum_N]
    kept_N[order_N] = rank_N < count_S[stratum_N]
    return kept_N
