"""Threads that a log repeats with every turn: the longest stays, nothing that is asked is lost, and nothing leaks."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from draftforge.data.conversation import Conversation, Message, turns
from draftforge.data.dedup import Member, place, signature
from draftforge.data.mix import build_mix, load_log, load_manifest, load_members, load_mix
from draftforge.data.records import Record
from draftforge.data.settings import MixSettings
from draftforge.data.threads import Threads

WORDS = [f"word{i}" for i in range(500)]
TOOLS = [{"type": "function", "function": {"name": "find"}}]
Line = dict[str, Any]


def words(*seed: object) -> str:
    return " ".join(random.Random(repr(seed)).choices(WORDS, k=20))


def thread(i: int, count: int = 3) -> list[dict[str, Any]]:
    """Messages of a thread of so many turns, with every answer."""
    return [{"role": role, "content": words(i, turn, role)} for turn in range(count) for role in ("user", "assistant")]


def replayed(i: int, count: int = 3, **more: Any) -> list[Line]:
    """The requests of a thread, each with the history."""
    return [
        {"messages": thread(i, turn + 1), "domain": "chat", "started": 1000.0 + turn, **more} for turn in range(count)
    ]


def build(base: Path, lines: list[Line], name: str = "mix", earlier: list[Path] | None = None, **changes: Any) -> Path:
    (base / "log.jsonl").write_text("".join(json.dumps(item) + "\n" for item in lines))
    settings = {"sources": [{"kind": "messages", "path": "log.jsonl"}], **changes}
    build_mix(MixSettings.model_validate(settings), base, base / name, ancestors=earlier or [])
    return base / name


def record(*texts: str, **more: Any) -> Record:
    """Texts of a user; `>` begins the assistant's, `^` the system's, `=` a tool's."""
    roles = {">": "assistant", "^": "system", "=": "tool"}
    messages = tuple(Message(role=roles.get(text[0], "user"), content=text.lstrip(">^=")) for text in texts)  # type: ignore[arg-type]
    return Record(domain="d", messages=messages, **more)


def continued(*records: Record) -> dict[int, int]:
    """Places of the conversations that others go on from, and of those."""
    threads = Threads()
    for one in records:
        threads.add(one)
    names = [f"{number:03d}" for number in range(len(records))]
    return {int(part): int(whole) for part, whole in threads.continued(names).items()}


def test_a_replayed_thread_is_one_conversation(tmp_path: Path) -> None:
    lines = [line for i in range(40) for line in replayed(i)]
    folder = build(tmp_path, random.Random(1).sample(lines, len(lines)))
    mix, left_out = load_mix(folder), load_manifest(folder)["left_out"]
    assert sorted(len(one.messages) for one in mix) == [6] * 40 and left_out["continued"] == 80
    assert len(mix) + sum(left_out.values()) == 120
    assert Counter(load_log(folder).column("fate").to_pylist())["continued"] == 80
    assert all([len(turn.messages) for turn in turns(one)] == [1, 3, 5] for one in mix)  # every answer is drawn again
    assert {line["messages"][0]["content"] for line in lines} == {one.messages[0].content for one in mix}


def test_the_longest_stands_whatever_the_order() -> None:
    parts = [record("a", ">1"), record("a", ">1", "b", ">2"), record("a", ">1", "b", ">2", "c"), record("x", ">1")]
    assert continued(*parts) == {0: 2, 1: 2}
    assert continued(*reversed(parts)) == {2: 1, 3: 1}
    fork = record("a", ">1", "d", ">2")
    assert continued(parts[0], parts[1], fork) == {0: 1} and continued(parts[0], fork, parts[1]) == {0: 1}
    assert continued(record("a"), record("a", ">9"), parts[1]) == {0: 2, 1: 2}  # its own last answer is drawn again
    assert continued(record("a", ">1", "b"), parts[1]) == {}  # the same turns: near-copies


@pytest.mark.parametrize(
    "whole",
    [
        record("^be brief", "a", ">1", "b"),
        record("a", ">1", "b", tools=TOOLS),
        record("a", ">1", "b", template_args={"enable_thinking": True}),
        record("b", ">1", "a", ">1", "c"),
        record("a", "b", ">1"),  # nobody asks for an answer to a alone
    ],
)
def test_what_asks_something_else_is_no_continuation(whole: Record) -> None:
    assert continued(record("a", ">1"), whole) == {}


