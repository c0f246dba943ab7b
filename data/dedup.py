"""De-duplication: repeated turns, near-copies, and the clusters that the split deals out whole.

Turns are compared by a hash of their context (messages, tools, template arguments). Conversations are compared by
MinHash signatures of their user turns (Broder, 1997) through a locality-sensitive index.

A cluster is everything joined by near-copies (similar user turns) and by explicit groups (one template, one thread).
The split deals whole clusters, so a cluster's id must outlive today's log. It is derived from content: the smallest
hash of its groups or, where it has none, of its members.

Its limit: without `known` members, a new member that sorts lower, or one that bridges two clusters, gives the cluster
another id, and with it perhaps another split. With them (the members of every ancestor's mix, carried on from mix to
mix as signatures, without text) their placement wins, and of several the one the ancestor saw most of: train before
selection before holdout. So what an ancestor was trained on, its near-copies, its groups and the parts of its threads
never enter a later holdout; a holdout conversation may leave for train when a new one ties it to something trained on.
"""

import hashlib
import json
import re
import unicodedata
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import progress
from .chat_template import calls_with_objects, without_billing
from .conversation import SPLITS, Conversation, Engine, Message, Split, as_printed, calls_as_printed, turn_ends
from .records import Record

TurnKeys = NDArray[np.uint64]
"""A conversation's turns, as hashes of their contexts."""
NO_TURNS: TurnKeys = np.empty(0, dtype=np.uint64)
Asking = tuple[Split, TurnKeys]
"""A conversation's split, and what it asks."""
_KEY_BYTES = 8


class TurnIndex:
    """Index of turns: the hash of each turn's context, conversation by conversation in the order of `add`.

    Shapes: N conversations, T turns of all of them.
    """

    def __init__(self) -> None:
        self._keys, self._counts = array("Q"), array("I")

    def add(self, keys: Sequence[int]) -> None:
        """Take in one conversation, by its `turn_keys`."""
        self._keys.extend(keys)
        self._counts.append(len(keys))

    def keys(self) -> list[TurnKeys]:
        """The turn keys of every conversation, in order."""
        return np.split(np.array(self._keys, dtype=np.uint64), np.cumsum(self._counts)[:-1]) if self._counts else []

    def continued(self, ids: Sequence[str]) -> dict[str, str]:
        """Map each conversation that another one continues to the longest that does (of several the first by id).

        `ids`: the conversations' ids, in their order. None of the longest ones is itself continued.
        """
        keys_T, counts_N = np.array(self._keys, dtype=np.uint64), np.array(self._counts, dtype=np.int64)
        some_N = np.flatnonzero(counts_N)
        if not len(some_N):
            return {}

        # Of the turns with equal keys, the first is that of the longest conversation (then of the smallest id).
        rank_N = np.empty(len(ids), dtype=np.int64)
        rank_N[sorted(range(len(ids)), key=ids.__getitem__)] = np.arange(len(ids))
        owner_T = np.repeat(np.arange(len(ids)), counts_N)
        order_T = np.lexsort((rank_N[owner_T], -counts_N[owner_T], keys_T))
        distinct, first = np.unique(keys_T[order_T], return_index=True)

        # A conversation is continued if a longer one asks its last turn: the context of that holds all before it.
        last_N = keys_T[(counts_N.cumsum() - 1)[some_N]]
        longest_N = owner_T[order_T][first][np.searchsorted(distinct, last_N)]
        goes_on_N = counts_N[longest_N] > counts_N[some_N]
        pairs = zip(some_N[goes_on_N].tolist(), longest_N[goes_on_N].tolist())
        return {ids[number]: ids[longest] for number, longest in pairs}


