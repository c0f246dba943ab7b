"""Answers that the doctor replays a draft along: recorded ones, or the target's own to prompts given or shipped."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..data.chat_template import render
from ..data.conversation import SPLITS, Message
from ..data.files import objects
from ..data.record_outcomes import SourceCounts
from ..data.settings import FileSource
from ..data.sources import detect_kind, read_records
from ..data.store import MANIFEST, Capture
from ..errors import DraftforgeError, InputError, MissingFileError
from ..progress import bar, say
from ..specdec.decoder import decode_rounds
from ..specdec.replay.target_trace import RecordedAnswer
from ..specdec.requests import DecodeRun, Request
from ..specdec.sampling_settings import SamplingSettings
from ..specdec.targets import Target
from ..storage import read_object

MOST_ANSWERS, NEW_TOKENS = 200, 64
"""Answers that are replayed, and tokens of those that the target is asked for."""
_SHIPPED_ANSWERS = 96
_SECONDS = 300.0
"""Time for answers; the prompts that are not answered by then are left out."""
_BATCH, _MOST_READ = 16, 20_000
"""Prompts that are answered at a time, and that are read: of these MOST_ANSWERS are taken, from everywhere."""
_OTHER_FORMS = 24
_ASKED = (
    "Explain in a few sentences how {} works.",
    "Write a short Python function about {}.",
    "What are three common mistakes with {}?",
    "Write an e-mail to a colleague about {}.",
    "Summarise what a beginner should know about {}.",
    "Give a numbered list of five facts about {}.",
    "Translate into French: I would like to learn more about {}.",
    "Compare {} with its closest alternative.",
)
_TOPICS = (
    *("a bicycle", "compound interest", "sorting a list", "photosynthesis", "a train timetable", "baking bread"),
    *(
        "password security",
        "the water cycle",
        "a chess opening",
        "regular expressions",
        "solar panels",
        "renting a flat",
    ),
)


class Asked(NamedTuple):
    """A prompt, and the recorded answer to it, if any."""

    prompt_ids: list[int]
    answer_ids: list[int]
    messages: tuple[Message, ...] = ()
    """Messages that the prompt was rendered from; none where ids or plain text were given."""


def asked_of(place: Path | None, target: Target, **template_args: Any) -> list[Asked]:
    """Prompts and recorded answers of a file or capture; None: the shipped prompts. Raises InputError for none."""
    if place is None:
        prompts = [form.format(topic) for topic, form in itertools.product(_TOPICS, _ASKED)][:_SHIPPED_ANSWERS]
        found = [_rendered(target, (Message(role="user", content=one),), "", template_args) for one in prompts]
    elif not place.exists():
        raise MissingFileError(f"--answers {place}: no such file or folder")
    elif (place / MANIFEST).is_file():
        capture = Capture.open(place, verify=False)
        samples = [one for split in reversed(SPLITS) for one in capture.samples(split) if one.sampling.greedy]
        largest = max((token for one in samples for token in (*one.prompt_ids, *one.answer_ids)), default=0)
        if largest >= target.embedding_rows:  # a capture may be of another target
            raise InputError(f"--answers {place}: token {largest}: the target has {target.embedding_rows}")
        found = [Asked(one.prompt_ids, one.answer_ids) for one in samples]
    else:
        found = list(itertools.islice(_of_ids(place, target), _MOST_READ))
        found = found or list(itertools.islice(_of_log(place, target, template_args), _MOST_READ))
    # As many as are replayed, taken from everywhere.
    fitting = [
        one for one in found if len(one.prompt_ids) + max(len(one.answer_ids), NEW_TOKENS) < target.max_positions
    ]
    if not fitting:
        raise InputError(f"--answers {place}: holds no prompt that fits the target's context, and no answer at T=0")
    if len(fitting) < len(found):
        say(f"{len(found) - len(fitting)} prompts are left out: they do not fit the target's context")
    step = max(1, len(fitting) / MOST_ANSWERS)
    return [fitting[int(place * step)] for place in range(min(len(fitting), MOST_ANSWERS))]


def _of_ids(place: Path, target: Target) -> Iterator[Asked]:
    """Lines of ids: `{"prompt_ids": [...], "answer_ids": [...]}`."""
    if place.is_file():
        for item in objects([place], ""):
            try:
                raw = item.decode()
            except InputError:
                return
            if not isinstance(raw, dict) or "prompt_ids" not in raw:
                return
            ids = [raw["prompt_ids"], raw.get("answer_ids") or []]
            if (
                not all(
                    isinstance(row, list) and all(type(one) is int and 0 <= one < target.embedding_rows for one in row)
                    for row in ids
                )
                or not ids[0]
            ):
                raise InputError(f"{item.where}: prompt_ids and answer_ids must be ids of the target's tokens")
            yield Asked(*ids)


def _of_log(place: Path, target: Target, template_args: dict[str, Any]) -> Iterator[Asked]:
    """Conversations of a log: their last answer, where there is one, is a recorded one."""
    kind, named = detect_kind(Path(), str(place))
    source = FileSource.model_validate(
        {"kind": kind, "path": str(place), "domain": None if named else "answers", "skip_invalid": True}
    )
    counts = SourceCounts()
    for record in read_records(source, Path(), 0, counts):
        messages = record.messages
        answer = ""
        if messages and messages[-1].role == "assistant":
            messages, answer = messages[:-1], messages[-1].text
        if messages:
            yield _rendered(target, messages, answer, {**(record.template_args or {}), **template_args})
    if counts.skipped:
        say(f"{place}: {counts.skipped} lines are left out: they break a rule of kind {kind}")


def _rendered(target: Target, messages: Sequence[Message], answer: str, template_args: dict[str, Any]) -> Asked:
    """A conversation as ids; without a chat template its texts one below the other."""
    if getattr(target.tokenizer, "chat_template", None):
        ids = render(target.tokenizer, list(messages), template_args=template_args or None)
    else:
        ids = list(target.tokenizer("\n".join(one.text for one in messages)).input_ids)
    said = list(target.tokenizer(answer, add_special_tokens=False).input_ids) if answer else []
    return Asked(ids, said, tuple(messages))


def answered(target: Target, asked: Sequence[Asked]) -> list[RecordedAnswer]:
    """Recorded answers as they are, and the target's own to all other prompts, at temperature 0."""
    kept = [
        RecordedAnswer(one.prompt_ids, one.answer_ids, len(one.answer_ids)) for one in asked if len(one.answer_ids) > 1
    ]
    open_ones = [one for one in asked if not one.answer_ids]
    if not open_ones:
        return kept
    # The target decodes some prompts at a time, until the time is up.
    until, new = time.monotonic() + _SECONDS, list[RecordedAnswer]()
    with bar("answering", len(open_ones), "prompts") as advance:
        for start in range(0, len(open_ones), _BATCH):
            part = open_ones[start : start + _BATCH]
            requests = [Request(one.prompt_ids, SamplingSettings(), 0, NEW_TOKENS, target.stop_ids) for one in part]
            for step in decode_rounds(DecodeRun(target, None, requests, batch_size=_BATCH)):
                for number, generation in step:
                    new.append(RecordedAnswer(part[number].prompt_ids, generation.tokens, NEW_TOKENS))
                    advance()
            if time.monotonic() > until and start + _BATCH < len(open_ones):
                say(f"{len(open_ones) - len(new)} prompts are left out: {_SECONDS:.0f} s are up")
                break
    long_enough = [one for one in (*kept, *new) if len(one.answer_ids) > 1]
    if len(long_enough) < 3:
        raise InputError("the target's answers are too short to replay a draft on; give other prompts by --answers")
    return long_enough


