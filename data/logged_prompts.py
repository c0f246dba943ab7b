"""Logged prompts: what a log tells of each prompt that was asked, and whether a target's template makes the same one.

Logs of engines hold the text of a prompt, of which a mix keeps the hash; SGLang's holds it apart from the request, so
that a prompt is looked up among all that were served. Most other logs hold the number of its tokens as the server
counted them. A request that was logged without something that shaped its prompt (LiteLLM keeps no
`chat_template_kwargs`, say) shows by another number. Numbers that another tokenizer counted show nothing: whether a
counter has the target's tokenizer, an even sample of its prompts tells.
"""

import hashlib
import itertools
import math
import re
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError
from jinja2.defaults import DEFAULT_NAMESPACE

from ..errors import InputError
from .chat_template import chat_template_for, ids_of_prompt, turn_ids, turn_prompt
from .conversation import (
    FILLED_IN,
    NO_ARGUMENTS,
    NO_HISTORY,
    NO_SYSTEM_PROMPT,
    NO_TOOLS,
    NOT_ALL,
    OTHER_READINGS,
    Conversation,
    LoggedPrompt,
    PromptCount,
    Turn,
    turn_ends,
)
from .dedup import NO_TURNS, TurnKeys
from .logs.parsing import prompt_digest
from .settings import RESERVED_ARGS
from .split import unit
from .stratify import LogTable
from .template_process import ask_of

OTHER_PROMPT = "its chat template makes another prompt of the messages than the logged one"
OTHER_COUNT = "its prompt has another number of tokens than the log counts"
UNPROVEN = "the log does not show that its prompt was this one"
NOT_ANSWERED = "the log shows that its engine refused it or failed at it"
EITHER_WAY = "its request makes other prompts if it is read otherwise, and the log does not show which it was"
_LACKING = {
    NO_SYSTEM_PROMPT: "LiteLLM logs no system prompt that was sent as blocks",
    NO_HISTORY: "Langfuse's client does not log which response a request continues, or its stored prompt",
    NO_TOOLS: "not every logger that writes to Langfuse logs the tools beside messages with calls",
    NOT_ALL: "instrumentations other than Langfuse's own, and code of your own, may log a part of what was sent",
    NO_ARGUMENTS: "LiteLLM and Langfuse's clients log no `chat_template_kwargs`, by which a template may think or not",
    FILLED_IN: "a gateway adds a stored prompt, texts or tools that such a request names (`prompt_id`, `files`, …)",
}
"""What a log may lack, by the end of its counter's name."""
_UNPROVEN_ARE = ": where it counts others than the prompt has, or none to compare, none is asked"
_IF_NOT_SWITCHED = ", nor where another value makes as many; `template_args` of a source that sets one is believed"
_SAMPLED = 256  # prompts of a counter that tell whose tokens it counts
_TRIED = 64  # prompts with another number of tokens that settings are tried on
_MOST_KEPT = 8  # numbers and hashes of one prompt
_MOST_NAMED = 3
_EFFORTS = ("none", "low", "medium", "high")
_SWITCHES = re.compile(r"think|effort|reasoning(?!_content)")
"""Template arguments that switch reasoning."""
_SPECIAL_TOKENS = "add_special_tokens: true"
"""What `/v1/completions` has by default: a prompt that a client rendered begins with two BOS tokens."""
_DIGEST_BYTES = 16


class PromptTraces(NamedTuple):
    """What a record's line tells of its last prompt."""

    turn_key: int
    counter: str | None
    """Who counted its tokens, such as `litellm, model qwen3`; None: nobody."""
    comparable: bool
    """Whether the record still holds what was counted: something was, and nothing of it was redacted."""
    digest: bytes | None
    """Hash of its text; None: the log has no text."""
    received: int | None
    """Source whose log shows its text apart from it, if at all; None: none does, or it cannot be compared."""