def contained_in(parts: Sequence[TurnKeys], others: Sequence[TurnKeys]) -> dict[int, int]:
    """Map each part whose every turn one other conversation asks too to the first such other; both by index."""
    keys_T, owner_T = _flattened(others)
    distinct, first = np.unique(keys_T, return_index=True)  # the first of equal ones: owners stand in order
    some = [index for index, keys in enumerate(parts) if len(keys)]
    if not some or not len(distinct):
        return {}
    # The key of the last turn covers its whole context, so who asks it asks every turn before it.
    last_N = np.array([parts[index][-1] for index in some])
    at_N = np.minimum(np.searchsorted(distinct, last_N), len(distinct) - 1)
    found_N = distinct[at_N] == last_N
    return {index: int(owner_T[first[at]]) for index, at, found in zip(some, at_N, found_N) if found}


def asked_elsewhere(found: Sequence[Asking], before: Sequence[Asking]) -> list[list[int]]:
    """For each conversation, list its turns (0, 1, …) that do not count there.

    A turn that several conversations ask counts in one of them: in train before selection before holdout, and within a
    split in the first. It counts in none of them where an ancestor (`before`) had it in an earlier one of these splits.
    """
    if not found:
        return []
    keys_T, owner_T = _flattened([keys for _, keys in found])
    split_T = np.array([SPLITS.index(split) for split, _ in found], dtype=np.int64)[owner_T]

    # All but the first of the turns with one key, by split and then by order, are asked again.
    order_T = np.lexsort((owner_T, split_T, keys_T))
    again_T = np.ones(len(keys_T), dtype=np.bool_)
    again_T[order_T[np.unique(keys_T[order_T], return_index=True)[1]]] = False

    # So are those that an ancestor had in an earlier split.
    for split in SPLITS[:-1]:
        seen = [keys for name, keys in before if name == split]
        again_T |= (split_T > SPLITS.index(split)) & np.isin(keys_T, np.concatenate([NO_TURNS, *seen]))
    elsewhere: list[list[int]] = [[] for _ in found]
    turn_T = np.arange(len(keys_T)) - np.searchsorted(owner_T, owner_T)
    for owner, turn in zip(owner_T[again_T].tolist(), turn_T[again_T].tolist()):
        elsewhere[owner].append(turn)
    return elsewhere


def _flattened(each: Sequence[TurnKeys]) -> tuple[TurnKeys, NDArray[np.int64]]:
    """Concatenate turn keys: all keys [T], and the index [T] of the conversation that each belongs to."""
    return np.concatenate([NO_TURNS, *each]), np.repeat(np.arange(len(each)), [len(keys) for keys in each])


def asking(split: Split, conversation: Conversation) -> Asking:
    """Split and turn keys of a conversation, as `asked_elsewhere` takes them."""
    return split, np.array(turn_keys(conversation), dtype=np.uint64)


def turn_keys(record: Record | Conversation) -> list[int]:
    """Hash the context of each turn that the target is asked.

    A turn that waits for the target's own earlier answers differs from the same messages with logged answers, or
    without any.
    """
    ends, keys = turn_ends(record), list[int]()
    ended, last = set(ends), max(ends, default=0)
    # One running hash over the messages; its state after each context is that turn's key. What is as in most
    # conversations does not count.
    engine = [] if record.engine == "vllm" else [record.engine]
    arguments = {name: as_printed(value) for name, value in (record.template_args or {}).items()}
    hashed = hashlib.blake2b(_json_line([as_printed(record.tools), arguments, *engine]), digest_size=_KEY_BYTES)
    for number, message in enumerate(record.messages, start=1):
        hashed.update(_json_line(_without_what_changes(message, record.engine)))
        if number in ended:
            here = hashed.copy()
            here.update(b"waits" if record.turn_by_turn and keys else b"")
            if number == last and record.prompt_end != "opened":
                here.update(_json_line(record.prompt_end))
            keys.append(int.from_bytes(here.digest(), "little"))
    return keys


