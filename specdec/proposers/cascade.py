"""A cascade: a smaller helper drafts for the draft, which drafts for the target (Chen et al. 2023, arXiv 2312.11462;
a hierarchy of drafts as in TriForce, Sun et al. 2024, arXiv 2404.11912).

Shapes: B active slots, N drafted nodes, R tokens chosen at once, V vocabulary.

What the helper guesses is never judged by chance. The draft chooses the token of each node as it does alone: the
likeliest, or the one that the node's own number draws from q; where a guess is that token, the draft has read it in the
same pass and goes on behind it. So the chain, its q and the numbers it takes are those of the draft alone, whatever the
helper says, and what is lossless for that chain is so for this one. A helper that has distributions draws with the same
numbers: then two that are alike say the same (Daliri et al. 2025, arXiv 2408.07978).
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...errors import InputError
from ..drafts.small import SmallDraft
from ..models import States
from ..replay.packing import Pack
from ..sampling import categorical
from ..sampling_settings import SamplingSettings
from .base import Ask, Draft, Texts, Trace
from .cross_tokenizer import TextReader
from .logits import likeliest, penalised_rows, process_rows
from .small import SmallDrafter
from .static_tree import StaticProposer
from .tree_shape import Drawn, TreeShape


class Chosen(NamedTuple):
    """Tokens that were chosen, and the distributions that they were drawn from."""

    tokens_BR: Tensor
    q_BRV: Tensor | None
    """Distribution of each token's draw; None: nothing was drawn."""


class Choice:
    """Token choice of one round, for the draft's logits and the helper's alike: that of `StaticProposer` in a chain."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._u_BN = None if ask.uniforms is None else ask.uniforms(ask.levels)

    @property
    def device(self) -> torch.device:
        """The target's device, on which logits must be."""
        return self._ask.limits_B.device

    def __call__(self, logits_BRV: Tensor, drafted: Sequence[list[int]], first: Sequence[int]) -> Chosen:
        """Choose tokens [B, R] from logits. Row r of slot b follows drafted[b][: first[b] + r] and chooses node
        first[b] + r."""
        # Nothing is drawn: the likeliest token of each row, after penalties.
        seen_BRV, device = self._seen(logits_BRV, drafted, first), logits_BRV.device
        if self._u_BN is None:
            scores_BRV = penalised_rows(logits_BRV, self._ask.sampling, seen_BRV)
            return Chosen(likeliest(scores_BRV, 1)[1][..., 0], None)

        # Each node is drawn with its own number, so that the choice does not depend on how passes are cut.
        q_BRV = process_rows(logits_BRV, self._ask.sampling, seen_BRV)
        node_BR = torch.tensor(first, device=device)[:, None] + torch.arange(logits_BRV.shape[1], device=device)
        u_BR = self._u_BN.gather(1, node_BR.clamp(max=self._u_BN.shape[1] - 1))
        return Chosen(categorical(q_BRV, u_BR), q_BRV)

    def _seen(self, logits_BRV: Tensor, drafted: Sequence[list[int]], first: Sequence[int]) -> Tensor | None:
        """Marks [B, R, V] of the tokens that stand before each row; None: no slot has a repetition penalty."""
        if self._ask.seen_BV is None:
            return None
        # Pad drafted tokens with the id `vocab`, and scatter there too whatever stands after a row.
        rows, vocab, device = *logits_BRV.shape[1:], logits_BRV.device
        longest = 1 + max(map(len, drafted))
        tokens_BN = torch.tensor([[*row, *[vocab] * (longest - len(row))] for row in drafted], device=device)
        before_BR = torch.tensor(first, device=device)[:, None] + torch.arange(rows, device=device)
        stands_BRN = torch.arange(longest, device=device) < before_BR[..., None]
        seen_BRV = torch.nn.functional.pad(self._ask.seen_BV, (0, 1))[:, None].repeat(1, rows, 1)
        seen_BRV.scatter_(2, torch.where(stands_BRN, tokens_BN[:, None], vocab), True)  # the last column is no token
        return seen_BRV[..., :vocab]


