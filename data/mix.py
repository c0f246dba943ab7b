"""The mix: from sources to de-duplicated, redacted, balanced and split conversations, in one folder.

    conversations.parquet   what the target is asked, nested values as JSON text
    members.parquet         signatures, turns and placements of these, their parts and every ancestor's; no text
    log.parquet             labels of every record that was read, and what became of it; no text
    clusters.parquet        centres of the domains that clustering named, where it named any
    manifest.json           counts, what was left out and redacted, digests of sources and files

The same settings, sources and ancestors give the same bytes. Texts wait on disk: memory holds about two kilobytes of
a conversation, and seven more of each that resembles another.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from .. import fingerprint, progress, storage
from ..errors import CorruptDataError, MissingFileError, named
from . import clusters
from .concurrency import in_flight_told
from .contamination import holdout_report, near_any, read_evaluation_sets, turn_report
from .conversation import SPLITS, Conversation, Split
from .dedup import NO_TURNS, SIGNATURE_LENGTH, Member, PlacedMember, Placement, asked_elsewhere, place, turn_keys
from .ingest import Gathered, Spool, gather, sampling_of, strictest
from .settings import MixSettings
from .sources import SamplePrompts, input_digests, name_of
from .split import require_every_split, split_of
from .stratify import KEYS, SOURCE, Column, Margin, half_lives, keep, largest_size, raked

FORMAT = 2
CONVERSATIONS, MEMBERS, LOG, MANIFEST = "conversations.parquet", "members.parquet", "log.parquet", "manifest.json"
COPIES = ("exact_copies", "continued", "near_copies")
"""Records that other ones stand for."""
LEFT_OUT = (*COPIES, "contaminated", "over_share")
FATES = (*SPLITS, *LEFT_OUT)
"""What becomes of a record."""
_CONVERSATION_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("domain", pa.string()),
        ("cluster", pa.string()),
        ("split", pa.string()),
        ("messages", pa.string()),
        ("tools", pa.string()),
        ("template_args", pa.string()),
        ("sampling", pa.string()),
        ("max_new_tokens", pa.int64()),
        ("asked_elsewhere", pa.list_(pa.int32())),
    ]
)
_MEMBER_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("group", pa.string()),
        ("cluster", pa.string()),
        ("split", pa.string()),
        ("signature", pa.binary(4 * SIGNATURE_LENGTH)),
        ("turn_keys", pa.list_(pa.uint64())),
    ]
)
_NESTED = ("messages", "tools", "template_args", "sampling")
_ROWS_AT_ONCE = 4096
_SYSTEM_STRATA = 64  # system prompts that keep their own shares; the rarer ones share one


def build_mix(
    settings: MixSettings,
    base_dir: Path,
    folder: Path,
    sample_prompts: SamplePrompts | None = None,
    ancestors: Sequence[Path] = (),
) -> None:
    """Build the mix and write it to `folder`, which appears only once it is complete.

    Paths of the settings are relative to `base_dir`. `ancestors` are mix folders beside those that the settings name.
    """
    digests = input_digests(settings, base_dir)
    earlier = [*(base_dir / name for name in settings.ancestors), *ancestors]
    for i, path in enumerate(earlier[: len(settings.ancestors)]):
        with named(f"mix.ancestors[{i}]"):
            check_members(path)
    known = load_members(earlier)
    with Spool(folder.parent) as spool:
        gathered = gather(settings, base_dir, sample_prompts, spool)
        found = _name_clusters(gathered, settings, earlier)
        mix = _Mix(settings, base_dir, gathered, known)
        with storage.new_folder(folder) as new:
            mix.write(new)
            if found is not None:
                clusters.write(found, new)
            manifest = {
                "format": FORMAT,
                "settings": settings.model_dump(mode="json"),
                "settings_fingerprint": fingerprint.of_json(settings.model_dump(mode="json")),
                "ancestors": sorted(storage.read_json(path / MANIFEST)["files"][CONVERSATIONS] for path in earlier),
                "sources": _sources_told(settings, digests, gathered),
                **mix.told(),
                "domain_clusters": None if found is None else found.told(),
                "files": {path.name: fingerprint.of_file(path) for path in sorted(new.iterdir())},
            }
            storage.write_json(new / MANIFEST, manifest)


def load_mix(folder: Path) -> list[Conversation]:
    """The conversations of a mix, in the order of their ids, after a check of the file's digest."""
    rows = _read_table(folder, CONVERSATIONS).to_pylist()
    for row in rows:
        for name in _NESTED:
            row[name] = None if row[name] is None else json.loads(row[name])
        row["asked_elsewhere"] = row.get("asked_elsewhere") or []  # older mixes have no such column
    return [Conversation.model_validate(row) for row in rows]


