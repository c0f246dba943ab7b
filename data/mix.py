"""Mix building: from sources to a folder of redacted, de-duplicated, balanced and split conversations.

    conversations.parquet   what the target is asked, nested values as JSON text
    origins.parquet         file and line that each of these was read from, and whether it may be skipped
    members.parquet         signatures, turns and placements of these, their parts and every ancestor's; no text
    log.parquet             labels of every record that was read, and what became of it; no text
    served.parquet          hashes of the prompts that logs of SGLang show as served, where any does
    clusters.parquet        centres of the domains that clustering named, where it named any
    manifest.json           counts, what was left out and redacted, digests of sources and files

The same settings, sources and ancestors give the same bytes. Texts wait on disk: memory holds about two kilobytes of
a conversation, and six more of each that resembles another.
"""

import gc
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from .. import fingerprint, progress, storage
from ..errors import CorruptDataError, InputError, MissingFileError, named, one_line
from . import domain_clusters
from .concurrency import concurrency_record
from .contamination import holdout_report, near_any, read_evaluation_sets, turn_report
from .conversation import SPLITS, Conversation, Split
from .dedup import SIGNATURE_LENGTH, Member, PlacedMember, asked_elsewhere, cluster_members
from .ingest import IngestedRecords, Spool, ingest, strictest
from .record_outcomes import BROKEN, COPY, name_of
from .settings import MixSettings, TargetSource
from .sources import SamplePrompts, input_digests
from .split import require_every_split, split_of
from .stratify import KEYS, SOURCE, Column, Margin, choose, half_lives, largest_size, rake_weights
from .workers import Workers

