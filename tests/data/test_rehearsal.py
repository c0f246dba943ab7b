"""Old conversations in a new mix: the share asked for, nothing that judges, and the same bytes each time."""

import json
from pathlib import Path

import pytest

from draftforge.data.conversation import turns
from draftforge.data.dedup import turn_keys
from draftforge.data.logs.parsing import prompt_digest
from draftforge.data.mix import build_mix, load_manifest, load_members, load_mix
from draftforge.data.rehearsal import base_of, blend, conversations_to_add
from draftforge.data.settings import MixSettings

SALT = "draftforge"


def mix_of(folder: Path, name: str, topics: list[str], ancestors: tuple[Path, ...] = ()) -> Path:
    lines = [
        json.dumps({"domain": name, "turns": [f"{topic} number {i} of {topic} {i * 7} about {topic} {i * 13}?"]})
        for topic in topics
        for i in range(40)
    ]
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    settings = MixSettings.model_validate({"sources": [{"kind": "turns", "path": f"{name}.jsonl"}]})
    build_mix(settings, folder, folder / name, ancestors=ancestors)
    return folder / name


def train_ids(mix: Path) -> set[str]:
    return {one.id for one in load_mix(mix) if one.split == "train"}


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_the_share_of_old_training_conversations_is_reached(share: float, tmp_path: Path) -> None:
    old = mix_of(tmp_path, "old", ["order", "parcel", "refund", "invoice"])
    new = mix_of(tmp_path, "new", ["python", "function"], (old,))
    added = conversations_to_add(new, old, share, SALT)
    assert set(added) <= train_ids(old) and added == conversations_to_add(new, old, share, SALT)
    total = len(train_ids(new)) + len(added)
    assert share <= len(added) / total < share + 1 / total
    blend(new, old, added, {"of": "f" * 64, "old": "e" * 64}, tmp_path / "both")
    assert train_ids(tmp_path / "both") == train_ids(new) | set(added)
    judging = {one.id for one in load_mix(new) if one.split != "train"}
    assert {one.id for one in load_mix(tmp_path / "both") if one.split != "train"} == judging
    both = load_mix(tmp_path / "both")
    ids = [one.id for one in both]
    assert ids == sorted(ids)
    assert all(one.where.startswith("old.jsonl:" if one.id in added else "new.jsonl:") for one in both)
    manifest = load_manifest(tmp_path / "both")
    assert sum(manifest["conversations"]["train"].values()) == total and manifest["blend"]["added"] == len(added)
    asked = sum(turn.counts for one in both if one.split == "train" for turn in turns(one))
    assert manifest["turns"]["train"] == asked
    assert base_of(tmp_path / "both") == "f" * 64 and base_of(new) is None
    assert len(load_members([tmp_path / "both"])) == len(load_members([new]))


def test_old_conversations_that_the_logs_still_hold_count(tmp_path: Path) -> None:
    old = mix_of(tmp_path, "old", ["order", "parcel"])
    (tmp_path / "more").mkdir()
    grown = tmp_path / "more" / "grown.jsonl"
    grown.write_text(
        (tmp_path / "old.jsonl").read_text() + '{"domain": "x", "turns": ["something else entirely here"]}\n'
    )
    settings = MixSettings.model_validate({"sources": [{"kind": "turns", "path": "grown.jsonl"}]})
    build_mix(settings, tmp_path / "more", tmp_path / "grown", ancestors=(old,))
    assert conversations_to_add(tmp_path / "grown", old, 0.5, SALT) == []


def test_no_more_than_there_are(tmp_path: Path) -> None:
    old = mix_of(tmp_path, "old", ["order"])
    new = mix_of(tmp_path, "new", ["python", "function", "class"], (old,))
    assert set(conversations_to_add(new, old, 0.9, SALT)) == train_ids(old)


def test_a_cluster_that_the_new_mix_judges_on_is_left_out(tmp_path: Path) -> None:
    """Without the inheritance that would have kept its cluster in train."""
    old = mix_of(tmp_path, "old", ["order", "parcel"])
    clusters = {one.cluster for one in load_mix(old) if one.split == "train"}
    new = mix_of(tmp_path, "new", ["order"], ())
    judging = {one.cluster for one in load_mix(new) if one.split != "train"}
    taken = set(conversations_to_add(new, old, 0.9, SALT))
    assert not {one.id for one in load_mix(old) if one.cluster in judging} & taken and clusters


