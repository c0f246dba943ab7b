"""A cascade: a smaller helper drafts for the draft, which drafts for the target (Chen et al. 2023, arXiv 2312.11462;
a hierarchy of drafts as in TriForce, Sun et al. 2024, arXiv 2404.11912).

Shapes: B active slots, N drafted nodes, R tokens chosen at once, V vocabulary.

What the helper guesses is never judged by chance. The draft chooses the token of each node as it does alone: the
likeliest, or the one that the node's own number draws from q; where a guess is that token, the draft has read it in the
same pass and goes on behind it. So the chain, its q and the numbers it takes are those of the draft alone, whatever the
helper says, and what is lossless for that chain is so for this one. A helper that has distributions draws with the same
numbers: then two that are alike say the same (Daliri et al. 2025, arXiv 2408.07978).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...errors import InputError
from ..cuda_graphs import read_back, running
from ..drafts.small import SmallDraft
from ..kv_cache import KVCache
from ..memory_fit import probe_pass
from ..models import CausalModel, States
from ..replay.packing import Pack
from ..sampling import categorical
from ..sampling_settings import SamplingSettings
from .base import Ask, Draft, Run, Texts, Trace
from .logits import gather_rows, likeliest, penalised_rows, process_rows
from .prompt_lookup import copies
from .small import SmallDrafter
from .static_tree import StaticProposer
from .text_table import TextTable
from .tree_shape import Drawn, TreeShape


class Chosen(NamedTuple):
    """Tokens that were chosen, and the distributions that they were drawn from."""

    tokens_BR: Tensor
    q_BRV: Tensor | None
    """Distribution of each token's draw; None: nothing was drawn."""


class Ahead(NamedTuple):
    """Texts of a round with what was drafted and guessed past their ends: the places of `ids_SL` past the counts."""

    ids_SL: Tensor
    counts_B: Tensor
    """Known tokens of each slot."""
    drafted_B: Tensor
    """Tokens that are drafted past them."""
    first: bool
    """Whether this is the round's first pass, before which nothing was read since the last one."""

    def put(self, tokens_BR: Tensor, past: int = 0) -> None:
        """Put tokens behind what is drafted and `past` more, in place of what stood there."""
        at_BR = self.counts_B[:, None] + self.drafted_B[:, None] + past
        at_BR = at_BR + torch.arange(tokens_BR.shape[1], device=at_BR.device)
        self.ids_SL[: len(at_BR)].scatter_(1, at_BR, tokens_BR)


class Choice:
    """Token choice of one round, for the draft's logits and the helper's alike: that of `StaticProposer` in a chain."""

    def __init__(self, ask: Ask, ahead: Ahead) -> None:
        self._ask, self._ahead = ask, ahead
        self._u_BN = None if ask.uniforms is None else ask.uniforms(ask.levels)

    def __call__(self, logits_BRV: Tensor, past: int = 0) -> Chosen:
        """Choose tokens [B, R] from logits. Row r follows what is drafted and the `past` + r places behind that."""
        # Nothing is drawn: the likeliest token of each row, after penalties.
        before_BR = self._ahead.drafted_B[:, None] + past
        before_BR = before_BR + torch.arange(logits_BRV.shape[1], device=before_BR.device)
        seen_BRV = self._seen(logits_BRV, before_BR)
        if self._u_BN is None:
            scores_BRV = penalised_rows(logits_BRV, self._ask.sampling, seen_BRV)
            return Chosen(likeliest(scores_BRV, 1)[1][..., 0], None)

        # Each node is drawn with its own number, so that the choice does not depend on how passes are cut.
        q_BRV = process_rows(logits_BRV, self._ask.sampling, seen_BRV)
        u_BR = self._u_BN.gather(1, before_BR.clamp(max=self._u_BN.shape[1] - 1))
        return Chosen(categorical(q_BRV, u_BR), q_BRV)

    def _seen(self, logits_BRV: Tensor, before_BR: Tensor) -> Tensor | None:
        """Marks [B, R, V] of the tokens that stand before each row; None: no slot has a repetition penalty."""
        if self._ask.seen_BV is None:
            return None
        # Scatter at the id `vocab` whatever stands after a row.
        (batch, rows, vocab), ahead = logits_BRV.shape, self._ahead
        past_N = torch.arange(self._ask.levels, device=logits_BRV.device)
        at_BN = (ahead.counts_B[:, None] + past_N).clamp(max=ahead.ids_SL.shape[1] - 1)
        tokens_BN = ahead.ids_SL[:batch].gather(1, at_BN)
        stands_BRN = past_N < before_BR[..., None]
        seen_BRV = torch.nn.functional.pad(self._ask.seen_BV, (0, 1))[:, None].repeat(1, rows, 1)
        seen_BRV.scatter_(2, torch.where(stands_BRN, tokens_BN[:, None], vocab), True)  # the last column is no token
        return seen_BRV[..., :vocab]


