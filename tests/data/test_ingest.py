"""Records come back from disk as they went in."""

from pathlib import Path

from draftforge.data.conversation import Message
from draftforge.data.ingest import Spool
from draftforge.data.prepare import restored, stored
from draftforge.data.records import Record
from draftforge.specdec.sampling import SamplingSettings

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


def test_records_come_back_whole_in_any_order(tmp_path: Path) -> None:
    bare = Record(domain="", messages=(Message(role="user", content="x" * 100_000),))
    with Spool(tmp_path) as spool:
        numbers = [spool.add(stored(record)) for record in (FULL, bare, FULL)]
        assert numbers == [0, 1, 2] and len(spool) == 3
        first, second, third = (restored(spool[number]) for number in numbers)
        assert second == bare and first == FULL == third
        assert (first.id, first.key, first.where) == (FULL.id, FULL.key, FULL.where)
        assert spool.add(stored(bare)) == 3 and restored(spool[3]) == bare and restored(spool[2]) == FULL


def test_a_large_spool_lies_on_disk_without_a_name(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    large = Record(domain="d", messages=(Message(role="user", content="y" * (1 << 20)),))
    with Spool(folder) as spool:
        for _ in range(40):
            spool.add(stored(large))
        assert restored(spool[39]) == large and spool._file.name is not None  # memory has no name
        assert list(folder.iterdir()) == []