def thread(number: int, turns: int, fork: str = "") -> list[dict[str, str]]:
    """Messages of a thread; with a `fork` its last turn is another one."""
    words = [f"{topic} {number * step}" for step, topic in enumerate(["red", "green", "blue", "white", "grey"], 7)]
    return [
        {
            "role": role,
            "content": (fork if turn == turns - 1 else "") + f"{role} {turn} " + " ".join(words[turn:] + words[:turn]),
        }
        for turn in range(turns)
        for role in ("user", "assistant")
    ]


def test_a_turn_that_the_new_mix_trains_on_counts_there(tmp_path: Path) -> None:
    """Of those that added conversations share, each in the first of them, whichever of the old ones it counted in."""

    def built(name: str, forks: str, ancestors: tuple[Path, ...] = ()) -> Path:
        lines = [json.dumps({"domain": "d", "messages": thread(n, 4, f)}) for n in range(40) for f in forks]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        source = {"kind": "messages", "path": f"{name}.jsonl"}
        settings = MixSettings.model_validate({"sources": [source], "near_threshold": 0.99})
        build_mix(settings, tmp_path, tmp_path / name, ancestors=ancestors)
        return tmp_path / name

    def taught(mix: Path, counting: bool) -> list[int]:
        trained = [one for one in load_mix(mix) if one.split == "train"]
        return [
            key
            for one in trained
            for i, key in enumerate(turn_keys(one))
            if not counting or i not in one.asked_elsewhere
        ]

    old = built("old", "abc")
    new = built("new", "d", (old,))
    added = conversations_to_add(new, old, 0.4, SALT)
    blend(new, old, added, {"of": "f" * 64, "old": "e" * 64}, tmp_path / "both")
    counting = taught(tmp_path / "both", counting=True)
    assert added and len(counting) == len(set(counting)) and set(counting) == set(taught(tmp_path / "both", False))
    mine = {one.id: one for one in load_mix(new)}
    assert all(mine.get(one.id, one) == one for one in load_mix(tmp_path / "both"))


def test_served_prompts_of_both_mixes_are_known(tmp_path: Path) -> None:
    def built(name: str, ancestors: tuple[Path, ...] = ()) -> Path:
        texts = [f"{name} number {i} of {i * 7} about {name} {i * 13}?" for i in range(60)]
        objects = [{"messages": [{"role": "user", "content": text}]} for text in texts]
        lines = [{"event": "request.received.openai", "obj": one} for one in objects]
        lines += [{"event": "request.finished", "obj": {"rid": "r", "text": text}} for text in texts]
        (tmp_path / f"{name}.log").write_text("\n".join(map(json.dumps, lines)) + "\n")
        source = {"kind": "sglang", "path": f"{name}.log", "domain": "d"}
        settings = MixSettings.model_validate({"sources": [source], "near_threshold": 1.0})
        build_mix(settings, tmp_path, tmp_path / name, ancestors=ancestors)
        return tmp_path / name

    old = built("old")
    new = built("new", (old,))
    added = conversations_to_add(new, old, 0.4, SALT)
    blend(new, old, added, {"of": "f" * 64, "old": "e" * 64}, tmp_path / "both")
    both = load_mix(tmp_path / "both")
    logs = {one.id in added: one.logged_prompts[0].served for one in both}
    assert logs[False] != logs[True]
    for one in both:
        (log,) = one.logged_prompts[0].served
        assert bytes.fromhex(prompt_digest(one.messages[0].text)) in one.served_prompts[log]


def test_no_turn_that_the_new_mix_judges_on_is_added(tmp_path: Path) -> None:
    """Without the inheritance that would have left these turns out: the old mix holds the threads' beginnings."""

    def built(name: str, turns: int, salt: str) -> Path:
        lines = [json.dumps({"domain": "d", "messages": thread(number, turns)}) for number in range(60)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        source = {"kind": "messages", "path": f"{name}.jsonl"}
        build_mix(
            MixSettings.model_validate({"sources": [source], "salt": salt, "near_threshold": 0.99}),
            tmp_path,
            tmp_path / name,
        )
        return tmp_path / name

    old, new = built("old", 2, "a"), built("new", 5, "b")
    starts = {one.messages[0].content: one.split for one in load_mix(new)}
    assert conversations_to_add(new, old, 0.9, SALT) == []  # train asks every turn of the others
    one, *_ = [one for one in load_mix(old) if one.split == "train" and starts[one.messages[0].content] == "holdout"]
    assert one.id not in conversations_to_add(new, old, 0.9, SALT)
