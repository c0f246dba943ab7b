"""A mix with a share of what an earlier one trained on: so that a draft learns the new without losing the old."""

import math
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from .. import fingerprint, storage
from .mix import CONVERSATIONS, MANIFEST, load_manifest, load_mix
from .split import unit

BLEND = "blend"


def to_add(mix: Path, old: Path, share: float, salt: str) -> list[str]:
    """Ids of the old mix's training conversations to add so that at least `share` of all training ones are old ones.

    Those that the new mix has anyway count; none is taken whose cluster it holds out or selects on. Fewer where there
    are no more.
    """
    new = load_mix(mix)
    trained = [one for one in load_mix(old) if one.split == "train"]
    mine = {one.id for one in new if one.split == "train"}
    judging = {one.cluster for one in new if one.split != "train"}
    here = {one.id for one in new}
    shared = sum(one.id in mine for one in trained)
    wanted = math.ceil((share * len(mine) - shared) / (1 - share) - 1e-9)
    left = [one.id for one in trained if one.id not in here and one.cluster not in judging]
    return sorted(left, key=lambda name: (unit("blend", salt, name), name))[: max(0, wanted)]


def blend(mix: Path, old: Path, added: list[str], made_of: dict[str, Any], folder: Path) -> None:
    """Write the mix with the added conversations of the old one to `folder`. `made_of` goes into its manifest."""
    manifest = load_manifest(mix)
    new, rest = (pq.read_table(place / CONVERSATIONS) for place in (mix, old))
    rest = rest.filter(pc.is_in(rest["id"], pa.array(added, pa.string())))
    table = pa.concat_tables(
        [new, rest.select([name for name in new.column_names if name in rest.column_names])], promote_options="default"
    )
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


def base_of(mix: Path) -> str | None:
    """Fingerprint of the mix that a blend was made of; None: it is no blend."""
    found = load_manifest(mix).get(BLEND)
    return str(found["of"]) if isinstance(found, dict) and "of" in found else None