class PlaceReader:
    """A causal LM that reads some places of texts, again where need be, on a cache of its own."""

    def __init__(self, lm: CausalModel) -> None:
        self._lm = lm
        self.waits = probe_pass(lm).waits

    @property
    def device(self) -> torch.device:
        return self._lm.device

    def reserve(self, slots: int, tokens: int) -> None:
        self._cache = KVCache(slots, tokens, self.device)

    def begin(self, slots_R: Tensor, known: Texts) -> None:
        """Read fresh texts, but for their last tokens."""
        with running(self.device):
            step = self._cache.prefill(slots_R.to(self.device), (known.counts_B - 1).to(self.device))
            self._lm.states(known.ids_BT[:, :-1].to(self.device), step)

    def logits(self, ids_SL: Tensor, starts_B: Tensor, width: int, first_B: Tensor, rows: int) -> Tensor:
        """Logits [B, R, V] after R of the `width` places from `starts` on that are read, the first of them `first`."""
        # Before the text's beginning nothing is read.
        starts_B, index_B = starts_B.clamp(min=0), (first_B - starts_B.clamp(min=0)).clamp(min=0)
        at_BW = starts_B[:, None] + torch.arange(width, device=starts_B.device)
        ids_BW = ids_SL[: len(at_BW)].gather(1, at_BW.clamp(max=ids_SL.shape[1] - 1))
        index_BR = index_B[:, None] + torch.arange(rows, device=index_B.device)
        # The cache goes back to where each row starts, and is written from there.
        with running(self.device):
            self._cache.lengths_S[: len(at_BW)] = starts_B
            step = self._cache.extend(len(at_BW), width)
            hidden_BWH = self._lm.states(ids_BW.to(self.device), step).hidden_BTH
            return self._lm.logits(gather_rows(hidden_BWH, index_BR.to(self.device))).to(ids_SL.device)

    def move(self, source: int, destination: int, length: Tensor) -> None:
        """Move a slot, whose text has that many tokens."""
        with running(self.device):
            self._cache.lengths_S[source] = length
            self._cache.move(source, destination)


class Helper(Protocol):
    """Helper protocol: guesses what a draft will say after texts, which it finds on the device."""

    waits: bool  # whether it waits for the device

    def reserve(self, slots: int, tokens: int, levels: int) -> None: ...

    def begin(self, slots_R: Tensor, known: Texts) -> None: ...

    def move(self, source: int, destination: int, length: Tensor) -> None: ...

    def guess(self, ahead: Ahead, count: int, choose: Choice) -> tuple[Tensor, Tensor]:
        """Guesses [B, G], up to `count` tokens that may follow each slot's text and what was drafted after it in this
        round, and how many of them count [B].

        `choose`: how the draft will choose, for a helper that has distributions.
        """


class LookupHelper:
    """Prompt lookup as helper."""

    waits = False

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        self._ngrams = range(min_ngram, max_ngram + 1)

    def reserve(self, slots: int, tokens: int, levels: int) -> None: ...

    def begin(self, slots_R: Tensor, known: Texts) -> None: ...

    def move(self, source: int, destination: int, length: Tensor) -> None: ...

    def guess(self, ahead: Ahead, count: int, choose: Choice) -> tuple[Tensor, Tensor]:
        ends_B = ahead.counts_B + ahead.drafted_B
        return copies(ahead.ids_SL, ends_B, torch.full_like(ends_B, count), self._ngrams, False, count)


