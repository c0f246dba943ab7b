"""The mix: from sources to de-duplicated, redacted, balanced and split conversations, in one folder.

    conversations.parquet   what the target is asked, nested values as JSON text
    members.parquet         signatures and placements of these and of every ancestor's conversations; no text
    manifest.json           counts, what was left out and redacted, digests of sources and files

The same settings, sources and ancestors give the same bytes.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .. import fingerprint, progress, storage
from ..errors import CorruptDataError, InputError, MissingFileError
from .conversation import SPLITS, Conversation, Split
from .dedup import SIGNATURE_LENGTH, Known, Member, Placement, group_key, place, signature
from .records import Record
from .redact import Redactor
from .settings import MixSettings
from .sources import SamplePrompts, SourceCounts, input_digests, name_of, read
from .split import keep_shares, require_every_split, split_of, weighted_choice

FORMAT = 1
CONVERSATIONS, MEMBERS, MANIFEST = "conversations.parquet", "members.parquet", "manifest.json"
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
    ]
)
_MEMBER_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("group", pa.string()),
        ("cluster", pa.string()),
        ("split", pa.string()),
        ("signature", pa.binary(4 * SIGNATURE_LENGTH)),
    ]
)
_NESTED = ("messages", "tools", "template_args", "sampling")


@dataclass
class _Account:
    """What the manifest tells of how the mix came about."""

    sources: list[SourceCounts]
    redacted: Mapping[str, int]
    exact_copies: int = 0
    near_copies: int = 0
    over_share: int = 0


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
    known = load_members(earlier)
    records, bound, account = _collect(settings, base_dir, sample_prompts)
    members = {record.id: _member(record) for record in progress.track(records, "signatures", unit="conversations")}
    placed = place(members.values(), known, settings.near_threshold)
    distinct = [record for record in records if placed[record.id].copy_of is None]
    chosen = _balanced(distinct, settings)
    account.near_copies = len(records) - len(distinct)
    account.over_share = len(distinct) - len(chosen)
    splits = _bound_clusters(bound, placed)
    conversations = [_conversation(record, placed[record.id], splits, settings) for record in chosen]
    require_every_split([c.split for c in conversations], [c.cluster for c in conversations], settings)
    placements = {c.id: Known(members[c.id], c.cluster, c.split) for c in conversations}
    with storage.new_folder(folder) as new:
        _write_table(new / CONVERSATIONS, (_row(c) for c in conversations), _CONVERSATION_SCHEMA)
        _write_table(new / MEMBERS, _member_rows(placements, known), _MEMBER_SCHEMA)
        manifest = {
            "format": FORMAT,
            "settings": settings.model_dump(mode="json"),
            "settings_fingerprint": fingerprint.of_json(settings.model_dump(mode="json")),
            "ancestors": sorted(storage.read_json(path / MANIFEST)["files"][CONVERSATIONS] for path in earlier),
            **_told(account, settings, digests, conversations),
            "files": {name: fingerprint.of_file(new / name) for name in (CONVERSATIONS, MEMBERS)},
        }
        storage.write_json(new / MANIFEST, manifest)


def load_mix(folder: Path) -> list[Conversation]:
    """The conversations of a mix, in the order of their ids, after a check of the file's digest."""
    rows = _read_table(folder, CONVERSATIONS)
    for row in rows:
        for name in _NESTED:
            row[name] = None if row[name] is None else json.loads(row[name])
    return [Conversation.model_validate(row) for row in rows]


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


def load_members(folders: Iterable[Path]) -> list[Known]:
    """Placements that earlier mixes hold, their own and those they carry on; each conversation once a placement."""
    known: dict[tuple[str, str, str], Known] = {}
    for row in (row for folder in folders for row in _read_table(folder, MEMBERS)):
        member = Member(row["id"], row["group"], np.frombuffer(row["signature"], dtype="<u4").astype(np.uint32))
        known[row["id"], row["cluster"], row["split"]] = Known(member, row["cluster"], row["split"])
    return list(known.values())


def _collect(
    settings: MixSettings, base_dir: Path, sample_prompts: SamplePrompts | None
) -> tuple[list[Record], dict[str, Split], _Account]:
    """Redacted records of all sources, each content once, in the order of their ids; and the splits that sources name
    for some of them."""
    redactor = Redactor(settings.redact)
    account = _Account([], redactor.counts)
    found: list[Record] = []
    for index, source in enumerate(settings.sources):
        records, counts = read(source, base_dir, index, sample_prompts)
        account.sources.append(counts)
        found += records
    redacted = [_redacted(record, redactor) for record in progress.track(found, "redacting", unit="conversations")]
    once: dict[str, Record] = {}
    for record in sorted(redacted, key=lambda record: (record.id, record.key, record.source)):
        once.setdefault(record.id, record)
    account.exact_copies = len(redacted) - len(once)
    named = [(record.id, settings.sources[record.source].only) for record in redacted]
    return list(once.values()), _strictest((name, split) for name, split in named if split is not None), account


