"""Stratified sampling: chooses the conversations of a mix so that its shares are those of the log or of the recipe.

Shapes: N conversations, S strata (sets of conversations with equal labels), V values of one label.

Every conversation has a weight: 1, halved for each half-life of its age, then raked so that the labels that the recipe
names get its shares. Raking (Deming and Stephan, 1940) changes the weights as little as possible, so the association of
the other labels stays as in the log. Counts and choices follow from the weights and a hash:

- Counts: a stratum's share is its part of the weight. Systematic sampling turns shares into whole numbers: it cuts
  their running sum at steps of one, shifted by the salt. Strata are nested, so the count of each stratum, and of each
  run of strata with the same first labels (a domain; a domain at a sampling setting; …), is less than one conversation
  away from its share. Over salts it is right on average, so a label of small strata alone does not vanish.
- Choices: in a stratum, the conversations with the smallest exponential keys stay (Efraimidis and Spirakis, 2006). This
  is a draw without replacement: each next one is any of the rest, with a probability in proportion to its weight.

No conversation is kept twice: this bounds the size of the mix, by the heaviest conversation's weight.
"""

import hashlib
import heapq
import json
import math
import re
from array import array
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..specdec.sampling_settings import SamplingSettings
from .conversation import Message
from .records import Record
from .settings import Key
from .split import unit

KEYS: tuple[Key, ...] = get_args(Key)
"""Labels in the order in which strata are nested."""
SOURCE, DAY = "source", "day"
NONE, OTHER, UNKNOWN = "none", "other", "unknown"
CHARACTERS_PER_TOKEN = 4
_TURNS = (1, 2, 3, 5, 9)
_TOKENS = (0, 64, 256, 1024, 4096, 16384)
_SYSTEM_DIGITS = 8
_MOST_NAMED_CLOCKS = 5
_BUCKET = re.compile(r"(\d+)(?:-\d+|\+)?")


class Labels(NamedTuple):
    """Labels of one conversation, by which shares are counted."""

    domain: str
    """Name of its domain; empty: none is known yet."""
    sampling: str
    """Key of its sampling settings; `default`: those of the capture."""
    tools: str
    """`with` or `without`."""
    system: str
    """Hash of its system prompt, or `none`."""
    turns: str
    """Range of the number of user messages, such as `3-4`."""
    prompt: str
    """Range of the tokens before the last answer, such as `64-255`."""
    answer: str
    """Range of the tokens of the last answer; `unknown`: the log holds none."""
    source: str
    """Index of the source in the recipe."""
    day: str
    """Date (UTC) when it was asked, or `unknown`."""


class Lengths(NamedTuple):
    """Tokens of a logged request."""

    prompt: int
    answer: int | None
    """None: the log holds no answer."""
    counted: bool
    """Whether the log counts the prompt's tokens; if not, they are estimated."""


def _day(started: float) -> str:
    return datetime.fromtimestamp(started, UTC).date().isoformat()


def system_text(record: Record) -> str:
    """System messages of a record, one a line; empty: it has none."""
    return "\n".join(message.text for message in record.messages if message.role in ("system", "developer"))


def lengths_of(record: Record) -> Lengths:
    """Tokens of the prompt and of the last answer: as logged, or estimated from characters."""
    messages = list(record.messages)
    last = messages.pop() if messages[-1].role == "assistant" else None
    # Without counts, tools and messages are measured by their characters.
    prompt, answer = record.prompt_tokens, record.answer_tokens
    if prompt is None:
        tools = len(json.dumps(record.tools)) if record.tools else 0
        prompt = _estimated_tokens(tools + sum(map(_characters, messages)))
    if answer is None and last is not None:
        answer = _estimated_tokens(_characters(last))
    return Lengths(prompt, answer, counted=record.prompt_tokens is not None)


def _characters(message: Message) -> int:
    return len(message.text) + (len(json.dumps(message.tool_calls)) if message.tool_calls else 0)