class SmallHelper:
    """A smaller model with the same tokenizer as helper; it guesses at most `most` tokens, a pass of its own each."""

    def __init__(self, draft: SmallDraft, most: int = 3) -> None:
        if most < 1:
            raise InputError(f"helper: {most} guesses: must be at least 1")
        self._reader, self._most = PlaceReader(draft.lm), most
        self.width, self.waits = draft.vocab_size, self._reader.waits

    def reserve(self, slots: int, tokens: int, levels: int) -> None:
        self._reader.reserve(slots, tokens)
        self._emitted = levels + 1  # tokens of a round, at most

    def begin(self, slots_R: Tensor, known: Texts) -> None:
        self._reader.begin(slots_R, known)

    def move(self, source: int, destination: int, length: Tensor) -> None:
        self._reader.move(source, destination, length)

    def guess(self, ahead: Ahead, count: int, choose: Choice) -> tuple[Tensor, Tensor]:
        # Unread are the tokens of the last round; in later passes its last guess, if it was right, and what the draft
        # said after that. Then the helper has a pass of its own for every guess.
        last_B, guesses = ahead.counts_B + ahead.drafted_B - 1, list[Tensor]()
        for past in range(min(count, self._most)):
            width = 1 if past else self._emitted if ahead.first else 2
            ends_B = last_B + past
            logits_B1V = self._reader.logits(ahead.ids_SL, ends_B - width + 1, width, ends_B, 1)
            guesses.append(choose(logits_B1V, past).tokens_BR)
            ahead.put(guesses[-1], past)
        guesses_BG = torch.cat(guesses, 1)
        return guesses_BG, torch.full_like(last_B, guesses_BG.shape[1])