FORMAT = 9
READING = 4
"""Version of what is made of a log: a mix of another one is made again, and may be an ancestor."""
CONVERSATIONS, ORIGINS, MEMBERS = "conversations.parquet", "origins.parquet", "members.parquet"
LOG, SERVED, MANIFEST = "log.parquet", "served.parquet", "manifest.json"
CONTINUED, NEAR_COPY = "continued by a longer one", "near-copy"
CONTAMINATED, OVER_SHARE = "near an evaluation set", "over the mix's shares or limit"
COPIES = (COPY, CONTINUED, NEAR_COPY)
"""Fates of records that another record stands for."""
LEFT_OUT = (*COPIES, CONTAMINATED, OVER_SHARE)
FATES = (*SPLITS, *LEFT_OUT)
"""The fates of a record: a split, or why it was left out."""
_MOST_NAMED = 5  # domains and sources without an answered turn, in a message
_CONVERSATION_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("domain", pa.string()),
        ("cluster", pa.string()),
        ("split", pa.string()),
        ("messages", pa.string()),
        ("tools", pa.string()),
        ("template_args", pa.string()),
        ("turn_by_turn", pa.bool_()),
        ("prompt_end", pa.string()),
        ("engine", pa.string()),
        ("sampling", pa.string()),
        ("max_new_tokens", pa.int64()),
        ("asked_elsewhere", pa.list_(pa.int32())),
        ("asked_at", pa.float64()),
        ("logged_prompts", pa.string()),
        ("server_sampling", pa.list_(pa.string())),
    ]
)
_ORIGIN_SCHEMA = pa.schema(
    [("id", pa.string()), ("where", pa.string()), ("skip_invalid", pa.bool_()), ("redacted", pa.string())]
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
_SERVED_SCHEMA = pa.schema([("log", pa.string()), ("prompt", pa.binary(16)), ("answered", pa.bool_())])
_NESTED = ("messages", "tools", "template_args", "sampling", "logged_prompts")
_encoded = json.JSONEncoder(ensure_ascii=False).encode  # `json.dumps` makes an encoder for each call
_ROWS_AT_ONCE = 4096
_SYSTEM_STRATA = 64  # system prompts that keep shares of their own; the rarer ones share one


def build_mix(
    settings: MixSettings,
    base_dir: Path,
    folder: Path,
    sample_prompts: SamplePrompts | None = None,
    ancestors: Sequence[Path] = (),
    processes: int | None = None,
) -> None:
    """Build the mix and write it to `folder`, which appears only once it is complete.

    Paths of the settings are relative to `base_dir`. `ancestors` are mix folders in addition to those that the settings
    name. `processes` read the log, None: one for each core; the mix is the same for any number of them.
    """
    # 1) Check what the mix depends on before anything is read.
    digests = input_digests(settings, base_dir)
    earlier = [*(base_dir / name for name in settings.ancestors), *ancestors]
    for i, path in enumerate(earlier[: len(settings.ancestors)]):
        with named(f"mix.ancestors[{i}]"):
            check_members(path)
    known = load_members(earlier)
    with Spool(folder.parent) as spool, ExitStack() as at_end:
        # 2) Read every source once: redacted, each content once in the spool.
        with Workers(settings, processes) as workers:
            records = ingest(settings, base_dir, sample_prompts, spool, workers)
        found = _name_domains(records, settings, earlier)

        # 3) Decide what becomes of every record. What was read stays: it is searched for garbage no more.
        gc.freeze()
        at_end.callback(gc.unfreeze)
        mix = _Mix(settings, base_dir, records, known)

        # 4) Write the folder, the manifest with the digests of all other files last.
        with storage.new_folder(folder) as new:
            mix.write_tables(new)
            if found is not None:
                domain_clusters.write(found, new)
            manifest = {
                "format": FORMAT,
                "settings": settings.model_dump(mode="json"),
                "settings_fingerprint": fingerprint.of_json(settings.model_dump(mode="json")),
                "ancestors": sorted(str(load_manifest(path)["files"].get(CONVERSATIONS)) for path in earlier),
                "sources": _source_records(settings, base_dir, digests, records),
                **mix.manifest_counts(),
                "domain_clusters": None if found is None else found.record(),
                "files": {path.name: fingerprint.of_file(path) for path in sorted(new.iterdir())},
            }
            storage.write_json(new / MANIFEST, manifest)


def load_mix(folder: Path) -> list[Conversation]:
    """Load the conversations of a mix, sorted by id, after a check of the files' digests."""
    rows = _read_table(folder, CONVERSATIONS).to_pylist()
    columns = ["id", "where", "skip_invalid"]
    origins = {row["id"]: row for row in _read_table(folder, ORIGINS).select(columns).to_pylist()}
    served: dict[str, dict[bytes, bool]] = {}
    if SERVED in load_manifest(folder)["files"]:
        for one in _read_table(folder, SERVED).to_pylist():
            served.setdefault(one["log"], {})[one["prompt"]] = one["answered"]
    for row in rows:
        row |= origins[row["id"]] | {"served_prompts": served or None}
        for name in _NESTED:
            row[name] = None if row[name] is None else json.loads(row[name])
    return [Conversation.model_validate(row) for row in rows]


def load_log(folder: Path) -> pa.Table:
    """Load the labels and fates of every record that the mix was made of, after a check of the file's digest."""
    return _read_table(folder, LOG)


def load_manifest(folder: Path) -> dict[str, Any]:
    """Load the manifest of a mix folder. Raises MissingFileError or CorruptDataError."""
    if not folder.is_dir():
        raise MissingFileError(f"{folder}: no such mix folder")
    path = folder / MANIFEST
    manifest = storage.read_json(path)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise CorruptDataError(f"{path}: is not a mix manifest")
    if manifest.get("format") != FORMAT:
        raise CorruptDataError(f"{path}: is of format {manifest.get('format')}; must be {FORMAT}: build the mix again")
    return manifest


def summary(manifest: Mapping[str, Any]) -> str:
    """Say in one line what was read, what it made, and what was left out for which reason."""
    conversations = sum(sum(domains.values()) for domains in manifest["conversations"].values())
    left_out = _told(manifest["left_out"])
    return (
        f"{manifest['read']} records read: {conversations} conversations with {sum(manifest['turns'].values())} turns"
        f"{'; left out: ' if left_out else ''}{left_out}"
    )


def check_unanswered(manifest: Mapping[str, Any], settings: MixSettings) -> None:
    """Raise InputError if a domain or a source ended without a turn to answer, and the recipe does not allow it."""
    found: Mapping[str, str] = manifest["unanswered"]
    refused = [name for name in found if name not in settings.may_be_unanswered]
    if refused:
        told = [f"{name!r} ({found[name]})" for name in refused[:_MOST_NAMED]]
        more = f" and {len(refused) - _MOST_NAMED} more" if len(refused) > _MOST_NAMED else ""
        raise InputError(
            f"mix: no turn is left to answer of {', '.join(told)}{more}; a domain or source that may end so must stand "
            "in mix.may_be_unanswered"
        )


def check_members(folder: Path) -> None:
    """Raise MissingFileError or CorruptDataError unless `load_members` can read this mix."""
    _checked(folder, MEMBERS)


def load_members(folders: Iterable[Path]) -> list[PlacedMember]:
    """Load the placed members of earlier mixes, their own and inherited ones; each once, sorted by content."""
    known: dict[tuple[str, str, str, str], PlacedMember] = {}
    for row in (row for folder in folders for row in _member_table(folder).to_pylist()):
        # The same placement may come from several ancestors: the first one stands.
        signature = np.frombuffer(row["signature"], dtype="<u4").astype(np.uint32)
        member = Member(row["id"], row["group"], signature, np.array(row["turn_keys"], dtype=np.uint64))
        placement = (row["id"], row["cluster"], row["split"], row["group"] or "")
        known.setdefault(placement, PlacedMember(member, row["cluster"], row["split"]))
    return [known[placement] for placement in sorted(known)]


def _member_table(folder: Path) -> pa.Table:
    """The table of an earlier mix's members. Raises CorruptDataError: the mix may be another's."""
    path, table = folder / MEMBERS, _read_table(folder, MEMBERS)
    if not table.schema.equals(_MEMBER_SCHEMA):
        raise CorruptDataError(f"{path}: its columns are not those of a mix's members")
    empty = [name for name in table.column_names if name != "group" and table[name].null_count]
    if empty or not {*table["split"].unique().to_pylist()} <= {*SPLITS}:
        raise CorruptDataError(f"{path}: {empty[0] if empty else 'split'}: has values that no member has")
    return table


def _name_domains(
    records: IngestedRecords, settings: MixSettings, earlier: Sequence[Path]
) -> domain_clusters.Clusters | None:
    """Name the domains of records without one by text clustering; None: no clusters are asked for or needed."""
    count, domains = settings.domains.clusters, records.log.column("domain")
    if count is None or "" not in domains.names:
        return None

    # The contents of all nameless rows; ids are hashes, so the first of them are an even sample.
    nameless_rows = np.flatnonzero(domains.codes_N == domains.names.index(""))
    numbers = sorted(set(records.number_at_row[nameless_rows].tolist()), key=records.ids.__getitem__)

    # An ancestor's centres are kept, so that the same name means the same domain.
    with_clusters = (path for path in earlier if domain_clusters.FILE in load_manifest(path)["files"])
    found = domain_clusters.read_first((_read_table(path, domain_clusters.FILE) for path in with_clusters), count)
    if found is None:
        found = domain_clusters.fit([records.user_text(n) for n in numbers[: domain_clusters.MOST_FITTED]], count)

    # Name each content's cluster, then every row of that content.
    texts = (records.user_text(n) for n in progress.track(numbers, "clusters", unit="conversations"))
    name_of_number = dict(zip(numbers, domain_clusters.assign(found, texts)))
    for row, number in zip(nameless_rows.tolist(), records.number_at_row[nameless_rows].tolist()):
        records.log.rename(row, name_of_number[number])
    return found


class _Mix:
    """Decisions on every record of a mix, and the tables that hold them.

    A content has a number (its index in `records.ids`) and an id (its hash).
    """

    def __init__(
        self, settings: MixSettings, base_dir: Path, records: IngestedRecords, known: Sequence[PlacedMember]
    ) -> None:
        self._settings, self._base_dir, self._records, self._known = settings, base_dir, records, known
        self._ids, self._members, self._rows = records.ids, list(records.members()), records.rows

        # 1) Cluster near-copies, groups and threads among themselves and with what earlier mixes placed.
        self._continued = records.continued()
        self._placed = cluster_members(self._members, known, settings.near_threshold, self._continued)

        # 2) Give every cluster a split: an ancestor's, a source's, or that of its hash.
        self._splits = self._split_clusters()

        # 3) What is near an evaluation set may not train.
        near_sets = self._near_evaluation_sets()
        self._contaminated = {id for id in set().union(*near_sets.values()) if self._splits[id] == "train"}

        # 4) Of originals, keep as many as size and shares allow.
        self._kept = self._choose()
        self._placements = {self._ids[n]: self._place(n) for n in self._kept}
        held = self._placements.values()
        require_every_split([item.split for item in held], [item.cluster for item in held], settings)

        # 5) A turn that several conversations ask in the same context counts in one of them.
        asking = [(item.split, item.member.turn_keys) for item in held]
        before = [(item.split, item.member.turn_keys) for item in known]
        self._elsewhere = dict(zip(self._placements, asked_elsewhere(asking, before)))
        times_N = np.array(records.log.started)
        self._newest = None if np.isnan(times_N).all() else float(np.nanmax(times_N))

        # 6) Later mixes must know the parts of what is kept too: a later log may hold them alone.
        self._seen = {
            id: self._placements.get(id) or self._place(n)
            for n, id in enumerate(self._ids)
            if id in self._placements or (id in self._continued and self._original(id) in self._placements)
        }

        # 7) Look again at what was promised of the holdout, and that no domain and no source went away unsaid.
        self._fates = self._fates_of_rows()
        self._unanswered = self._without_turns()
        for source in records.sources:
            self._unanswered |= dict.fromkeys(source.unanswered, "a conversation without a turn")
        check_unanswered({"unanswered": self._unanswered}, settings)
        self._contamination = {
            **holdout_report(self._seen, known, near_sets, settings.near_threshold),
            **turn_report(self._placements, self._elsewhere, known),
            "near_conversations": {name: len(ids) for name, ids in near_sets.items()},
        }

    def _place(self, number: int) -> PlacedMember:
        id = self._ids[number]
        return PlacedMember(self._members[number], self._placed[id].cluster, self._splits[id])

    def _original(self, id: str) -> str:
        """Id of the conversation that stands for this one: the longest that continues it, or the original of that."""
        whole = self._continued.get(id, id)
        return self._placed[whole].copy_of or whole

    def _split_clusters(self) -> dict[str, Split]:
        """The split of each content, by id. Where sources bind contents of one cluster, the strictest split holds."""
        # What sources prescribe for a content holds for its whole cluster.
        bound: dict[str, Split] = {}
        for id, split in self._records.bound.items():
            cluster = self._placed[id].cluster
            bound[cluster] = strictest([split, bound.get(cluster, split)])
        return {
            id: placement.split or bound.get(placement.cluster) or split_of(placement.cluster, self._settings)
            for id, placement in self._placed.items()
        }

    def _near_evaluation_sets(self) -> dict[str, set[str]]:
        """For each evaluation set, by name, the originals that are near it or continue a conversation that is."""
        # Near-copies need no look of their own: their original stands for them.
        found: dict[str, set[str]] = {}
        distinct = [member for member in self._members if self._placed[member.id].copy_of is None]
        for evaluation_set in read_evaluation_sets(self._settings, self._base_dir):
            title = f"near {evaluation_set.name}"
            near = near_any(distinct, evaluation_set.signatures, self._settings.near_threshold, title)
            found[evaluation_set.name] = {self._original(id) for id in near}
        return found

    def _choose(self) -> list[int]:
        """Choose the contents that stay so that the mix has its size and its shares; numbers sorted by id."""
        # Only originals that are not contaminated can stay.
        settings, ids = self._settings, self._ids
        numbers = [
            n
            for n in sorted(range(len(ids)), key=ids.__getitem__)
            if self._original(ids[n]) == ids[n] and ids[n] not in self._contaminated
        ]
        rows = self._rows[numbers]
        columns: dict[str, Column] = {key: self._records.log.column(key, rows) for key in (SOURCE, *KEYS)}

        # A weight for each: by age, then raked to the shares that the recipe names.
        weight_N = np.ones(len(numbers))
        if settings.half_life_days is not None:
            started_N = self._last_asked()[numbers]
            weight_N = half_lives(started_N, settings.half_life_days)
            timeless = int(np.isnan(started_N).sum())
            if timeless:
                progress.say(
                    f"mix.half_life_days: {timeless} of {len(numbers)} conversations have no time; they weigh 1"
                )
        by_source = {str(i): source.weight for i, source in enumerate(settings.sources) if source.weight is not None}
        margins = [Margin("sources", columns[SOURCE], by_source)] if by_source else []
        margins += [Margin(f"weights.{key}", columns[key], shares) for key, shares in settings.weights.items()]
        if margins:
            weight_N = rake_weights(weight_N, margins)

        # Strata nest the labels; those that come first meet their shares best.
        first = [*([SOURCE] if by_source else []), *settings.weights]
        nested = [columns[key] for key in first]
        nested += [
            columns[key].lumped(_SYSTEM_STRATA) if key == "system" else columns[key] for key in KEYS if key not in first
        ]
        # As many as leave no conversation wanted more than once, or the recipe's limit.
        size = largest_size(weight_N)
        total = min(size, settings.limit or size)
        kept_N = choose([ids[n] for n in numbers], weight_N, nested, total, settings.salt)
        return [n for n, kept in zip(numbers, kept_N.tolist()) if kept]

    def _last_asked(self) -> NDArray[np.float64]:
        """Unix seconds when each content was last asked, also as a near-copy or in part; nan: not known."""
        # The latest time of all rows of a content; `fmax` passes over nan.
        latest = np.full(len(self._ids), np.nan)
        np.fmax.at(latest, self._records.number_at_row, np.array(self._records.log.started))
        # What an original stands for counts as asked too.
        number_of = {id: number for number, id in enumerate(self._ids)}
        for id, number in number_of.items():
            original = number_of[self._original(id)]
            latest[original] = np.fmax(latest[original], latest[number])
        return latest

    def _fates_of_rows(self) -> NDArray[np.int8]:
        """The fate of every row of the log, as an index of FATES."""
        # Rows that stand for no content are exact copies of one that does.
        code_of = {name: code for code, name in enumerate(FATES)}
        fates = np.full(len(self._records.log), code_of[COPY], dtype=np.int8)
        for id, row in zip(self._ids, self._rows.tolist()):
            if id in self._placements:
                fates[row] = code_of[self._placements[id].split]
            elif id in self._continued:
                fates[row] = code_of[CONTINUED]
            elif self._placed[id].copy_of is not None:
                fates[row] = code_of[NEAR_COPY]
            else:
                fates[row] = code_of[CONTAMINATED if id in self._contaminated else OVER_SHARE]
        return fates

    def _original_of_rows(self) -> NDArray[np.int32]:
        """For every row of the log, the number of the content that stands for its record."""
        number_of = {id: number for number, id in enumerate(self._ids)}
        originals = np.array([number_of[self._original(id)] for id in self._ids], dtype=np.int32)
        return originals[self._records.number_at_row]

    def _without_turns(self) -> dict[str, str]:
        """Domains and sources that end without a turn that counts, and what became of their requests."""
        # 1) Of every domain and source, what became of its requests: those that gave no record, then the records.
        fates: dict[str, Counter[str]] = {}
        for source, counts in zip(self._settings.sources, self._records.sources):
            fates.setdefault(name_of(source), Counter()).update(counts.left_out)
            for domain, reasons in counts.domains.items():
                fates.setdefault(domain, Counter()).update(reasons)
        turns = Counter[str]()
        turns_K = [self._counting_turns(number) for number in self._kept]
        for key in ("domain", SOURCE):
            column = self._records.log.column(key)
            names = [name_of(self._settings.sources[int(i)]) for i in column.names] if key == SOURCE else column.names
            for (code, fate), count in Counter(zip(column.codes_N.tolist(), self._fates.tolist())).items():
                fates.setdefault(names[code], Counter())[FATES[fate]] += count
            for code, count in zip(column.codes_N[self._rows[self._kept]].tolist(), turns_K):
                turns[names[code]] += count

        # 2) Those without a turn, with what became of their requests.
        return {name: _told(fates[name]) or "no request" for name in sorted(fates) if name and not turns[name]}

    def _counting_turns(self, number: int) -> int:
        """Number of a kept content's turns that count."""
        return len(self._members[number].turn_keys) - len(self._elsewhere[self._ids[number]])

    def write_tables(self, folder: Path) -> None:
        """Write the tables of conversations, their origins, members and log labels."""
        # Conversations are read from the spool one by one; members hold no text.
        tracked = progress.track(self._kept, "writing", unit="conversations")
        logged = self._records.logged_prompts([self._members[n].turn_keys for n in self._kept])
        origins: list[dict[str, Any]] = []
        rows = (self._row(n, prompts, origins) for n, prompts in zip(tracked, logged))
        _write_table(folder / CONVERSATIONS, rows, _CONVERSATION_SCHEMA)
        # Where a file lies is no part of a conversation: the same log in another order gives the same ones.
        _write_table(folder / ORIGINS, iter(origins), _ORIGIN_SCHEMA)
        _write_table(folder / MEMBERS, _member_rows(self._seen, self._known), _MEMBER_SCHEMA)
        served = {key: self._records.sources[source].served for source, key in self._records.served().items()}
        if served:
            found = (
                {"log": key, "prompt": prompt, "answered": answered}
                for key, prompts in sorted(served.items())
                for prompt, answered in sorted(prompts.items())
            )
            _write_table(folder / SERVED, found, _SERVED_SCHEMA)
        log = self._records.log
        labels = {name: log.column(name) for name in (*KEYS, SOURCE, "day")}
        table = {
            **{
                name: pa.DictionaryArray.from_arrays(column.codes_N.astype(np.int32), column.names)
                for name, column in labels.items()
            },
            "prompt_tokens": np.array(log.prompt_tokens),
            "answer_tokens": np.array(log.answer_tokens),
            "counted": np.array(log.counted, dtype=np.bool_),
            "where": [where.removeprefix(f"{self._base_dir}/") for where in log.places()],
            "original": pa.DictionaryArray.from_arrays(self._original_of_rows(), self._ids),
            "fate": pa.DictionaryArray.from_arrays(self._fates, list(FATES)),
        }
        pq.write_table(pa.table(table), folder / LOG, compression="zstd")

    def _row(self, number: int, logged: list[dict[str, Any]], origins: list[dict[str, Any]]) -> dict[str, Any]:
        """Columns of a kept content, of whose prompts this is `logged`. Its origin goes into `origins`."""
        row, id = self._records.row(number), self._ids[number]
        source = self._settings.sources[row["source"]]
        where = row["where"].removeprefix(f"{self._base_dir}/")
        skips = not isinstance(source, TargetSource) and source.skip_invalid
        origins.append({"id": id, "where": where, "skip_invalid": skips, "redacted": row["redacted"]})
        placed = self._placements[id]
        placement = {"cluster": placed.cluster, "split": placed.split, "asked_elsewhere": self._elsewhere[id]}
        # The log table knows what was found after the record was spooled: domains that clustering named, odd clocks.
        log_row = int(self._rows[number])
        domain = row["domain"] or self._records.log.domain(log_row)
        started = self._records.log.started[log_row]
        asked_at = self._newest if math.isnan(started) else started
        return {**row, **placement, "domain": domain, "asked_at": asked_at, "logged_prompts": _encoded(logged)}

    def manifest_counts(self) -> dict[str, Any]:
        """Counts for the manifest: what was read, redacted and left out, what is in each split, the log's load.

        Everything read is a conversation of the mix, or was left out for one reason.
        """
        # What every source left out, and what became of the records that it gave.
        log = self._records.log
        fates = Counter(FATES[fate] for fate in self._fates.tolist())
        left_out = Counter({name: fates[name] for name in LEFT_OUT})
        for source in self._records.sources:
            left_out.update({**source.left_out, BROKEN: source.skipped})

        # Conversations and clusters of each split.
        domains = log.column("domain", self._rows[self._kept])
        counts: dict[Split, Counter[str]] = {split: Counter() for split in SPLITS}
        turns = Counter[Split](dict.fromkeys(SPLITS, 0))
        held: dict[Split, set[str]] = {split: set() for split in SPLITS}
        for number, placed, code in zip(self._kept, self._placements.values(), domains.codes_N.tolist()):
            counts[placed.split][domains.names[code]] += 1
            turns[placed.split] += self._counting_turns(number)
            held[placed.split].add(placed.cluster)

        # How long the frequent system prompts are, by their hashes.
        systems = log.column("system").lumped(_SYSTEM_STRATA).names
        # An ancestor's placement wins over a source's, and that over the hash.
        return {
            "read": sum(source.read for source in self._records.sources),
            "left_out": {reason: count for reason, count in sorted(left_out.items()) if count},
            "turns": dict(turns),
            "unanswered": self._unanswered,
            "redacted": dict(sorted(self._records.redacted.items())),
            "conversations": {split: dict(sorted(counts[split].items())) for split in SPLITS},
            "clusters": {split: len(held[split]) for split in SPLITS},
            "contamination": self._contamination,
            "system_characters": {
                name: log.system_characters[name] for name in systems if name in log.system_characters
            },
            "in_flight": concurrency_record(self._records.traffic, self._settings),
            "without_time": int(np.isnan(np.array(log.started)).sum()),
            "odd_clocks": {"count": log.odd_clocks, "some": self._records.odd_clocks},
        }


def _source_records(
    settings: MixSettings, base_dir: Path, digests: Mapping[str, str], records: IngestedRecords
) -> list[dict[str, Any]]:
    return [
        {
            "kind": source.kind,
            "name": name_of(source),
            "digest": digests[f"sources[{i}]"],
            "read": counts.read,
            "skipped": counts.skipped,
            "left_out": dict(sorted(counts.left_out.items())),
            "places": {
                reason: [where.removeprefix(f"{base_dir}/") for _, where in found]
                for reason, found in sorted(counts.places.items())
            },
            "taken": counts.taken,
            "unfollowed": dict(sorted(counts.unfollowed.items())),
        }
        for i, (source, counts) in enumerate(zip(settings.sources, records.sources))
    ]


def _told(counts: Mapping[str, int]) -> str:
    """Counts in words, the largest first."""
    return ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items(), key=lambda one: (-one[1], one[0])))