def _estimated_tokens(characters: int) -> int:
    return -(-characters // CHARACTERS_PER_TOKEN)


def bucket(value: int, starts: tuple[int, ...]) -> str:
    """Label the range that holds a value: `3-4`; `2` for a range of one number; `9+` for the last range."""
    index = max(i for i, start in enumerate(starts) if value >= start or i == 0)
    if index == len(starts) - 1:
        return f"{starts[index]}+"
    low, high = starts[index], starts[index + 1] - 1
    return str(low) if low == high else f"{low}-{high}"


def bucket_order(label: str) -> tuple[int, str]:
    """Sort key of a label: ranges by where they begin, then all others by name, which puts dates in order."""
    found = _BUCKET.fullmatch(label)
    return (int(found[1]), "") if found else (1 << 30, label)


class LogRow(NamedTuple):
    """What the log table keeps of one record."""

    labels: Labels
    lengths: Lengths
    system_characters: int
    """Length of its system prompt."""
    started: float | None
    where: str


def log_row(record: Record, sampling: SamplingSettings | None) -> LogRow:
    """Row of a record that is answered under `sampling` (None: the capture's default)."""
    lengths, system = lengths_of(record), system_text(record)
    labels = Labels(
        domain=record.domain,
        sampling="default" if sampling is None else sampling.key,
        tools="with" if record.tools else "without",
        system=hashlib.sha256(system.encode()).hexdigest()[:_SYSTEM_DIGITS] if system else NONE,
        turns=bucket(sum(message.role == "user" for message in record.messages), _TURNS),
        prompt=bucket(lengths.prompt, _TOKENS),
        answer=UNKNOWN if lengths.answer is None else bucket(lengths.answer, _TOKENS),
        source=str(record.source),
        day=UNKNOWN if record.started is None else _day(record.started),
    )
    return LogRow(labels, lengths, len(system), record.started, record.where)


class LogTable:
    """Columns of labels, lengths and times of every record that was read: about a hundred bytes for each."""

    def __init__(self) -> None:
        self._codes = {name: array("I") for name in Labels._fields}
        self._names: dict[str, dict[str, int]] = {name: {} for name in Labels._fields}
        self.prompt_tokens, self.answer_tokens, self.counted = array("q"), array("q"), array("b")
        self.started = array("d")
        self.system_characters: dict[str, int] = {}
        self._stems: dict[str, int] = {}  # places without the number at their end
        self._stem_codes, self._place_numbers = array("I"), array("q")
        self.odd_clocks = 0
        """Number of records whose time `distrust_clocks` took."""
        # The first and the last times and where their records stand, as heaps.
        self._earliest: list[tuple[float, str]] = []
        self._latest: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self.started)

    def add(self, row: LogRow) -> int:
        """Keep what is logged of one record. Returns the number of its row."""
        # Labels are stored as codes in the order of first sight; -1 and nan stand for what is not known.
        for codes, names, label in zip(self._codes.values(), self._names.values(), row.labels):
            codes.append(names.setdefault(label, len(names)))
        self.prompt_tokens.append(row.lengths.prompt)
        self.answer_tokens.append(-1 if row.lengths.answer is None else row.lengths.answer)
        self.counted.append(row.lengths.counted)
        self.started.append(np.nan if row.started is None else row.started)
        self.system_characters.setdefault(row.labels.system, row.system_characters)
        stem = row.where.rstrip("0123456789")
        self._stem_codes.append(self._stems.setdefault(stem, len(self._stems)))
        self._place_numbers.append(int(row.where[len(stem) :] or -1))
        if row.started is not None:
            for heap, time in ((self._earliest, -row.started), (self._latest, row.started)):
                keep = heapq.heappush if len(heap) < _MOST_NAMED_CLOCKS else heapq.heappushpop
                keep(heap, (time, row.where))
        return len(self) - 1

    def distrust_clocks(self) -> list[tuple[str, str]]:
        """Take the time from records whose clock was wrong, as if none were logged. Returns date and place of some."""
        started_N = np.array(self.started)
        odd_N = odd_clocks(started_N)
        self.odd_clocks = int(odd_N.sum())
        if not self.odd_clocks:
            return []
        # Days are named anew, so that none stays that no record has.
        self.started = array("d", np.where(odd_N, np.nan, started_N).tolist())
        days, codes = list(self._names[DAY]), self._codes[DAY]
        named = [UNKNOWN if odd else days[code] for odd, code in zip(odd_N.tolist(), codes)]
        self._names[DAY] = {}
        self._codes[DAY] = array("I", [self._code(DAY, name) for name in named])
        # Of the first and last times those that were taken.
        taken = set(started_N[odd_N].tolist())
        times = {*((-time, where) for time, where in self._earliest), *self._latest}
        return [(_day(time), where) for time, where in sorted(times) if time in taken]

    def places(self) -> list[str]:
        """File and line of every record."""
        stems = list(self._stems)
        return [
            stems[code] if number < 0 else f"{stems[code]}{number}"
            for code, number in zip(self._stem_codes, self._place_numbers)
        ]

    def rename(self, row: int, domain: str) -> None:
        """Set the domain of a record."""
        self._codes["domain"][row] = self._code("domain", domain)

    def domain(self, row: int) -> str:
        """Domain of a record."""
        return list(self._names["domain"])[self._codes["domain"][row]]

    def column(self, name: str, rows: NDArray[np.int64] | None = None) -> "Column":
        """Column of one label for some records, or for all, with codes in the sorted order of the labels."""
        # Renumber from the order of first sight to the sorted order, which depends on no input order.
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
        """Lump rare labels: at most `most` labels stay, the last of them `other` for all rare ones."""
        counts = self.counts()
        if len(counts) <= most:
            return self
        # The most frequent ones, of equals the first by name.
        kept = sorted(counts, key=lambda name: (-counts[name], name))[: most - 1]
        names = [*sorted(kept, key=bucket_order), OTHER]
        # Map old codes to new ones.
        code_of = {name: code for code, name in enumerate(names)}
        codes = np.array([code_of.get(name, len(names) - 1) for name in self.names], dtype=np.int64)
        return Column(names, codes[self.codes_N])


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_MOST_ROUNDS, _CLOSE = 2000, 1e-9
_DIGITS = 9  # of running sums: what lies this near a whole number is one
_SECONDS_PER_DAY = 86400.0
_TEN_YEARS, _MONTH = 3652.0, 30.0  # days
_FIRST_CLOCKS = 11 * 365.25 * _SECONDS_PER_DAY
_TIMES_AS_WIDE, _A_TENTH = 3, 10


