"""Speculative decoder: rounds of draft, target pass and verification, by which every draft is scored.

Shapes: B rows of a round (the first B slots), R prompts read at once, T tokens of the longest, N drafted nodes,
M = N + 1 rows of the target (row 0 after the last emitted token, row i + 1 after node i), D levels, V vocabulary,
S slots.

One round: the proposer drafts a tree a slot (a chain is one); one target pass over [last token, nodes] gives the
target's distribution p after each; the accept rule keeps a path of the tree and adds one token of the target's own
(`verify.py` states each rule in p and q). Plain decoding is the round with nothing drafted.

Counting: the prefill and the token it yields are no round; drafts are clipped to min(K, remaining - 1) levels; tokens
after a stop are neither emitted nor accepted.

On a GPU each part of a round is a CUDA graph, and the host waits once, to read the verdict. Rounds are as wide there as
their graphs: what stands past the active slots is free and says nothing. Where no part needs the host, the next round
is launched before the verdict of this one is read, so that the device never waits: what a stopped slot says in that
round is dropped.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .accept_rules import RULES
from .cuda_graphs import Replays, Shapes, read_back, running, send
from .kv_cache import KVCache
from .memory_fit import takes_graphs
from .models import States
from .proposers.base import Ask, Draft, DraftsInSteps, ObservesTargetArgmax, Texts
from .proposers.logits import likeliest, pick_states, process_rows
from .requests import DecodeRun, Generation, Lap, Request, Round, until_stop
from .sampling import Purpose
from .sampling_settings import SamplingSettings
from .slot_table import SlotTable, draw, read_prompts, rows_by_setting
from .tree import TreeBatch
from .verify_batch import BatchVerdict, settle, settle_greedy, verify_batch

Finished = tuple[int, Generation]
"""Index of a request, and its answer."""
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
    unread: int = 0  # rounds that are launched, and whose verdict the host has not read

    @property
    def remaining(self) -> int:
        return self.request.max_new_tokens - len(self.generation.tokens)

    @property
    def finished(self) -> bool:
        return self.stopped or self.remaining <= 0


def decode_rounds(run: DecodeRun) -> Iterator[list[Finished]]:
    """Decode all requests of a run, step by step: the first step reads the first prompts, each later one is a round.

    Each step yields what finished in it. Two runs may take turns; each needs a proposer of its own.
    """
    return _Decoder(run).steps()


def decode_one(run: DecodeRun) -> Iterator[Generation]:
    """Decode the only request of a run; yields its generation, always the same object, whenever it has grown."""
    decoder = _Decoder(run)
    for finished in decoder.steps():
        yield finished[0][1] if finished else decoder.slots[0].generation


def _one_by_one(ask: Callable[P, DecodeRun]) -> Callable[P, Iterator[Finished]]:
    def generate(*args: P.args, **kwargs: P.kwargs) -> Iterator[Finished]:
        """Answer every request of a `DecodeRun`, whose arguments these are; yields each as it finishes."""
        for finished in decode_rounds(ask(*args, **kwargs)):
            yield from finished

    return generate


generate = _one_by_one(DecodeRun)


class _Judged(NamedTuple):
    """Verdict of a round and what follows from it, on the device."""

    read_BX: Tensor  # what the host reads: accepted, drafted and reached counts, then the tokens
    new: Texts
    states: States  # from which each of them was emitted
    best_BM: Tensor | None  # for a proposer that hears it: the likeliest token after each row


class _Launched(NamedTuple):
    """Round that is launched, and whose verdict the host has not read."""

    slots: list[_Slot]  # of its rows, whatever moves later
    nodes: int
    judged: _Judged
    read: Callable[[], Tensor]
    lap: Lap | None  # of the timer, if any


class _Decoder:
    """Decoder of one run: its slots, the target's cache, and the queue of waiting requests."""

    def __init__(self, run: DecodeRun) -> None:
        # What the run asks for, and which features of the target the proposer reads.
        target, proposer, requests = run.target, run.proposer, run.requests
        self.target, self.proposer, self.rule = target, proposer, RULES[run.rule]
        self.draft_tokens, self.decode, self.timer = run.draft_tokens, run.decode, run.timer
        self.listener = proposer if isinstance(proposer, ObservesTargetArgmax) else None
        self.aux_layers = proposer.aux_layers if proposer is not None else ()
        self.waiting, self.barriers = deque(enumerate(requests)), run.barriers
        self.slots: list[_Slot] = []
        self.empty_drafts: dict[int, Draft] = {}
        self.batch_size = min(run.batch_size, max(len(requests), 1))
        # Capacity of the longest request, and the largest tree of a round behind it.
        longest = max((len(r.prompt_ids) + r.max_new_tokens for r in requests), default=1) + 1
        # Rows near their end are padded up to the largest tree of the batch.
        self.nodes = proposer.most_nodes(run.draft_tokens) if proposer is not None else 0
        # Fixed sizes wherever graphs could hold the passes; graphs themselves on CUDA only.
        fixed = takes_graphs(target)
        self.shapes = Shapes(self.batch_size, longest, fixed)
        self.replays = Replays(fixed and target.device.type == "cuda")
        on_device = proposer is None or not proposer.needs_host_sync
        self.runs_ahead, self.ahead = fixed and on_device, list[_Launched]()
        slots = self.batch_size + fixed  # one more takes what padding writes
        # Caches and tables of target and proposer have the same slots.
        self.cache = KVCache(slots, longest + self.nodes, target.device)
        if proposer is not None:
            proposer.reserve(slots, longest, run.draft_tokens)
        self.table = SlotTable(slots, target.device)

    def steps(self) -> Iterator[list[Finished]]:
        yield list(self._refill())
        while self.slots:
            with running(self.target.device):
                self._round()
            yield [*self._retire(), *self._refill()]
        # What runs behind the last answer reads memory that is about to go.
        for launched in self.ahead:
            launched.read()

    def _round(self) -> None:
        """One round of all active slots: the one that was launched ahead, if any. Launches the next one ahead."""
        launched = self.ahead.pop() if self.ahead else self._launch()
        # A slot is sure to end with its budget; whether a stop ends it only its verdict tells.
        if self.runs_ahead and any(slot.remaining > slot.unread for slot in self.slots):
            self.ahead.append(self._launch())
        self._finish(launched)

    def _launch(self) -> _Launched:
        """Start a round of all active slots on the device."""
        lap = None if self.timer is None else self.timer.start()
        # 1) Draft a tree a slot, from q where the rule draws.
        rows = self.shapes.rows(len(self.slots))
        sampling = self._sampling(rows)
        draft = self._draft(rows, sampling)
        _mark(lap)
        # 2) One target pass gives p after the last token and after every node.
        nodes = draft.tree.tokens_BN.shape[1]
        shape = (rows, nodes, draft.tree.depth, draft.chain)
        states, logits_BMV = self.replays.run(("target", *shape), self._target_pass, draft)
        _mark(lap)
        # 3) The rule keeps a path and adds a token; the verdict starts on its way to the host.
        judged = self._by_setting(("judge", *shape), sampling, self._judge, draft, logits_BMV, states)
        read = read_back(judged.read_BX)
        # 4) The proposer learns what was emitted: on the device while the host waits for the verdict, or after that.
        if self.proposer is not None and not self.proposer.needs_host_sync:
            _mark(lap)
            self.replays.run(("observe", *shape), self._observe, judged.new, judged.states, judged.best_BM)
            _mark(lap)
        for slot in self.slots:
            slot.unread += 1
        return _Launched(list(self.slots), nodes, judged, read, lap)

    def _finish(self, launched: _Launched) -> None:
        """Wait for a round's verdict, and note it."""
        emitted = self._emit(launched.slots, launched.read())
        if self.proposer is None or self.proposer.needs_host_sync:
            _mark(launched.lap)
            judged = launched.judged
            if self.proposer is not None:
                self._observe(judged.new._replace(known=emitted), judged.states, judged.best_BM)
            _mark(launched.lap)
        if self.timer is not None and launched.lap is not None:
            self.timer.end(launched.lap, launched.nodes, len(launched.slots))

    def _observe(self, new: Texts, states: States, best_BM: Tensor | None) -> None:
        assert self.proposer is not None
        if self.listener is not None and best_BM is not None:
            self.listener.observe_target_argmax(best_BM)
        self.proposer.observe(new, states)

    def _by_setting(
        self, name: tuple[object, ...], sampling: list[SamplingSettings], function: Callable[..., T], *args: object
    ) -> T:
        """Run a part that depends on the sampling settings: a graph holds one, so slots of several run without one."""
        # Settings are constants of a captured graph, so they are part of its name.
        if len(set(sampling)) > 1:
            return function(sampling, *args)
        return self.replays.run((*name, sampling[0].key), partial(function, sampling), *args)

    def _sampling(self, rows: int) -> list[SamplingSettings]:
        known = [slot.request.sampling for slot in self.slots]
        return known + known[:1] * (rows - len(known))

    def _draft(self, rows: int, sampling: list[SamplingSettings]) -> Draft:
        levels = min(self.draft_tokens, max(slot.remaining - slot.unread for slot in self.slots) - 1)
        # With room for the target's own token alone nothing is drafted.
        if self.proposer is None or levels <= 0:
            return self._empty_draft(rows)
        # Without fixed sizes the draft is as deep as the longest answer may still go.
        if not self.shapes.fixed:
            return self._propose(sampling, levels)
        levels = self.draft_tokens  # whatever is left: a graph has one shape
        # A proposer that stays on the device drafts in a graph; one that reads on the host drafts outside of one, and
        # is padded to the graphs' size.
        if not self.proposer.needs_host_sync:
            if isinstance(self.proposer, DraftsInSteps):
                return self._propose_in_steps(self.proposer, sampling, levels)
            return self._by_setting(("draft", rows), sampling, partial(self._propose, levels=levels))
        draft = self._propose(sampling, levels)
        return draft.padded(self.nodes, levels) if draft.tree.tokens_BN.shape[1] else draft

    def _empty_draft(self, rows: int) -> Draft:
        """A draft without a node in any slot; made once, so that plain decoding launches nothing for it."""
        if rows not in self.empty_drafts:
            empty_B0 = torch.zeros(rows, 0, dtype=torch.long, device=self.target.device)
            counts_B = torch.zeros_like(self.table.last_S[:rows])
            self.empty_drafts[rows] = Draft.of_chains(empty_B0, counts_B, "deterministic")
        return self.empty_drafts[rows]

    def _propose(self, sampling: list[SamplingSettings], levels: int) -> Draft:
        assert self.proposer is not None
        return self.proposer.propose(self._ask(sampling, levels))

    def _propose_in_steps(self, proposer: DraftsInSteps, sampling: list[SamplingSettings], levels: int) -> Draft:
        def run(name: tuple[object, ...], step: Callable[[], T]) -> T:
            return self._by_setting(("draft", len(sampling), *name), sampling, lambda _: step())

        return proposer.propose_in_steps(run, levels, partial(self._ask, sampling, levels))

    def _ask(self, sampling: list[SamplingSettings], levels: int) -> Ask:
        rows = len(sampling)
        # Random numbers only where the rule wants drafts that are drawn from q.
        draws = self.rule.draws and not all(setting.greedy for setting in sampling)
        numbers = partial(self.table.uniforms, slice(rows), Purpose.DRAFT) if draws else None
        limits_B = self.table.limits(rows, levels)
        return Ask(limits_B, levels, sampling, numbers, self.table.seen(slice(rows)))

    def _target_pass(self, draft: Draft) -> tuple[States, Tensor]:
        """States [B, M, H] and logits [B, M, V] of the target after the last token and after every node."""
        tree = draft.tree
        rows, nodes = tree.tokens_BN.shape
        ids_BM = torch.cat([self.table.last_S[:rows, None], tree.tokens_BN], dim=1)
        # A chain extends each slot's past causally; a tree branches off it under its mask.
        step = self.cache.extend(rows, nodes + 1) if draft.chain else tree.below_last_token(self.cache)
        states = self.target.states(ids_BM, step, self.aux_layers)
        return states, self.target.logits(states.hidden_BTH)

    def _judge(self, sampling: list[SamplingSettings], draft: Draft, logits_BMV: Tensor, states: States) -> _Judged:
        """Verify every slot's draft by the rule, and bring table and cache to where that leaves them."""
        tree = draft.tree
        # 1) Distributions of the target, the verdict, and what each slot emits: the accepted tokens and the target's
        # own. At temperature 0 every rule is the greedy one, and no random number is read.
        p_BMV, live_B = self._processed(sampling, tree, logits_BMV), self.table.live(len(sampling))
        best_BM: Tensor | None = None
        if all(setting.greedy for setting in sampling):
            best_BM = likeliest(p_BMV, 1)[1][..., 0]
            settled = settle_greedy(best_BM, tree, live_B, draft.chain)
        else:
            settled = settle(self._verify(sampling, draft, p_BMV), tree, live_B)
        new = Texts(settled.ids_BE, settled.counts_B)
        # 2) The likeliest tokens, for a proposer that hears them.
        if best_BM is None and self.listener is not None and tree.depth:
            best_BM = p_BMV.argmax(-1)
        # 3) The cache keeps the path: of a chain its beginning, of a tree nodes that are moved side by side.
        if draft.chain:
            self.cache.keep(new.counts_B)
        else:
            self.cache.keep_path(settled.path_BE, new.counts_B)
            states = pick_states(states, settled.path_BE.clamp(min=0))
        self.table.advance(new, settled.last_B)
        return _Judged(settled.read_BX, new, states, best_BM if tree.depth else None)

    def _processed(self, sampling: list[SamplingSettings], tree: TreeBatch, logits_BMV: Tensor) -> Tensor:
        """The target's p after every row; where all take the likeliest token, logits will do."""
        seen_BMV = _seen_along(tree, self.table.seen(slice(len(sampling))))
        if seen_BMV is None and all(setting.greedy for setting in sampling):
            return logits_BMV
        return process_rows(logits_BMV, sampling, seen_BMV)

    def _verify(self, sampling: list[SamplingSettings], draft: Draft, p_BMV: Tensor) -> BatchVerdict:
        slots, tree = slice(len(sampling)), draft.tree
        rule = self.rule.name if tree.depth else "onehot"  # with nothing drafted that is a draw from p
        # Random numbers for acceptance, one a node, and for the target's own draws. A draw `ahead` tokens later takes
        # the number that plain decoding would take there.
        accept_BN = self.table.uniforms(slots, Purpose.ACCEPT, tree.tokens_BN.shape[1])
        finals = [
            self.table.uniforms(slots, Purpose.FINAL, 1, ahead) for ahead in range(RULES[rule].target_draws(tree.depth))
        ]
        return verify_batch(rule, p_BMV, draft.q_BNV, tree, accept_BN, torch.cat(finals, 1))

    def _emit(self, slots: list[_Slot], read_BX: Tensor) -> list[list[int]]:
        """Append each slot's accepted tokens and the target's own, up to a stop; record the round."""
        emitted: list[list[int]] = []
        rows, now = read_BX.tolist(), time.perf_counter()
        for slot, (accepted, drafted, reached, *along) in zip(slots, rows):
            slot.unread -= 1
            if slot.finished:  # the round was launched before that was known
                continue
            known = slot.generation.tokens
            slot.generation.arrivals.append(now)
            # Cut after a stop, which the device does not look for.
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
        """Leave a slot empty, and fill the gap with the last active one."""
        last = self.slots.pop()
        vacant = last.index
        # Active slots stay the first ones, so the last one moves into the gap everywhere.
        if last is not slot:
            self.cache.move(vacant, slot.index)
            self.table.move(vacant, slot.index)
            if self.proposer is not None:
                self.proposer.move(vacant, slot.index)
            self.slots[slot.index], last.index = last, slot.index
        vacant_1 = send(torch.tensor([vacant]), self.target.device)
        self.cache.free(vacant_1)
        self.table.free(vacant_1)

    def _refill(self) -> Iterator[Finished]:
        """Prefill waiting requests into free slots; a request may end with its first token."""
        while len(self.slots) < self.batch_size:
            # Take waiting requests as far as slots are free; at a barrier wait until all before it are answered.
            fresh: list[_Slot] = []
            for index in range(len(self.slots), self.batch_size):
                held_back = self.waiting and self.waiting[0][0] in self.barriers and (self.slots or fresh)
                if held_back or not self.waiting:
                    break
                number, request = self.waiting.popleft()
                fresh.append(_Slot(index, number, request, Generation(), time.perf_counter()))
            if not fresh:
                return
            # Requests that end with their first token free their slots at once, hence the loop.
            with running(self.target.device):
                self._prefill(fresh)
            self.slots.extend(fresh)
            yield from self._retire()

    def _prefill(self, fresh: list[_Slot]) -> None:
        """Read the prompts in one pass and emit each slot's first token."""
        # 1) One padded pass over the prompts; the spare slot takes the padding rows.
        device, padding = self.target.device, self.shapes.padding(len(fresh))
        prompts = [slot.request.prompt_ids for slot in fresh]
        texts = Texts.of([*prompts, *prompts[:1] * padding], device).wide(self.shapes.width(max(map(len, prompts))))
        slots_R = send(torch.tensor([slot.index for slot in fresh] + [self.batch_size] * padding), device)
        shape = tuple(texts.ids_BT.shape)
        read = partial(read_prompts, self.target, self.cache, self.aux_layers)
        states, logits_RV = self.replays.run(("read", *shape), read, slots_R, texts.ids_BT, texts.counts_B)
        # 2) Each answer's first token.
        self.table.admit(slots_R, [slot.request for slot in fresh], texts, self.target.vocab_size)
        sampling = [slot.request.sampling for slot in fresh]
        settings = rows_by_setting(sampling + sampling[:1] * padding, device)
        u_R = self.table.uniforms(slots_R, Purpose.FINAL, 1)[:, 0]
        tokens_R = draw(logits_RV, settings, self.table.seen(slots_R), u_R)
        self.table.emit(slots_R, tokens_R)
        first, now = tokens_R.tolist(), time.perf_counter()
        for slot, token in zip(fresh, first):
            slot.generation.arrivals.append(now)
            slot.generation.tokens, slot.stopped = until_stop((), [token], slot.request, self.decode)
        if self.proposer is None:
            return
        # 3) The proposer begins with prompt and first token, on the host where it reads tokens there.
        known = Texts(_followed_by(texts, tokens_R), texts.counts_B + 1)
        if self.proposer.needs_host_sync:
            rows = [[*slot.request.prompt_ids, *slot.generation.tokens] for slot in fresh]
            some = slice(len(fresh))
            known = Texts(known.ids_BT[some], known.counts_B[some], rows)
            aux_RTA = None if states.aux_BTA is None else states.aux_BTA[some]
            self.proposer.begin(slots_R[some], known, States(states.hidden_BTH[some], aux_RTA))
        else:
            self.replays.run(("begin", *shape), self.proposer.begin, slots_R, known, states)

    @staticmethod
    def _close(slot: _Slot) -> Finished:
        generation = slot.generation
        generation.finish = "stop" if slot.stopped else "length"
        generation.begun = slot.started
        generation.seconds = time.perf_counter() - slot.started
        return slot.number, generation


def _mark(lap: Lap | None) -> None:
    if lap is not None:
        lap.mark()


def _seen_along(tree: TreeBatch, seen_BV: Tensor | None) -> Tensor | None:
    """Tokens known at every row of the target [B, M, V]: those of the slot, and the row's node and ancestors."""
    if seen_BV is None:
        return None
    batch, nodes = tree.tokens_BN.shape
    seen_BMV = seen_BV[:, None].repeat(1, nodes + 1, 1)
    # Climb from every node to the root, one level a step, marking the tokens on the way; the root stays where it is.
    above_BN = torch.arange(nodes, device=seen_BV.device).expand(batch, nodes)
    for _ in range(tree.depth):
        seen_BMV[:, 1:].scatter_(2, tree.tokens_BN.gather(1, above_BN)[..., None], True)
        parents_BN = tree.parents_BN.gather(1, above_BN)
        above_BN = torch.where(parents_BN < 0, above_BN, parents_BN)
    return seen_BMV


def _followed_by(texts: Texts, tokens_R: Tensor) -> Tensor:
    """Each row's tokens and one more [R, T+1]."""
    return F.pad(texts.ids_BT, (0, 1)).scatter(1, texts.counts_B[:, None], tokens_R[:, None])
