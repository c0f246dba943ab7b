"""Preparation of records: redacted, hashed, signed and labelled, as ingestion keeps them. Any process can do it."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ..errors import InputError
from ..specdec.sampling_settings import SamplingSettings
from ..storage import utf8
from .conversation import Message, turn_ends
from .dedup import group_key, signature, turn_keys
from .logged_prompts import PromptTraces
from .logs.parsing import prompt_digest
from .record_outcomes import OVER_LIMIT, Outcome, Unit, outcomes_of
from .records import Record
from .redact import Redactor
from .settings import MixSettings
from .split import weighted_choice
from .stratify import LogRow, log_row

_encoded = json.JSONEncoder(ensure_ascii=False).encode  # `json.dumps` makes an encoder for each call
_PLAIN = ("id", "domain", "turn_by_turn", "prompt_end", "engine", "source", "where")
_OF_MESSAGES = tuple(name for name in Message.model_fields if name != "role")
_NESTED = ("messages", "tools", "template_args", "sampling", "redacted")


class Prepared(NamedTuple):
    """What ingestion keeps of a record."""

    id: str
    """Id and key of the redacted record."""
    key: str
    source: int
    group: str | None
    """Hash of its group; None: it has none."""
    stored: bytes
    """The redacted record, as `stored` writes it."""
    signature: bytes
    """Of its user's text, 4 little-endian bytes an entry; an array takes long to send to another process."""
    turn_keys: list[int]
    traces: PromptTraces
    row: LogRow
    redacted: Mapping[str, int]
    """Number of redactions, by kind."""


class Preparer:
    """Turns lines into prepared records under the settings of a mix. What it remembers only saves time."""

    def __init__(self, settings: MixSettings) -> None:
        self._settings = settings
        self._redactor = Redactor(settings.redact, settings.phone_countries)

    def prepared_outcomes(self, index: int, units: Iterable[Unit]) -> list[Outcome[Prepared]]:
        """Outcomes of some lines of the source with this index, their records prepared."""
        return [self._prepared_outcome(one) for one in self._outcomes(index, units)]

    def outcomes_below(self, index: int, units: Iterable[Unit], limit_key: str | None) -> list[Outcome[Record]]:
        """Outcomes of some lines, their records as they are; those with a key above `limit_key` are left out."""
        return [
            outcome.with_record(None)._replace(left_out=OVER_LIMIT)
            if limit_key is not None and outcome.record is not None and outcome.record.key > limit_key
            else outcome
            for outcome in self._outcomes(index, units)
        ]

    def prepared_records(self, records: Iterable[Record]) -> list[Outcome[Prepared]]:
        """Prepare records that a limit kept."""
        return [self._prepared_outcome(Outcome(one.where, one, domain=one.domain)) for one in records]

    def prepared(self, found: Record) -> Prepared:
        """Redact one record, and compute all that ingestion keeps of it. Raises InputError naming its place."""
        before = self._redactor.counts.copy()
        record = redacted(found, self._redactor)
        counts = self._redactor.counts - before
        sampling, max_new_tokens = sampling_of(record, self._settings)
        keys = turn_keys(record)
        return Prepared(
            id=record.id,
            key=record.key,
            source=record.source,
            group=None if record.group is None else group_key(record.domain, record.group),
            stored=stored(record, sampling, max_new_tokens, counts),
            signature=signature(record.user_text).astype("<u4").tobytes(),
            turn_keys=keys,
            traces=_traces(found, record, keys[-1], self._settings.sources[record.source].kind),
            row=log_row(record, sampling),
            redacted=dict(counts),
        )

    def _prepared_outcome(self, one: Outcome[Record]) -> Outcome[Prepared]:
        try:
            return one.with_record(None if one.record is None else self.prepared(one.record))
        except UnicodeEncodeError:
            # Tools, template arguments and calls are hashed as they are printed, where half a character is six.
            broken = f"{one.where}: holds text that is not valid Unicode"
            return Outcome(one.where, broken=broken, domain=one.domain, timing=one.timing)
        except InputError as error:
            return Outcome(one.where, broken=str(error), domain=one.domain, timing=one.timing)

    def _outcomes(self, index: int, units: Iterable[Unit]) -> Iterable[Outcome[Record]]:
        source = self._settings.sources[index]
        return (self._shown(outcome) for unit in units for outcome in outcomes_of(source, index, unit))

    def _shown(self, outcome: Outcome[Record]) -> Outcome[Record]:
        """The outcome; a broken rule, which is stored and said, redacted behind its place: it quotes the line, where
        half a character may stand."""
        if outcome.broken is None:
            return outcome
        place = outcome.where if outcome.broken.startswith(outcome.where) else ""
        said = place + self._redactor.text(outcome.broken.removeprefix(place))
        return outcome._replace(broken=utf8(said))