def _without_what_changes(message: Message, engine: Engine) -> dict[str, Any]:
    """A message without what is new in each request: a billing header, which no template is shown, the marks of what to
    cache, which move on with a thread, and the ids that a server drew for its tool calls."""
    asked = message.record() | {"content": without_billing(message, engine) or ""}
    asked.pop("tool_call_id", None)
    if message.part_fields is not None:
        fields = [
            {name: value for name, value in one.items() if name != "cache_control"} for one in message.part_fields
        ]
        asked |= {"part_fields": as_printed(fields)}
        if not any(fields):
            del asked["part_fields"]
    if message.tool_calls is not None:
        try:
            calls = calls_as_printed(calls_with_objects(message.tool_calls, engine))
        except ValueError:  # their text holds NaN or a number past all floats, which vLLM reads
            calls = message.tool_calls
        asked["tool_calls"] = [{name: value for name, value in call.items() if name != "id"} for call in calls]
    return asked


_sorted = json.JSONEncoder(sort_keys=True).encode  # `json.dumps` makes an encoder for each call


def _json_line(value: object) -> bytes:
    """The value as JSON in a line of its own, which no text can imitate."""
    return _sorted(value).encode() + b"\n"


Signature = NDArray[np.uint32]
SIGNATURE_LENGTH = 128
_SHINGLE_WORDS = 3
_RECALL_AT_THRESHOLD = 0.99
# One word, or one character of a script that is written without spaces.
_WORD = re.compile(r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_]+")


class Member(NamedTuple):
    """Clustering's view of a conversation: no text."""

    id: str
    group: str | None
    """Hash of its group's name; None: no group."""
    signature: Signature
    turn_keys: TurnKeys = NO_TURNS
    """Keys of all its turns."""


class PlacedMember(NamedTuple):
    """A member of an earlier mix, with its placement there."""

    member: Member
    cluster: str
    split: Split


class Placement(NamedTuple):
    """Clustering's result for one new member."""

    cluster: str
    split: Split | None
    """The split that an ancestor gave its cluster; None: the hash decides."""
    copy_of: str | None
    """The kept member that it is a near-copy of; None: it is kept itself."""


def group_key(domain: str, group: str) -> str:
    """The hash that stands for a group of a domain."""
    return hashlib.sha256(f"{domain}\0{group}".encode()).hexdigest()[:24]


def shingles(text: str) -> set[str]:
    """Word triples of a text, case and punctuation aside; a shorter text is one shingle."""
    words = _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
    if len(words) < _SHINGLE_WORDS:
        return {" ".join(words) or text.strip()}
    return {" ".join(words[i : i + _SHINGLE_WORDS]) for i in range(len(words) - _SHINGLE_WORDS + 1)}


def signature(text: str) -> Signature:
    """MinHash of a text's shingles: the share of equal entries of two signatures estimates their Jaccard similarity.

    Computed here and not by datasketch, whose hash family changed with 2.0: stored signatures must stay comparable.
    """
    hashes = [hashlib.blake2b(shingle.encode(), digest_size=8).digest() for shingle in shingles(text)]
    values_S1 = np.frombuffer(b"".join(hashes), dtype="<u8").astype(np.uint64)[:, None]
    with np.errstate(over="ignore"):  # multiply-add-shift: the wrap at 2^64 is the modulus
        permuted_SN = values_S1 * _FACTORS
        permuted_SN += _OFFSETS
    smallest: Signature = (permuted_SN.min(axis=0) >> np.uint64(32)).astype(np.uint32)
    return smallest


def similarity(left: Signature, right: Signature) -> float:
    """Estimated Jaccard similarity of two signatures."""
    return float((left == right).mean())