def test_turns_that_wait_for_the_targets_own_answers_are_others_than_logged_ones() -> None:
    asked = record("a", "b"), record("a", "b", "c")
    assert continued(*asked) == {0: 1}
    assert continued(asked[0], record("a", ">1", "b", ">2", "c")) == {}
    assert continued(record("a"), asked[0]) == {0: 1}  # the first turn waits for none
    assert continued(asked[0], record("a", "b", ">2", "c")) == {}


def test_steps_of_an_agent_are_one_conversation() -> None:
    """Tool calls are what the template shows: arguments as text or as an object."""

    def step(arguments: object, *more: Message) -> Record:
        call = Message(
            role="assistant", content="", tool_calls=[{"function": {"name": "find", "arguments": arguments}}]
        )
        return Record("d", (Message(role="user", content="a"), call, *more), tools=TOOLS)

    tool, answer = Message(role="tool", content="found"), Message(role="assistant", content="Here.")
    more = Message(role="user", content="thanks")
    assert continued(step('{"q": 1}', tool, answer), step({"q": 1}, tool, answer, more)) == {0: 1}


def test_a_part_shares_its_cluster_and_nothing_is_its_copy() -> None:
    contents = {"a-part": words(1), "b-near": words(1) + " now", "c-whole": f"{words(1)} {words(2)} {words(3)}"}
    members = [Member(id, None, signature(text)) for id, text in contents.items()]
    placed = place(members, [], 0.8, {"a-part": "c-whole"})
    assert len({one.cluster for one in placed.values()}) == 1
    assert {one.copy_of for one in placed.values()} == {None}
    assert place(members, [], 0.8)["b-near"].copy_of == "a-part"


def test_an_ancestor_that_trained_on_a_part_or_on_the_whole_binds_the_other(tmp_path: Path) -> None:
    short = build(tmp_path, [replayed(i, 1)[0] for i in range(60)], "short")
    grown = build(tmp_path, [line for i in range(60) for line in replayed(i, 4)], "grown", [short], salt="other")
    again = build(tmp_path, [replayed(i, 2)[1] for i in range(60)], "again", [grown], salt="third")
    first, *later = [
        {one.messages[0].content: one.split for one in load_mix(folder)} for folder in (short, grown, again)
    ]
    assert len(first) == 60 and all(found == first for found in later)
    assert len(load_members([grown])) == 240  # parts too: a later log may hold them alone


def test_a_whole_is_as_near_to_an_evaluation_set_and_as_recent_as_its_parts(tmp_path: Path) -> None:
    lines = [line for i in range(60) for line in replayed(i)]
    trained = [one.messages[0].content for one in load_mix(build(tmp_path, lines, "free")) if one.split == "train"][:4]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in trained))
    folder = build(tmp_path, lines, contamination=["eval.jsonl"])
    manifest = load_manifest(folder)
    assert not {one.messages[0].content for one in load_mix(folder)} & set(trained)
    assert manifest["left_out"]["contaminated"] == 4 and manifest["left_out"]["continued"] == 120
    assert manifest["contamination"]["near_conversations"] == {"eval.jsonl": 4}
    for number, line in enumerate(lines):  # the first requests of half of the threads came much later
        line["started"] = 9e8 if number % 6 == 0 else 1000.0
    recent = load_mix(build(tmp_path, lines, "recent", half_life_days=1))
    asked = {one.messages[0].content for one in recent}
    assert asked == {lines[i]["messages"][0]["content"] for i in range(0, len(lines), 6)}


def test_conversations_keep_their_own_sampling_and_domain(tmp_path: Path) -> None:
    """The whole is asked as its own request was."""
    lines = [line for i in range(40) for line in replayed(i)]
    for line in lines:
        turn = len(line["messages"]) // 2
        line |= {"domain": f"d{turn}", "temperature": turn / 10, "max_tokens": turn}
    mix: list[Conversation] = load_mix(build(tmp_path, lines))
    assert {(one.domain, one.sampling and one.sampling.temperature, one.max_new_tokens) for one in mix} == {
        ("d3", 0.3, 3)
    }
