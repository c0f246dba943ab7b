"""Registry of log formats: the reader of each kind of log, and how its files are split into items."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

from .. import files
from ..read_limits import Limits
from ..settings import FileSource, LogKind
from . import langfuse, litellm, openai
from .chat import LogReader, ObjectReader
from .sglang import SglangReader
from .vllm import VllmReader


class Format(NamedTuple):
    """One kind of log."""

    items: Callable[[Sequence[Path], str, Limits], Iterator[files.Item]]
    """Splits files into the reader's items: lines of text, JSON values or table rows."""
    reader: Callable[[FileSource], LogReader]
    joins: bool = True
    """Whether the reader must see all lines, in order; False: each item is complete in itself, and any process may read
    it."""


FORMATS: dict[LogKind, Format] = {
    "openai": Format(files.objects, lambda source: ObjectReader(openai.entries, source.engine), joins=False),
    "vllm": Format(files.text_lines, lambda source: VllmReader(source.year)),
    "sglang": Format(files.text_lines, lambda source: SglangReader()),
    "litellm": Format(files.objects, lambda source: ObjectReader(litellm.entries, source.engine), joins=False),
    "langfuse": Format(files.objects, lambda source: ObjectReader(langfuse.entries, source.engine), joins=False),
}
assert set(FORMATS) == set(get_args(LogKind))
