"""The speculative decoder: the judge of every checkpoint.

Shapes: B rows of a round (the first B slots), R prompts read at once, T tokens of the longest, N drafted nodes,
M = N + 1 rows of the target (row 0 after the last emitted token, row i + 1 after node i), D levels, V vocabulary,
S slots.

One round: the proposer drafts a tree a slot (a chain is one); one target pass over [last token, nodes] gives the
target's distribution p after each; the accept rule keeps a path of the tree and adds one token of the target's own
(`verify.py` states each rule in p and q). Plain decoding is the round with nothing drafted.

Counting: the prefill and the token it yields are no round; drafts are clipped to min(K, remaining - 1) levels; tokens
after a stop are neither emitted nor accepted.

On a GPU each part of a round is a CUDA graph, and the host waits once, to read the verdict. Rounds are as wide there as
their graphs: what stands past the active slots is free and says nothing.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .cache import KVCache
from .cuda_graphs import Replays, Shapes, read_back, running, send
from .memory_fit import takes_graphs
from .models import States
from .proposers.base import Ask, Draft, ObservesTargetArgmax, Texts
from .proposers.logits import pick_states, process_rows
from .requests import DecodeRun, Generation, Request, Round, until_stop
from .rules import RULES
from .sampling import Purpose, SamplingSettings, categorical, uniforms
from .tree import TreeBatch
from .verify_batch import BatchVerdict, verify_batch, verify_greedy_chains


class RoundState:
    """Last tokens, counts, seeds and repetition marks of every slot."""

    def __init__(self, slots: int, device: torch.device, marked: int = 0) -> None:
        """`marked`: tokens of the vocabulary, where any request has a repetition penalty."""
        self.last_S, self.emitted_S, self.budget_S, self.seed_S = torch.zeros(
            4, slots, dtype=torch.long, device=device
        ).unbind()
        self._seen_SV = torch.zeros(slots, marked, dtype=torch.bool, device=device) if marked else None

    def admit(self, slots_R: Tensor, requests: Sequence[Request], ids_RT: Tensor, counts_R: Tensor) -> None:
        """Put requests into slots; rows past them are padding. `ids`: their prompts."""
        numbers = [[request.max_new_tokens, request.seed] for request in requests]
        numbers += [[0, 0]] * (len(slots_R) - len(requests))
        budget_R, seed_R = send(torch.tensor(numbers), slots_R.device).unbind(1)
        self.budget_S[slots_R], self.seed_S[slots_R], self.emitted_S[slots_R] = budget_R, seed_R, 0
        if self._seen_SV is not None:
            seen_RV = self._seen_SV.new_zeros(len(slots_R), self._seen_SV.shape[1])
            inside_RT = torch.arange(ids_RT.shape[1], device=ids_RT.device) < counts_R[:, None]
            self._seen_SV[slots_R] = seen_RV.scatter_(1, torch.where(inside_RT, ids_RT, ids_RT[:, :1]), True)

    def begin(self, slots_R: Tensor, tokens_R: Tensor) -> None:
        """Each answer's first token."""
        self.last_S[slots_R], self.emitted_S[slots_R] = tokens_R, 1
        if self._seen_SV is not None:
            self._seen_SV[slots_R, tokens_R] = True

    def advance(self, new: Texts) -> None:
        """What each of the first slots emitted."""
        rows = len(new.counts_B)
        self.last_S[:rows] = new.last()
        self.emitted_S[:rows] += new.counts_B
        if self._seen_SV is not None:
            inside_BT = torch.arange(new.ids_BT.shape[1], device=new.ids_BT.device) < new.counts_B[:, None]
            self._seen_SV[:rows].scatter_(1, torch.where(inside_BT, new.ids_BT, new.ids_BT[:, :1]), True)

    def limits(self, rows: int, levels: int) -> Tensor:
        """[B]: levels that may be drafted, so that the target's own token still fits."""
        return (self.budget_S[:rows] - self.emitted_S[:rows] - 1).clamp(0, levels)

    def live(self, rows: int) -> Tensor:
        """[B]: whether a request is there."""
        return self.budget_S[:rows] > 0

    def seen(self, rows: int) -> Tensor | None:
        """Marks [B, V] of the tokens that each slot knows; None where no request has a use for them."""
        return None if self._seen_SV is None else self._seen_SV[:rows]

    def seen_by(self, slots_R: Tensor) -> Tensor | None:
        """The same of some slots."""
        return None if self._seen_SV is None else self._seen_SV[slots_R]

    def uniforms(self, slots: Tensor | slice, purpose: Purpose, count: int, ahead: int = 0) -> Tensor:
        """Numbers [., C] of a round that starts `ahead` tokens later than this one."""
        return uniforms(self.seed_S[slots], self.emitted_S[slots] + ahead, purpose, count)

    def move(self, source: int, destination: int) -> None:
        """Copy a slot onto another."""
        for part in (self.last_S, self.emitted_S, self.budget_S, self.seed_S, self._seen_SV):
            if part is not None:
                part[destination] = part[source]

    def free(self, slot: int) -> None:
        """Nothing is there."""
        self.budget_S[slot] = 0


