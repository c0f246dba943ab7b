"""The speculative decoder: the judge of every checkpoint.

Shapes: B active slots (always the first B), N drafted nodes, M = N + 1 rows of the target (row 0 after the last emitted
token, row i + 1 after node i), D levels, V vocabulary, S slots.

One round: the proposer drafts a tree a slot (a chain is one); one target pass over [last token, nodes] gives the
target's distribution p after each; the accept rule keeps a path of the tree and adds one token of the target's own
(`verify.py` states each rule in p and q). Plain decoding is the round with nothing drafted.

Counting: the prefill and the token it yields are no round; drafts are clipped to min(K, remaining - 1) levels; tokens
after a stop are neither emitted nor accepted.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec

import torch
from torch import Tensor

from .cache import KVCache
from .models import States
from .proposers.base import Ask, Draft
from .proposers.rows import fill_rows, pick_states, process_rows
from .requests import Generation, Request, Round, RoundSeconds, Run, until_stop
from .rules import RULES
from .sampling import Purpose, categorical, uniforms
from .tree import TreeBatch
from .verify_batch import BatchVerdict, verify_batch

Finished = tuple[int, Generation]
"""A request's index, and its answer."""
P = ParamSpec("P")


@dataclass
class _Slot:
    index: int  # its row in the caches
    number: int  # of its request
    request: Request
    generation: Generation
    started: float
    stopped: bool = False

    @property
    def remaining(self) -> int:
        return self.request.max_new_tokens - len(self.generation.tokens)

    @property
    def finished(self) -> bool:
        return self.stopped or self.remaining <= 0


def decode_rounds(run: Run) -> Iterator[list[Finished]]:
    """Answer every request, step by step: the first step reads the first prompts, each later one is a round.

    Each step yields what finished in it. Two runs may take turns; each needs a proposer of its own.
    """
    return _Decoder(run).steps()


def _one_by_one(ask: Callable[P, Run]) -> Callable[P, Iterator[Finished]]:
    def generate(*args: P.args, **kwargs: P.kwargs) -> Iterator[Finished]:
        """Answer every request of a `Run`, whose arguments these are; yields each as it finishes."""
        for finished in decode_rounds(ask(*args, **kwargs)):
            yield from finished

    return generate


generate = _one_by_one(Run)


