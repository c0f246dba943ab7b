"""Records on disk while a mix is made, so that memory holds a few hundred bytes of each and not its text.

They come here redacted. The file has no name: it is gone when it is closed, or when the process is killed.
"""

import json
import tempfile
from array import array
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any

from .. import storage
from ..specdec.sampling import SamplingSettings
from .conversation import Message
from .records import Record

_IN_MEMORY_BYTES = 32 << 20


class Spool:
    """Records by the number that `add` gave them."""

    def __init__(self, beside: Path) -> None:
        """A small spool stays in memory; a larger one lies on the file system of `beside`."""
        beside.mkdir(parents=True, exist_ok=True)
        self._place = beside
        self._file = tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES, dir=str(beside))  # noqa: SIM115  closed by __exit__
        self._ends = array("Q", [0])

    def __enter__(self) -> "Spool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._ends) - 1

    def add(self, record: Record) -> int:
        """Keep a record; its number."""
        line = json.dumps(_plain(record), ensure_ascii=False).encode()
        with storage.disk_errors(self._place):
            self._file.seek(self._ends[-1])
            self._file.write(line)
        self._ends.append(self._ends[-1] + len(line))
        return len(self._ends) - 2

    def __getitem__(self, number: int) -> Record:
        """The record that was kept under this number."""
        start, end = self._ends[number], self._ends[number + 1]
        self._file.seek(start)
        return _record(json.loads(self._file.read(end - start)))


def _plain(record: Record) -> dict[str, Any]:
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    values["messages"] = [message.model_dump(exclude_none=True) for message in record.messages]
    values["sampling"] = record.sampling and record.sampling.model_dump()
    values["template_args"] = record.template_args and dict(record.template_args)
    return values


def _record(values: dict[str, Any]) -> Record:
    sampling = values["sampling"]
    parsed = {
        "messages": tuple(Message.model_validate(message) for message in values["messages"]),
        "sampling": None if sampling is None else SamplingSettings.model_validate(sampling),
    }
    return Record(**{**values, **parsed})
