"""Signatures, near-copies and clusters: what is alike is found, in any order, and what ancestors saw stays seen."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftforge.data.conversation import Split
from draftforge.data.dedup import (
    Member,
    PlacedMember,
    Placement,
    cluster_members,
    group_key,
    sharing_a_band,
    shingles,
    signature,
    similarity,
)

WORDS = [f"word{i}" for i in range(400)]


def text(seed: int, count: int = 60) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def near_copy(original: str, seed: int) -> str:
    words = original.split()
    words[random.Random(seed).randrange(len(words))] = "changed"
    return " ".join(words).upper() + "!"


def member(id: str, content: str, group: str | None = None) -> Member:
    return Member(id, group, signature(content))


def test_shingles_ignore_case_and_punctuation() -> None:
    assert shingles("Where is my order?") == {"where is my", "is my order"}
    assert shingles("Hi!") == {"hi"} and shingles("?!") == {"?!"}
    assert len(shingles("注文はどこですか")) == 6  # no spaces: characters count as words


def test_signatures_stay_comparable() -> None:
    """Members of old mixes hold these numbers: they must never change."""
    assert signature("Where is my order BW-1? It was due on Monday.")[:4].tolist() == [
        410553164,
        10334716,
        151533285,
        242339505,
    ]
    assert signature("x").dtype == np.uint32


@pytest.mark.parametrize("changed", [2, 10, 30])
def test_similarity_estimates_jaccard(changed: int) -> None:
    left, words = text(1, 300), text(1, 300).split()
    words[:changed] = text(2, changed).split()
    right = " ".join(words)
    exact = len(shingles(left) & shingles(right)) / len(shingles(left) | shingles(right))
    assert similarity(signature(left), signature(right)) == pytest.approx(exact, abs=0.12)


def test_near_copies_are_found_and_one_is_kept() -> None:
    contents = {f"{i:02d}": text(i) for i in range(20)}
    copies = {f"{i:02d}-copy": near_copy(contents[f"{i:02d}"], i) for i in range(20)}
    placed = cluster_members([member(id, c) for id, c in (contents | copies).items()], [], 0.8)
    assert all(placed[id].copy_of is None for id in contents)
    assert {id: placed[id].copy_of for id in copies} == {f"{id}-copy": id for id in contents}
    assert len({placement.cluster for placement in placed.values()}) == 20


def test_many_equal_texts_are_one_cluster() -> None:
    placed = cluster_members([member(f"{i:04d}", "hello there") for i in range(500)], [], 0.8)
    assert sum(placement.copy_of is None for placement in placed.values()) == 1


def test_groups_join_clusters_without_dropping() -> None:
    placed = cluster_members([member("a", text(1), "g"), member("b", text(2), "g"), member("c", text(3))], [], 0.8)
    assert placed["a"] == placed["b"] == Placement("g", None, None)
    assert placed["c"] == Placement("c", None, None)
    assert group_key("a", "b") != group_key("ab", "")


MEMBERS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 3), st.sampled_from([None, "g1", "g2", "g3"])), max_size=20, unique=True
)


def built(rows: list[tuple[int, int, str | None]]) -> list[Member]:
    """Members whose content is one of ten texts or a near-copy of it."""
    contents = [text(base) if copy == 0 else near_copy(text(base), copy) for base, copy, _ in rows]
    return [member(f"{base}.{copy}.{group}", content, group) for content, (base, copy, group) in zip(contents, rows)]


@settings(max_examples=20)
@given(MEMBERS, st.randoms(use_true_random=False))
def test_order_changes_nothing(rows: list[tuple[int, int, str | None]], rng: random.Random) -> None:
    members = built(rows)
    shuffled = rng.sample(members, len(members))
    assert cluster_members(members, [], 0.8) == cluster_members(shuffled, [], 0.8)


@settings(max_examples=20)
@given(MEMBERS)
def test_kept_members_differ_and_dropped_ones_resemble_a_kept_one(rows: list[tuple[int, int, str | None]]) -> None:
    members = {item.id: item for item in built(rows)}
    placed = cluster_members(members.values(), [], 0.8)
    kept = [id for id, placement in placed.items() if placement.copy_of is None]
    for id, placement in placed.items():
        alike = [k for k in kept if k != id and similarity(members[id].signature, members[k].signature) >= 0.8]
        assert bool(alike) == (placement.copy_of is not None)
        assert placement.copy_of in [None, *alike]
        assert all(placed[k].cluster == placement.cluster for k in alike if k < id)


@settings(max_examples=20)
@given(MEMBERS, MEMBERS, st.randoms(use_true_random=False))
def test_what_ancestors_trained_on_stays_in_train(
    old: list[tuple[int, int, str | None]], new: list[tuple[int, int, str | None]], rng: random.Random
) -> None:
    """However tomorrow's log extends, joins or re-sorts clusters: alike or same group as trained means train."""
    splits: tuple[Split, ...] = ("train", "selection", "holdout")
    earlier = cluster_members(built(old), [], 0.8)
    split_of = {cluster: rng.choice(splits) for cluster in sorted({p.cluster for p in earlier.values()})}
    known = [
        PlacedMember(item, earlier[item.id].cluster, split_of[earlier[item.id].cluster])
        for item in built(old)
        if earlier[item.id].copy_of is None
    ]
    today = built(new)
    placed = cluster_members(today, known, 0.8)
    for item in today:
        for past in known:
            tied = item.group is not None and item.group == past.member.group
            if tied or item.id == past.member.id or similarity(item.signature, past.member.signature) >= 0.8:
                split = placed[item.id].split
                assert split is not None and splits.index(split) <= splits.index(past.split)


def test_of_ancestors_that_disagree_on_a_cluster_the_one_that_trained_wins() -> None:
    known = [PlacedMember(member("a", text(1)), "k", "train"), PlacedMember(member("b", text(2)), "k", "holdout")]
    assert cluster_members([member("c", near_copy(text(2), 0))], known, 0.8)["c"] == Placement("k", "train", None)
    assert cluster_members([member("c", near_copy(text(2), 0))], known[1:], 0.8)["c"] == Placement("k", "holdout", None)


def test_without_ancestors_an_unrelated_record_moves_nothing() -> None:
    before = cluster_members([member(f"m{i}", text(i)) for i in range(10)], [], 0.8)
    after = cluster_members([member(f"m{i}", text(i)) for i in range(10)] + [member("a", text(99))], [], 0.8)
    assert {id: after[id] for id in before} == before


def test_who_shares_no_band_has_no_similar_one() -> None:
    """Whoever is left out of the index is similar to nobody; of unlike texts nearly all are left out."""
    contents = [text(i) for i in range(200)]
    contents += [near_copy(contents[i], i) for i in range(0, 200, 10)]
    signatures = [signature(content) for content in contents]
    meets = sharing_a_band(signatures, 0.8)
    for i, one in enumerate(signatures):
        similar = [j for j, other in enumerate(signatures) if j != i and similarity(one, other) >= 0.8]
        assert meets[i] or not similar
    assert meets[200:].all() and 40 <= meets.sum() < 60
    assert not sharing_a_band([], 0.8).any() and not sharing_a_band(signatures[:1], 0.8).any()
    assert sharing_a_band([signatures[0], signatures[0]], 0.8).all()
