"""Records come back from disk as they went in."""

import json
from pathlib import Path
from typing import Any

from draftforge.data.conversation import Message
from draftforge.data.ingest import Spool
from draftforge.data.prepared_records import Preparer, columns, restored, sampling_of, stored
from draftforge.data.record_outcomes import SourceCounts
from draftforge.data.records import Record
from draftforge.data.served_request import template_args
from draftforge.data.settings import MixSettings
from draftforge.data.sources import units
from draftforge.specdec.sampling_settings import SamplingSettings

CALL = [{"id": "c1", "function": {"name": "clock", "arguments": "{}"}}]
FULL = Record(
    domain="d",
    messages=(
        Message(role="user", content="où est\nma commande ?", name="jo"),
        Message(role="assistant", content="", tool_calls=CALL),
        Message(role="tool", content="12:00", tool_call_id="c1"),
    ),
    tools=[{"function": {"name": "clock"}}],
    template_args={"enable_thinking": False},
    sampling=SamplingSettings(temperature=0.3, top_p=0.9),
    max_new_tokens=7,
    group="g",
    source=3,
    started=1.5,
    ended=2.5,
    replica="r1",
    prompt_tokens=11,
    answer_tokens=5,
    where="log.jsonl:7",
)


SETTINGS = MixSettings.model_validate({"sources": [{"kind": "turns", "path": "log.jsonl"}]})


def line(record: Record) -> bytes:
    return stored(record, *sampling_of(record, SETTINGS), {"email": 2})


def test_lines_come_back_whole_in_any_order(tmp_path: Path) -> None:
    bare = Record(domain="", messages=(Message(role="user", content="x" * 100_000),))
    with Spool(tmp_path) as spool:
        numbers = [spool.add(line(record)) for record in (FULL, bare, FULL)]
        assert numbers == [0, 1, 2] and len(spool) == 3
        assert spool[1] == line(bare) and spool[0] == line(FULL) == spool[2]
        assert spool.add(line(bare)) == 3 and spool[3] == line(bare) and spool[2] == line(FULL)


def test_what_the_target_is_shown_comes_back_and_the_rest_as_columns() -> None:
    back, row = restored(line(FULL)), columns(line(FULL))
    assert (back.id, back.user_text, back.where, back.source) == (FULL.id, FULL.user_text, FULL.where, 3)
    assert (row["id"], row["domain"], row["max_new_tokens"]) == (FULL.id, "d", 7)
    assert json.loads(row["sampling"]) == {"temperature": 0.3, "top_k": 0, "top_p": 0.9, "min_p": 0.0}
    assert json.loads(row["redacted"]) == {"email": 2}


def test_a_large_spool_lies_on_disk_without_a_name(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    large = b"y" * (1 << 20)
    with Spool(folder) as spool:
        for _ in range(40):
            spool.add(large)
        assert spool[39] == large and spool._file.name is not None  # memory has no name
        assert list(folder.iterdir()) == []


def test_broken_rules_quote_no_personal_data(tmp_path: Path) -> None:
    """They are stored in the mix, and said."""
    turns = [{"role": "user", "content": "Hi"}]
    odd = "ann@mail.org, +49 30 901820"
    lines: list[dict[str, Any]] = [
        {"max_tokens": odd},
        {"domain": odd},
        {"temperature": [odd]},
        {"max_tokens": {odd: 1}},
    ]
    path = tmp_path / "ann@mail.org.jsonl"
    path.write_text("\n".join(json.dumps({"messages": turns, **one}) for one in lines))
    source = {"kind": "messages", "path": path.name, "domain_field": "domain", "skip_invalid": True}
    settings = MixSettings.model_validate({"sources": [source]})
    items = list(units(settings.sources[0], tmp_path, 0, SourceCounts()))
    broken = [one.broken or "" for one in Preparer(settings).prepared_outcomes(0, items)]
    assert len(broken) == 4 and all(said.startswith(f"{path}:") for said in broken)
    assert not any("ann@mail.org, " in said or "901820" in said for said in broken)
    assert sum("<email>" in said for said in broken) >= 2


def test_a_request_does_not_say_how_the_messages_api_is_rendered() -> None:
    own = {"messages_api": {"disabled": True, "own_thinking": False}}
    assert template_args(own.get, "vllm", "log.jsonl:1") == {}
