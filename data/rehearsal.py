"""Rehearsal (replay of old data): blends train conversations of an earlier mix into a new one, so that a draft learns
the new data without losing the old."""

import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from .. import fingerprint, storage
from .conversation import Conversation, turns
from .dedup import asked_elsewhere, asking, turn_keys
from .mix import CONVERSATIONS, MANIFEST, ORIGINS, SERVED, load_manifest, load_mix
from .split import unit

BLEND = "blend"
_ELSEWHERE = "asked_elsewhere"


def conversations_to_add(mix: Path, old: Path, share: float, salt: str) -> list[str]:
    """Choose train conversations of the old mix so that at least `share` of all train conversations are old; their ids.

    Old conversations that the new mix trains on anyway count as old. Left out are those whose cluster is in the new
    selection or holdout, those that ask a turn which counts there, and those whose every turn is trained on already.
    Returns fewer where there are no more.
    """
    new = load_mix(mix)
    old_train = [one for one in load_mix(old) if one.split == "train"]
    new_train, judging = list[Conversation](), list[Conversation]()
    for conversation in new:
        (new_train if conversation.split == "train" else judging).append(conversation)

    # 1) How many are missing, counting the old ones that the new mix trains on anyway.
    ids = {one.id for one in new_train}
    shared = sum(one.id in ids for one in old_train)
    wanted = math.ceil((share * len(ids) - shared) / (1 - share) - 1e-9)

    # 2) Candidates: unknown to the new mix, and of no cluster that judges.
    known, judging_clusters = {one.id for one in new}, {one.cluster for one in judging}
    candidates = [one for one in old_train if one.id not in known and one.cluster not in judging_clusters]

    # 3) In the order of a hash, take those that teach a turn which is new and judges nowhere.
    judging_keys = {key for one in judging for key in _counting_keys(one)}
    taught_keys = {key for one in new_train for key in turn_keys(one)}
    added: list[str] = []
    for one in sorted(candidates, key=lambda one: (unit("blend", salt, one.id), one.id)):
        if len(added) >= wanted:
            break
        keys = turn_keys(one)
        if judging_keys.isdisjoint(keys) and not taught_keys.issuperset(keys):
            added.append(one.id)
            taught_keys.update(keys)
    return added


def _counting_keys(conversation: Conversation) -> list[int]:
    """Keys of a conversation's turns that count."""
    keys = turn_keys(conversation)
    return [keys[turn.index] for turn in turns(conversation) if turn.counts]


def blend(mix: Path, old: Path, added: list[str], made_of: dict[str, Any], folder: Path) -> None:
    """Write the mix with the `added` conversations of the old one to `folder`. `made_of` goes into its manifest.

    A turn that several of them ask counts once: in the mix's own train conversation, else in the first one added.
    """
    manifest = load_manifest(mix)

    # 1) The old conversations' rows, with the turns that do not count in this mix.
    new, rows = pq.read_table(mix / CONVERSATIONS), _rows_of(added, old / CONVERSATIONS)
    elsewhere = _turns_asked_elsewhere(mix, old, added)
    turns_elsewhere = pa.array([elsewhere[id] for id in rows["id"].to_pylist()], pa.list_(pa.int32()))
    rows = rows.drop_columns(_ELSEWHERE).append_column(_ELSEWHERE, turns_elsewhere)
    conversations = pa.concat_tables([new, rows.select(new.column_names)], promote_options="default")
    origins = pa.concat_tables([pq.read_table(mix / ORIGINS), _rows_of(added, old / ORIGINS)])

    # 2) The counts of train: conversations by domain, and turns.
    train: dict[str, int] = dict(manifest["conversations"]["train"])
    for domain in rows["domain"].to_pylist():
        train[domain] = train.get(domain, 0) + 1
    manifest["turns"]["train"] += sum(turn.counts for one in _teaching(old, elsewhere) for turn in turns(one))

    # 3) Prompts that the logs of both show as served. A key stands for the same ones in any mix.
    tables = {CONVERSATIONS: conversations.sort_by("id"), ORIGINS: origins.sort_by("id")}
    served = [pq.read_table(path) for path in (mix / SERVED, old / SERVED) if path.is_file()]
    if served:
        others = [table.filter(pc.invert(pc.is_in(table["log"], served[0]["log"]))) for table in served[1:]]
        tables[SERVED] = pa.concat_tables([served[0], *others])

    # 4) The folder: all other files of the mix as they are.
    with storage.new_folder(folder) as blended:
        for path in mix.iterdir():
            if path.is_file() and path.name not in (*tables, MANIFEST):
                shutil.copyfile(path, blended / path.name)
        for name, table in tables.items():
            pq.write_table(table, blended / name, compression="zstd")
            manifest["files"][name] = fingerprint.of_file(blended / name)
        manifest["conversations"]["train"] = dict(sorted(train.items()))
        storage.write_json(blended / MANIFEST, manifest | {BLEND: made_of | {"added": len(added)}})


def _teaching(old: Path, elsewhere: Mapping[str, list[int]]) -> Iterator[Conversation]:
    """Conversations of the old mix that were added, with the turns that do not count in the blend."""
    for one in load_mix(old):
        if one.id in elsewhere:
            yield one.model_copy(update={"asked_elsewhere": elsewhere[one.id]})


def _rows_of(ids: list[str], path: Path) -> pa.Table:
    """Rows of a table that have one of some ids."""
    table = pq.read_table(path)
    return table.filter(pc.is_in(table["id"], pa.array(ids, pa.string())))


def _turns_asked_elsewhere(mix: Path, old: Path, added: list[str]) -> dict[str, list[int]]:
    """List the turns of each added conversation that do not count in the blend, by id."""
    trained = [one for one in load_mix(mix) if one.split == "train"]
    by_id = {one.id: one for one in load_mix(old)}
    asked = [asking("train", one) for one in [*trained, *(by_id[id] for id in added)]]
    return dict(zip(added, asked_elsewhere(asked, [])[len(trained) :]))


def base_of(mix: Path) -> str | None:
    """Fingerprint of the new mix that a blend was made of; None: the mix is no blend."""
    found = load_manifest(mix).get(BLEND)
    return str(found["of"]) if isinstance(found, dict) and "of" in found else None
