"""TurnIndex that a log repeats with every turn: the longest stays, nothing that is asked is lost, and nothing leaks."""

import json
import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftforge.data.conversation import SPLITS, Conversation, Message, Split, turns
from draftforge.data.dedup import Asking, Member, TurnIndex, asked_elsewhere, cluster_members, signature, turn_keys
from draftforge.data.mix import (
    CONVERSATIONS,
    MEMBERS,
    build_mix,
    load_log,
    load_manifest,
    load_members,
    load_mix,
)
from draftforge.data.records import Record
from draftforge.data.settings import MixSettings
from draftforge.errors import InputError

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
    """Texts of a user; `>` begins the assistant's, `^` the system's, `=` a tool's. Without these, asked one by one."""
    more.setdefault("turn_by_turn", not any(text[0] in ">=" for text in texts))
    roles = {">": "assistant", "^": "system", "=": "tool"}
    messages = tuple(Message(role=roles.get(text[0], "user"), content=text.lstrip(">^=")) for text in texts)
    return Record(domain="d", messages=messages, **more)


def continued(*records: Record) -> dict[int, int]:
    """Places of the conversations that others go on from, and of those."""
    threads = TurnIndex()
    for one in records:
        threads.add(turn_keys(one))
    names = [f"{number:03d}" for number in range(len(records))]
    return {int(part): int(whole) for part, whole in threads.continued(names).items()}


def test_a_billing_header_makes_no_other_thread() -> None:
    def asked(count: int, role: Any = "system", **more: Any) -> Record:
        first = Message(role=role, content=f"x-anthropic-billing-header: cch={count}\nBe kind.")
        said = [Message(role=("user", "assistant")[i % 2], content=f"m{i}") for i in range(count)]
        return Record(domain="d", messages=(first, *said), **more)

    assert continued(asked(1), asked(3)) == {0: 1}
    # A user's own line stays, and SGLang shows the system's.
    assert continued(asked(1, "user"), asked(3, "user")) == {}
    assert continued(asked(1, engine="sglang"), asked(3, engine="sglang")) == {}


def test_arguments_that_no_json_holds_tell_turns_apart() -> None:
    """vLLM reads the text of a call's arguments as Python does: NaN and numbers past all floats, too."""
    texts = ('{"b": NaN, "a": 1}', '{"a": 1e400}', '{"a": 2}')
    calls = ([{"type": "function", "function": {"name": "f", "arguments": text}}] for text in texts)
    said = [Message(role="user", content="Hi"), Message(role="tool", content="done")]
    records = [
        Record(domain="d", messages=(said[0], Message(role="assistant", content="", tool_calls=one), said[1]))
        for one in calls
    ]
    assert len({turn_keys(one)[-1] for one in records}) == len({one.id for one in records}) == 3


def test_a_replayed_thread_is_one_conversation(tmp_path: Path) -> None:
    lines = [line for i in range(40) for line in replayed(i)]
    folder = build(tmp_path, random.Random(1).sample(lines, len(lines)))
    mix, left_out = load_mix(folder), load_manifest(folder)["left_out"]
    assert sorted(len(one.messages) for one in mix) == [6] * 40 and left_out["continued by a longer one"] == 80
    assert len(mix) + sum(left_out.values()) == 120
    assert Counter(load_log(folder).column("fate").to_pylist())["continued by a longer one"] == 80
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
    # Two messages of a user in one request are one prompt, which a thread may go on from.
    assert continued(record("a", "b", turn_by_turn=False), record("a", "b", ">2", "c")) == {0: 1}
    assert continued(record("a", "b", turn_by_turn=False), asked[1]) == {}


def test_turns_whose_prompts_end_otherwise_are_others() -> None:
    plain, thread = record("a", ">1", turn_by_turn=False), record("a", ">1", "b", turn_by_turn=False)
    assert continued(plain, thread) == {0: 1}
    for end in ("prefill", "after_answer", "bare"):
        assert continued(record("a", ">1", prompt_end=end), thread) == {}
    assert continued(record("a", engine="sglang"), record("a", ">1", "b")) == {}


