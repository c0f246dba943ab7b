"""Which reader reads which kind of log, and what it is fed with."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

from .. import files
from ..settings import FileSource, LogKind
from . import langfuse, litellm, openai
from .chat import LogReader, OneByOne
from .sglang import Sglang
from .vllm import Vllm


class Format(NamedTuple):
    """One kind of log."""

    items: Callable[[Sequence[Path], str], Iterator[files.Item]]
    """What the reader is fed with: lines of text, JSON values, or table rows."""
    reader: Callable[[FileSource], LogReader]


FORMATS: dict[LogKind, Format] = {
    "openai": Format(files.objects, lambda source: OneByOne(openai.entries)),
    "vllm": Format(files.text_lines, lambda source: Vllm(source.year)),
    "sglang": Format(files.text_lines, lambda source: Sglang()),
    "litellm": Format(files.objects, lambda source: OneByOne(litellm.entries)),
    "langfuse": Format(files.table_rows, lambda source: OneByOne(langfuse.entries)),
}
assert set(FORMATS) == set(get_args(LogKind))
