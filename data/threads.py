"""What is asked in the very same context twice: threads that are logged with every request, and threads that fork.

A log that holds turn 1, turns 1 and 2, turns 1 to 3 of a thread as requests of their own needs the last one only.

A conversation is *continued* where another one asks the target everything that it asks, in the same contexts (system
prompt, tools, template arguments, earlier messages), and more. What its own last answer was does not count: the target
answers again. Contexts are known by hashes of 64 bits, 8 bytes a turn, whatever they say; among ten million turns,
two of different contexts are taken for the same with a chance of 3 in a million.

Where conversations share some turns only, each of these turns counts in one of them: where it was seen most, in train
before selection before holdout. It counts in none where an ancestor's mix had it in an earlier split. A conversation's
own last turns are left to it.

Shapes: N conversations, T turns of all of them.
"""

import hashlib
import json
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .conversation import SPLITS, Conversation, Message, Split, turn_ends
from .records import Record

TurnKeys = NDArray[np.uint64]
"""A conversation's turns, as hashes of their contexts."""
NO_TURNS: TurnKeys = np.empty(0, dtype=np.uint64)
Asking = tuple[Split, TurnKeys]
"""A conversation's split, and what it asks."""
_KEY_BYTES = 8


class Threads:
    """Hashes of every turn's context, of conversations in the order in which they were added."""

    def __init__(self) -> None:
        self._keys, self._counts = array("Q"), array("I")

    def add(self, record: Record) -> None:
        """Take in one conversation."""
        keys = turn_keys(record)
        self._keys.extend(keys)
        self._counts.append(len(keys))

    def each(self) -> list[TurnKeys]:
        """Those of every conversation, in order."""
        return np.split(np.array(self._keys, dtype=np.uint64), np.cumsum(self._counts)[:-1]) if self._counts else []

    def continued(self, ids: Sequence[str]) -> dict[str, str]:
        """For each conversation that another one goes on from, the longest that does (of several the first by id).

        `ids` are those of the conversations, in their order. None of the longest is itself continued.
        """
        keys_T, counts_N = np.array(self._keys, dtype=np.uint64), np.array(self._counts, dtype=np.int64)
        some_N = np.flatnonzero(counts_N)
        if not len(some_N):
            return {}
        rank_N = np.empty(len(ids), dtype=np.int64)
        rank_N[sorted(range(len(ids)), key=ids.__getitem__)] = np.arange(len(ids))
        owner_T = np.repeat(np.arange(len(ids)), counts_N)
        last_N = keys_T[(counts_N.cumsum() - 1)[some_N]]
        order_T = np.lexsort((rank_N[owner_T], -counts_N[owner_T], keys_T))
        distinct, first = np.unique(keys_T[order_T], return_index=True)
        longest_N = owner_T[order_T][first][np.searchsorted(distinct, last_N)]
        goes_on_N = counts_N[longest_N] > counts_N[some_N]
        pairs = zip(some_N[goes_on_N].tolist(), longest_N[goes_on_N].tolist())
        return {ids[number]: ids[longest] for number, longest in pairs}


def wholes(parts: Sequence[TurnKeys], others: Sequence[TurnKeys]) -> dict[int, int]:
    """Places of the parts whose every turn is asked by another conversation too, with the first such one's."""
    keys_T, owner_T = _joined(others)
    distinct, first = np.unique(keys_T, return_index=True)  # the first of equal ones: owners stand in order
    some = [place for place, keys in enumerate(parts) if len(keys)]
    if not some or not len(distinct):
        return {}
    last_N = np.array([parts[place][-1] for place in some])
    at_N = np.minimum(np.searchsorted(distinct, last_N), len(distinct) - 1)
    found_N = distinct[at_N] == last_N
    return {place: int(owner_T[first[at]]) for place, at, found in zip(some, at_N, found_N) if found}


def asked_elsewhere(found: Sequence[Asking], before: Sequence[Asking]) -> list[list[int]]:
    """For each conversation, its turns (0, 1, …) that do not count there.

    A turn counts where it was seen most: in train before selection before holdout, and of equals in the first. So it
    counts nowhere where an ancestor (`before`) had it in an earlier one of these splits.
    """
    if not found:
        return []
    keys_T, owner_T = _joined([keys for _, keys in found])
    split_T = np.array([SPLITS.index(split) for split, _ in found], dtype=np.int64)[owner_T]
    order_T = np.lexsort((owner_T, split_T, keys_T))
    again_T = np.ones(len(keys_T), dtype=np.bool_)
    again_T[order_T[np.unique(keys_T[order_T], return_index=True)[1]]] = False
    for split in SPLITS[:-1]:
        seen = [keys for name, keys in before if name == split]
        again_T |= (split_T > SPLITS.index(split)) & np.isin(keys_T, np.concatenate([NO_TURNS, *seen]))
    ends = np.cumsum([len(keys) for _, keys in found])[:-1]
    return [np.flatnonzero(again).tolist() for again in np.split(again_T, ends)]


def _joined(each: Sequence[TurnKeys]) -> tuple[TurnKeys, NDArray[np.int64]]:
    """All keys, and whose each is."""
    return np.concatenate([NO_TURNS, *each]), np.repeat(np.arange(len(each)), [len(keys) for keys in each])


def asking(split: Split, conversation: Conversation) -> Asking:
    """A conversation as `asked_elsewhere` sees it, in a split."""
    return split, np.array(turn_keys(conversation), dtype=np.uint64)


def turn_keys(record: Record | Conversation) -> list[int]:
    """A hash of the context of each turn that the target is asked. A turn that waits for the target's own earlier
    answers is another one than the same messages with logged answers, or without any."""
    ends, waiting = turn_ends(record.messages)
    ended, keys = set(ends), list[int]()
    hashed = hashlib.blake2b(_text([record.tools, dict(record.template_args or {})]), digest_size=_KEY_BYTES)
    for number, message in enumerate(record.messages, start=1):
        hashed.update(_text(_asked(message)))
        if number in ended:
            here = hashed.copy()
            here.update(b"waits" if waiting and keys else b"")
            keys.append(int.from_bytes(here.digest(), "little"))
    return keys


def _asked(message: Message) -> dict[str, Any]:
    """A message without the ids that a server drew for its tool calls: another run of the same draws others."""
    asked = message.for_template()
    asked.pop("tool_call_id", None)
    for call in asked.get("tool_calls", []):
        call.pop("id", None)
    return asked


def _text(value: object) -> bytes:
    """As JSON in a line of its own, which no text can imitate."""
    return json.dumps(value, sort_keys=True).encode() + b"\n"
