"""A source of another kind than its files is told so at its first file, before anything is read whole."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from draftforge.data.settings import FileSource, Source
from draftforge.data.sources import check_kinds
from draftforge.errors import InputError

SAMPLES = Path(__file__).parent / "samples"
SOURCE: TypeAdapter[Source] = TypeAdapter(Source)
KINDS = {
    "openai.jsonl": "openai",
    "vllm.log": "vllm",
    "vllm_json.log": "vllm",
    "sglang.log": "sglang",
    "sglang.jsonl": "sglang",
    "litellm.jsonl": "litellm",
    "langfuse.jsonl": "langfuse",
    "langfuse.csv": "langfuse",
    "langfuse_api.json": "langfuse",
    "sharegpt.json": "sharegpt",
}
READ_BY_OTHERS = {("litellm.jsonl", "openai"), ("litellm.jsonl", "messages")}
"""A log whose lines hold messages where another kind looks for them, too: it reads well as either."""


def source(kind: str, path: Path | str, **settings: Any) -> Source:
    return SOURCE.validate_python({"kind": kind, "path": str(path), **settings})


@pytest.mark.parametrize("name", KINDS)
def test_each_log_passes_as_its_own_kind_and_is_named_under_every_other(name: str) -> None:
    check_kinds([source(KINDS[name], SAMPLES / name)], SAMPLES)
    for kind in ("openai", "vllm", "sglang", "litellm", "langfuse", "messages", "sharegpt", "turns", "prompts"):
        if kind == KINDS[name] or (name, kind) in READ_BY_OTHERS:
            continue
        with pytest.raises(InputError) as caught:
            check_kinds([source(kind, name)], SAMPLES)
        said = str(caught.value)
        assert said.startswith(f"mix.sources[0].kind {kind}: ") and f"looks like kind {KINDS[name]}: " in said
        assert name in said and "\n" not in said


def test_what_is_of_no_kind_passes_until_it_is_read(tmp_path: Path) -> None:
    """The beginning of an engine's log holds no request; an empty file says nothing; a broken line is named later."""
    (tmp_path / "server.log").write_text("INFO 11-28 10:00:00 starting\n" * 20)
    (tmp_path / "broken.jsonl").write_text('{"turns": [\n')
    (tmp_path / "empty.jsonl").write_text("")
    sources = [source("vllm", "server.log"), source("turns", "broken.jsonl"), source("openai", "empty.jsonl")]
    check_kinds(sources, tmp_path)


def test_only_the_beginning_of_the_first_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second source is named, before either is read whole: a file that breaks later does not matter yet."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n' * 600 + "broken")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "1.jsonl").write_text("")
    (tmp_path / "b" / "2.jsonl").write_text('{"turns": ["a"]}\n' * 3)
    (tmp_path / "b" / "3.jsonl").write_text("broken")
    with pytest.raises(InputError, match=r"mix\.sources\[1\]\.kind vllm: .*2\.jsonl looks like kind turns: .* 3 conv"):
        check_kinds([source("prompts", "a.jsonl"), source("vllm", "b")], tmp_path)
    assert isinstance(source("vllm", "b"), FileSource)
