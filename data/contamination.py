"""Contamination: keeps what is near evaluation sets out of train, and checks that the holdout is near no train data."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .. import progress
from ..errors import InputError, named
from .conversation import SPLITS
from .dedup import NO_TURNS, Member, PlacedMember, Signature, SimilarityIndex, TurnKeys, sharing_a_band, signature
from .prepared_records import redacted
from .prompts import source_of
from .redact import Redactor
from .settings import MixSettings
from .sources import read, seen


class EvaluationSet(NamedTuple):
    """The signatures of an evaluation set."""

    name: str
    signatures: list[Signature]


def read_evaluation_sets(settings: MixSettings, base_dir: Path) -> list[EvaluationSet]:
    """Read the evaluation sets of `mix.contamination`, redacted like the mix, so that equal texts stay equal.

    Raises InputError for one with rows that give no conversation: what is near them would enter train.
    """
    redactor = Redactor(settings.redact, settings.phone_countries)
    found: list[EvaluationSet] = []
    for i, name in enumerate(settings.contamination):
        with named(f"mix.contamination[{i}]"):
            records, counts = read(source_of(base_dir / name), Path(), 0)
            if counts.left_out:
                rule = "nothing is compared with rows that are left out; write them as `prompts` or `messages`"
                one = next(iter(counts.places.values()))[0][1]
                raise InputError(f"{base_dir / name}: {seen(counts)}, as at {one}: {rule}")
        found.append(EvaluationSet(name, [signature(redacted(record, redactor).user_text) for record in records]))
    return found


def near_any(members: Iterable[Member], signatures: Sequence[Signature], threshold: float, title: str) -> set[str]:
    """Ids of the members whose similarity to one of the signatures reaches the threshold."""
    # Only signatures that share a band can be found similar: the rest is neither indexed nor looked up.
    members = list(members)
    meets = sharing_a_band([*signatures, *(member.signature for member in members)], threshold)
    # Index the known signatures.
    index = SimilarityIndex(threshold, len(signatures))
    for number, known in enumerate(signatures):
        if meets[number]:
            index.add(number, known)
    # Look up the members.
    some = [member for member, may in zip(members, meets[len(signatures) :]) if may]
    return {
        member.id for member in progress.track(some, title, unit="conversations") if index.similar(member.signature)
    }


def holdout_report(
    placed: Mapping[str, PlacedMember],
    known: Sequence[PlacedMember],
    near_sets: Mapping[str, Collection[str]],
    threshold: float,
) -> dict[str, object]:
    """Count the holdout's clusters, and those near this mix's train, near an ancestor's train, or near evaluation sets.

    Both counts for train are 0 by construction: near conversations share a cluster, a cluster has one split, and an
    ancestor's split wins.
    """
    # The holdout against train here and train of earlier mixes.
    holdout = {id: item for id, item in placed.items() if item.split == "holdout"}
    members = [item.member for item in holdout.values()]
    trained = [item.member.signature for item in placed.values() if item.split == "train"]
    before = [item.member.signature for item in known if item.split == "train"]

    # Several conversations of one cluster count once.
    def clusters(ids: Iterable[str]) -> int:
        return len({holdout[id].cluster for id in ids if id in holdout})

    return {
        "holdout_clusters": clusters(holdout),
        "near_train": clusters(near_any(members, trained, threshold, "holdout against train")),
        "near_ancestors_train": clusters(near_any(members, before, threshold, "holdout against ancestors")),
        "near_evaluation_sets": {name: clusters(ids) for name, ids in near_sets.items()},
    }


def turn_report(
    placed: Mapping[str, PlacedMember], elsewhere: Mapping[str, Sequence[int]], known: Sequence[PlacedMember]
) -> dict[str, object]:
    """Count the holdout's turns, those of them that train or an ancestor's train asks in the very same context, and the
    turns of each split that do not count as they are asked elsewhere.

    Both counts for train are 0 by construction: a turn counts only in the split that saw most of it.
    """

    def keys_of(items: Iterable[PlacedMember]) -> TurnKeys:
        return np.concatenate([NO_TURNS, *(item.member.turn_keys for item in items)])

    # Turns of train, here and in earlier mixes.
    trained = keys_of(item for item in placed.values() if item.split == "train")
    before = keys_of(item for item in known if item.split == "train")

    # Turns of the holdout without those that another conversation asks.
    holdout = {id: item for id, item in placed.items() if item.split == "holdout"}
    counting = np.concatenate(
        [NO_TURNS, *(np.delete(item.member.turn_keys, elsewhere[id]) for id, item in holdout.items())]
    )

    # Turns that do not count, by split.
    left_out = Counter(dict.fromkeys(SPLITS, 0))
    for id, item in placed.items():
        left_out[item.split] += len(elsewhere[id])
    return {
        "holdout_turns": len(counting),
        "asked_in_train": int(np.isin(counting, trained).sum()),
        "asked_in_ancestors_train": int(np.isin(counting, before).sum()),
        "turns_asked_elsewhere": dict(left_out),
    }