class Helper(Protocol):
    """Helper protocol: follows the texts as a proposer does (base.py), and guesses what a draft will say after them."""

    def reserve(self, slots: int, tokens: int, levels: int) -> None: ...

    def begin(self, slots_R: Tensor, known: Texts, states: States) -> None: ...

    def observe(self, new: Texts, states: States) -> None: ...

    def move(self, source: int, destination: int) -> None: ...

    def guess(self, drafted: Sequence[list[int]], counts: Sequence[int], choose: Choice) -> list[list[int]]:
        """Guesses: up to counts[b] tokens that may follow slot b's text and what was drafted after it in this round.

        `choose`: how the draft will choose, for a helper that has distributions.
        """


class SmallHelper:
    """A smaller model with the same tokenizer as helper; it guesses at most `most` tokens, a pass of its own each."""

    def __init__(self, draft: SmallDraft, most: int = 3) -> None:
        if most < 1:
            raise InputError(f"helper: {most} guesses: must be at least 1")
        self._texts, self._most = TextReader(draft.lm), most
        self.width = draft.vocab_size

    def reserve(self, slots: int, tokens: int, levels: int) -> None:
        self._texts.reserve(slots, tokens + levels)

    def begin(self, slots_R: Tensor, known: Texts, states: States) -> None:
        self._texts.begin(slots_R.tolist(), known.rows)

    def observe(self, new: Texts, states: States) -> None:
        for slot, emitted in enumerate(new.rows):
            self._texts.extend(slot, emitted)

    def move(self, source: int, destination: int) -> None:
        self._texts.move(source, destination)

    def guess(self, drafted: Sequence[list[int]], counts: Sequence[int], choose: Choice) -> list[list[int]]:
        # The helper has a pass of its own for every guess; each slot's row grows by one.
        rows = [list(row) for row in drafted]
        for _ in range(min(max(counts), self._most)):
            for slot, row in enumerate(rows):
                self._texts.append_text(slot, row)
            logits_B1V = self._texts.logits([1] * len(rows)).to(choose.device)
            tokens_B1 = choose(logits_B1V, rows, [len(row) for row in rows]).tokens_BR
            for row, (token,) in zip(rows, tokens_B1.tolist()):
                row.append(token)
        # Only the guesses, cut to what each slot asked for.
        return [row[len(known) :][:count] for row, known, count in zip(rows, drafted, counts)]