def _strictest(named: Iterable[tuple[str, Split]]) -> dict[str, Split]:
    """One split a name. Holdout before selection before train: what one source judges on, no other may train on."""
    found: dict[str, Split] = {}
    for name, split in named:
        found[name] = max(split, found.get(name, split), key=SPLITS.index)
    return found


def _bound_clusters(bound: Mapping[str, Split], placed: Mapping[str, Placement]) -> dict[str, Split]:
    """The splits of clusters that hold a conversation whose split its source names."""
    return _strictest((placed[name].cluster, split) for name, split in bound.items())


def _redacted(record: Record, redactor: Redactor) -> Record:
    messages = tuple(
        message.model_copy(
            update={
                "content": redactor.text(message.content),
                "name": redactor.value(message.name),
                "tool_calls": redactor.value(message.tool_calls),
            }
        )
        for message in record.messages
    )
    return replace(record, messages=messages, tools=redactor.value(record.tools))


def _member(record: Record) -> Member:
    group = None if record.group is None else group_key(record.domain, record.group)
    return Member(record.id, group, signature(record.user_text))


def _balanced(records: Sequence[Record], settings: MixSettings) -> list[Record]:
    """The records that stay when the mix has the shares that sources' or domains' weights ask for."""
    by_source = {str(i): source.weight for i, source in enumerate(settings.sources) if source.weight is not None}
    weights = by_source or settings.domain_weights
    if not weights:
        return list(records)
    groups: dict[str, list[str]] = {group: [] for group in weights}
    for record in records:
        group = str(record.source) if by_source else record.domain
        if group not in groups:
            raise InputError(f"mix.domain_weights: domain {group!r} has no weight; weights name {', '.join(weights)}")
        groups[group].append(record.id)
    for group, ids in groups.items():
        if not ids:
            name = f"sources[{group}]" if by_source else f"domain_weights.{group}"
            raise InputError(f"mix.{name}: weight {weights[group]}, but no conversation is left for it")
    kept = keep_shares(groups, weights, settings.salt)
    return [record for record in records if record.id in kept]


def _conversation(
    record: Record, placement: Placement, splits: Mapping[str, Split], settings: MixSettings
) -> Conversation:
    sampling = record.sampling if settings.logged_sampling else None
    max_new_tokens = record.max_new_tokens if settings.logged_sampling else None
    if settings.sampling:
        weights = [choice.weight for choice in settings.sampling]
        drawn = weighted_choice(settings.sampling, weights, "sampling", settings.salt, record.id)
        sampling = sampling or drawn.settings
        max_new_tokens = max_new_tokens or drawn.max_new_tokens
    return Conversation(
        id=record.id,
        domain=record.domain,
        messages=list(record.messages),
        tools=record.tools,
        template_args=dict(record.template_args or {}),
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        cluster=placement.cluster,
        split=placement.split or splits.get(placement.cluster) or split_of(placement.cluster, settings),
    )


def _told(
    account: _Account, settings: MixSettings, digests: Mapping[str, str], conversations: Sequence[Conversation]
) -> dict[str, Any]:
    counts: dict[Split, Counter[str]] = {split: Counter() for split in SPLITS}
    clusters: dict[Split, set[str]] = {split: set() for split in SPLITS}
    for conversation in conversations:
        counts[conversation.split][conversation.domain] += 1
        clusters[conversation.split].add(conversation.cluster)
    sources = [
        {"kind": source.kind, "name": name_of(source), "digest": digests[f"sources[{i}]"], **vars(account.sources[i])}
        for i, source in enumerate(settings.sources)
    ]
    return {
        "sources": sources,
        "redacted": dict(sorted(account.redacted.items())),
        "left_out": {name: getattr(account, name) for name in ("exact_copies", "near_copies", "over_share")},
        "conversations": {split: dict(sorted(counts[split].items())) for split in SPLITS},
        "clusters": {split: len(clusters[split]) for split in SPLITS},
    }


def _row(conversation: Conversation) -> dict[str, Any]:
    row = conversation.model_dump(mode="json")
    row["messages"] = [message.model_dump(exclude_none=True) for message in conversation.messages]
    for name in _NESTED:
        row[name] = None if row[name] is None else json.dumps(row[name], ensure_ascii=False)
    return row


def _member_rows(placements: Mapping[str, Known], known: Sequence[Known]) -> Iterable[dict[str, Any]]:
    """This mix's members and the inherited ones; a conversation in both stands once, as it is placed now."""
    rest = [item for item in known if item.member.id not in placements]
    for item in sorted([*placements.values(), *rest], key=lambda item: (item.member.id, item.cluster, item.split)):
        placement = {"cluster": item.cluster, "split": item.split}
        yield {**item.member._asdict(), **placement, "signature": item.member.signature.astype("<u4").tobytes()}


def _write_table(path: Path, rows: Iterable[Mapping[str, Any]], schema: pa.Schema) -> None:
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), path, compression="zstd")


def _read_table(folder: Path, name: str) -> list[dict[str, Any]]:
    recorded = load_manifest(folder)["files"].get(name)
    path = folder / name
    if fingerprint.of_file(path) != recorded:
        raise CorruptDataError(f"{path}: its content does not match the digest in {MANIFEST}; build the mix again")
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows
