"""Prompts to be answered once, from files of any shape that mixes read, in an order that mixes their domains."""

import re
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path

from ..errors import InputError
from .conversation import Conversation, Message, turns
from .files import first_line
from .records import DEFAULT_COLUMNS, Record
from .settings import FileSource, Shape
from .sources import read


def read_prompts(paths: Sequence[Path], most: int | None = None) -> list[Record]:
    """The distinct conversations of some files, domain by domain in turn; at most so many of them.

    Which ones, and their order, follows from what they say and not from where they stand. The first line of a file
    tells its shape; where it names no domain, the file's name is the domain of all. Raises InputError naming file and
    line, MissingFileError.
    """
    if most is not None and most < 1:
        raise InputError(f"--max-prompts {most}: must be >= 1")
    found: dict[str, Record] = {}
    for path in paths:
        for record in read(source_of(path), Path(), 0)[0]:
            found.setdefault(record.id, record)
    return _by_turns(found.values())[:most]


def asked_of(record: Record) -> list[Message]:
    """What the target is asked: the last turn whose context is known. Of user turns alone that is the first one: the
    others wait for its answer."""
    conversation = Conversation(
        id=record.id, domain=record.domain, messages=list(record.messages), cluster=record.id, split="selection"
    )
    known = [turn for turn in turns(conversation) if turn.waits_for is None]
    if not known:
        raise InputError(f"conversation {record.id}: no answer follows a user message; nothing to ask")
    return known[-1].messages


def source_of(path: Path) -> FileSource:
    """A file as a source: its first line tells its shape."""
    line = first_line(path)
    if line is None:
        raise InputError(f"{path}: is empty; must hold at least one prompt")
    names = line if isinstance(line, dict) else {}
    shape: Shape = next((shape for shape, column in DEFAULT_COLUMNS.items() if column in names), "turns")
    domain = None if "domain" in names else re.sub(r"[^\w-]", "-", path.name.split(".")[0])[:64] or "prompts"
    return FileSource(kind=shape, path=str(path), domain=domain, limit=None, weight=None)


def _by_turns(records: Iterable[Record]) -> list[Record]:
    domains: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda record: record.id):
        domains.setdefault(record.domain, []).append(record)
    return [
        one for some in zip_longest(*(domains[name] for name in sorted(domains))) for one in some if one is not None
    ]