def test_steps_of_an_agent_are_one_conversation() -> None:
    """Tool calls are what the template shows: arguments as text or as an object. Each run draws ids of its own."""

    def step(run: str, arguments: object, *texts: str) -> Record:
        call = {"id": run, "function": {"name": "find", "arguments": arguments}}
        messages = [
            Message(role="user", content="a"),
            Message(role="assistant", content="", tool_calls=[call]),
            Message(role="tool", content="found", tool_call_id=run),
            *(Message(role=role, content=text) for role, text in zip(("assistant", "user"), texts)),
        ]
        return Record("d", tuple(messages), tools=TOOLS)

    assert continued(step("call_1", '{"q": 1}', "Here."), step("call_2", {"q": 1}, "Here.", "thanks")) == {0: 1}
    assert continued(step("call_1", {"q": 1}, "Here."), step("call_1", {"q": 2}, "Here.", "thanks")) == {}


def test_a_part_shares_its_cluster_and_nothing_is_its_copy() -> None:
    contents = {"a-part": words(1), "b-near": words(1) + " now", "c-whole": f"{words(1)} {words(2)} {words(3)}"}
    members = [Member(id, None, signature(text)) for id, text in contents.items()]
    placed = cluster_members(members, [], 0.8, {"a-part": "c-whole"})
    assert len({one.cluster for one in placed.values()}) == 1
    assert {one.copy_of for one in placed.values()} == {None}
    assert cluster_members(members, [], 0.8)["b-near"].copy_of == "a-part"


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
    assert (
        manifest["left_out"]["near an evaluation set"] == 4 and manifest["left_out"]["continued by a longer one"] == 120
    )
    assert manifest["contamination"]["near_conversations"] == {"eval.jsonl": 4}
    for number, line in enumerate(lines):  # the first requests of half of the threads came much later
        line["started"] = 9e8 if number % 6 == 0 else 9e8 - 40 * 86400
    recent = load_mix(build(tmp_path, lines, "recent", half_life_days=1))
    asked = {one.messages[0].content for one in recent}
    assert asked == {lines[i]["messages"][0]["content"] for i in range(0, len(lines), 6)}


def test_conversations_keep_their_own_sampling_and_domain(tmp_path: Path) -> None:
    """The whole is asked as its own request was."""
    lines = [line for i in range(40) for line in replayed(i)]
    for line in lines:
        turn = len(line["messages"]) // 2
        line |= {"domain": f"d{turn}", "temperature": turn / 10, "max_tokens": turn}
    with pytest.raises(InputError, match=r"no turn is left to answer of 'd1' \(40 continued by a longer one\), 'd2'"):
        build(tmp_path, lines)
    mix: list[Conversation] = load_mix(build(tmp_path, lines, may_be_unanswered=["d1", "d2"]))
    assert {(one.domain, one.sampling and one.sampling.temperature, one.max_new_tokens) for one in mix} == {
        ("d3", 0.3, 3)
    }


def asked(conversations: Iterable[Conversation], counting: bool = True) -> list[str]:
    """Contexts that the target is asked, of the turns that count or of all."""
    return [
        json.dumps([message.model_dump(exclude_none=True) for message in turn.messages])
        for one in conversations
        for turn in turns(one if counting else one.model_copy(update={"asked_elsewhere": []}))
        if turn.counts
    ]


def leaks(folder: Path, before: Path | None = None) -> int:
    """Contexts that holdout or selection counts and that were trained on."""
    mix = load_mix(folder)
    taught = {*asked(one for one in mix if one.split == "train")}
    if before is not None:
        taught |= {*asked(one for one in load_mix(before) if one.split == "train")}
    return sum(context in taught for context in asked(one for one in mix if one.split != "train"))


def forked(i: int, **more: Any) -> list[Line]:
    """Two threads of four turns with the first two in common."""
    start = thread(i, 2)
    return [
        {
            "messages": start
            + [{"role": role, "content": words(i, fork, t, role)} for t in "yz" for role in ("user", "assistant")],
            "domain": "chat",
            **more,
        }
        for fork in "ab"
    ]


@pytest.mark.parametrize("grouped", [False, True])
def test_a_turn_that_forks_share_counts_once(tmp_path: Path, grouped: bool) -> None:
    lines = [line for i in range(60) for line in forked(i)]
    for number, line in enumerate(lines):  # a group binds within its domain only
        line |= {"domain": f"d{number % 2}", "group": f"t{number // 2}"} if grouped else {}
    folder = build(tmp_path, lines, selection_share=0.2, holdout_share=0.2)
    mix, report = load_mix(folder), load_manifest(folder)["contamination"]
    contexts = asked(mix)
    assert len(mix) == 120 and leaks(folder) == 0
    assert len(contexts) == len(set(contexts)) and set(contexts) == {*asked(mix, counting=False)}
    assert sum(report["turns_asked_elsewhere"].values()) == 120 and report["asked_in_train"] == 0
    held = [one for one in mix if one.split == "holdout"]
    assert report["holdout_turns"] == len(asked(held)) and report["turns_asked_elsewhere"]["holdout"] > 0
    assert all({2, 3} <= {turn.index for turn in turns(one)} for one in mix)  # its own last turns


def test_a_thread_that_an_ancestor_trained_on_the_beginning_of_is_judged_by_the_rest(tmp_path: Path) -> None:
    short = build(tmp_path, [{"messages": thread(i, 2), "domain": "chat"} for i in range(80)], "short")
    lines = [{"messages": thread(i, 10), "domain": "chat"} for i in range(80)]
    folder = build(tmp_path, lines, "grown", [short], salt="other", holdout_share=0.3)
    report = load_manifest(folder)["contamination"]
    assert leaks(folder, short) == 0 == report["asked_in_ancestors_train"]
    assert report["turns_asked_elsewhere"]["holdout"] > 0 == report["turns_asked_elsewhere"]["train"]
    taught = {one.messages[0].content: one.split for one in load_mix(short)}
    for one in load_mix(folder):
        seen = SPLITS.index(taught[one.messages[0].content]) < SPLITS.index(one.split)
        assert one.asked_elsewhere == ([0, 1] if seen else [])
    assert leaks(build(tmp_path, lines, "alone", salt="other", holdout_share=0.3), short) > 0  # what would leak


def test_a_part_of_a_thread_that_an_ancestor_has_is_placed_with_it(tmp_path: Path) -> None:
    whole = build(tmp_path, [{"messages": thread(i, 10), "domain": "chat"} for i in range(80)], "whole")
    parts = build(tmp_path, [{"messages": thread(i, 2), "domain": "chat"} for i in range(80)], "parts", [whole])
    first, later = [{one.messages[0].content: one.split for one in load_mix(folder)} for folder in (whole, parts)]
    assert later == first and leaks(parts, whole) == 0
    assert sum(load_manifest(parts)["contamination"]["turns_asked_elsewhere"].values()) == 0


def test_ancestors_in_any_order_give_the_same_bytes(tmp_path: Path) -> None:
    """Also where two place a conversation alike and know it by different groups: both groups bind."""
    lines = [line for i in range(60) for line in replayed(i, 1)]
    first = build(tmp_path, lines, "first")
    groups = [
        build(tmp_path, [{**line, "group": name} for line in lines[:1]] + lines[1:], name, [first]) for name in "ab"
    ]
    more = [{**replayed(100 + i, 1)[0], "group": name} for i, name in enumerate("ab")]
    for name, order in [("one", groups), ("other", [*reversed(groups), groups[0]])]:
        build(tmp_path, more + lines, name, order)
    for file in (CONVERSATIONS, MEMBERS):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "other" / file).read_bytes()
    bound = {
        one.cluster
        for one in load_mix(tmp_path / "one")
        if one.messages[0].text in (words(i, 0, "user") for i in (0, 100, 101))
    }
    assert len(bound) == 1


@given(
    st.lists(st.tuples(st.sampled_from(SPLITS), st.lists(st.integers(0, 5), unique=True)), max_size=8),
    st.integers(0, 4),
)
def test_where_a_turn_counts_equals_a_plain_walk(found: list[tuple[Split, list[int]]], own: int) -> None:
    """In the order of splits, then of conversations: the first that asks a turn keeps it, unless an ancestor had it."""
    items: list[Asking] = [(split, np.array(keys, dtype=np.uint64)) for split, keys in found]
    asking, before = items[own:], items[:own]
    seen = {
        key: min(SPLITS.index(s) for s, keys in found[:own] if key in keys) for _, keys in found[:own] for key in keys
    }
    expected: list[list[int]] = [[] for _ in asking]
    taken = set[int]()
    for at in sorted(range(len(asking)), key=lambda at: (SPLITS.index(asking[at][0]), at)):
        split, keys = found[own + at]
        for turn, key in enumerate(keys):
            if key in taken or seen.get(key, 9) < SPLITS.index(split):
                expected[at].append(turn)
            taken.add(key)
    assert asked_elsewhere(asking, before) == expected
