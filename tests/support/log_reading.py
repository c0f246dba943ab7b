"""Sources read in one line, for tests of logs."""

from pathlib import Path
from typing import Any, NamedTuple

from draftforge.data.concurrency import Traffic
from draftforge.data.record_outcomes import SourceCounts
from draftforge.data.records import Record
from draftforge.data.settings import FileSource
from draftforge.data.sources import read_records

SAMPLES = Path(__file__).resolve().parent.parent / "data" / "samples"


class Read(NamedTuple):
    """All that a source gave."""

    records: list[Record]
    counts: SourceCounts
    traffic: Traffic

    @property
    def talks(self) -> list[list[tuple[str, str]]]:
        return [[(message.role, message.text) for message in record.messages] for record in self.records]

    @property
    def times(self) -> list[tuple[float, float, str]]:
        """Start, length and replica of each request that may be in flight."""
        names = list(self.traffic.names)
        starts, ends = self.traffic.started, self.traffic.ended
        return [(start, end - start, names[i]) for start, end, i in zip(starts, ends, self.traffic.replica)]


def read_log(path: Path, kind: Any, **source: Any) -> Read:
    """Read a file, a folder or a pattern."""
    counts, traffic = SourceCounts(), Traffic()
    settings = FileSource(kind=kind, path=str(path), **{"domain": "d", **source})
    records = list(read_records(settings, Path(), 0, counts, traffic=traffic))
    if settings.limit is None:
        assert counts.read == counts.taken + counts.skipped + sum(counts.left_out.values())
    return Read(records, counts, traffic)


def write_lines(path: Path, *lines: str) -> Path:
    """A file of these lines."""
    path.write_text("".join(line + "\n" for line in lines))
    return path


def asked(text: str, *before: str) -> str:
    """A prompt in ChatML, with the assistant's turn begun."""
    return "".join(before) + f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def finished(name: str, text: str, reason: str = "{'type': 'stop'}", **fields: str) -> str:
    """SGLang's line of a request that ended."""
    obj = ", ".join(f"{key}={value}" for key, value in {"rid": repr(name), "text": repr(text), **fields}.items())
    out = f"{{'text': 'Yes', 'meta_info': {{'finish_reason': {reason}, 'e2e_latency': 2.0}}}}"
    return f"[2026-11-28 10:00:04] Finish: obj=GenerateReqInput({obj}), out={out}"