def redacted(record: Record, redactor: Redactor) -> Record:
    """Redact a record in everything that the target is shown: messages, tool calls, tools, template arguments.

    Raises InputError naming its place where one of these is nested too deeply.
    """
    try:
        messages = tuple(_redacted_message(message, redactor) for message in record.messages)
        # Tools and template arguments are JSON values, whose texts are redacted at all depths.
        arguments = None if record.template_args is None else redactor.value(dict(record.template_args))
        tools = redactor.value(record.tools)
    except RecursionError:
        raise InputError(f"{record.where}: holds a JSON value that is nested too deeply") from None
    # A record without anything to redact stays, and with it what was computed of it.
    if (messages, tools, arguments) == (record.messages, record.tools, record.template_args):
        return record
    return replace(record, messages=messages, tools=tools, template_args=arguments)


def _redacted_message(message: Message, redactor: Redactor) -> Message:
    found = {name: getattr(message, name) for name in _OF_MESSAGES}
    redacted = {name: redactor.value(value) for name, value in found.items() if value}
    changes = {name: value for name, value in redacted.items() if value != found[name]}
    return message.model_copy(update=changes) if changes else message


def sampling_of(record: Record, settings: MixSettings) -> tuple[SamplingSettings | None, int | None]:
    """Sampling settings and token limit of a record: the logged ones, else drawn from `mix.sampling`; None: neither."""
    sampling = record.sampling if settings.logged_sampling else None
    max_new_tokens = record.max_new_tokens if settings.logged_sampling else None
    # The draw depends on the content's id alone; it fills in only what is missing.
    if settings.sampling and (sampling is None or max_new_tokens is None):
        weights = [choice.weight for choice in settings.sampling]
        drawn = weighted_choice(settings.sampling, weights, "sampling", settings.salt, record.id)
        sampling = sampling or drawn.settings
        max_new_tokens = max_new_tokens or drawn.max_new_tokens
    return sampling, max_new_tokens


def stored(
    record: Record, sampling: SamplingSettings | None, max_new_tokens: int | None, redactions: Mapping[str, int]
) -> bytes:
    """A record as lines of JSON text, for `columns`: the columns of the mix's tables that it fills.

    `sampling`, `max_new_tokens`: what `sampling_of` gives.
    """
    nested = {
        "messages": [message.model_dump(exclude_none=True) for message in record.messages],
        "tools": record.tools,
        "template_args": dict(record.template_args or {}),
        "sampling": None if sampling is None else sampling.model_dump(),
        "redacted": dict(redactions),
    }
    plain = {name: getattr(record, name) for name in _PLAIN}
    left = record.server_sampling if sampling == record.sampling else ()
    plain |= {"max_new_tokens": max_new_tokens, "server_sampling": left}
    return "\n".join(map(_encoded, (plain, *nested.values()))).encode()


def _traces(found: Record, record: Record, turn_key: int, kind: str) -> PromptTraces:
    """What a line tells of its last prompt. `found`: the record before it was redacted; `kind`: its source's."""
    # A turn that waits for the target's own answers has another prompt than its log's.
    if record.turn_by_turn:
        return PromptTraces(turn_key, None, False, None, None)
    end = turn_ends(record)[-1]
    same = record is found or (
        (record.messages[:end], record.tools, record.template_args)
        == (found.messages[:end], found.tools, found.template_args)
    )
    digest = record.shown if same else None
    if record.pieces is not None:
        first, *rest = record.pieces
        contents = (message.text for message in record.messages)
        text = first + "".join(content + piece for content, piece in zip(contents, rest))
        digest = bytes.fromhex(prompt_digest(text))
    # Of a request as the client sent it other lines show the prompt; one that was redacted is not compared.
    received = kind == "sglang" and record.pieces is None and same
    comparable = same and bool(record.prompt_tokens)
    return PromptTraces(turn_key, record.counter, comparable, digest, record.source if received else None)


def columns(lines: bytes) -> dict[str, Any]:
    """Columns of a record that `stored` wrote: nested values as JSON text, None where there is none."""
    plain, *nested = lines.decode().split("\n")  # JSON text holds no line ends
    found: dict[str, Any] = json.loads(plain)
    return found | {name: None if text == "null" else text for name, text in zip(_NESTED, nested, strict=True)}


def restored(lines: bytes) -> Record:
    """What the target is shown of a record that `stored` wrote."""
    found = columns(lines)
    messages = tuple(Message.model_validate(message) for message in json.loads(found["messages"]))
    tools = None if found["tools"] is None else json.loads(found["tools"])
    form = {name: found[name] for name in ("domain", "turn_by_turn", "prompt_end", "engine", "source", "where")}
    return Record(messages=messages, tools=tools, template_args=json.loads(found["template_args"]), **form)