class LoggedPromptIndex:
    """What the log tells of every prompt, by the key of the turn that asked it: 32 bytes for each row of its table."""

    def __init__(self) -> None:
        self._keys, self._counters, self._comparable = array("Q"), array("i"), array("b")
        self._received = array("i")
        self._digests = bytearray()
        self._names: dict[str, int] = {}

    def add(self, traces: PromptTraces) -> None:
        """Take in what is told of the next row of the log table."""
        self._keys.append(traces.turn_key)
        none = traces.counter is None
        self._counters.append(-1 if none else self._names.setdefault(str(traces.counter), len(self._names)))
        self._comparable.append(traces.comparable)
        self._digests += traces.digest or bytes(_DIGEST_BYTES)
        self._received.append(-1 if traces.received is None else traces.received)

    def served(self, sources: Sequence[Mapping[bytes, bool]]) -> dict[int, str]:
        """The key of the prompts that a source's log shows as served, by source: of those that show any, and hold
        requests whose prompts are looked up among them."""
        found = {}
        for source in set(self._received):
            if source >= 0 and sources[source]:
                pairs = sorted(sources[source].items())
                content = b"".join(digest + bytes([answered]) for digest, answered in pairs)
                found[source] = hashlib.blake2b(content, digest_size=8).hexdigest()
        return found

    def prompts(
        self, asked: Sequence[TurnKeys], log: LogTable, served: Mapping[int, str]
    ) -> Iterator[list[dict[str, Any]]]:
        """Yield, for conversations with these turns, the `LoggedPrompt`s of each, as JSON objects. `served`: the keys
        of served prompts by source."""
        # Rows by their keys: those of one key stand together, the earliest request first.
        keys_R, started_R = np.array(self._keys, dtype=np.uint64), np.array(log.started)
        order_R = np.lexsort((np.nan_to_num(started_R, nan=-np.inf), keys_R))
        asked_T = np.concatenate([NO_TURNS, *asked])
        sorted_R, order, times, names = keys_R[order_R], order_R.tolist(), started_R.tolist(), list(self._names)
        bounds = zip(
            np.searchsorted(sorted_R, asked_T).tolist(), np.searchsorted(sorted_R, asked_T, side="right").tolist()
        )
        for turns in asked:
            found = []
            for turn, (start, stop) in enumerate(islice(bounds, len(turns))):
                if start == stop:  # a turn of a thread's middle, of which no request was logged
                    continue
                rows = order[start:stop]
                latest = times[rows[-1]]
                one = {
                    "asked_at": None if math.isnan(latest) else latest,
                    "counts": self._counts(rows, names, log),
                    "digests": self._some_digests(rows),
                }
                if logs := {served[self._received[row]] for row in rows if self._received[row] in served}:
                    one["served"] = sorted(logs)
                if one["asked_at"] is not None or one["counts"] or one["digests"] or logs:
                    found.append({"turn": turn, **one})
            yield found

    def _counts(self, rows: Sequence[int], names: Sequence[str], log: LogTable) -> list[list[Any]]:
        counts: dict[tuple[str, int], int] = {}  # a Counter takes longer to make than it counts
        for row in rows:
            if self._counters[row] >= 0:
                pair = names[self._counters[row]], log.prompt_tokens[row] if self._comparable[row] else 0
                counts[pair] = counts.get(pair, 0) + 1
        return [[*pair, number] for pair, number in _most(counts)]

    def _some_digests(self, rows: Sequence[int]) -> list[str]:
        """Hashes of the requests' prompts, the first ones in their order."""
        digests = {bytes(self._digests[_DIGEST_BYTES * row : _DIGEST_BYTES * (row + 1)]) for row in rows}
        return sorted(digest.hex() for digest in digests - {bytes(_DIGEST_BYTES)})[:_MOST_KEPT]


def _most(counts: Mapping[tuple[str, int], int]) -> list[tuple[tuple[str, int], int]]:
    """The most frequent pairs, in an order that the log's does not influence."""
    return sorted(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:_MOST_KEPT])


@dataclass
class _Comparison:
    """Requests of one counter whose prompts are compared."""

    compared: int = 0
    differ: int = 0
    least: int = 0
    """Smallest number of tokens by which the logged ones are more (negative: fewer); `most`: the largest."""
    most: int = 0
    redacted: int = 0
    """Number of requests of which something was redacted, so that their tokens are other ones, or nobody counted."""
    some: list[str] = field(default_factory=list)
    """Figures and places of some that differ."""
    tried: int = 0
    restored: Counter[str] = field(default_factory=Counter)
    """Settings that give the logged number, the first of each prompt alone, and for how many of those tried."""