Finished = tuple[int, Generation]
"""A request's index, and its answer."""
P = ParamSpec("P")
T = TypeVar("T")


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


def decode_rounds(run: DecodeRun) -> Iterator[list[Finished]]:
    """Answer every request, step by step: the first step reads the first prompts, each later one is a round.

    Each step yields what finished in it. Two runs may take turns; each needs a proposer of its own.
    """
    return _Decoder(run).steps()


def _one_by_one(ask: Callable[P, DecodeRun]) -> Callable[P, Iterator[Finished]]:
    def generate(*args: P.args, **kwargs: P.kwargs) -> Iterator[Finished]:
        """Answer every request of a `DecodeRun`, whose arguments these are; yields each as it finishes."""
        for finished in decode_rounds(ask(*args, **kwargs)):
            yield from finished

    return generate


generate = _one_by_one(DecodeRun)


class _Judged(NamedTuple):
    """What a round leaves on the device."""

    read_BX: Tensor  # what the host reads: accepted, drafted and reached counts, then the tokens
    new: Texts
    states: States  # from which each of them was emitted
    best_BM: Tensor | None  # for a proposer that hears it: the likeliest token after each row


class _Decoder:
    """State of one run: the slots, the target's cache, the queue of waiting requests."""

    def __init__(self, run: DecodeRun) -> None:
        target, proposer, requests = run.target, run.proposer, run.requests
        self.target, self.proposer, self.rule = target, proposer, RULES[run.rule]
        self.draft_tokens, self.decode, self.timer = run.draft_tokens, run.decode, run.timer
        self.listener = proposer if isinstance(proposer, ObservesTargetArgmax) else None
        self.aux_layers = proposer.aux_layers if proposer is not None else ()
        self.waiting, self.barriers = deque(enumerate(requests)), run.barriers
        self.slots: list[_Slot] = []
        self.nothing: dict[int, Draft] = {}
        self.batch_size = min(run.batch_size, max(len(requests), 1))
        longest = max((len(r.prompt_ids) + r.max_new_tokens for r in requests), default=1) + 1
        # Rows near their end are padded up to the largest tree of the batch.
        self.nodes = proposer.most_nodes(run.draft_tokens) if proposer is not None else 0
        fixed = takes_graphs(target)
        self.shapes = Shapes(self.batch_size, longest, fixed)
        self.replays = Replays(fixed and target.device.type == "cuda")
        slots = self.batch_size + fixed  # one more takes what padding writes
        self.cache = KVCache(slots, longest + self.nodes, target.device)
        if proposer is not None:
            proposer.reserve(slots, longest, run.draft_tokens)
        marked = any(request.sampling.repetition_penalty != 1.0 for request in requests)
        self.state = RoundState(slots, target.device, target.vocab_size if marked else 0)

    def steps(self) -> Iterator[list[Finished]]:
        yield list(self._refill())
        while self.slots:
            with running(self.target.device):
                self._round()
            yield [*self._retire(), *self._refill()]

    def _round(self) -> None:
        """Draft from q, let the target see it in one pass, keep what the rule accepts by p and q, tell the proposer."""
        mark = self.timer.mark if self.timer is not None else lambda: None
        if self.timer is not None:
            self.timer.start()
        rows = self.shapes.rows(len(self.slots))
        sampling = self._sampling(rows)
        draft = self._draft(rows, sampling)
        mark()
        nodes = draft.tree.tokens_BN.shape[1]
        shape = (rows, nodes, draft.tree.depth, draft.chain)
        states, logits_BMV = self.replays.run(("target", *shape), self._target_pass, draft)
        mark()
        judged = self._replayed(("judge", *shape), sampling, self._judge, draft, logits_BMV, states)
        read = read_back(judged.read_BX)
        if self.listener is not None and judged.best_BM is not None:
            self.listener.observe_target_argmax(judged.best_BM)
        if (
            self.proposer is not None and not self.proposer.needs_host_sync
        ):  # beside the host, which waits for the verdict only
            mark()
            self.replays.run(("observe", *shape), self.proposer.observe, judged.new, judged.states)
            mark()
            self._emit(read())
        else:
            emitted = self._emit(read())
            mark()
            if self.proposer is not None:
                self.proposer.observe(judged.new._replace(known=emitted), judged.states)
            mark()
        if self.timer is not None:
            self.timer.end(nodes, len(self.slots))

    def _replayed(
        self, name: tuple[object, ...], sampling: list[SamplingSettings], function: Callable[..., T], *args: object
    ) -> T:
        """A graph holds one setting; slots of several are judged without one."""
        if len(set(sampling)) > 1:
            return function(sampling, *args)
        return self.replays.run((*name, sampling[0].key), partial(function, sampling), *args)

    def _sampling(self, rows: int) -> list[SamplingSettings]:
        known = [slot.request.sampling for slot in self.slots]
        return known + known[:1] * (rows - len(known))

    def _draft(self, rows: int, sampling: list[SamplingSettings]) -> Draft:
        levels = min(self.draft_tokens, max(slot.remaining for slot in self.slots) - 1)
        if self.proposer is None or levels <= 0:
            return self._nothing(rows)
        if not self.shapes.fixed:
            return self._propose(sampling, levels)
        levels = self.draft_tokens  # whatever is left: a graph has one shape
        if not self.proposer.needs_host_sync:
            return self._replayed(("draft", rows), sampling, partial(self._propose, levels=levels))
        draft = self._propose(sampling, levels)
        return draft.padded(self.nodes, levels) if draft.tree.tokens_BN.shape[1] else draft

    def _nothing(self, rows: int) -> Draft:
        """No node in any slot; made once, so that plain decoding launches nothing for it."""
        if rows not in self.nothing:
            empty_B0 = torch.zeros(rows, 0, dtype=torch.long, device=self.target.device)
            counts_B = torch.zeros_like(self.state.last_S[:rows])
            self.nothing[rows] = Draft.of_chains(empty_B0, counts_B, "deterministic")
        return self.nothing[rows]

    def _propose(self, sampling: list[SamplingSettings], levels: int) -> Draft:
        assert self.proposer is not None
        rows = len(sampling)
        draws = self.rule.draws and not all(setting.greedy for setting in sampling)
        numbers = partial(self.state.uniforms, slice(rows), Purpose.DRAFT) if draws else None
        limits_B = self.state.limits(rows, levels)
        return self.proposer.propose(Ask(limits_B, levels, sampling, numbers, self.state.seen(rows)))

    def _target_pass(self, draft: Draft) -> tuple[States, Tensor]:
        """The target's states and logits after the last token and after every node."""
        tree = draft.tree
        rows, nodes = tree.tokens_BN.shape
        ids_BM = torch.cat([self.state.last_S[:rows, None], tree.tokens_BN], dim=1)
        step = self.cache.extend(rows, nodes + 1) if draft.chain else self.cache.branch(*tree.below_one_root())
        states = self.target.states(ids_BM, step, self.aux_layers)
        return states, self.target.logits(states.hidden_BTH)

    def _judge(self, sampling: list[SamplingSettings], draft: Draft, logits_BMV: Tensor, states: States) -> _Judged:
        """The rule's verdict for every slot, and the slots as it leaves them."""
        tree = draft.tree
        p_BMV = self._processed(sampling, tree, logits_BMV)
        best_BM = p_BMV.argmax(-1) if self.listener is not None and tree.depth else None
        verdict = self._verify(sampling, draft, p_BMV)
        along_BD = tree.tokens_BN.gather(1, verdict.path_BD.clamp(min=0))
        ids_BE = F.pad(along_BD, (0, 1)).scatter(1, verdict.length_B[:, None], verdict.token_B[:, None])
        new = Texts(ids_BE, (verdict.length_B + 1) * self.state.live(len(ids_BE)))
        drafted_B, reached_B = tree.candidate_BN.sum(1), verdict.length_B + tree.goes_on(verdict.path_BD)
        read_BX = torch.cat([torch.stack([verdict.length_B, drafted_B, reached_B], 1), ids_BE], 1)
        if draft.chain:
            self.cache.keep(new.counts_B)
        else:
            path_BE = F.pad(verdict.path_BD + 1, (1, 0)).masked_fill_(F.pad(verdict.path_BD < 0, (1, 0)), -1)
            self.cache.keep_path(path_BE, new.counts_B)
            states = pick_states(states, path_BE.clamp(min=0))
        self.state.advance(new)
        return _Judged(read_BX, new, states, best_BM)

    def _processed(self, sampling: list[SamplingSettings], tree: TreeBatch, logits_BMV: Tensor) -> Tensor:
        """The target's p after every row; where all take the likeliest token, logits will do."""
        seen_BMV = _seen_along(tree, self.state.seen(len(sampling)))
        if seen_BMV is None and all(setting.greedy for setting in sampling):
            return logits_BMV
        return process_rows(logits_BMV, sampling, seen_BMV)

    def _verify(self, sampling: list[SamplingSettings], draft: Draft, p_BMV: Tensor) -> BatchVerdict:
        slots, tree = slice(len(sampling)), draft.tree
        if all(setting.greedy for setting in sampling):
            if draft.chain:
                return verify_greedy_chains(p_BMV, tree)
            no_numbers = p_BMV.new_empty(len(sampling), 0)
            return verify_batch("greedy", p_BMV, None, tree, no_numbers, no_numbers)
        rule = self.rule.name if tree.depth else "onehot"  # with nothing drafted that is a draw from p
        accept_BN = self.state.uniforms(slots, Purpose.ACCEPT, tree.tokens_BN.shape[1])
        finals = [
            self.state.uniforms(slots, Purpose.FINAL, 1, ahead) for ahead in range(RULES[rule].target_draws(tree.depth))
        ]
        return verify_batch(rule, p_BMV, draft.q_BNV, tree, accept_BN, torch.cat(finals, 1))

    def _emit(self, read_BX: Tensor) -> list[list[int]]:
        """Append each slot's accepted tokens and the target's own, up to a stop; record the round."""
        emitted: list[list[int]] = []
        rows, now = read_BX.tolist(), time.perf_counter()
        for slot, (accepted, drafted, reached, *along) in zip(self.slots, rows):
            known = slot.generation.tokens
            slot.generation.arrivals.append(now)
            tokens, slot.stopped = until_stop(known, along[: accepted + 1], slot.request, self.decode)
            known.extend(tokens)
            if self.proposer is not None:
                # A stop inside the path: what was drafted after it is neither accepted nor reached.
                rest = reached if accepted < len(tokens) else len(tokens)
                slot.generation.rounds.append(Round(drafted, min(accepted, len(tokens)), len(tokens), rest))
            emitted.append(tokens)
        return emitted

    def _retire(self) -> Iterator[Finished]:
        """Hand over finished answers; the last active slot takes a finished one's place."""
        for slot in [slot for slot in reversed(self.slots) if slot.finished]:
            with running(self.target.device):
                self._free(slot)
            yield self._close(slot)

    def _free(self, slot: _Slot) -> None:
        last = self.slots.pop()
        vacant = last.index
        if last is not slot:
            self.cache.move(last.index, slot.index)
            self.state.move(last.index, slot.index)
            if self.proposer is not None:
                self.proposer.move(last.index, slot.index)
            self.slots[slot.index], last.index = last, slot.index
        self.cache.free(vacant)
        self.state.free(vacant)

    def _refill(self) -> Iterator[Finished]:
        """Prefill waiting requests into free slots; a request may end with its first token."""
        while len(self.slots) < self.batch_size:
            fresh: list[_Slot] = []
            for index in range(len(self.slots), self.batch_size):
                held_back = self.waiting and self.waiting[0][0] in self.barriers and (self.slots or fresh)
                if held_back or not self.waiting:
                    break
                number, request = self.waiting.popleft()
                fresh.append(_Slot(index, number, request, Generation(), time.perf_counter()))
            if not fresh:
                return
            with running(self.target.device):
                self._prefill(fresh)
            self.slots.extend(fresh)
            yield from self._retire()

    def _prefill(self, fresh: list[_Slot]) -> None:
        """Read the prompts in one pass and emit each slot's first token."""
        device, padding = self.target.device, self.shapes.padding(len(fresh))
        prompts = [slot.request.prompt_ids for slot in fresh]
        texts = Texts.of([*prompts, *prompts[:1] * padding], device).wide(self.shapes.width(max(map(len, prompts))))
        slots_R = send(torch.tensor([slot.index for slot in fresh] + [self.batch_size] * padding), device)
        shape = tuple(texts.ids_BT.shape)
        states, logits_RV = self.replays.run(("read", *shape), self._read, slots_R, texts.ids_BT, texts.counts_B)
        self.state.admit(slots_R, [slot.request for slot in fresh], texts.ids_BT, texts.counts_B)
        sampling = [slot.request.sampling for slot in fresh]
        p_RV = process_rows(logits_RV, sampling + sampling[:1] * padding, self.state.seen_by(slots_R))
        tokens_R = categorical(p_RV, self.state.uniforms(slots_R, Purpose.FINAL, 1)[:, 0])
        self.state.begin(slots_R, tokens_R)
        first, now = tokens_R.tolist(), time.perf_counter()
        for slot, token in zip(fresh, first):
            slot.generation.arrivals.append(now)
            slot.generation.tokens, slot.stopped = until_stop((), [token], slot.request, self.decode)
        if self.proposer is None:
            return
        known = Texts(_followed_by(texts, tokens_R), texts.counts_B + 1)
        if self.proposer.needs_host_sync:
            rows = [[*slot.request.prompt_ids, *slot.generation.tokens] for slot in fresh]
            some = slice(len(fresh))
            known = Texts(known.ids_BT[some], known.counts_B[some], rows)
            aux_RTA = None if states.aux_BTA is None else states.aux_BTA[some]
            self.proposer.begin(slots_R[some], known, States(states.hidden_BTH[some], aux_RTA))
        else:
            self.replays.run(("begin", *shape), self.proposer.begin, slots_R, known, states)

    def _read(self, slots_R: Tensor, ids_RT: Tensor, counts_R: Tensor) -> tuple[States, Tensor]:
        states = self.target.states(ids_RT, self.cache.prefill(slots_R, counts_R), self.aux_layers)
        rows_R = torch.arange(len(slots_R), device=slots_R.device)
        return states, self.target.logits(states.hidden_BTH[rows_R, counts_R - 1])

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


def _followed_by(texts: Texts, tokens_R: Tensor) -> Tensor:
    """Each row's tokens and one more [R, T+1]."""
    return F.pad(texts.ids_BT, (0, 1)).scatter(1, texts.counts_B[:, None], tokens_R[:, None])