class Margin(NamedTuple):
    """Wanted shares of the values of one label."""

    key: str
    """Name in the recipe, such as `weights.domain`."""
    column: Column
    shares: Mapping[str, float]
    """Share of each value, in any unit."""


def odd_clocks(started_N: Floats) -> NDArray[np.bool_]:
    """Which times are of wrong clocks: a few, apart from the rest at one end (nan: no time).

    They are before 1981, where a clock begins that knows no time; or lie behind a gap of ten years, and are less than
    half; or, after the rest, behind a gap of a month that is
    three times as long as any in the rest, and are less than a tenth. A gap before the rest may be an archive's.
    """
    order = np.argsort(started_N)[: int((~np.isnan(started_N)).sum())]
    odd_N = np.zeros(len(started_N), dtype=np.bool_)

    # 1) Too early: what lies before the last such gap.
    gap = np.diff(started_N[order]) / _SECONDS_PER_DAY
    before = np.arange(1, len(order))
    early = np.flatnonzero((gap > _TEN_YEARS) & ((2 * before < len(order)) | (started_N[order[:-1]] < _FIRST_CLOCKS)))
    first = int(early[-1]) + 1 if len(early) else 0
    odd_N[order[:first]] = True

    # 2) Too late: what lies behind the first one.
    gap, behind = gap[first:], len(order) - before[first:]
    widest = np.maximum.accumulate(np.concatenate([[0.0], gap]))[:-1]
    apart = (gap > np.maximum(_MONTH, _TIMES_AS_WIDE * widest)) & (_A_TENTH * behind < len(order))
    late = np.flatnonzero(((gap > _TEN_YEARS) & (2 * behind < len(order))) | apart)
    if len(late):
        odd_N[order[first + int(late[0]) + 1 :]] = True
    return odd_N


def half_lives(started_N: Floats, half_life_days: float) -> Floats:
    """Age weights: 1 for the newest, halved for each `half_life_days` of age; 1 where the time is not known (nan)."""
    if np.isnan(started_N).all():
        return np.ones(len(started_N))
    age_N = (np.nanmax(started_N) - started_N) / _SECONDS_PER_DAY
    weight_N: Floats = np.where(np.isnan(age_N), 1.0, np.exp2(-age_N / half_life_days))
    return weight_N


def rake_weights(weight_N: Floats, margins: Sequence[Margin]) -> Floats:
    """Rake weights to margins by iterative proportional fitting (Deming and Stephan, 1940): the smallest change.

    Raises InputError where no weights meet all margins.
    """
    # Shares and masses both add up to 1, so that a factor of 1 means a margin that is met.
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

    # Margins that contradict each other never settle.
    keys = " and ".join(f"mix.{margin.key}" for margin in margins)
    raise InputError(f"{keys}: no weights of conversations give all these shares; they contradict each other")


def _wanted_shares(margin: Margin, weight_N: Floats) -> Floats:
    """Normalized shares of a margin's values. Raises InputError unless exactly the present values have shares."""
    # Present are the values with any weight.
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
    # In the order of the column's names, adding up to 1.
    share_V = np.array([margin.shares.get(name, 0.0) for name in names])
    found: Floats = share_V / share_V.sum()
    return found


def largest_size(weight_N: Floats) -> int:
    """Largest sample with these weights in which no conversation is wanted more than once."""
    return math.floor(weight_N.sum() / weight_N.max() * (1 + _CLOSE) + _CLOSE) if len(weight_N) else 0


def allot(mass_S: Floats, total: int, start: float) -> Ints:
    """Systematic sampling: whole numbers that add up to `total`, in proportion to the masses.

    The sum over each run of neighbours is less than one away from its share, and right on average if `start` is uniform
    in [0, 1).
    """
    # The running sum of the shares, rounded so that an error of floats does not move a cut.
    edges = np.concatenate([[0.0], np.cumsum(mass_S) / mass_S.sum() * total])
    edges[-1] = total
    edges = np.round(edges, _DIGITS)
    # Count the cuts below each edge, at whole numbers shifted by `start`.
    whole = np.floor(edges)
    counts: Ints = np.diff(whole + (edges - whole + start >= 1)).astype(np.int64)
    return counts


def exponential_keys(ids: Sequence[str], weight_N: Floats, salt: str) -> Floats:
    """Exponential keys: their order is a draw without replacement by weight (Efraimidis and Spirakis, 2006)."""
    # Exponential waiting times with the weights as rates; a weight of 0 never comes.
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
