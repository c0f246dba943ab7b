"""A mix with a share of what an earlier one trained on: so that a draft learns the new without losing the old."""

import math
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from .. import fingerprint, storage
from .conversation import Conversation, turns
from .dedup import asked_elsewhere, asking, turn_keys
from .mix import CONVERSATIONS, MANIFEST, load_manifest, load_mix
from .split import unit

BLEND = "blend"
_ELSEWHERE = "asked_elsewhere"


def to_add(mix: Path, old: Path, share: float, salt: str) -> list[str]:
    """Ids of the old mix's training conversations to add so that at least `share` of all training ones are old ones.

    Those that the new mix has anyway count. None is taken whose cluster it holds out or selects on, none that asks a
    turn which counts there, and none whose every turn it trains on, itself or by those taken before. Fewer where there
    are no more.
    """
    new = load_mix(mix)
    trained = [one for one in load_mix(old) if one.split == "train"]
    mine = {one.id for one in new if one.split == "train"}
    judging = {one.cluster for one in new if one.split != "train"}
    here = {one.id for one in new}
    shared = sum(one.id in mine for one in trained)
    wanted = math.ceil((share * len(mine) - shared) / (1 - share) - 1e-9)
    judged = {key for one in new if one.split != "train" for key in _counting(one)}
    taught = {key for one in new if one.split == "train" for key in turn_keys(one)}
    left = [one for one in trained if one.id not in here and one.cluster not in judging]
    added: list[str] = []
    for one in sorted(left, key=lambda one: (unit("blend", salt, one.id), one.id)):
        if len(added) >= wanted:
            break
        keys = turn_keys(one)
        if judged.isdisjoint(keys) and not taught.issuperset(keys):
            added.append(one.id)
            taught.update(keys)
    return added


def _counting(conversation: Conversation) -> list[int]:
    """Keys of the turns that count."""
    keys = turn_keys(conversation)
    return [keys[turn.index] for turn in turns(conversation) if turn.counts]


def blend(mix: Path, old: Path, added: list[str], made_of: dict[str, Any], folder: Path) -> None:
    """Write the mix with the added conversations of the old one to `folder`. `made_of` goes into its manifest.

    Of their turns, those that the mix trains on count there, the others in the first of them as they were taken.
    """
    manifest = load_manifest(mix)
    new, rest = (pq.read_table(place / CONVERSATIONS) for place in (mix, old))
    rest = rest.filter(pc.is_in(rest["id"], pa.array(added, pa.string())))
    elsewhere = _elsewhere(mix, old, added)
    places = pa.array([elsewhere[id] for id in rest["id"].to_pylist()], pa.list_(pa.int32()))
    rest = rest.select([name for name in new.column_names if name in rest.column_names and name != _ELSEWHERE])
    table = pa.concat_tables([new, rest.append_column(_ELSEWHERE, places)], promote_options="default")
    train: dict[str, int] = dict(manifest["conversations"]["train"])
    for domain in rest["domain"].to_pylist():
        train[domain] = train.get(domain, 0) + 1
    with storage.new_folder(folder) as beside:
        for path in mix.iterdir():
            if path.is_file() and path.name not in (CONVERSATIONS, MANIFEST):
                shutil.copyfile(path, beside / path.name)
        pq.write_table(table.sort_by("id"), beside / CONVERSATIONS, compression="zstd")
        manifest["conversations"]["train"] = dict(sorted(train.items()))
        manifest["files"][CONVERSATIONS] = fingerprint.of_file(beside / CONVERSATIONS)
        storage.write_json(beside / MANIFEST, manifest | {BLEND: made_of | {"added": len(added)}})


def _elsewhere(mix: Path, old: Path, added: list[str]) -> dict[str, list[int]]:
    """Turns of each added conversation that do not count, by its id."""
    trained = [one for one in load_mix(mix) if one.split == "train"]
    by_id = {one.id: one for one in load_mix(old)}
    every = [*trained, *(by_id[name] for name in added)]
    places = asked_elsewhere([asking("train", one) for one in every], [])
    return dict(zip(added, places[len(trained) :]))


def base_of(mix: Path) -> str | None:
    """Fingerprint of the mix that a blend was made of; None: it is no blend."""
    found = load_manifest(mix).get(BLEND)
    return str(found["of"]) if isinstance(found, dict) and "of" in found else None