class _Decoder:
    """State of one run: the slots, the target's cache, the queue of waiting requests."""

    def __init__(self, run: Run) -> None:
        target, proposer, requests = run.target, run.proposer, run.requests
        self.target, self.proposer, self.rule = target, proposer, RULES[run.rule]
        self.draft_tokens, self.on_logits = run.draft_tokens, run.on_logits
        self.decode, self.timer = run.decode, run.timer
        self.aux_layers = proposer.aux_layers if proposer is not None else ()
        self.waiting = iter(enumerate(requests))
        self.slots: list[_Slot] = []
        self.batch_size = min(run.batch_size, max(len(requests), 1))
        longest = max((len(r.prompt_ids) + r.max_new_tokens for r in requests), default=1) + 1
        # Rows near their end are padded up to the largest tree of the batch.
        nodes = proposer.most_nodes(run.draft_tokens) if proposer is not None else 0
        self.cache = KVCache(self.batch_size, longest + nodes, target.device)
        if proposer is not None:
            proposer.reserve(self.batch_size, longest, run.draft_tokens)
        self.seen_SV: Tensor | None = None  # tokens known to each slot, where any request has a repetition penalty
        if any(request.sampling.repetition_penalty != 1.0 for request in requests):
            self.seen_SV = torch.zeros(self.batch_size, target.vocab_size, dtype=torch.bool, device=target.device)

    def steps(self) -> Iterator[list[Finished]]:
        yield list(self._refill())
        while self.slots:
            self._round()
            yield [*self._retire(), *self._refill()]

    @torch.inference_mode()  # here and not around the yields: the caller may be training
    def _round(self) -> None:
        """Draft from q, let the target see it in one pass, keep what the rule accepts by p and q, tell the proposer."""
        mark = self.timer.mark if self.timer is not None else time.perf_counter
        t0 = mark()
        draft = self._draft()
        t1 = mark()
        states, logits_BMV = self._target_pass(draft)
        t2 = mark()
        verdict = self._verify(draft, logits_BMV)
        emitted = self._emit(verdict, draft, logits_BMV)
        states = self._keep(verdict, draft, [len(tokens) for tokens in emitted], states)
        t3 = mark()
        if self.proposer is not None:
            self.proposer.observe(emitted, states)
        if self.timer is not None:
            # What `observe` does prepares the next draft, so its time is the draft's.
            seconds = (t1 - t0 + mark() - t3, t2 - t1, t3 - t2)
            self.timer.rounds.append(RoundSeconds(*seconds, draft.tree.tokens_BN.shape[1], len(self.slots)))

    def _draft(self) -> Draft:
        limits = [min(self.draft_tokens, slot.remaining - 1) for slot in self.slots]
        if self.proposer is None or max(limits) <= 0:
            empty_B0 = torch.zeros(len(self.slots), 0, dtype=torch.long, device=self.target.device)
            return Draft.of_chains(empty_B0, [0] * len(self.slots), "deterministic")
        sampling = [slot.request.sampling for slot in self.slots]
        draws = self.rule.draws and not all(setting.greedy for setting in sampling)
        numbers = partial(self._uniforms, self.slots, Purpose.DRAFT) if draws else None
        return self.proposer.propose(Ask(limits, sampling, numbers, self._seen()))

    def _target_pass(self, draft: Draft) -> tuple[States, Tensor]:
        """The target's states and logits after the last token and after every node."""
        tree = draft.tree
        last_B1 = fill_rows([slot.generation.tokens[-1:] for slot in self.slots], self.target.device)
        ids_BM = torch.cat([last_B1, tree.tokens_BN], dim=1)
        step = self.cache.extend(*ids_BM.shape) if draft.chain else self.cache.branch(*tree.below_one_root())
        states = self.target.states(ids_BM, step, self.aux_layers)
        return states, self.target.logits(states.hidden_BTH)

    def _verify(self, draft: Draft, logits_BMV: Tensor) -> BatchVerdict:
        """The rule's verdict for every slot, on the device."""
        sampling = [slot.request.sampling for slot in self.slots]
        tree, seen_BMV = draft.tree, _seen_along(draft.tree, self._seen())
        if all(setting.greedy for setting in sampling):
            p_BMV = logits_BMV if seen_BMV is None else process_rows(logits_BMV, sampling, seen_BMV)
            no_numbers = logits_BMV.new_empty(len(self.slots), 0)
            return verify_batch("greedy", p_BMV, None, tree, no_numbers, no_numbers)
        rule = self.rule.name if tree.depth else "onehot"  # with nothing drafted that is a draw from p
        accept_BN = self._uniforms(self.slots, Purpose.ACCEPT, tree.tokens_BN.shape[1])
        finals = [
            self._uniforms(self.slots, Purpose.FINAL, 1, ahead) for ahead in range(RULES[rule].finals(tree.depth))
        ]
        p_BMV = process_rows(logits_BMV, sampling, seen_BMV)
        return verify_batch(rule, p_BMV, draft.q_BNV, tree, accept_BN, torch.cat(finals, 1))

    def _emit(self, verdict: BatchVerdict, draft: Draft, logits_BMV: Tensor) -> list[list[int]]:
        """Append each slot's accepted tokens and the target's own, up to a stop; record the round.

        The one place where a round waits for the device.
        """
        tree = draft.tree
        along_BD = tree.tokens_BN.gather(1, verdict.path_BD.clamp(min=0))
        drafted_B, judged_B = tree.candidate_BN.sum(1), verdict.length_B + tree.goes_on(verdict.path_BD)
        read = torch.cat([torch.stack([verdict.length_B, verdict.token_B, drafted_B, judged_B], 1), along_BD], 1)
        emitted: list[list[int]] = []
        rows, now = read.tolist(), time.perf_counter()
        for slot, (accepted, token, drafted, judged, *along) in zip(self.slots, rows):
            known = slot.generation.tokens
            slot.generation.arrivals.append(now)
            tokens, slot.stopped = until_stop(known, [*along[:accepted], token], slot.request, self.decode)
            known.extend(tokens)
            if self.proposer is not None:
                # A stop inside the path: what was drafted after it is neither accepted nor reached.
                rest = judged if accepted < len(tokens) else len(tokens)
                slot.generation.rounds.append(Round(drafted, min(accepted, len(tokens)), len(tokens), rest))
            emitted.append(tokens)
        self._see(self.slots, emitted)
        if self.on_logits is not None:
            last_B = torch.tensor([tokens[-1] for tokens in emitted], device=logits_BMV.device)
            self.on_logits([slot.number for slot in self.slots], logits_BMV[:, 0], last_B)
        return emitted

    def _keep(self, verdict: BatchVerdict, draft: Draft, counts: list[int], states: States) -> States:
        """Let the accepted path stay in the cache; the states along it, one a token emitted."""
        if draft.chain:
            self.cache.keep(counts)
            return states
        path_BD = torch.cat([torch.zeros_like(verdict.path_BD[:, :1]), verdict.path_BD + 1], 1)
        path_BD[:, 1:][verdict.path_BD < 0] = -1
        self.cache.keep_path(path_BD, counts)
        return pick_states(states, path_BD.clamp(min=0))

    def _retire(self) -> Iterator[Finished]:
        """Hand over finished answers; the last active slot takes a finished one's place."""
        for slot in [slot for slot in reversed(self.slots) if slot.finished]:
            self._free(slot)
            yield self._close(slot)

    @torch.inference_mode()
    def _free(self, slot: _Slot) -> None:
        last = self.slots.pop()
        if last is not slot:
            self.cache.move(last.index, slot.index)
            if self.seen_SV is not None:
                self.seen_SV[slot.index] = self.seen_SV[last.index]
            if self.proposer is not None:
                self.proposer.move(last.index, slot.index)
            self.slots[slot.index], last.index = last, slot.index

    def _refill(self) -> Iterator[Finished]:
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
        if self.seen_SV is not None:
            self.seen_SV[[slot.index for slot in fresh]] = False
            self._see(fresh, prompts)
        seen_BV = None if self.seen_SV is None else self.seen_SV[[slot.index for slot in fresh]]
        p_BV = process_rows(logits_BV, [slot.request.sampling for slot in fresh], seen_BV)
        tokens_B = categorical(p_BV, self._uniforms(fresh, Purpose.FINAL, 1)[:, 0])
        first, now = [[token] for token in tokens_B.tolist()], time.perf_counter()
        for slot, tokens in zip(fresh, first):
            slot.generation.arrivals.append(now)
            slot.generation.tokens, slot.stopped = until_stop((), tokens, slot.request, self.decode)
        self._see(fresh, first)
        if self.on_logits is not None:
            self.on_logits([slot.number for slot in fresh], logits_BV, tokens_B)
        if self.proposer is not None:
            known = [[*slot.request.prompt_ids, *slot.generation.tokens] for slot in fresh]
            self.proposer.begin([slot.index for slot in fresh], known, states)

    def _seen(self) -> Tensor | None:
        return None if self.seen_SV is None else self.seen_SV[: len(self.slots)]

    def _see(self, slots: Sequence[_Slot], tokens: Sequence[list[int]]) -> None:
        if self.seen_SV is not None:
            for slot, new in zip(slots, tokens):
                self.seen_SV[slot.index, new] = True

    def _uniforms(self, slots: Sequence[_Slot], purpose: Purpose, count: int, ahead: int = 0) -> Tensor:
        """Numbers of a round that starts `ahead` tokens later than this one."""
        seeds = torch.tensor([slot.request.seed for slot in slots], device=self.target.device)
        emitted = torch.tensor([len(slot.generation.tokens) + ahead for slot in slots], device=self.target.device)
        return uniforms(seeds, emitted, purpose, count)

    @staticmethod
    def _close(slot: _Slot) -> Finished:
        generation = slot.generation
        generation.finish = "stop" if slot.stopped else "length"
        generation.begun = slot.started
        generation.seconds = time.perf_counter() - slot.started
        return slot.number, generation


def _seen_along(tree: TreeBatch, seen_BV: Tensor | None) -> Tensor | None:
    """Tokens known at every row of the target [B, M, V]: those of the slot, and the row's node and ancestors."""
    if seen_BV is None:
        return None
    batch, nodes = tree.tokens_BN.shape
    seen_BMV = seen_BV[:, None].repeat(1, nodes + 1, 1)
    above_BN = torch.arange(nodes, device=seen_BV.device).expand(batch, nodes)
    for _ in range(tree.depth):
        seen_BMV[:, 1:].scatter_(2, tree.tokens_BN.gather(1, above_BN)[..., None], True)
        parents_BN = tree.parents_BN.gather(1, above_BN)
        above_BN = torch.where(parents_BN < 0, above_BN, parents_BN)
    return seen_BMV
