"""Threads that are logged again with every request: of turn 1, turns 1 and 2, turns 1 to 3, the last holds them all.

A conversation is *continued* where another one asks the target everything that it asks, in the same contexts (system
prompt, tools, template arguments, earlier messages), and more. What its own last answer was does not count: the target
answers again. Contexts are known by hashes of 64 bits, 8 bytes a turn, whatever they say; among ten million turns,
two of different contexts are taken for the same with a chance of 3 in a million.

Shapes: N conversations, T turns of all of them.
"""

import hashlib
import json
from array import array
from collections.abc import Sequence

import numpy as np

from .conversation import turn_ends
from .records import Record

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


def turn_keys(record: Record) -> list[int]:
    """A hash of the context of each turn that the target is asked. A turn that waits for the target's own earlier
    answers is another one than the same messages with logged answers, or without any."""
    ends, waiting = turn_ends(record.messages)
    ended, keys = set(ends), list[int]()
    hashed = hashlib.blake2b(_text([record.tools, dict(record.template_args or {})]), digest_size=_KEY_BYTES)
    for number, message in enumerate(record.messages, start=1):
        hashed.update(_text(message.for_template()))
        if number in ended:
            here = hashed.copy()
            here.update(b"waits" if waiting and keys else b"")
            keys.append(int.from_bytes(here.digest(), "little"))
    return keys


def _text(value: object) -> bytes:
    """As JSON in a line of its own, which no text can imitate."""
    return json.dumps(value, sort_keys=True).encode() + b"\n"
