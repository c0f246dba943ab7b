"""Prompts: read from files of any shape that mixes read, or sampled from the target itself.

**From files** (`read_prompts`): distinct conversations, domain by domain in turn, each asked once.

**From the target** (`prompts_of`): the target continues the prefix that its chat template puts before a user message,
as in Magpie (Xu et al., 2024, https://arxiv.org/abs/2406.08464).
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import InputError
from ..progress import bar, say
from ..specdec.continuous_batching import PlainDecoder, QueuedRequest
from ..specdec.requests import Request
from ..specdec.sampling_settings import SamplingSettings
from ..specdec.targets import Target
from .chat_template import UNKNOWN_TIME, render_text
from .conversation import Conversation, Message, Turn, turns
from .files import first_line
from .records import DEFAULT_COLUMNS, Record
from .settings import FileSource, Shape
from .sources import SamplePrompts, read, seen
from .split import unit

_SENTINEL = "zqxUSERTEXTqxz"
_MOST_WAVES = 4
_AS_THE_MODEL_SAMPLES = SamplingSettings(temperature=1.0)


def read_prompts(paths: Sequence[Path], most: int | None = None) -> list[Record]:
    """Read the distinct conversations of some files, domain by domain in turn, at most `most` of them.

    Choice and order depend on the conversations' content, not on their place in the files. The first line of a file
    tells its shape; if it names no domain, the file's name is the domain of all its conversations. A line says what of
    a file is left out. Raises InputError naming file and line, MissingFileError.
    """
    if most is not None and most < 1:
        raise InputError(f"--max-prompts {most}: must be >= 1")
    found: dict[str, Record] = {}
    for path in paths:
        records, counts = read(source_of(path), Path(), 0)
        if counts.left_out:
            say(f"{path}: {seen(counts)}")
        for record in records:
            found.setdefault(record.id, record)
    return _interleaved(found.values())[:most]


def last_turn(record: Record) -> tuple[Conversation, Turn]:
    """The last turn that can be asked at once, and its conversation. Of one that is asked turn by turn this is the
    first turn, as the others wait for its answer."""
    conversation = record.conversation(cluster=record.id, split="selection")
    return conversation, [turn for turn in turns(conversation) if turn.waits_for is None][-1]


def source_of(path: Path) -> FileSource:
    """Make a source of a prompt file, whose first line tells its shape. Raises InputError for an empty file."""
    line = first_line(path)
    if line is None:
        raise InputError(f"{path}: is empty; must hold at least one prompt")
    # The shape whose column the line has; without any, `turns`, so that an error says what is missing.
    names = line if isinstance(line, dict) else {}
    shape: Shape = next((shape for shape, column in DEFAULT_COLUMNS.items() if column in names), "turns")
    # Without a domain of its own, the file's name up to the first dot, as a label.
    domain = None if "domain" in names else re.sub(r"[^\w-]", "-", path.name.split(".")[0])[:64] or "prompts"
    return FileSource(kind=shape, path=str(path), domain=domain, limit=None, weight=None)


def _interleaved(records: Iterable[Record]) -> list[Record]:
    """Interleave records: one of each domain in turn, by id within a domain."""
    domains: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda record: record.id):
        domains.setdefault(record.domain, []).append(record)
    rounds = zip_longest(*(domains[name] for name in sorted(domains)))
    return [record for records in rounds for record in records if record is not None]


class UserTurn(NamedTuple):
    """Text that a chat template puts around the first user message."""

    prefix_ids: list[int]
    ending: str
    """Text that closes the message, e.g. `<|im_end|>`; empty: nothing closes it."""
    ending_id: int | None
    """The special token that the ending starts with, if it does."""


def user_turn(tokenizer: Any) -> UserTurn:
    """Find the user-turn prefix by rendering a sentinel message and cutting before it.

    Raises InputError for a tokenizer without chat template, or with one that does not show the user's text once.
    """
    # 1) What the template puts before the user's text is the prefix that the target continues.
    text = render_text(tokenizer, [Message(role="user", content=_SENTINEL)], asked_at=UNKNOWN_TIME)
    if text.count(_SENTINEL) != 1:
        raise InputError(f"{tokenizer.name_or_path}: its chat template does not show a user message once and unchanged")
    prefix, suffix = text.split(_SENTINEL)
    prefix_ids: list[int] = tokenizer(prefix, add_special_tokens=False)["input_ids"]
    if not prefix_ids:
        raise InputError(f"{tokenizer.name_or_path}: its chat template puts nothing before a user message")

    # 2) What it puts after ends a prompt: a special token, or else the first word.
    suffix_ids = tokenizer(suffix.lstrip(), add_special_tokens=False)["input_ids"]
    ending_id = next((id for id in suffix_ids[:1] if id in set(tokenizer.all_special_ids)), None)
    ending = tokenizer.decode([ending_id]) if ending_id is not None else (suffix.split() or [""])[0]
    return UserTurn(prefix_ids, ending, ending_id)


def prompts_of(target: Target, batch_size: int = 16) -> SamplePrompts:
    """Make the function `sample_prompts(count, seed, max_tokens)` that `build_mix` takes: the target's own prompts.

    It samples at temperature 1, and gives the same prompts for the same seed. Prompts that are empty, or not finished
    within `max_tokens`, are drawn anew, at most four times `count` in all; after that it returns fewer.
    """

    return partial(_sample_prompts, target, batch_size)


def _sample_prompts(target: Target, batch_size: int, count: int, seed: int, max_tokens: int) -> list[str]:
    # A prompt ends where the user's turn would, or where an answer would.
    turn = user_turn(target.tokenizer)
    target.check_ids(turn.prefix_ids)
    stops = target.stop_ids | ({turn.ending_id} if turn.ending_id is not None else set())
    found: list[str] = []
    with bar("prompts of the target", count, "prompts") as advance:
        # Each wave draws as many as are still missing, under seeds of its own.
        for wave in range(_MOST_WAVES):
            requests = [
                Request(turn.prefix_ids, _AS_THE_MODEL_SAMPLES, _seed_of(seed, wave * count + i), max_tokens, stops)
                for i in range(count - len(found))
            ]
            # Prompts come as they are finished; the order of their seeds makes the result reproducible.
            drawn: dict[int, str] = {}
            for index, tokens in _answers(target, requests, batch_size):
                text = _user_text(target.tokenizer, tokens, turn, stops)
                if text is not None:
                    drawn[index] = text
                    advance()
            found += [drawn[index] for index in sorted(drawn)]
            if len(found) >= count:
                break
    return found


def _answers(target: Target, requests: Sequence[Request], batch_size: int) -> Iterator[tuple[int, list[int]]]:
    """Decode requests; yields the index and tokens of each answer as it is finished."""
    longest = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
    budget = max(request.max_new_tokens for request in requests)
    decoder = PlainDecoder(target, min(batch_size, len(requests)), longest, budget)
    decoder.submit([QueuedRequest(str(index), request) for index, request in enumerate(requests)])
    while not decoder.idle:
        for answered in decoder.step():
            yield int(answered.name), answered.tokens


def _user_text(tokenizer: Any, tokens: list[int], turn: UserTurn, stops: frozenset[int]) -> str | None:
    """Decode a sampled prompt to text; None: it is empty, or cut before its end."""
    text = tokenizer.decode([token for token in tokens if token not in stops], skip_special_tokens=True)
    # An ending that is no special token is found in the text.
    ended = bool(tokens) and tokens[-1] in stops
    if turn.ending and turn.ending_id is None and turn.ending in text:
        text, ended = text.split(turn.ending)[0], True
    return text.strip() or None if ended else None


def _seed_of(seed: int, number: int) -> int:
    return int(unit("self prompt", str(seed), str(number)) * (1 << 53))