class _Checked(NamedTuple):
    """What was found of a conversation."""

    asked: Conversation
    """The reading of it that its request was of."""
    refused: dict[int, str]
    """By turn: why it is not asked."""
    rendered: dict[int, list[int]]
    """By turn: the ids of prompts that were compared."""


class PromptCheck:
    """Compares the prompts that a tokenizer's template makes of a mix with what its log tells of them."""

    def __init__(
        self,
        tokenizer: Any,
        conversations: Sequence[Conversation],
        all_in_doubt: bool = False,
        ask_unproven: bool = False,
    ) -> None:
        """Find out, by a sample of all `conversations`, whose tokens each counter counts.

        `all_in_doubt`: vLLM makes the target's prompts otherwise, or perhaps (`targets.prompts_in_doubt`), so that each
        must be shown to be the same; `ask_unproven`: none needs to be shown so.
        """
        self._tokenizer = tokenizer
        self._own_code, self._ask_unproven = all_in_doubt, ask_unproven
        self._switches = _switches(tokenizer)
        self._last: tuple[str, _Checked] | None = None
        self._sampled = {name: self._sample(name, some) for name, some in _by_counter(conversations).items()}
        self._found = {name: _Comparison() for name in self._sampled}
        self._counted: set[tuple[str, int]] = set()

    def refusal(self, conversation: Conversation, turn: int) -> str | None:
        """Why a turn is not asked: its prompt is not the logged one, or is in doubt and not shown to be it.
        None: it is, or nothing is logged of it.

        A turn of which nothing is logged was asked in the history of a later one, and goes with that.
        """
        return self._checked(conversation).refused.get(turn)

    def as_asked(self, conversation: Conversation, turn: Turn) -> tuple[Conversation, Turn]:
        """The conversation and the turn as the request asked them, of which `turn_prompt` makes the prompt."""
        asked = self._checked(conversation).asked
        same = None if turn.waits_for is not None else _as_in(asked, conversation, turn)
        return asked, same or turn

    def ids(self, conversation: Conversation, turn: Turn, answers: Sequence[str] = ()) -> list[int]:
        """Prompt ids of a turn, as `chat_template.turn_ids` makes them; those of a comparison are not made again."""
        known = None if turn.waits_for is not None else self._checked(conversation).rendered.get(turn.index)
        return known or turn_ids(self._tokenizer, *self.as_asked(conversation, turn), answers)

    def lines(self, sampled: bool = False) -> list[str]:
        """What the comparison found, a line for each counter. `sampled`: in the sample alone."""
        return [
            line
            for name, found in (self._sampled if sampled else self._found).items()
            if (line := self._line(name, found))
        ]

    def _checked(self, conversation: Conversation) -> "_Checked":
        """What was found of each turn; kept of the last conversation."""
        if self._last is None or self._last[0] != conversation.id:
            logged = {one.turn: one for one in conversation.logged_prompts if one.counts or one.digests or one.served}
            asked, reason = self._reading(conversation, logged)
            found = _Checked(asked, {}, {})
            if reason is None and self._in_doubt(conversation, None):
                reason = UNPROVEN
            for turn in reversed(_whole_turns(conversation) if logged or reason or asked is not conversation else []):
                as_asked = _as_in(asked, conversation, turn)
                if as_asked is None:
                    reason = EITHER_WAY
                elif turn.index in logged and reason != EITHER_WAY:
                    reason = self._compared(asked, as_asked, logged[turn.index], found.rendered)
                if reason is not None:
                    found.refused[turn.index] = reason
            self._last = (conversation.id, found)
        return self._last[1]

    def _reading(
        self, conversation: Conversation, logged: Mapping[int, LoggedPrompt]
    ) -> tuple[Conversation, str | None]:
        """The reading of a conversation that its last prompt is shown to be of, and why that cannot be told."""
        # 1) Readings that make other prompts; what a template refuses was not answered.
        last = len(_whole_turns(conversation)) - 1
        lengths: dict[str, tuple[int, Conversation]] = {}
        for reading in conversation.readings() if OTHER_READINGS in conversation.template_args else ():
            try:
                prompt = turn_prompt(self._tokenizer, reading, replace(_whole_turns(reading)[-1], index=last))
                ids = ids_of_prompt(self._tokenizer, prompt)
            except InputError:
                continue
            lengths.setdefault(prompt.whole, (len(ids), reading))
        if len(lengths) < 2:
            return next((reading for _, reading in lengths.values()), conversation), None

        # 2) The logged number of tokens tells prompts of other lengths apart.
        told = self._told(logged[last]) if last in logged else set()
        alike = Counter(length for length, _ in lengths.values())
        shown = [reading for length, reading in lengths.values() if length in told and alike[length] == 1]
        if shown or (told and not told.intersection(alike)):
            return shown[0] if shown else conversation, None
        return conversation, None if self._ask_unproven else EITHER_WAY

    def _told(self, logged: LoggedPrompt) -> set[int]:
        """Numbers of the target's tokens that the log tells of a prompt."""
        return {one.tokens for one in logged.counts if one.tokens and self._counts_our_tokens(one.counter)}

    def _compared(
        self, conversation: Conversation, turn: Turn, logged: LoggedPrompt, rendered: dict[int, list[int]]
    ) -> str | None:
        """Why a prompt is not the logged one. Its ids go into `rendered`; what a template refuses is told elsewhere."""
        try:
            prompt = turn_prompt(self._tokenizer, conversation, turn)
            ids = rendered[turn.index] = ids_of_prompt(self._tokenizer, prompt)
        except InputError:
            return UNPROVEN if self._in_doubt(conversation, logged) else None
        # SGLang logs the text of a prompt's ids, which may differ from the text that its template made.
        digests = {prompt_digest(prompt.whole)}
        if logged.served or (logged.digests and conversation.engine == "sglang"):
            digests.add(prompt_digest(self._tokenizer.decode(ids, skip_special_tokens=False)))
        served = [
            prompts[digest]
            for prompts in (conversation.served_prompts[log] for log in logged.served)
            for digest in map(bytes.fromhex, digests)
            if digest in prompts
        ]
        if served and not any(served) and not logged.digests:
            return NOT_ANSWERED
        if logged.digests and not served and digests.isdisjoint(logged.digests):
            return OTHER_PROMPT
        counts = [one for one in logged.counts if not one.tokens or self._counts_our_tokens(one.counter)]
        if (conversation.id, turn.index) not in self._counted:
            self._counted.add((conversation.id, turn.index))
            for one in counts:
                _add(self._found[one.counter], one, len(ids), place(conversation, turn.index))
        told = self._told(logged)
        if told and len(ids) not in told:
            return f"{OTHER_COUNT} ({len(ids)}, logged {_listed(told)})"
        if told and not logged.digests and self._may_be_switched(conversation, turn, logged, prompt.whole, len(ids)):
            return UNPROVEN
        proven = told or logged.digests or served
        return UNPROVEN if not proven and self._in_doubt(conversation, logged) else None

    def _in_doubt(self, conversation: Conversation, logged: LoggedPrompt | None) -> bool:
        """Whether a prompt must be shown to be the served one: vLLM makes it by other code; or no number can be
        compared, and its log shows served prompts, or may lack a part of it."""
        own_code = self._own_code and conversation.engine == "vllm" and not self._ask_unproven
        if logged is None or self._told(logged):
            return own_code
        shown = bool(logged.served) and not self._ask_unproven
        return own_code or shown or self._may_lack_a_part(conversation, logged.counts)

    def _may_be_switched(
        self, conversation: Conversation, turn: Turn, logged: LoggedPrompt, text: str, size: int
    ) -> bool:
        """Whether a switch of reasoning that the log may lack makes another prompt of as many tokens."""
        if not self._may_lack_a_part(conversation, logged.counts):
            return False
        for name, one in _settings(self._tokenizer, conversation, turn):
            if name.partition(":")[0] not in self._switches:
                continue
            try:
                other = turn_prompt(self._tokenizer, *one)
                if other.whole != text and len(ids_of_prompt(self._tokenizer, other)) == size:
                    return True
            except InputError:  # a value that the template refuses
                continue
        return False

    def _may_lack_a_part(self, conversation: Conversation, counts: Sequence[PromptCount]) -> bool:
        """Whether the log of each request of a prompt may lack a part of it, as a system prompt, messages or tools."""
        lacking = bool(counts) and all(self._lacking(one.counter, conversation.template_args) for one in counts)
        return lacking and not self._ask_unproven

    def _lacking(self, counter: str, given: Collection[str] = ()) -> str:
        """What a log of a counter may lack; empty: nothing, as where the template has no switch that requests with
        these template arguments do not set."""
        end, what = next(((end, what) for end, what in _LACKING.items() if counter.endswith(end)), ("", ""))
        return "" if end == NO_ARGUMENTS and (not self._switches or self._switches.intersection(given)) else what

    def _counts_our_tokens(self, counter: str) -> bool:
        """Whether at least half of a counter's sampled prompts have the logged number of tokens, as they are or under
        some setting that the log may lack. Numbers of another tokenizer agree by chance alone."""
        found = self._sampled[counter]
        explained = float(found.compared - found.differ)
        if found.tried:
            explained += found.differ * found.restored.total() / found.tried
        return found.compared > 0 and explained >= found.compared / 2

    def _sample(self, counter: str, some: Sequence[tuple[Conversation, LoggedPrompt]]) -> _Comparison:
        """Compare a sample of a counter's prompts, and try settings on those that differ."""
        found = _Comparison()
        for conversation, logged in some:
            turn = _whole_turns(conversation)[logged.turn]
            counts = [one for one in logged.counts if one.counter == counter]
            told = {one.tokens for one in counts if one.tokens}
            each = ((one, _as_in(one, conversation, turn)) for one in conversation.readings())
            lengths = [self._length(one, same) for one, same in each if same is not None]
            known = [length for length in lengths if length is not None]
            if not known:
                continue
            length = next((length for length in known if length in told), known[0])
            for one in counts:
                _add(found, one, length, place(conversation, turn.index))
            if length not in told and found.tried < _TRIED:
                found.tried += 1
                others = ((name, self._length(*one)) for name, one in _settings(self._tokenizer, conversation, turn))
                every = itertools.chain([(_SPECIAL_TOKENS, length + len(self._tokenizer("")["input_ids"]))], others)
                found.restored.update([name for name, size in every if size in told][:1])
        return found

    def _length(self, conversation: Conversation, turn: Turn) -> int | None:
        try:
            return len(turn_ids(self._tokenizer, conversation, turn))
        except InputError:
            return None

    def _line(self, name: str, found: _Comparison) -> str:
        """What was found of a counter; empty: nothing to tell."""
        shown = name if self._lacking(name) else name.removesuffix(NO_ARGUMENTS)
        title, sampled = f"prompt tokens of {shown}", self._sampled[name]
        why = "not compared, as something in them was redacted or nobody counted it"
        more = f"; {found.redacted:,} {why}" if found.redacted else ""
        if lacking := self._lacking(name):
            more += f"; {lacking}"
            more += "" if self._ask_unproven else _UNPROVEN_ARE
            more += _IF_NOT_SWITCHED if name.endswith(NO_ARGUMENTS) and not self._ask_unproven else ""
        if sampled.compared and not self._counts_our_tokens(name):
            least, most = sampled.least, sampled.most
            return (
                f"{title}: not compared: of {sampled.compared:,} requests {sampled.differ:,} have another number "
                f"({'; '.join(sampled.some)}; {least:+,} to {most:+,} tokens), as of another tokenizer or template, or "
                f"where the log lacks a part of every prompt{more}"
            )
        if not found.compared:
            unknown = name.endswith(NO_ARGUMENTS) and not lacking
            return f"{title}: none compared{more}" if more and not unknown else ""
        if not found.differ:
            return f"{title}: all {found.compared:,} requests have the logged number{more}"
        for setting, number in sampled.restored.most_common(_MOST_NAMED):
            more += f"; with `{setting}` {number} of {sampled.tried} tried have the logged number"
        if sampled.restored.keys() - {_SPECIAL_TOKENS}:
            more += "; the log does not hold that, and `template_args` of a source sets it for all of its requests"
        if _SPECIAL_TOKENS in sampled.restored:
            more += "; a capture never asks with a second BOS, as engines do where clients send a whole prompt"
        return (
            f"{title}: {found.differ:,} of {found.compared:,} requests have another number than logged "
            f"({'; '.join(found.some)}), and turns that were asked by such requests alone are left out{more}"
        )