def rendered_otherwise(
    target: Target, draft: Path, asked: Sequence[Asked], note: Callable[[str], None]
) -> Iterator[tuple[str, str, list[Asked]]]:
    """Some of the prompts in other forms: hypothesis, what is changed, and the prompts.

    Thinking switched on and off where the target's chat template knows that, the draft's own template, and none.
    `note` is told of a template that cannot be read or fails.
    """
    spoken = [one for one in asked if one.messages]
    spoken = spoken[:: max(1, len(spoken) // _OTHER_FORMS)][:_OTHER_FORMS]
    template = str(getattr(target.tokenizer, "chat_template", None) or "")
    if not spoken or not template:
        return
    # 1) Arguments of the template.
    for name in ("enable_thinking", "thinking"):
        for value in (True, False) if name in template else ():
            told = f"{name} {str(value).lower()} in the prompts' template"
            yield "thinking on or off", told, [_rendered(target, one.messages, "", {name: value}) for one in spoken]
    # 2) Another template, or none.
    own = None
    try:
        own = _template_of(draft if draft.is_dir() else draft.parent)
    except (DraftforgeError, OSError, ValueError) as error:
        note(f"the template that lies beside the draft is not tried: {error}")
    others = {"the template that lies beside the draft": own} if own and own != template else {}
    for told, other in {**others, "prompts without a chat template": None}.items():
        target.tokenizer.chat_template = other
        try:
            yield "another template", told, [_rendered(target, one.messages, "", {}) for one in spoken]
        except DraftforgeError as error:
            # The error names the tokenizer's place, which is the target's.
            note(f"{told} is not tried: {str(error).removeprefix(f'{target.tokenizer.name_or_path}: ')}")
        finally:
            target.tokenizer.chat_template = template


def _template_of(folder: Path) -> str | None:
    """Chat template among a draft's files; None: there is none."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    known = read_object(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    found = known.get("chat_template")
    return found if isinstance(found, str) else None
