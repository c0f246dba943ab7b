"""Where numbers go while training runs: the caller's sink, and JSON lines in the run's folder."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any, Protocol

from .. import storage
from ..errors import CorruptDataError


class MetricSink(Protocol):
    """Receives figures by step. The registry's MLflow run is one."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Record the values of one step."""
        ...


class NoSink:
    """Records nothing."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Record nothing."""


class MetricLog:
    """One JSON object a line, in order of steps, no step twice."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def log(self, step: int, values: dict[str, float]) -> None:
        """Append a line."""
        with storage.disk_errors(self._path), self._path.open("a") as stream:
            stream.write(json.dumps({"step": step, **values}) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """All complete lines; a last line cut short by a kill is left out."""
        if not self._path.is_file():
            return []
        lines = self._path.read_text().split("\n")
        try:
            read = [json.loads(line) for line in lines[:-1]]
            return [line | {"step": int(line["step"])} for line in read]
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptDataError(f"{self._path}: not JSON lines with a step ({error}); delete it") from None

    def truncate(self, step: int) -> None:
        """Forget everything after `step`: a resumed run will log it again."""
        kept = [line for line in self.read() if line["step"] <= step]
        storage.write_bytes(self._path, "".join(json.dumps(line) + "\n" for line in kept).encode())


def extend_digest(digest: str, step: int, loss: float) -> str:
    """Digest of the loss sequence so far: equal digests mean that every loss was equal, bit for bit."""
    return hashlib.sha256(digest.encode() + struct.pack("<qd", step, loss)).hexdigest()
