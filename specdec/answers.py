"""Answers to prompts by speculative decoding, whole or piece by piece, and what drafting was worth for each.

`draftforge generate`, the Python API and registered MLflow models all answer through this file.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import InputError
from .accept_rules import RuleName, choose_rule, known_rule
from .decoder import decode_one, decode_rounds
from .proposers.base import Proposer
from .requests import DecodeRun, Generation, Request
from .sampling_settings import SamplingSettings
from .serving_plan import ServingPlan
from .targets import Target

INCOMPLETE = "\ufffd"
"""Sign that stands for half a character where a text is cut inside of one."""


@dataclass(frozen=True)
class Answer:
    """Answer to one prompt."""

    text: str
    """Text of the answer, without special tokens."""
    generation: Generation
    """Tokens, rounds and times of the answer as the decoder recorded them."""
    rule: str | None
    """Accept rule that judged the drafted tokens; None for plain decoding, which has none."""

    @property
    def tokens(self) -> list[int]:
        """Token ids of the answer, the stop token included."""
        return self.generation.tokens

    @property
    def finish(self) -> Literal["stop", "length"]:
        """Why the answer ended: at a stop token, or at `max_new_tokens`."""
        return self.generation.finish

    @property
    def seconds(self) -> float:
        """Seconds from when the request had a slot, before its prompt was read, until the last token was known."""
        return self.generation.seconds

    @property
    def rounds(self) -> int:
        """Number of rounds: passes of the target after the prompt's. 0 for plain decoding, which has no rounds."""
        return len(self.generation.rounds)

    @property
    def drafted(self) -> int:
        """Number of drafted tokens that were judged."""
        return sum(one.drafted for one in self.generation.rounds)

    @property
    def accepted(self) -> int:
        """Number of drafted tokens that were accepted."""
        return sum(one.accepted for one in self.generation.rounds)

    @property
    def tau(self) -> float | None:
        """Tokens a round; None without a round. The first token counts in none: it comes with the prompt's pass."""
        return (len(self.tokens) - 1) / self.rounds if self.rounds else None

    def record(self) -> dict[str, Any]:
        """JSON-able form: text, finish, tau, and the numbers of tokens, rounds, drafted and accepted tokens."""
        names = ("text", "finish", "rounds", "tau", "drafted", "accepted")
        return {**{name: getattr(self, name) for name in names}, "tokens": len(self.tokens)}


def answer_run(
    target: Target,
    proposer: Proposer | None,
    plan: ServingPlan,
    prompts: Sequence[list[int]],
    sampling: SamplingSettings,
    preferred: Sequence[RuleName],
    *,
    max_new_tokens: int,
    seed: int = 0,
    rule: str | None = None,
    batch_size: int = 1,
) -> DecodeRun:
    """Decoding run that answers prompts, given as token ids.

    `proposer`: None for plain decoding, whose plan says nothing. `preferred`: accept rules above temperature 0, which
    the plan's own goes before; `rule`: this one instead, refused in plain decoding. Each prompt has a seed of its own,
    so that equal prompts may get different samples. Raises InputError or ContextLengthError for what cannot be answered
    so.
    """
    for ids in prompts:
        target.check_ids(ids)
    asked = [
        Request(ids, sampling, seed + number, max_new_tokens, target.stop_ids) for number, ids in enumerate(prompts)
    ]
    if proposer is None:
        if rule is not None:
            raise InputError(f"rule: {known_rule(rule).name!r}: judges drafted tokens; without a draft there are none")
        return DecodeRun(target, None, asked, batch_size=batch_size)
    chosen = choose_rule(sampling, proposer, plan.prefer(preferred), rule)
    return DecodeRun(target, proposer, asked, chosen, plan.draft_tokens, batch_size)


def answers(target: Target, run: DecodeRun) -> list[Answer]:
    """Answer every request of a run, in the order of the requests."""
    done = dict(finished for step in decode_rounds(run) for finished in step)
    return [Answer(text_of(target, done[n].tokens), done[n], _rule(run)) for n in sorted(done)]


def _rule(run: DecodeRun) -> str | None:
    # A run without a proposer judges nothing.
    return None if run.proposer is None else run.rule


class AnswerStream(Iterator[str]):
    """Answer to one prompt while it is decoded: an iterator of pieces of its text, one a round that completes any."""

    def __init__(self, target: Target, run: DecodeRun) -> None:
        """`run`: a run of one request."""
        self._target, self._run = target, run
        self._generation = Generation()
        self._pieces = self._decode()

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def answer(self) -> Answer:
        """The answer so far; the whole one once the iterator is exhausted."""
        return Answer(text_of(self._target, self._generation.tokens), self._generation, _rule(self._run))

    def _decode(self) -> Iterator[str]:
        growing = GrowingText(self._target)
        for generation in decode_one(self._run):
            self._generation = generation
            if piece := growing.more(generation.tokens):
                yield piece
        if piece := growing.more(self._generation.tokens, last=True):
            yield piece


class GrowingText:
    """Text of an answer that grows, piece by piece."""

    def __init__(self, target: Target) -> None:
        self._target, self._shown = target, ""

    def more(self, tokens: Sequence[int], last: bool = False) -> str:
        """Text that these tokens have beyond those of the call before, which they begin with.

        Half a character waits for its other half, unless nothing follows (`last`).
        """
        # Decoded whole: a token alone may decode otherwise.
        text = text_of(self._target, tokens)
        if text.endswith(INCOMPLETE) and not last:
            return ""
        piece, self._shown = text[len(self._shown) :], text
        return piece


def text_of(target: Target, tokens: Sequence[int]) -> str:
    """Text of an answer's tokens, without stop tokens and other special ones."""
    shown = [token for token in tokens if token not in target.stop_ids]
    return str(target.tokenizer.decode(shown, skip_special_tokens=True))