def _add(found: _Comparison, logged: PromptCount, made: int, where: str) -> None:
    """Count the requests of a prompt of `made` tokens of which the log tells one number."""
    if not logged.tokens:
        found.redacted += logged.requests
        return
    more = logged.tokens - made
    found.least, found.most = (min(found.least, more), max(found.most, more)) if found.compared else (more, more)
    found.compared += logged.requests
    if more:
        found.differ += logged.requests
        if len(found.some) < _MOST_NAMED:
            found.some.append(f"{made}, logged {logged.tokens}, at {where}")


def _by_counter(conversations: Sequence[Conversation]) -> dict[str, list[tuple[Conversation, LoggedPrompt]]]:
    """For each counter an even sample of the prompts that can be compared, by hash."""
    found: dict[str, list[tuple[Conversation, LoggedPrompt]]] = {}
    for conversation in conversations:
        for logged in conversation.logged_prompts:
            for one in logged.counts:
                some = found.setdefault(one.counter, [])
                if one.tokens and (not some or some[-1][1] is not logged):
                    some.append((conversation, logged))
    return {
        name: sorted(some, key=lambda one: unit("compared prompts", one[0].id, str(one[1].turn)))[:_SAMPLED]
        for name, some in sorted(found.items())
    }


def _settings(
    tokenizer: Any, conversation: Conversation, turn: Turn
) -> Iterator[tuple[str, tuple[Conversation, Turn]]]:
    """Settings that a log may lack, as a recipe writes them, and the turn with each: arguments that the template reads
    and the request does not set, and the end of the prompt."""
    if turn.prompt_end == "after_answer":
        yield "continue_final_message: true", (conversation, replace(turn, prompt_end="prefill"))
    for name in _arguments(chat_template_for(tokenizer, conversation.tools)):
        if name in conversation.template_args:
            continue
        for value in _EFFORTS if name == "reasoning_effort" else (False, True):
            # vLLM switches thinking on or off by an effort.
            implied = {"enable_thinking": value != "none"} if name == "reasoning_effort" else {}
            arguments = implied | conversation.template_args | {name: value}
            changed = conversation.model_copy(update={"template_args": arguments})
            yield f"{name}: {str(value).lower()}", (changed, turn)