def _member_rows(seen: Mapping[str, PlacedMember], known: Sequence[PlacedMember]) -> Iterator[dict[str, Any]]:
    """Yield the rows of this mix's members and the inherited ones; of a conversation in both, this mix's placement."""
    rest = [item for item in known if item.member.id not in seen]
    for item in sorted([*seen.values(), *rest], key=lambda item: (item.member.id, item.cluster, item.split)):
        placement = {"cluster": item.cluster, "split": item.split}
        id, group, signature, keys = item.member
        hashes = {"signature": signature.astype("<u4").tobytes(), "turn_keys": keys.tolist()}
        yield {"id": id, "group": group, **placement, **hashes}


def _write_table(path: Path, rows: Iterator[Mapping[str, Any]], schema: pa.Schema) -> None:
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        while batch := list(islice(rows, _ROWS_AT_ONCE)):
            writer.write_table(pa.Table.from_pylist(batch, schema=schema))


def _read_table(folder: Path, name: str) -> pa.Table:
    path = _checked(folder, name)
    try:
        table = pq.read_table(path)
        table.validate(full=True)  # text may be no UTF-8
    except (pa.ArrowException, OSError) as error:
        raise CorruptDataError(f"{path}: not a readable table ({one_line(error)})") from None
    return table


def _checked(folder: Path, name: str) -> Path:
    """Path of a file of a mix, after a check of its digest. Raises MissingFileError or CorruptDataError."""
    recorded = load_manifest(folder)["files"].get(name)
    path = folder / name
    if fingerprint.of_file(path) != recorded:
        raise CorruptDataError(f"{path}: its content does not match the digest in {MANIFEST}; build the mix again")
    return path