class CascadeProposer:
    """Chains of a small draft, in fewer passes of the draft thanks to a helper's guesses.

    `passes`: passes of the draft so far; `passes_alone`: passes that the same chains take without a helper.
    """

    replayable = True
    nested = True
    chain = True
    drawn: Drawn = "iid"
    aux_layers: tuple[int, ...] = ()
    needs_hidden_states = False
    needs_host_sync = True

    def __init__(self, draft: SmallDraft, helper: Helper) -> None:
        if isinstance(helper, SmallHelper) and helper.width != draft.vocab_size:
            raise InputError(f"helper: vocab_size {helper.width}: must be {draft.vocab_size}, the draft's")
        self._alone = StaticProposer(SmallDrafter(draft))
        self._texts, self._helper = TextReader(draft.lm), helper
        self.passes = self.passes_alone = 0

    def reserve(self, slots: int, tokens: int, levels: int) -> None:
        self._texts.reserve(slots, tokens + levels)
        self._helper.reserve(slots, tokens + levels, levels)

    def most_nodes(self, levels: int) -> int:
        return self._alone.most_nodes(levels)

    def shape(self, levels: int) -> TreeShape:
        return self._alone.shape(levels)

    def trace(self, pack: Pack, count: int, sampling: SamplingSettings, states: States | None) -> Trace:
        """Trace of the draft without a helper: its chains are the same."""
        return self._alone.trace(pack, count, sampling, states)

    def begin(self, slots_R: Tensor, known: Texts, states: States) -> None:
        self._texts.begin(slots_R.tolist(), known.rows)
        self._helper.begin(slots_R, known, states)

    def observe(self, new: Texts, states: States) -> None:
        for slot, emitted in enumerate(new.rows):
            self._texts.extend(slot, emitted)
        self._helper.observe(new, states)

    def move(self, source: int, destination: int) -> None:
        self._texts.move(source, destination)
        self._helper.move(source, destination)

    def propose(self, ask: Ask) -> Draft:
        """Draft chains: each pass of the draft reads the helper's guesses and decides at least one node of every slot
        that is below its limit."""
        # Every slot starts with an empty chain.
        choose, limits = Choice(ask), ask.limits_B.tolist()
        levels = max(limits)
        drafted: list[list[int]] = [[] for _ in limits]
        q_BNV: Tensor | None = None
        while any(len(row) < limit for row, limit in zip(drafted, limits)):
            # 1) The helper guesses what follows; the draft reads drafted and guessed tokens in one pass.
            first = [len(row) for row in drafted]
            read = self._guess(drafted, limits, choose)
            logits_BRV = self._texts.logits([len(r) - len(d) + 1 for r, d in zip(read, drafted)]).to(choose.device)

            # 2) The draft's own choice after each of them, and the q of it.
            chosen = choose(logits_BRV, read, first)
            if chosen.q_BRV is not None:
                q_BNV = _store(q_BNV, chosen.q_BRV, first, levels)

            # 3) Keep the guesses that equal the draft's choices, and the choice after them.
            for row, guessed, said, limit in zip(drafted, read, chosen.tokens_BR.tolist(), limits):
                row.extend(_confirmed(guessed[len(row) :], said) if len(row) < limit else [])
            self.passes += 1

        # Alone, the draft takes a pass a level.
        self.passes_alone += levels
        chains = Texts.of(drafted, choose.device)
        return Draft.of_chains(chains.ids_BT, chains.counts_B, "deterministic" if q_BNV is None else self.drawn, q_BNV)

    def _guess(self, drafted: list[list[int]], limits: Sequence[int], choose: Choice) -> list[list[int]]:
        """Tokens that the draft reads next past each text: those drafted so far, then the helper's guesses. The last
        node needs no guess: it is chosen from the tokens before it."""
        # Guess only as far as the limits allow.
        counts = [max(limit - len(row) - 1, 0) for row, limit in zip(drafted, limits)]
        guesses = self._helper.guess(drafted, counts, choose) if any(counts) else [[] for _ in drafted]

        # Put them past the text, where the draft's pass reads them.
        read = [[*row, *guess] for row, guess in zip(drafted, guesses)]
        for slot, row in enumerate(read):
            self._texts.append_text(slot, row)
        return read


def _confirmed(guessed: list[int], said: list[int]) -> list[int]:
    """Tokens that the draft chose (`said`): the guesses that equal its choices, then its own choice after them."""
    right = next((place for place, token in enumerate(guessed) if said[place] != token), len(guessed))
    return said[: right + 1]


def _store(q_BNV: Tensor | None, q_BRV: Tensor, first: Sequence[int], levels: int) -> Tensor:
    """Store q rows from node `first` of each slot on; rows past a wrong guess are overwritten in the next pass."""
    # The first pass makes the tensor.
    batch, rows, vocab = q_BRV.shape
    if q_BNV is None:
        q_BNV = q_BRV.new_zeros(batch, levels, vocab)

    # A slot near its limit has rows past the last level: they are dropped.
    device = q_BRV.device
    node_BR = torch.tensor(first, device=device)[:, None] + torch.arange(rows, device=device)
    slot_BR = torch.arange(batch, device=device)[:, None].expand_as(node_BR)
    inside_BR = node_BR < levels
    q_BNV[slot_BR[inside_BR], node_BR[inside_BR]] = q_BRV[inside_BR]
    return q_BNV
