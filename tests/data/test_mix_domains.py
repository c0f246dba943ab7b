"""Domains by rules and by clusters, sizes, weights and age, evaluation sets: whole mixes of made logs."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from draftforge.data import domain_clusters
from draftforge.data.domain_clusters import assign, fit
from draftforge.data.mix import build_mix, load_log, load_manifest, load_mix
from draftforge.data.records import parse
from draftforge.data.settings import MixSettings
from draftforge.errors import InputError

TOPICS = {
    "cook": "flour butter oven sugar recipe dough yeast salt bake whisk simmer garlic onion pepper stew",
    "code": "function variable compile loop python class import error stack thread module pointer array debug merge",
    "trip": "flight hotel beach passport luggage museum train ticket island tour visa border guide airport hostel",
}
Line = dict[str, Any]


def said(topic: str, seed: int, count: int = 24) -> str:
    return " ".join(random.Random(f"{topic}{seed}").choices(TOPICS[topic].split(), k=count))


def line(i: int, **more: Any) -> Line:
    topic = ("cook", "code", "trip")[i % 3]
    return {"messages": [{"role": "user", "content": said(topic, i)}], **more}


def build(base: Path, lines: list[Line], name: str = "mix", **changes: Any) -> Path:
    (base / "log.jsonl").write_text("".join(json.dumps(item) + "\n" for item in lines))
    settings = {"sources": [{"kind": "messages", "path": "log.jsonl"}], **changes}
    build_mix(MixSettings.model_validate(settings), base, base / name)
    return base / name


def topics(folder: Path) -> dict[str, str]:
    """Topic of each domain; every conversation of a domain must be of one topic."""
    found: dict[str, set[str]] = {}
    for conversation in load_mix(folder):
        words = set(conversation.messages[-1].text.split())
        found.setdefault(conversation.domain, set()).update(t for t in TOPICS if words & set(TOPICS[t].split()))
    assert all(len(some) == 1 for some in found.values())
    return {domain: some.pop() for domain, some in found.items()}


@pytest.mark.parametrize(
    "rule, domain",
    [
        ({"match": "(?i)traceback"}, "found"),
        ({"match": "(?i)traceback", "role": "user"}, "found"),
        ({"match": "(?i)traceback", "role": "system"}, "own"),
        ({"match": "be brief"}, "found"),
        ({"match": "be brief", "role": "user"}, "own"),
        ({"match": "^shop-", "field": "model"}, "found"),
        ({"match": "shop-", "field": "prompt"}, "own"),
        ({"match": '"team": "b', "field": "metadata"}, "found"),
        ({"match": "answer"}, "own"),
    ],
)
def test_a_rule_reads_what_it_names(rule: dict[str, str], domain: str) -> None:
    messages = [("system", "be brief"), ("user", "Traceback (most recent call last)"), ("assistant", "answer")]
    request = {
        "messages": [{"role": role, "content": content} for role, content in messages],
        "model": "shop-7b",
        "metadata": {"team": "b"},
    }
    sources = [{"kind": "messages", "path": "x", "domain": "own"}]
    settings = MixSettings.model_validate({"sources": sources, "domains": {"rules": [{**rule, "domain": "found"}]}})
    assert parse({"request": request}, "messages", settings.sources[0], "x:1").domain == domain


def test_the_first_rule_that_matches_wins_and_what_none_matches_needs_a_name(tmp_path: Path) -> None:
    rules = [{"match": "flour|oven", "domain": "kitchen"}, {"match": "oven|flight|hotel|beach", "domain": "travel"}]
    folder = build(tmp_path, [line(i, domain="rest") for i in range(90)], domains={"rules": rules})
    for conversation in load_mix(folder):
        words = set(conversation.messages[-1].text.split())
        wanted = (
            "kitchen" if words & {"flour", "oven"} else "travel" if words & {"flight", "hotel", "beach"} else "rest"
        )
        assert conversation.domain == wanted
    with pytest.raises(InputError, match=r"log\.jsonl:2: has no domain, and .* or a rule of mix\.domains must"):
        build(tmp_path, [line(i) for i in range(90)], "other", domains={"rules": rules})


@pytest.mark.slow
def test_clusters_find_topics_and_a_later_mix_keeps_their_names(tmp_path: Path) -> None:
    lines = [line(i) for i in range(150)]
    first = build(tmp_path, lines, "first", domains={"clusters": 3})
    found = topics(first)
    assert found.keys() == {"c00", "c01", "c02"} and set(found.values()) == set(TOPICS)
    told = load_manifest(first)["domain_clusters"]
    assert told["agreement_of_halves"] == 1 and not told["kept_from_ancestor"]
    assert all(set(words) <= set(TOPICS[found[name]].split()) for name, words in told["terms"].items())
    assert (
        build(tmp_path, lines[::-1], "again", domains={"clusters": 3}).joinpath("clusters.parquet").read_bytes()
        == (first / "clusters.parquet").read_bytes()
    )
    # Another log, in which another topic is the largest: fitted alone its names are others, as an heir's they stay.
    later = [line(i) for i in range(1000, 1150) if i % 3 != 0 or i % 4 == 0]
    alone = build(tmp_path, later, "alone", domains={"clusters": 3})
    heir = build(tmp_path, later, "heir", domains={"clusters": 3}, ancestors=["first"])
    assert topics(heir) == found and topics(alone) != found
    assert load_manifest(heir)["domain_clusters"] == {**told, "agreement_of_halves": None, "kept_from_ancestor": True}
    grandchild = build(tmp_path, later, "grandchild", domains={"clusters": 3}, ancestors=["heir"])
    assert topics(grandchild) == found


def test_only_what_nothing_names_is_clustered(tmp_path: Path) -> None:
    lines = [line(i, **({"domain": "kitchen"} if i % 3 == 0 else {})) for i in range(240)]
    found = topics(build(tmp_path, lines, domains={"clusters": 2}))
    assert found.pop("kitchen") == "cook" and found.keys() == {"c00", "c01"}
    named = build(tmp_path, [line(i, domain="all") for i in range(60)], "named", domains={"clusters": 2})
    assert load_manifest(named)["domain_clusters"] is None and not (named / domain_clusters.FILE).exists()


def test_chance_clusters_do_not_agree_and_too_few_texts_are_refused() -> None:
    words = " ".join(TOPICS.values()).split()
    texts = [" ".join(random.Random(i).choices(words, k=24)) for i in range(300)]
    agreement = fit(texts, 5).agreement
    assert agreement is not None and agreement < 0.3
    with pytest.raises(InputError, match=r"mix\.domains\.clusters 2: the texts hold too few words"):
        fit(["aa bb", "cc dd", "ee ff", "gg hh"], 2)
    with pytest.raises(InputError, match=r"mix\.domains\.clusters 5: 8 conversations to name; must be at least 10"):
        fit([said("cook", i) for i in range(8)], 5)
    some = fit([said(topic, i) for i in range(20) for topic in TOPICS], 3)
    assert list(assign(some, [])) == [] and len(set(assign(some, [said(topic, 99) for topic in TOPICS]))) == 3


def test_a_limited_mix_keeps_the_log_s_shares(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "clock"}}]
    lines = [
        line(i, domain="ab"[i % 5 == 0], temperature=0.7 if i % 2 else 0, **({"tools": tools} if i % 3 == 0 else {}))
        for i in range(300)
    ]
    folder = build(tmp_path, lines, limit=100)

    def cells(some: list[Any]) -> Counter[Any]:
        return Counter((c.domain, c.sampling.temperature, bool(c.tools)) for c in some)

    whole, part = cells(load_mix(build(tmp_path, lines, "whole"))), cells(load_mix(folder))
    assert part.total() == 100 and all(abs(part[cell] - whole[cell] / 3) < 1 for cell in whole)
    assert load_manifest(folder)["left_out"]["over the mix's shares or limit"] == 200
    assert len(load_mix(build(tmp_path, lines, "most", limit=10_000))) == 300


def test_weights_change_what_they_name(tmp_path: Path) -> None:
    turns = [[{"role": "user", "content": said("cook", 1000 + i)}] * (1 + i % 2) for i in range(200)]
    lines = [{"messages": messages, "domain": "ab"[i % 5 == 0]} for i, messages in enumerate(turns)]
    mix = load_mix(build(tmp_path, lines, weights={"turns": {1: 3, 2: 1}}))
    assert len(mix) == 133 and Counter(len(c.messages) for c in mix)[1] in (99, 100)
    mix = load_mix(
        build(tmp_path, lines, "both", weights={"turns": {1: 1, 2: 1}, "domain": {"a": 1, "b": 1}}, limit=60)
    )
    assert Counter(c.domain for c in mix) == {"a": 30, "b": 30}
    assert Counter(len(c.messages) for c in mix)[1] == pytest.approx(30, abs=2)


@pytest.mark.slow
def test_recent_traffic_weighs_more(tmp_path: Path) -> None:
    """Five days at a half-life of one: what is kept of each day halves; a later copy makes a conversation recent."""
    day = 86400
    lines = [line(i, domain="a", started=(10 + i % 5) * day) for i in range(1000)]
    stale = {**lines[0], "started": 1}
    near = {"messages": [{"role": "user", "content": lines[1]["messages"][0]["content"] + " now"}], "domain": "a"}
    folder = build(tmp_path, [*lines, stale, {**near, "started": 14 * day}], half_life_days=1, limit=200)
    log = load_log(folder).to_pylist()
    kept = Counter(row["day"] for row in log if row["fate"] in ("train", "selection", "holdout"))
    days = [f"1970-01-{number:02d}" for number in (11, 12, 13, 14, 15)]
    shares = [kept[day] / 200 for day in days]
    expected = [2**i / 31 for i in range(5)]
    assert shares == pytest.approx(expected, abs=0.075) and sum(shares) == 1
    assert shares == sorted(shares)
    alone = load_log(build(tmp_path, lines, "alone", half_life_days=1)).to_pylist()
    sizes = Counter(row["day"] for row in alone if row["fate"] in ("train", "selection", "holdout"))
    assert sizes.total() == pytest.approx(200 * (1 + 1 / 2 + 1 / 4 + 1 / 8 + 1 / 16), abs=1)


def test_a_conversation_is_as_recent_as_its_latest_copy(tmp_path: Path) -> None:
    old = [line(i, domain="a", started=1000.0) for i in range(120)]
    asked = [item["messages"][0]["content"] for item in old]
    again = [{**item, "started": 9000.0} for item in old[:30]]
    near = [{**item, "messages": [{"role": "user", "content": text.upper() + "!"}]} for item, text in zip(old, asked)]
    recent = [{**item, "started": 9000.0} for item in near[30:60]]
    mix = load_mix(build(tmp_path, [*old, *again, *recent], half_life_days=0.001))
    assert {c.messages[0].text.lower().rstrip("!") for c in mix} == set(asked[:60])


def test_a_log_without_times_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = build(tmp_path, [line(i, domain="a") for i in range(90)], half_life_days=1)
    assert len(load_mix(folder)) == 90 and load_manifest(folder)["without_time"] == 90
    assert "mix.half_life_days: 90 of 90 conversations have no time; they weigh 1" in capsys.readouterr().err


def test_an_evaluation_set_stays_out_of_train(tmp_path: Path) -> None:
    lines = [line(i, domain="a") for i in range(120)]
    trained = [c.messages[-1].text for c in load_mix(build(tmp_path, lines, "free")) if c.split == "train"][:5]
    asked = [*trained[:3], *(text + " now" for text in trained[3:]), "nothing like it at all"]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in asked))
    folder = build(tmp_path, lines, contamination=["eval.jsonl"])
    manifest = load_manifest(folder)
    assert not {c.messages[-1].text for c in load_mix(folder)} & set(trained)
    assert manifest["left_out"]["near an evaluation set"] == 5 and manifest["contamination"]["near_conversations"] == {
        "eval.jsonl": 5
    }
    assert Counter(load_log(folder).column("fate").to_pylist())["near an evaluation set"] == 5
    held = next(c.messages[-1].text for c in load_mix(folder) if c.split == "holdout")
    (tmp_path / "eval.jsonl").write_text(json.dumps({"prompt": held}) + "\n")
    report = load_manifest(build(tmp_path, lines, "held", contamination=["eval.jsonl"]))["contamination"]
    assert report["near_evaluation_sets"] == {"eval.jsonl": 1} and report["near_conversations"] == {"eval.jsonl": 1}
    assert report["near_train"] == report["near_ancestors_train"] == 0 < report["holdout_clusters"]