def _switches(tokenizer: Any) -> set[str]:
    """Template arguments by which a target reasons or not, of any of its templates."""
    some: tuple[list[dict[str, Any]] | None, ...] = (None, [{}])
    found = {chat_template_for(tokenizer, tools) for tools in some}
    return {name for template in found for name in _arguments(template) if _SWITCHES.search(name)}


@lru_cache(maxsize=32)
def _arguments(template: str) -> list[str]:
    """Names of the arguments that a template reads, beside those that every request fills."""
    try:
        names = set(ask_of(template, "arguments"))
    except TemplateError:
        return []
    known = {*RESERVED_ARGS, *DEFAULT_NAMESPACE, "documents", "raise_exception", "strftime_now"}
    return sorted(name for name in names - known if not name.endswith("_token"))


def _as_in(asked: Conversation, conversation: Conversation, turn: Turn) -> Turn | None:
    """A whole turn of a conversation as another reading of it has it, where the last ones are the same; None: it has
    none."""
    if asked is conversation:
        return turn
    whole, behind = _whole_turns(asked), len(_whole_turns(conversation)) - turn.index
    return replace(whole[-behind], index=turn.index) if behind <= len(whole) else None


def _whole_turns(conversation: Conversation) -> list[Turn]:
    """Every turn of a conversation, those that are asked elsewhere too, in its logged context."""
    ends = turn_ends(conversation)
    last = len(ends) - 1
    return [
        Turn(conversation.messages[:end], i, None, True, conversation.prompt_end if i == last else "opened")
        for i, end in enumerate(ends)
    ]


def place(conversation: Conversation, turn: int) -> str:
    """Where a turn was logged, for messages: file and line where they are known."""
    return f"{conversation.where or f'conversation {conversation.id}'}, turn {turn}"


def _listed(numbers: "set[int]") -> str:
    return " or ".join(map(str, sorted(numbers)))
