"""The speculative decoder: the judge of every checkpoint.

Shapes: B active slots (always the first B), K drafted tokens, V vocabulary.

One round: the proposer drafts up to K tokens a slot; one target pass over [last token, drafted tokens] gives the
target's distribution p after each; the accept rule keeps a prefix of the draft and adds one token of the target's
own (`verify.py` states each rule in p and q). Plain decoding is the round with nothing drafted.

Counting: the prefill and the token it yields are no round; drafts are clipped to min(K, remaining - 1); tokens after
a stop are neither emitted nor accepted.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import ContextLengthError, InputError
from .cache import KVCache
from .models import CausalModel
from .proposers.base import Draft, Proposer
from .proposers.chain import fill_rows, process_rows
from .sampling import Purpose, SamplingSettings, categorical, uniforms
from .tree import DraftTree
from .verify import RULES, Rule, Verdict, check_rule, verify_block, verify_onehot, verify_token

OnLogits = Callable[[list[int], Tensor, Tensor], None]


@dataclass(frozen=True)
class Request:
    """One prompt to answer."""

    prompt_ids: list[int]
    sampling: SamplingSettings
    seed: int
    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()


class Round(NamedTuple):
    """One target pass of one request."""

    drafted: int
    accepted: int
    emitted: int


class RoundSeconds(NamedTuple):
    """Wall time of one round of the whole batch."""

    draft: float
    verify: float
    rest: float
    drafted: int
    batch: int

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.rest


class RoundTimer:
    """Collects the seconds of every round; `mark` waits for the device, so only timed runs pay for it."""

    def __init__(self, device: torch.device) -> None:
        self.rounds: list[RoundSeconds] = []
        self._device = device

    def mark(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


@dataclass
class Generation:
    """An answer and how it came about. `tokens` includes the stop token where one ended it."""

    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish: Literal["stop", "length"] = "length"
    seconds: float = 0.0


@dataclass
class _Slot:
    index: int  # its row in the caches
    number: int  # of its request
    request: Request
    generation: Generation
    started: float

    @property
    def remaining(self) -> int:
        return self.request.max_new_tokens - len(self.generation.tokens)


def generate(
    target: CausalModel,
    proposer: Proposer | None,
    requests: Sequence[Request],
    rule: str = "greedy",
    draft_tokens: int = 4,
    batch_size: int = 1,
    on_logits: OnLogits | None = None,
) -> Iterator[tuple[int, Generation]]:
    """Answer every request; yields (index of the request, generation) as they finish.

    A finished row is replaced at once. `proposer` None: plain decoding; then `on_logits(indexes, logits_BV,
    tokens_B)` sees, for every emitted token, the raw logits it was drawn from. Raises ContextLengthError for a
    request that does not fit the target, InputError for a rule that does not suit a request.
    """
    for finished in decode_rounds(target, proposer, requests, rule, draft_tokens, batch_size, on_logits):
        yield from finished


def decode_rounds(
    target: CausalModel,
    proposer: Proposer | None,
    requests: Sequence[Request],
    rule: str = "greedy",
    draft_tokens: int = 4,
    batch_size: int = 1,
    on_logits: OnLogits | None = None,
    timer: RoundTimer | None = None,
) -> Iterator[list[tuple[int, Generation]]]:
    """`generate`, step by step: the first step reads the first prompts, each later one is a round.

    Each step yields what finished in it. Two decoders may take turns; each needs a proposer of its own.
    """
    if rule not in RULES:
        raise InputError(f"rule {rule!r}: must be one of {', '.join(RULES)}")
    if proposer is not None and on_logits is not None:
        raise InputError("on_logits: only plain decoding reports logits")
    _check_requests(target, requests, batch_size)
    for request in requests if proposer is not None else ():
        check_rule(rule, "iid" if RULES[rule].needs_q else "deterministic", request.sampling)
        if proposer is not None and proposer.deterministic and RULES[rule].needs_q and not request.sampling.greedy:
            raise InputError(f"rule {rule!r}: reads the draft's probabilities; this proposer has none, use onehot")
    decoder = _Decoder(target, proposer, requests, RULES[rule], draft_tokens, batch_size, on_logits, timer)
    yield from decoder.run()


def _check_requests(target: CausalModel, requests: Sequence[Request], batch_size: int) -> None:
    if batch_size < 1:
        raise InputError(f"batch_size {batch_size}: must be >= 1")
    for number, request in enumerate(requests):
        if not request.prompt_ids:
            raise InputError(f"request {number}: empty prompt")
        if request.max_new_tokens < 1:
            raise InputError(f"request {number}: max_new_tokens {request.max_new_tokens}: must be >= 1")
        need = len(request.prompt_ids) + request.max_new_tokens
        if need > target.max_positions:
            raise ContextLengthError(
                f"request {number}: prompt of {len(request.prompt_ids)} + {request.max_new_tokens} new tokens: "
                f"must fit the context of {target.max_positions}"
            )


class _Decoder:
    """State of one run: the slots, the target's cache, the queue of waiting requests."""

    def __init__(
        self,
        target: CausalModel,
        proposer: Proposer | None,
        requests: Sequence[Request],
        rule: Rule,
        draft_tokens: int,
        batch_size: int,
        on_logits: OnLogits | None,
        timer: RoundTimer | None,
    ) -> None:
        self.target, self.proposer, self.rule, self.draft_tokens = target, proposer, rule, draft_tokens
        self.on_logits, self.timer = on_logits, timer
        self.aux_layers = proposer.aux_layers if proposer is not None else ()
        self.waiting = iter(enumerate(requests))
        self.slots: list[_Slot] = []
        self.batch_size = min(batch_size, max(len(requests), 1))
        longest = max((len(r.prompt_ids) + r.max_new_tokens for r in requests), default=1)
        capacity = longest + draft_tokens + 1  # rows near their end are padded up to the batch's longest draft
        self.cache = KVCache(self.batch_size, capacity, target.device)
        if proposer is not None:
            proposer.reserve(self.batch_size, capacity)

    def run(self) -> Iterator[list[tuple[int, Generation]]]:
        yield list(self._refill())
        while self.slots:
            self._round()
            yield [*self._retire(), *self._refill()]

    @torch.inference_mode()  # here and not around the yields: the caller may be training
    def _round(self) -> None:
        """Draft, let the target see it in one pass, keep what the rule accepts, tell the proposer."""
        mark = self.timer.mark if self.timer is not None else time.perf_counter
        t0 = mark()
        draft = self._draft()
        t1 = mark()
        last = fill_rows([slot.generation.tokens[-1:] for slot in self.slots], self.target.device)
        ids_BN = torch.cat([last, draft.tokens_BK], dim=1)
        states = self.target.states(ids_BN, self.cache.extend(*ids_BN.shape), self.aux_layers)
        logits_BNV = self.target.logits(states.hidden_BTH)
        t2 = mark()
        emitted = self._emit(self._verify(draft, logits_BNV), draft, logits_BNV)
        self.cache.keep([len(tokens) for tokens in emitted])
        t3 = mark()
        if self.proposer is not None:
            self.proposer.observe(emitted, states)
        if self.timer is not None:
            # What `observe` does prepares the next draft, so its time is the draft's.
            seconds = (t1 - t0 + mark() - t3, t2 - t1, t3 - t2)
            self.timer.rounds.append(RoundSeconds(*seconds, draft.tokens_BK.shape[1], len(self.slots)))

    def _draft(self) -> Draft:
        if self.proposer is None or self.draft_tokens == 0:
            empty = torch.zeros(len(self.slots), 0, dtype=torch.long, device=self.target.device)
            return Draft(empty, [0] * len(self.slots), None)
        limits = [min(self.draft_tokens, slot.remaining - 1) for slot in self.slots]
        sampled = self.rule.needs_q and any(not slot.request.sampling.greedy for slot in self.slots)
        chances = self._uniforms(self.slots, Purpose.DRAFT, max(limits)) if sampled and max(limits) > 0 else None
        return self.proposer.propose(limits, [slot.request.sampling for slot in self.slots], chances)

    def _verify(self, draft: Draft, logits_BNV: Tensor) -> list[tuple[int, int]]:
        """Per slot: how many drafted tokens the rule accepts, and the target's token that follows."""
        if all(slot.request.sampling.greedy for slot in self.slots):
            return verify_greedy_rows(draft.tokens_BK, draft.count_B, logits_BNV)
        sampling = [slot.request.sampling for slot in self.slots]
        if not any(draft.count_B):
            p_BV = process_rows(logits_BNV[:, 0], sampling)
            tokens = categorical(p_BV, self._uniforms(self.slots, Purpose.FINAL, 1)[:, 0]).tolist()
            return [(0, token) for token in tokens]
        accept_BK = self._uniforms(self.slots, Purpose.ACCEPT, draft.tokens_BK.shape[1]).cpu()
        final_B = self._uniforms(self.slots, Purpose.FINAL, 1)[:, 0].cpu()
        return [
            self._verify_slot(b, draft, logits_BNV[b], accept_BK[b], float(final_B[b])) for b in range(len(self.slots))
        ]

    def _verify_slot(self, b: int, draft: Draft, logits_NV: Tensor, u_K: Tensor, u_final: float) -> tuple[int, int]:
        count = draft.count_B[b]
        p_NV = process_rows(logits_NV[: count + 1], [self.slots[b].request.sampling])
        q_KV = draft.q_BKV[b, :count] if draft.q_BKV is not None else None
        verdict = verify_chain(self.rule, p_NV, q_KV, draft.tokens_BK[b, :count].tolist(), u_K[:count], u_final)
        return len(verdict.accepted), verdict.token

    def _emit(self, verdicts: list[tuple[int, int]], draft: Draft, logits_BNV: Tensor) -> list[list[int]]:
        """Append each slot's accepted tokens and the target's own, up to a stop; record the round."""
        drafted = draft.tokens_BK.tolist()
        emitted: list[list[int]] = []
        for slot, (accepted, token) in zip(self.slots, verdicts):
            tokens = _until_stop([*drafted[slot.index][:accepted], token], slot.request.stop_ids)
            slot.generation.tokens.extend(tokens)
            if self.proposer is not None:
                count = draft.count_B[slot.index]
                slot.generation.rounds.append(Round(count, min(accepted, len(tokens)), len(tokens)))
            emitted.append(tokens)
        if self.on_logits is not None:
            last_B = torch.tensor([tokens[-1] for tokens in emitted], device=logits_BNV.device)
            self.on_logits([slot.number for slot in self.slots], logits_BNV[:, 0], last_B)
        return emitted

    def _retire(self) -> Iterator[tuple[int, Generation]]:
        """Hand over finished answers; the last active slot takes a finished one's place."""
        for slot in [slot for slot in reversed(self.slots) if _finished(slot)]:
            self._free(slot)
            yield self._close(slot)

    @torch.inference_mode()
    def _free(self, slot: _Slot) -> None:
        last = self.slots.pop()
        if last is not slot:
            self.cache.move(last.index, slot.index)
            if self.proposer is not None:
                self.proposer.move(last.index, slot.index)
            self.slots[slot.index], last.index = last, slot.index

    def _refill(self) -> Iterator[tuple[int, Generation]]:
        """Prefill waiting requests into free slots; a request may end with its first token."""
        while len(self.slots) < self.batch_size:
            fresh: list[_Slot] = []
            for index in range(len(self.slots), self.batch_size):
                number, request = next(self.waiting, (-1, None))
                if request is None:
                    break
                fresh.append(_Slot(index, number, request, Generation(), time.perf_counter()))
            if not fresh:
                return
            self._prefill(fresh)
            self.slots.extend(fresh)
            yield from self._retire()

    @torch.inference_mode()
    def _prefill(self, fresh: list[_Slot]) -> None:
        """Read the prompts in one pass and emit each slot's first token."""
        prompts = [slot.request.prompt_ids for slot in fresh]
        lengths = [len(prompt) for prompt in prompts]
        step = self.cache.prefill([slot.index for slot in fresh], lengths)
        states = self.target.states(fill_rows(prompts, self.target.device), step, self.aux_layers)
        last_B = torch.tensor(lengths, device=self.target.device) - 1
        logits_BV = self.target.logits(states.hidden_BTH[torch.arange(len(fresh)), last_B])
        p_BV = process_rows(logits_BV, [slot.request.sampling for slot in fresh])
        tokens_B = categorical(p_BV, self._uniforms(fresh, Purpose.FINAL, 1)[:, 0])
        for slot, token in zip(fresh, tokens_B.tolist()):
            slot.generation.tokens.append(token)
        if self.on_logits is not None:
            self.on_logits([slot.number for slot in fresh], logits_BV, tokens_B)
        if self.proposer is not None:
            known = [[*slot.request.prompt_ids, *slot.generation.tokens] for slot in fresh]
            self.proposer.begin([slot.index for slot in fresh], known, states)

    def _uniforms(self, slots: Sequence[_Slot], purpose: Purpose, count: int) -> Tensor:
        seeds = torch.tensor([slot.request.seed for slot in slots], device=self.target.device)
        emitted = torch.tensor([len(slot.generation.tokens) for slot in slots], device=self.target.device)
        return uniforms(seeds, emitted, purpose, count)

    @staticmethod
    def _close(slot: _Slot) -> tuple[int, Generation]:
        generation = slot.generation
        generation.finish = "stop" if generation.tokens[-1] in slot.request.stop_ids else "length"
        generation.seconds = time.perf_counter() - slot.started
        return slot.number, generation