def load_log(folder: Path) -> pa.Table:
    """Labels and fates of every record that the mix was made of, after a check of the file's digest."""
    return _read_table(folder, LOG)


def load_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a mix folder. Raises MissingFileError or CorruptDataError."""
    if not folder.is_dir():
        raise MissingFileError(f"{folder}: no such mix folder")
    manifest = storage.read_json(folder / MANIFEST)
    if (
        not isinstance(manifest, dict)
        or manifest.get("format") != FORMAT
        or not isinstance(manifest.get("files"), dict)
    ):
        raise CorruptDataError(f"{folder / MANIFEST}: is not a mix manifest of format {FORMAT}")
    return manifest


def check_members(folder: Path) -> None:
    """Raise MissingFileError or CorruptDataError unless `load_members` can read this mix."""
    _checked(folder, MEMBERS)


def load_members(folders: Iterable[Path]) -> list[PlacedMember]:
    """Placements that earlier mixes hold, their own and those they carry on, each once; in an order of their own."""
    known: dict[tuple[str, str, str, str], PlacedMember] = {}
    for row in (row for folder in folders for row in _rows_of_members(folder)):
        signature = np.frombuffer(row["signature"], dtype="<u4").astype(np.uint32)
        keys = row["turn_keys"]
        member = Member(row["id"], row["group"], signature, NO_TURNS if not keys else np.array(keys, dtype=np.uint64))
        placement = (row["id"], row["cluster"], row["split"], row["group"] or "")
        if keys or placement not in known:
            known[placement] = PlacedMember(member, row["cluster"], row["split"])
    return [known[placement] for placement in sorted(known)]


def _rows_of_members(folder: Path) -> list[dict[str, Any]]:
    """Older mixes keep no turns of their members: those of their own conversations are found in their texts."""
    table = _read_table(folder, MEMBERS)
    rows: list[dict[str, Any]] = table.to_pylist()
    if "turn_keys" in table.column_names:
        return rows
    keys_of = {one.id: turn_keys(one) for one in load_mix(folder)} if (folder / CONVERSATIONS).is_file() else {}
    return [row | {"turn_keys": keys_of.get(row["id"])} for row in rows]


def _name_clusters(gathered: Gathered, settings: MixSettings, earlier: Sequence[Path]) -> clusters.Clusters | None:
    """Give every record that nothing names the domain of its cluster."""
    count, domains = settings.domains.clusters, gathered.log.column("domain")
    if count is None or "" not in domains.names:
        return None
    nameless_rows = np.flatnonzero(domains.codes_N == domains.names.index(""))
    numbers = sorted(set(gathered.number_at_row[nameless_rows].tolist()), key=gathered.ids.__getitem__)
    found = clusters.read_first(earlier, count)
    if found is None:  # ids are hashes: the first of them are an even sample
        found = clusters.fit([gathered.record(n).user_text for n in numbers[: clusters.MOST_FITTED]], count)
    texts = (gathered.record(n).user_text for n in progress.track(numbers, "clusters", unit="conversations"))
    name_of_number = dict(zip(numbers, clusters.assign(found, texts)))
    for row in nameless_rows.tolist():
        gathered.log.rename(row, name_of_number[int(gathered.number_at_row[row])])
    return found


class _Mix:
    """What becomes of every record, and the files that say so."""

    def __init__(
        self, settings: MixSettings, base_dir: Path, gathered: Gathered, known: Sequence[PlacedMember]
    ) -> None:
        self._settings, self._gathered, self._known = settings, gathered, known
        ids = gathered.ids
        self._continued = gathered.continued()
        placed = place(gathered.members(), known, settings.near_threshold, self._continued)
        splits = self._splits(placed)
        near_sets = self._near_sets(base_dir, placed)
        near = set().union(*near_sets.values())
        barred = {id for id in near if splits[id] == "train"}
        self._numbers = sorted(range(len(ids)), key=ids.__getitem__)
        able = [n for n in self._numbers if self._stands(placed, ids[n]) == ids[n] and ids[n] not in barred]
        kept_N = self._chosen(able, [ids[n] for n in able], self._latest(placed))
        self.kept = [n for n, kept in zip(able, kept_N.tolist()) if kept]
        members = list(gathered.members())
        self.placements = {ids[n]: PlacedMember(members[n], placed[ids[n]].cluster, splits[ids[n]]) for n in self.kept}
        self._seen = {  # with the parts of those that stay: a later log may hold them alone
            id: PlacedMember(members[n], placed[id].cluster, splits[id])
            for n, id in enumerate(ids)
            if id in self.placements or (id in self._continued and self._stands(placed, id) in self.placements)
        }
        asking = [(item.split, item.member.turn_keys) for item in self.placements.values()]
        before = [(item.split, item.member.turn_keys) for item in known]
        self._elsewhere = dict(zip(self.placements, asked_elsewhere(asking, before)))
        stay = self.placements.values()
        require_every_split([item.split for item in stay], [item.cluster for item in stay], settings)
        self._fates = self._fates_of(placed, barred)
        self._near_sets_told = {name: len(found) for name, found in near_sets.items()}
        self._report = holdout_report(self._seen, known, near_sets, settings.near_threshold)
        self._report |= turn_report(self.placements, self._elsewhere, known)

    def _stands(self, placed: Mapping[str, Placement], id: str) -> str:
        """The conversation that stands for this one: the longest that goes on from it, or what that is a copy of."""
        whole = self._continued.get(id, id)
        return placed[whole].copy_of or whole

    def _splits(self, placed: Mapping[str, Placement]) -> dict[str, Split]:
        bound: dict[str, Split] = {}
        for id, split in self._gathered.bound.items():
            cluster = placed[id].cluster
            bound[cluster] = strictest([split, bound.get(cluster, split)])
        return {
            id: item.split or bound.get(item.cluster) or split_of(item.cluster, self._settings)
            for id, item in placed.items()
        }

    def _near_sets(self, base_dir: Path, placed: Mapping[str, Placement]) -> dict[str, set[str]]:
        """Contents that are near each evaluation set, or go on from one that is."""
        found: dict[str, set[str]] = {}
        for one in read_evaluation_sets(self._settings, base_dir):
            distinct = [member for member in self._gathered.members() if placed[member.id].copy_of is None]
            title = f"near {one.name}"
            near = near_any(distinct, one.signatures, self._settings.near_threshold, title)
            found[one.name] = {self._stands(placed, id) for id in near}
        return found

    def _latest(self, placed: Mapping[str, Placement]) -> NDArray[np.float64]:
        """When each content was last asked, also as a near-copy or as a part of it; nan: not known."""
        gathered = self._gathered
        latest = np.full(len(gathered.ids), np.nan)
        np.fmax.at(latest, gathered.number_at_row, np.array(gathered.log.started))
        number_of = {id: number for number, id in enumerate(gathered.ids)}
        for id, number in number_of.items():
            original = number_of[self._stands(placed, id)]
            latest[original] = np.fmax(latest[original], latest[number])
        return latest

    def _chosen(self, numbers: Sequence[int], ids: Sequence[str], latest: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Which contents stay when the mix has its size and its shares."""
        settings, log = self._settings, self._gathered.log
        rows = self._gathered.rows[numbers]
        columns: dict[str, Column] = {key: log.column(key, rows) for key in (SOURCE, *KEYS)}
        weight_N = np.ones(len(ids))
        if settings.half_life_days is not None:
            started_N = latest[numbers]
            weight_N = half_lives(started_N, settings.half_life_days)
            timeless = int(np.isnan(started_N).sum())
            if timeless:
                progress.say(f"mix.half_life_days: {timeless} of {len(ids)} conversations have no time; they weigh 1")
        by_source = {str(i): source.weight for i, source in enumerate(settings.sources) if source.weight is not None}
        margins = [Margin("sources", columns[SOURCE], by_source)] if by_source else []
        margins += [Margin(f"weights.{key}", columns[key], shares) for key, shares in settings.weights.items()]
        if margins:
            weight_N = raked(weight_N, margins)
        first = [*([SOURCE] if by_source else []), *settings.weights]  # nested first: their shares are met best
        rest = [key for key in KEYS if key not in first]
        nested = [columns[key] for key in first]
        nested += [columns[key].lumped(_SYSTEM_STRATA) if key == "system" else columns[key] for key in rest]
        size = largest_size(weight_N)
        return keep(ids, weight_N, nested, min(size, settings.limit or size), settings.salt)

    def _fates_of(self, placed: Mapping[str, Placement], barred: set[str]) -> NDArray[np.int8]:
        """The place in FATES of every row of the log."""
        fate_of = {name: place for place, name in enumerate(FATES)}
        fates = np.full(len(self._gathered.log), fate_of["exact_copies"], dtype=np.int8)
        for id, row in zip(self._gathered.ids, self._gathered.rows.tolist()):
            if id in self.placements:
                fates[row] = fate_of[self.placements[id].split]
            elif id in self._continued:
                fates[row] = fate_of["continued"]
            elif placed[id].copy_of is not None:
                fates[row] = fate_of["near_copies"]
            else:
                fates[row] = fate_of["contaminated" if id in barred else "over_share"]
        return fates

    def write(self, folder: Path) -> None:
        """The tables."""
        tracked = progress.track(self.kept, "writing", unit="conversations")
        _write_table(folder / CONVERSATIONS, (_row(self._conversation(n)) for n in tracked), _CONVERSATION_SCHEMA)
        _write_table(folder / MEMBERS, _member_rows(self._seen, self._known), _MEMBER_SCHEMA)
        log = self._gathered.log
        columns = {name: log.column(name) for name in (*KEYS, SOURCE, "day")}
        table = {
            **{
                name: pa.DictionaryArray.from_arrays(c.codes_N.astype(np.int32), c.names) for name, c in columns.items()
            },
            "prompt_tokens": np.array(log.prompt_tokens),
            "answer_tokens": np.array(log.answer_tokens),
            "counted": np.array(log.counted, dtype=np.bool_),
            "fate": pa.DictionaryArray.from_arrays(self._fates, list(FATES)),
        }
        pq.write_table(pa.table(table), folder / LOG, compression="zstd")

    def _conversation(self, number: int) -> Conversation:
        record = self._gathered.record(number)
        item = self.placements[record.id]
        sampling, max_new_tokens = sampling_of(record, self._settings)
        return Conversation(
            id=record.id,
            domain=record.domain or self._gathered.log.domain(int(self._gathered.rows[number])),
            messages=list(record.messages),
            tools=record.tools,
            template_args=dict(record.template_args or {}),
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            cluster=item.cluster,
            split=item.split,
            asked_elsewhere=self._elsewhere[record.id],
        )

    def told(self) -> dict[str, Any]:
        """Counts for the manifest."""
        log = self._gathered.log
        fates = Counter(FATES[fate] for fate in self._fates.tolist())
        domains = log.column("domain", self._gathered.rows[self.kept])
        counts: dict[Split, Counter[str]] = {split: Counter() for split in SPLITS}
        held: dict[Split, set[str]] = {split: set() for split in SPLITS}
        for item, code in zip(self.placements.values(), domains.codes_N.tolist()):
            counts[item.split][domains.names[code]] += 1
            held[item.split].add(item.cluster)
        return {
            "redacted": dict(sorted(self._gathered.redacted.items())),
            "left_out": {name: fates[name] for name in LEFT_OUT},
            "conversations": {split: dict(sorted(counts[split].items())) for split in SPLITS},
            "clusters": {split: len(held[split]) for split in SPLITS},
            "contamination": {**self._report, "near_conversations": self._near_sets_told},
            "system_characters": {
                name: log.system_characters[name]
                for name in log.column("system").lumped(_SYSTEM_STRATA).names
                if name in log.system_characters
            },
            "in_flight": in_flight_told(self._gathered.traffic, self._settings),
            "without_time": int(np.isnan(np.array(log.started)).sum()),
        }


