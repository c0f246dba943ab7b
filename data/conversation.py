"""Conversations of a mix: messages, the assistant turns that the target must answer, and chat-template rendering."""

import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from jinja2 import TemplateError
from pydantic import BaseModel, ConfigDict, Field

from ..errors import InputError
from ..specdec.sampling_settings import SamplingSettings

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
Engine = Literal["vllm", "sglang"]
PromptEnd = Literal["opened", "after_answer", "prefill", "bare"]
Split = Literal["train", "selection", "holdout"]
ROLES: tuple[Role, ...] = get_args(Role)
SPLITS: tuple[Split, ...] = ("train", "selection", "holdout")


class Message(BaseModel):
    """One message in the shape that chat templates read."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Role
    content: str | list[str]
    """Text, or its parts where it was sent in several; an empty list: the request had no content (null)."""
    reasoning: str | None = None
    """Reasoning that the client sent back beside an answer."""
    tool_calls: list[dict[str, Any]] | None = None
    name: str | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """The content as one text, its parts a line each."""
        return self.content if isinstance(self.content, str) else "\n".join(self.content)

    def record(self) -> dict[str, Any]:
        """JSON-able form without absent fields. Content that was absent counts as empty."""
        message = self.model_dump(exclude_none=True)
        message["content"] = self.content or ""
        return message

    def for_template(self) -> dict[str, Any]:
        """The dict that a chat template gets. Tool arguments logged as JSON text become objects, as servers do it."""
        message = self.model_dump(exclude_none=True)
        for call in message.get("tool_calls", []):
            function = call.get("function", call)
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                function["arguments"] = _object_or_text(function["arguments"])
        return message


class Conversation(BaseModel):
    """One conversation of a mix."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    """Hash of the redacted content (messages, tools, template arguments), never of a position."""
    domain: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    template_args: dict[str, Any] = {}
    """Extra arguments of the chat template, e.g. `enable_thinking`, `reasoning_effort`, `documents`."""
    turn_by_turn: bool = Field(default=False, exclude_if=operator.not_)
    """Whether the target answers each user message in turn, in the context of its own answers, instead of all
    messages as one prompt."""
    prompt_end: PromptEnd = Field(default="opened", exclude_if="opened".__eq__)
    """How the last prompt ends. opened: after the last message that is no logged answer, the assistant's turn is
    opened. after_answer: the same after an assistant's message that belongs to the prompt. prefill: the assistant's
    last message is continued. bare: nothing is opened."""
    engine: Engine = Field(default="vllm", exclude_if="vllm".__eq__)
    """Engine whose way of rendering holds, where that matters."""
    sampling: SamplingSettings | None = None
    """Sampling settings of the target's answers; None: the capture's default."""
    max_new_tokens: int | None = None
    cluster: str
    """Stable id of its near-duplicate cluster; whole clusters fall in one split."""
    split: Split
    asked_elsewhere: list[int] = Field(default=[], exclude_if=operator.not_)
    """Turns (0, 1, …) that do not count, as a conversation before this one asks them in the very same context."""
    where: str = Field(default="", exclude=True)
    """File and line of the log that it was read from, relative to the recipe; no part of what a capture depends on."""


@dataclass(frozen=True)
class Turn:
    """One assistant turn that the target answers."""

    messages: list[Message]
    """The context before the answer. Where `waits_for` is set, the earlier answers are still missing."""
    index: int
    """0, 1, … among the answered turns of the conversation."""
    waits_for: int | None
    """The turn whose answer this one's context needs; None: the context is complete."""
    counts: bool
    """Whether drafts are trained and scored on this turn; if not, it is answered only as later turns wait for it."""

    def context(self, answers: Sequence[str] = ()) -> list[Message]:
        """Complete the context: put `answers` of turns 0 … index-1 after their user messages."""
        if self.waits_for is None:
            return self.messages
        if len(answers) < self.index:
            raise InputError(f"turn {self.index}: {len(answers)} earlier answers given, {self.index} needed")
        # Each user message but the last is followed by its answer.
        filled: list[Message] = []
        pending = iter(answers[: self.index])
        for message in self.messages:
            filled.append(message)
            answer = next(pending, None) if message.role == "user" else None
            if answer is not None:
                filled.append(Message(role="assistant", content=answer))
        return filled


def turns(conversation: Conversation) -> list[Turn]:
    """List the assistant turns to answer, in order.

    A conversation of user messages alone is answered turn by turn, in the context of the target's own earlier answers.
    A logged conversation keeps its assistant messages: each one after a user or tool message is answered again in its
    logged context, and so is a last user or tool message without an answer. Turns asked elsewhere are left out, unless
    a later turn waits for them.
    """
    # A turn that does not count is kept only before a counting one that waits for it.
    messages = conversation.messages
    ends, waiting = turn_ends(messages)
    counting = set(range(len(ends))) - set(conversation.asked_elsewhere)
    last = max(counting, default=-1)
    return [
        Turn(messages[:end], i, i - 1 if waiting and i else None, i in counting)
        for i, end in enumerate(ends)
        if i in counting or (waiting and i < last)
    ]


def turn_ends(messages: Sequence[Message]) -> tuple[list[int], bool]:
    """Number of messages before each answer, and whether later answers wait for the target's own earlier ones."""
    # User messages alone: the target writes the whole dialogue.
    if all(message.role in ("system", "user") for message in messages):
        return [i + 1 for i, message in enumerate(messages) if message.role == "user"], True
    # A logged dialogue: answers belong after user and tool messages that an assistant message, or nothing, follows.
    closing = [*messages[1:], None]
    ends = [
        i + 1
        for i, (message, following) in enumerate(zip(messages, closing))
        if message.role in ("user", "tool") and (following is None or following.role == "assistant")
    ]
    return ends, False


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None = None,
    template_args: dict[str, Any] | None = None,
) -> list[int]:
    """Render messages to prompt ids with the tokenizer's chat template, generation prompt included.

    Raises InputError for a tokenizer without chat template and for messages that its template refuses.
    """
    require_chat_template(tokenizer)
    try:
        # Text first, and tokenized without special tokens: the template has written its own.
        text = tokenizer.apply_chat_template(
            [message.for_template() for message in messages],
            tools=tools,
            add_generation_prompt=True,
            tokenize=False,
            **(template_args or {}),
        )
    # Errors of the template are errors of the data: its own `raise_exception` too.
    except (TemplateError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{tokenizer.name_or_path}: its chat template refuses the messages ({reason})") from None
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def require_chat_template(tokenizer: Any) -> None:
    """Raise InputError unless the tokenizer has a chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(f"{tokenizer.name_or_path}: the tokenizer has no chat template; conversations need one")


def _object_or_text(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text
