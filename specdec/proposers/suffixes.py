"""Counts of everything that was said in some texts, up to a length: a trie of their suffixes, grown token by token.

A suffix is followed no further than to where it first differs from all others; what comes after that is read from the
text itself. So a token costs as many steps as the text's end has been said before, and a text of T tokens takes about
T entries, whatever the depth.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias


class Once(NamedTuple):
    """What was said once, in `text`, and is followed by text[at:]."""

    text: Sequence[int]
    at: int


class Node:
    """What was said `count` times, more than once when it was made, and what followed."""

    __slots__ = ("count", "next")

    def __init__(self, count: int, follows: "dict[int, Place]") -> None:
        self.count, self.next = count, follows


Place: TypeAlias = Node | Once
"""Where a walk along some tokens ends: every sequence of them that was said has one place."""


def times(place: Place) -> int:
    """How often it was said."""
    return place.count if isinstance(place, Node) else 1


def following(place: Place) -> list[tuple[int, Place]]:
    """The tokens that followed, and their places."""
    if isinstance(place, Node):
        return list(place.next.items())
    text, at = place
    return [(text[at], Once(text, at + 1))] if at < len(text) else []


class SuffixTrie:
    """Counts of all sequences of at most `depth` tokens in a set of texts, one of which may still be growing."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._root = Node(0, {})
        self._text: list[int] = []
        self._repeated: list[Node] = []  # the nodes of the growing text's suffixes said before, by length from 1

    def start(self) -> list[int]:
        """Begin another text, and return it; the one that grew so far is done."""
        self._text, self._repeated = [], []
        return self._text

    def extend(self, tokens: Sequence[int]) -> None:
        """Let the text grow."""
        for token in tokens:
            self._text.append(token)
            repeated: list[Node] = []
            for node in (self._root, *self._repeated[: self._depth - 1]):
                place = node.next.get(token)
                if place is None:
                    node.next[token] = Once(self._text, len(self._text))
                    continue
                if isinstance(place, Node):
                    place.count += 1
                else:  # the two part from here on, or later
                    place = node.next[token] = Node(2, dict(following(place)))
                repeated.append(place)
            self._repeated = repeated

    def remove(self, text: Sequence[int]) -> None:
        """Take out a text that was added and is done."""
        for start in range(len(text)):
            node = self._root
            for token in text[start : start + self._depth]:
                place = node.next[token]
                if isinstance(place, Once) or place.count == 1:
                    del node.next[token]
                    break
                place.count -= 1
                node = place

    def find(self, tokens: Sequence[int]) -> Place | None:
        """Where these tokens lead, if they were said."""
        place: Place = self._root
        for read, token in enumerate(tokens):
            if isinstance(place, Once):
                text, at = place
                rest = tokens[read:]
                return Once(text, at + len(rest)) if list(text[at : at + len(rest)]) == list(rest) else None
            found = place.next.get(token)
            if found is None:
                return None
            place = found
        return place

    def contexts(self, tokens: Sequence[int]) -> Iterator[tuple[int, Place]]:
        """The suffixes of `tokens` after which something was said, longest first: length and place."""
        for length in range(len(tokens), 0, -1):
            place = self.find(tokens[-length:])
            if place is not None and following(place):
                yield length, place