def _sources_told(settings: MixSettings, digests: Mapping[str, str], gathered: Gathered) -> list[dict[str, Any]]:
    return [
        {"kind": source.kind, "name": name_of(source), "digest": digests[f"sources[{i}]"], **vars(gathered.sources[i])}
        for i, source in enumerate(settings.sources)
    ]


def _row(conversation: Conversation) -> dict[str, Any]:
    row = conversation.model_dump(mode="json")
    row["asked_elsewhere"] = conversation.asked_elsewhere
    row["messages"] = [message.model_dump(exclude_none=True) for message in conversation.messages]
    for name in _NESTED:
        row[name] = None if row[name] is None else json.dumps(row[name], ensure_ascii=False)
    return row


def _member_rows(seen: Mapping[str, PlacedMember], known: Sequence[PlacedMember]) -> Iterator[dict[str, Any]]:
    """This mix's members and the inherited ones; a conversation in both stands once, as it is placed now."""
    rest = [item for item in known if item.member.id not in seen]
    for item in sorted([*seen.values(), *rest], key=lambda item: (item.member.id, item.cluster, item.split)):
        placement = {"cluster": item.cluster, "split": item.split}
        signature, keys = item.member.signature.astype("<u4").tobytes(), item.member.turn_keys.tolist()
        yield {**item.member._asdict(), **placement, "signature": signature, "turn_keys": keys}


def _write_table(path: Path, rows: Iterator[Mapping[str, Any]], schema: pa.Schema) -> None:
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        while batch := list(islice(rows, _ROWS_AT_ONCE)):
            writer.write_table(pa.Table.from_pylist(batch, schema=schema))


def _read_table(folder: Path, name: str) -> pa.Table:
    return pq.read_table(_checked(folder, name))


def _checked(folder: Path, name: str) -> Path:
    """A file of a mix, its digest compared."""
    recorded = load_manifest(folder)["files"].get(name)
    path = folder / name
    if fingerprint.of_file(path) != recorded:
        raise CorruptDataError(f"{path}: its content does not match the digest in {MANIFEST}; build the mix again")
    return path