def cluster_members(
    members: Iterable[Member],
    known: Iterable[PlacedMember],
    threshold: float,
    continued: Mapping[str, str] | None = None,
) -> dict[str, Placement]:
    """Cluster new members (ids distinct) among the known ones. Returns placements by id; the input order has no effect.

    New members are visited by id. A member joins the clusters of all members that it resembles. If one of these is a
    new member that was kept, it is that one's near-copy and is not kept; if all are known ones, it is kept.
    `continued` maps members to the longer ones that continue them: both share a cluster, and a continued
    one neither is a near-copy nor has any. A member whose every turn a known member asks joins that one's cluster too.
    """
    # 1) Nodes: known members, then new ones, in an order that no input influences.
    continued = continued or {}
    known = sorted(known, key=lambda item: (item.member.id, item.cluster, item.split))
    members = sorted(members, key=lambda member: member.id)
    nodes = [item.member for item in known] + members

    # 2) Join what names tie: groups, the clusters of earlier mixes, conversations that go on from one another.
    union = _Union(len(nodes))
    union.join_equal([member.group for member in nodes])
    union.join_equal([item.cluster for item in known])
    node_of = {member.id: len(known) + i for i, member in enumerate(members)}
    for part, whole in continued.items():
        union.join(node_of[part], node_of[whole])

    # 3) Join what an earlier mix asked in full, in the split that saw most of it.
    seen_most = sorted(range(len(known)), key=lambda node: SPLITS.index(known[node].split))
    asked = contained_in([one.turn_keys for one in members], [known[node].member.turn_keys for node in seen_most])
    for at_new, at_known in asked.items():
        union.join(len(known) + at_new, seen_most[at_known])

    # 4) Join what is similar; of new members, the first stands and the others are its copies.
    meets = sharing_a_band([node.signature for node in nodes], threshold)
    index = SimilarityIndex(threshold, int(meets.sum()))
    for node, item in enumerate(known):
        if meets[node]:
            index.add(node, item.member.signature)
    copy_of: dict[int, str] = {}
    some = [node for node in range(len(known), len(nodes)) if meets[node]]
    for node in progress.track(some, "near-copies", unit="conversations"):
        similar = index.similar(nodes[node].signature)
        for other in similar:
            union.join(node, other)
        originals = (other for other in similar if other >= len(known) and nodes[other].id not in continued)
        original = None if nodes[node].id in continued else next(originals, None)
        if original is None:
            index.add(node, nodes[node].signature)
        else:
            copy_of[node] = nodes[original].id
    return _placements(nodes, known, union, copy_of)


def _placements(
    nodes: Sequence[Member], known: Sequence[PlacedMember], union: "_Union", copy_of: dict[int, str]
) -> dict[str, Placement]:
    # Groups, members and earlier placements of each cluster, by its root.
    groups: dict[int, list[str]] = {}
    ids: dict[int, list[str]] = {}
    seen: dict[int, list[tuple[int, str]]] = {}
    for node, member in enumerate(nodes):
        root = union.root(node)
        ids.setdefault(root, []).append(member.id)
        if member.group is not None:
            groups.setdefault(root, []).append(member.group)
        if node < len(known):
            seen.setdefault(root, []).append((SPLITS.index(known[node].split), known[node].cluster))
    # An earlier placement wins, that of the split that saw most; else the smallest hash names the cluster.
    placed: dict[str, Placement] = {}
    for node in range(len(known), len(nodes)):
        root = union.root(node)
        if root in seen:
            split_index, cluster = min(seen[root])
            split: Split | None = SPLITS[split_index]
        else:
            cluster, split = min(groups.get(root, ids[root])), None
        placed[nodes[node].id] = Placement(cluster, split, copy_of.get(node))
    return placed