def verify_greedy_rows(tokens_BK: Tensor, count_B: Sequence[int], logits_BNV: Tensor) -> list[tuple[int, int]]:
    """Rule greedy for a batch: accept the longest prefix equal to the target's best tokens; the next best follows."""
    best_BN = logits_BNV.argmax(-1)
    counts = torch.tensor(count_B, device=best_BN.device)
    drafted = torch.arange(tokens_BK.shape[1], device=best_BN.device) < counts[:, None]
    accepted_B = ((tokens_BK == best_BN[:, :-1]) & drafted).long().cumprod(1).sum(1)
    token_B = best_BN.gather(1, accepted_B[:, None])[:, 0]
    return list(zip(*torch.stack([accepted_B, token_B]).tolist()))


def verify_chain(
    rule: Rule, p_NV: Tensor, q_KV: Tensor | None, tokens_K: list[int], u_K: Tensor, u_final: float
) -> Verdict:
    """Apply a rule by its name to one slot's chain."""
    if rule.name == "onehot":
        return verify_onehot(p_NV, DraftTree.chain(tokens_K, "deterministic"), u_K, u_final)
    if q_KV is None:
        raise InputError(f"rule {rule.name}: needs the distributions that the draft was drawn from")
    return {"token": verify_token, "block": verify_block}[rule.name](p_NV, q_KV, tokens_K, u_K, u_final)


def _until_stop(tokens: list[int], stop_ids: frozenset[int]) -> list[int]:
    """Cut after the first stop token."""
    for place, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[: place + 1]
    return tokens


def _finished(slot: _Slot) -> bool:
    return slot.remaining <= 0 or slot.generation.tokens[-1] in slot.request.stop_ids