class CascadeProposer(TextTable):
    """Chains of a small draft, in fewer passes of the draft thanks to a helper's guesses.

    Each pass has a width of its own, so that a graph can hold it; the host looks whether another one is needed.
    `passes`: passes of the draft so far; `passes_alone`: passes that the same chains take without a helper.
    """

    replayable = True
    nested = True
    chain = True
    drawn: Drawn = "iid"

    def __init__(self, draft: SmallDraft, helper: Helper, device: torch.device | None = None) -> None:
        """`device`: the target's; None: that of the draft."""
        if isinstance(helper, SmallHelper) and helper.width != draft.vocab_size:
            raise InputError(f"helper: vocab_size {helper.width}: must be {draft.vocab_size}, the draft's")
        super().__init__()
        self._alone = StaticProposer(SmallDrafter(draft))
        self._reader, self._helper = PlaceReader(draft.lm), helper
        elsewhere = device is not None and device != draft.lm.device
        self.needs_host_sync = elsewhere or self._reader.waits or helper.waits
        self.passes = self.passes_alone = 0

    def reserve(self, slots: int, tokens: int, levels: int) -> None:
        # Past a text stand a chain, and guesses past that.
        super().reserve(slots, tokens, 2 * levels)
        self._reader.reserve(slots, tokens + 2 * levels + 1)
        self._helper.reserve(slots, tokens + 2 * levels + 1, levels)
        self._emitted = levels + 1
        self._q_SNV: Tensor | None = None

    def most_nodes(self, levels: int) -> int:
        return self._alone.most_nodes(levels)

    def shape(self, levels: int) -> TreeShape:
        return self._alone.shape(levels)

    def trace(self, pack: Pack, count: int, sampling: SamplingSettings, states: States | None) -> Trace:
        """Trace of the draft without a helper: its chains are the same."""
        return self._alone.trace(pack, count, sampling, states)

    def begin(self, slots_R: Tensor, known: Texts, states: States) -> None:
        fresh = not len(self._counts_S)
        super().begin(slots_R, known, states)
        if fresh:
            self._drafted_S = torch.zeros_like(self._counts_S)
        self._reader.begin(slots_R, known)
        self._helper.begin(slots_R, known)

    def move(self, source: int, destination: int) -> None:
        super().move(source, destination)
        self._reader.move(source, destination, self._counts_S[destination])
        self._helper.move(source, destination, self._counts_S[destination])

    def propose(self, ask: Ask) -> Draft:
        return self.propose_in_steps(lambda name, function: function(), ask.levels, lambda: ask)

    def propose_in_steps(self, run: Run[Any], levels: int, ask: Callable[[], Ask]) -> Draft:
        """Draft chains: each pass of the draft reads the helper's guesses and decides at least one node of every slot
        that is below its limit."""
        for number in range(levels):
            missing_2 = run(("pass", number, levels), partial(self._pass, number, ask))
            self.passes += 1
            missing, asked = read_back(missing_2)().tolist()
            if not missing:
                break
        # Alone, the draft takes a pass a level.
        self.passes_alone += asked
        draft: Draft = run(("chain", levels), partial(self._chain, ask))
        return draft

    def _pass(self, number: int, ask: Callable[[], Ask]) -> Tensor:
        """One pass of the draft. Returns how many slots miss nodes yet, and the largest limit [2]."""
        asked = ask()
        limits_B, guesses = asked.limits_B, asked.levels - number - 1
        counts_B, drafted_B = self._counts_S[: len(limits_B)], self._drafted_S[: len(limits_B)]
        if number == 0:
            drafted_B.zero_()
        ahead = Ahead(self._ids_SL, counts_B, drafted_B, number == 0)
        choose = Choice(asked, ahead)
        # 1) The helper guesses what follows; the last node needs no guess, it is chosen from the tokens before it.
        right_B = torch.zeros_like(drafted_B)
        if guesses:
            guesses_BG, offered_B = self._helper.guess(ahead, guesses, choose)
            guesses = guesses_BG.shape[1]
            ahead.put(guesses_BG)
        # 2) The draft reads what is drafted and guessed, in the first pass behind the tokens of the last round. Its own
        # choice after each of them, and the q of it.
        last_B, unread = counts_B + drafted_B - 1, self._emitted if number == 0 else 1
        logits_BRV = self._reader.logits(self._ids_SL, last_B - unread + 1, unread + guesses, last_B, guesses + 1)
        chosen = choose(logits_BRV)
        if chosen.q_BRV is not None:
            self._store(chosen.q_BRV, drafted_B)
        # 3) Keep the guesses that equal the draft's choices, and the choice after them.
        if guesses:
            inside_BG = torch.arange(guesses, device=offered_B.device) < offered_B[:, None]
            right_B = (inside_BG & (chosen.tokens_BR[:, :guesses] == guesses_BG)).long().cumprod(1).sum(1)
        ahead.put(chosen.tokens_BR)
        drafted_B.copy_(torch.minimum(drafted_B + right_B + 1, limits_B))
        return torch.stack([(drafted_B < limits_B).sum(), limits_B.amax()])

    def _store(self, q_BRV: Tensor, drafted_B: Tensor) -> None:
        """Store q rows from each slot's next node on; rows past a wrong guess are overwritten in the next pass."""
        batch, rows, vocab = q_BRV.shape
        # Made when something is first drawn. The last place takes what lies past the last level.
        if self._q_SNV is None:
            self._q_SNV = q_BRV.new_zeros(self._size[0], self._emitted, vocab)
        node_BR = drafted_B[:, None] + torch.arange(rows, device=drafted_B.device)
        slot_B1 = torch.arange(batch, device=drafted_B.device)[:, None]
        self._q_SNV[slot_B1, node_BR.clamp(max=self._emitted - 1)] = q_BRV

    def _chain(self, ask: Callable[[], Ask]) -> Draft:
        asked = ask()
        drafted_B = self._drafted_S[: len(asked.limits_B)]
        at_BK = self._counts_S[: len(drafted_B), None] + torch.arange(asked.levels, device=drafted_B.device)
        tokens_BK = self._ids_SL[: len(drafted_B)].gather(1, at_BK)
        if asked.uniforms is None or self._q_SNV is None:
            return Draft.of_chains(tokens_BK, drafted_B.clone(), "deterministic")
        q_BKV = self._q_SNV[: len(drafted_B), : asked.levels].clone()
        return Draft.of_chains(tokens_BK, drafted_B.clone(), self.drawn, q_BKV)