def sharing_a_band(signatures: Sequence[Signature], threshold: float) -> NDArray[np.bool_]:
    """Mark which of M signatures may be similar to another one: those that share the hash of some band.

    Most conversations resemble no other one, so an index, at kilobytes for each, need not hold them.
    """
    shared_M = np.zeros(len(signatures), dtype=np.bool_)
    if not signatures:
        return shared_M
    entries_MN = np.stack(signatures)
    bands, rows = _bands(threshold)
    for band in range(bands):
        # Hash the band of every signature by multiply-add.
        part_MR = entries_MN[:, band * rows : (band + 1) * rows].astype(np.uint64)
        hash_M = (part_MR * _FACTORS[:rows]).sum(axis=1, dtype=np.uint64)  # wraps at 2^64
        # After sorting, equal hashes stand side by side: both of each equal pair are marked.
        order_M = np.argsort(hash_M)
        same = np.diff(hash_M[order_M]) == 0
        shared_M[order_M[1:][same]] = True
        shared_M[order_M[:-1][same]] = True
    return shared_M


class SimilarityIndex:
    """Finds similar signatures: candidates are those that share a band, decided by the whole signature.

    Equal signatures share one row, so that a frequent text does not fill a bucket.
    """

    def __init__(self, threshold: float, capacity: int) -> None:
        self._threshold, self._bands = threshold, _bands(threshold)
        self._rows_at: dict[tuple[int, bytes], list[int]] = {}
        self._rows = np.empty((capacity, SIGNATURE_LENGTH), dtype=np.uint32)
        self._row_of: dict[bytes, int] = {}
        self._nodes: list[list[int]] = []

    def add(self, node: int, sig: Signature) -> None:
        """Take in a node's signature."""
        # A signature that is known shares its row; a new one gets a row and an entry in the index.
        row = self._row_of.setdefault(sig.tobytes(), len(self._nodes))
        if row < len(self._nodes):
            self._nodes[row].append(node)
            return
        self._rows[row] = sig
        self._nodes.append([node])
        for band in self._bands_of(sig):
            self._rows_at.setdefault(band, []).append(row)

    def similar(self, sig: Signature) -> list[int]:
        """Nodes at least as similar as the threshold, smallest first."""
        # Of the rows that share a band, the share of equal entries decides.
        sharing = {row for band in self._bands_of(sig) for row in self._rows_at.get(band, ())}
        candidates = np.array(list(sharing), dtype=np.int64)
        found = candidates[(self._rows[candidates] == sig).mean(axis=1) >= self._threshold]
        return sorted(node for row in found.tolist() for node in self._nodes[row])

    def _bands_of(self, sig: Signature) -> Iterator[tuple[int, bytes]]:
        """Number and entries of each band of a signature."""
        count, width = self._bands
        return ((band, sig[band * width : (band + 1) * width].tobytes()) for band in range(count))


class _Union:
    """Union-find over 0 … count-1; the smallest member is the root."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))

    def root(self, node: int) -> int:
        while self._parent[node] != node:
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node

    def join(self, left: int, right: int) -> None:
        low, high = sorted((self.root(left), self.root(right)))
        self._parent[high] = low

    def join_equal(self, keys: Sequence[str | None]) -> None:
        """Join nodes with equal keys; None joins nothing."""
        first: dict[str, int] = {}
        for node, key in enumerate(keys):
            if key is not None:
                self.join(node, first.setdefault(key, node))


def _bands(threshold: float) -> tuple[int, int]:
    """LSH parameters (bands, rows of a band): the most rows at which a pair exactly at the threshold still shares a
    band with a probability of at least 0.99."""
    # A pair of similarity t shares a band with probability 1 - (1 - t^rows)^bands.
    for rows in range(SIGNATURE_LENGTH, 0, -1):
        bands = SIGNATURE_LENGTH // rows
        if bands >= 2 and 1 - (1 - threshold**rows) ** bands >= _RECALL_AT_THRESHOLD:
            return bands, rows
    return SIGNATURE_LENGTH, 1


def _stream(name: str) -> NDArray[np.uint64]:
    digests = (hashlib.sha256(f"{name} {i}".encode()).digest()[:8] for i in range(SIGNATURE_LENGTH))
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)


_FACTORS = _stream("factor") | np.uint64(1)
_OFFSETS = _stream("offset")
