"""Replay of dynamic trees: drafting for real along recorded answers, since each round's confidence shapes its tree.

Shapes: B answers side by side, T tokens of the longest with its prompt, S starts of the answer that has most, R round
starts of all answers, N drafted nodes, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..cuda_graphs import running, send
from ..models import States
from ..proposers.base import Ask, Proposer, Texts
from ..proposers.logits import pick_states
from ..proposers.tree_shape import ROOT
from ..sampling_settings import SamplingSettings
from .expected_rounds import RoundCounts, survival_chosen, walk_expected
from .target_trace import RecordedAnswer, TargetTrace

_MOST_LOGITS = 1 << 28  # nodes times vocabulary of all trees that grow at once


class _Match(NamedTuple):
    """Match of a drafted tree with the recorded answer that follows."""

    nodes: int = 0
    """Candidate nodes of the tree."""
    run: int = 0
    """Levels of the tree that the answer follows from the root: tokens that are accepted."""
    judged: int = 0
    """Levels of the tree at which a token of the answer is judged."""


def replay_dynamic(proposer: Proposer, traced: TargetTrace, K: int) -> list[RoundCounts]:
    """Replay a proposer whose trees depend on its confidence: counts of each answer, some answers at a time.

    At temperature 0 trees are built where rounds start, as in decoding. Above it, for chosen siblings, the round goes
    on while the answer's token is among them; where it starts is not certain then, so trees are built at every token.
    """
    pack, counts = traced.pack, list[RoundCounts]()
    with running(pack.ids_BT.device):
        # A proposer that reads no states gets empty ones, so that slicing below is the same for all.
        states = traced.states or States(pack.ids_BT.new_zeros(*pack.ids_BT.shape, 0), None)
        # Where each token first occurs, for the repetition penalty: one table serves every round start.
        first_BV = None if traced.sampling.repetition_penalty == 1.0 else pack.first_places(traced.vocab_size)
        # As many answers side by side as logits of all their trees may take.
        for some in pack.groups(proposer.most_nodes(K) * traced.vocab_size, _MOST_LOGITS):
            own = States(states.hidden_BTH[some], None if states.aux_BTA is None else states.aux_BTA[some])
            marks_BV = None if first_BV is None else first_BV[some]
            counts += _DynamicReplay(proposer, traced.answers[some], traced.sampling, own, marks_BV, K).counts()
    return counts


class _DynamicReplay:
    """Dynamic-tree replay of some answers, a slot each. Ended answers stay in their slots and emit nothing."""

    def __init__(
        self,
        proposer: Proposer,
        answers: Sequence[RecordedAnswer],
        sampling: SamplingSettings,
        states: States,
        first_BV: Tensor | None,
        K: int,
    ) -> None:
        self._proposer, self._answers, self._sampling, self._states = proposer, answers, sampling, states
        self._first_BV, self._K, self._device = first_BV, K, states.hidden_BTH.device
        self._lengths = [len(answer.answer_ids) for answer in answers]
        self._emitted = [1] * len(answers)

    def counts(self) -> list[RoundCounts]:
        """Decode along all answers, and count each one's rounds."""
        # 1) A table of (nodes, run, judged) at every round start of every answer; untouched entries stay 0.
        starts_B, limits = np.array(self._lengths)[:, None] - 1, [answer.max_new_tokens for answer in self._answers]
        found_3BS = np.zeros((3, len(self._answers), max(max(self._lengths) - 1, 0)), np.int64)
        if found_3BS.size:
            self._begin()
        # 2) Rounds until all answers are used up; each is noted at the token after which it starts.
        while any(map(self._goes_on, range(len(self._answers)))):
            rows = [emitted - 1 for emitted in self._emitted]
            for index, match in self._round().items():
                found_3BS[:, index, rows[index]] = match
        # 3) Drop the columns past each answer's end, and push the mass of round starts along what is left.
        nodes_R, run_R, judged_R = found_3BS[:, np.arange(found_3BS.shape[2]) < starts_B]
        return walk_expected(survival_chosen(run_R, self._K), self._K, self._lengths, limits, judged_R, nodes_R)

    def _begin(self) -> None:
        """Begin drafting: give the proposer the prompts, the first answer tokens, and the target's states."""
        known = Texts.of([[*one.prompt_ids, *one.answer_ids[:1]] for one in self._answers], self._device)
        slots, longest = len(self._answers), self._states.hidden_BTH.shape[1]
        self._proposer.reserve(slots, longest + 1, self._K)
        # The state of a token predicts the next one, so the last known token has none yet.
        read_BT = torch.arange(known.ids_BT.shape[1] - 1, device=self._device).expand(slots, -1)
        self._proposer.begin(torch.arange(slots, device=self._device), known, pick_states(self._states, read_BT))

    def _goes_on(self, index: int) -> bool:
        return self._emitted[index] < self._lengths[index]

    def _round(self) -> dict[int, _Match]:
        """One round of each answer that goes on; returns each one's match."""
        # 1) Draft as deep as each answer may still go; those that have ended draft nothing.
        going = [index for index in range(len(self._answers)) if self._goes_on(index)]
        known = [len(one.prompt_ids) + emitted for one, emitted in zip(self._answers, self._emitted)]
        left = [one.max_new_tokens - emitted - 1 for one, emitted in zip(self._answers, self._emitted)]
        limits = [min(self._K, left[index]) if self._goes_on(index) else 0 for index in range(len(left))]
        limits_B, known_B = send(torch.tensor([limits, known]), self._device)
        matches = self._draft(limits_B, max(limits), known_B, going)
        # 2) Emit what the round accepts and one more token; above temperature 0 one token, as any may start a round.
        new: list[list[int]] = [[] for _ in self._answers]
        for index in going:
            emitted, step = self._emitted[index], 1 + matches[index].run if self._sampling.greedy else 1
            new[index] = self._answers[index].answer_ids[emitted : emitted + step]
            self._emitted[index] += len(new[index])
        # 3) Show the proposer the new tokens and the target's states before each.
        texts = Texts.of(new, self._device)
        at_BE = known_B[:, None] - 1 + torch.arange(texts.ids_BT.shape[1], device=self._device)
        at_BE = at_BE.clamp(max=self._states.hidden_BTH.shape[1] - 1)
        self._proposer.observe(texts, pick_states(self._states, at_BE))
        return matches

    def _draft(self, limits_B: Tensor, levels: int, known_B: Tensor, going: list[int]) -> dict[int, _Match]:
        """Draft a tree for each answer and match it with what follows there. The host waits for the device once."""
        if levels <= 0:
            return {index: _Match() for index in going}
        # A token is seen if its first place lies before the end of what is known.
        seen_BV = None if self._first_BV is None else self._first_BV < known_B[:, None]
        ask = Ask(limits_B, levels, [self._sampling] * len(self._answers), None, seen_BV)
        tree = self._proposer.propose(ask).tree
        # One transfer to the host for all trees.
        trees = torch.stack([tree.tokens_BN, tree.parents_BN, tree.candidate_BN.long()], 1).tolist()
        return {index: _match(trees[index], self._answers[index].answer_ids[self._emitted[index] :]) for index in going}


def _match(tree: list[list[int]], answer: list[int]) -> _Match:
    """Follow the answer down a tree of rows tokens, parents, and whether each node is a candidate."""
    tokens, parents, candidates = tree
    # (parent, token) names a child: siblings are distinct where they are chosen.
    edges = {(parent, token): n for n, (parent, token, ok) in enumerate(zip(parents, tokens, candidates)) if ok}
    node, run = ROOT, 0
    while run < len(answer) and (node, answer[run]) in edges:
        node = edges[node, answer[run]]
        run += 1
    # The level after the run is judged too, if a candidate stands there.
    return _Match(sum(candidates), run, run + any(parent == node for parent, _ in edges))
