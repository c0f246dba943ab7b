"""Cross-tokenizer drafting: one text in two tokenizers' ids, for a draft with another tokenizer than the target's.

Text goes over as text (string-level exact match, Timor et al. 2025, arXiv 2502.05202, algorithm 2): what the target has
emitted is decoded and encoded again, and so is what it drafts. Nothing here need be exact for the output to be: a
text that comes out otherwise costs accepted tokens only.
"""

import re
from collections.abc import Sequence
from itertools import chain

from transformers import PreTrainedTokenizerBase

from .drafts.base import DraftModule
from .drafts.small import SmallDraft
from .expressions import ids_of

_CONTEXT = 4  # ids before a piece that tell how it is written there
_WINDOW = 32  # target tokens that are spelled again together
_WORD = 16  # target tokens in which a word to go on from is looked for
_BROKEN = "\ufffd"  # stands where bytes are no whole character
_LINE = "\n"  # text before a piece, so that the tokenizer takes it for no beginning


class TokenizerBridge:
    """Tokenizer that encodes and decodes pieces of longer texts. Ids from `size` on, unknown to its model, are dropped.

    Special tokens are text like any other: where the tokenizer knows such a text as a token, it reads it as one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int) -> None:
        self._tokenizer, self._size = tokenizer, size
        self._line = self.encode(_LINE)
        # A begin-of-text token counts only where the tokenizer itself adds it.
        bos = tokenizer.bos_token_id
        begins = bos is not None and self._ids("a", add_special_tokens=True)[:1] == [bos]
        self._bos: list[int] = [bos] if begins else []

    def encode(self, text: str) -> list[int]:
        """Encode a whole text, without the special tokens that the tokenizer puts around it."""
        return self._ids(text, add_special_tokens=False)

    def opening(self, text: str) -> list[int]:
        """Encode the beginning of a text, with the begin-of-text token where the tokenizer adds one."""
        ids = self.encode(text)
        return ids if ids[: len(self._bos)] == self._bos else [*self._bos, *ids]

    def inside(self, text: str) -> list[int]:
        """Encode a piece that follows other text. Many tokenizers put a space before a text that stands alone.

        So a line break is encoded before it, and its ids are cut off.
        """
        ids = self.encode(_LINE + text)
        return ids[len(self._line) :] if ids[: len(self._line)] == self._line else self.encode(text)

    def text(self, ids: Sequence[int], start: int, stop: int) -> str:
        """Decode ids[start:stop] as they read after the ids before them, a few of which are decoded along."""
        # A few ids before give context; where the piece changes how they read, it is decoded alone.
        first = max(start - _CONTEXT, 0)
        before, whole = self._decode(ids[first:start]), self._decode(ids[first:stop])
        return whole[len(before) :] if whole.startswith(before) else self._decode(ids[start:stop])

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        ids = ids_of(self._tokenizer, text, add_special_tokens=add_special_tokens, verbose=False)
        return [token for token in ids if token < self._size]

    def _decode(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)


class Retokenized:
    """Retokenized text: a growing text, given in one tokenizer's ids, encoded in another's.

    Settled parts are encoded once, cut before words; only the last tokens are encoded anew as the text grows. The
    places of the cuts depend on the ids alone, not on how many came at once.
    """

    def __init__(self, known: TokenizerBridge, own: TokenizerBridge, ids: Sequence[int]) -> None:
        self._known, self._own = known, own
        self._ids, self._start = list(ids), 0
        self._words: dict[int, bool] = {}  # whether a word begins at a place, of those that were asked for
        self.settled: list[int] = []
        """Own ids of the text's settled beginning, at the start; `extend` returns those of later parts."""
        # A long prompt is settled at once, up to the last word that begins in its last window.
        if len(ids) > _WINDOW:
            self.settled = self._settle(self._cut(range(len(ids) - 1, len(ids) - _WINDOW, -1)))

    def extend(self, ids: Sequence[int]) -> list[int]:
        """Append ids to the text. Returns the own ids that are settled by it."""
        self._ids += ids
        settled: list[int] = []
        # Keep one window of tokens open, in which a later token may still change the encoding.
        while len(self._ids) - self._start >= 2 * _WINDOW:
            settled += self._settle(self._cut(range(self._start + _WINDOW, self._start, -1)))
        return settled

    @property
    def tail(self) -> list[int]:
        """Own ids of the unsettled end of the text, up to its last whole character."""
        return self._spell(self._whole_text(self._start))

    def following(self, continuation: str) -> list[int]:
        """Encode a drafted continuation in the known tokenizer's ids; [] where that would change ids before it."""
        # Encode from the last beginning of a word, so that tokens across the joint are found.
        first = self._cut(range(len(self._ids) - 1, max(len(self._ids) - _WORD, 0), -1)) if len(self._ids) > 1 else 0
        text, known = self._whole_text(first) + continuation.rstrip(_BROKEN), self._ids[first:]
        # The known ids must come out again, as the target has emitted them already.
        ids = self._known.inside(text) if first else self._known.encode(text)
        return ids[len(known) :] if ids[: len(known)] == known else []

    def _settle(self, stop: int) -> list[int]:
        ids = self._spell(self._known.text(self._ids, self._start, stop))
        self._start = stop
        return ids

    def _spell(self, text: str) -> list[int]:
        return self._own.inside(text) if self._start else self._own.opening(text)

    def _whole_text(self, start: int) -> str:
        return self._known.text(self._ids, start, len(self._ids)).rstrip(_BROKEN)

    def _cut(self, places: Sequence[int]) -> int:
        """Place to cut: the first of these at which a word begins with its space; else a character; else the first."""
        words = (at for at in places if self._begins_word(at))
        whole = (at for at in places if not self._known.text(self._ids, max(at - _CONTEXT, 0), at).endswith(_BROKEN))
        return next(chain(words, whole), places[0])

    def _begins_word(self, at: int) -> bool:
        if at not in self._words:
            self._words[at] = bool(re.match(r" \S", self._known.text(self._ids, at, at + 1)))
        return self._words[at]


class ForeignDraft(DraftModule):
    """Foreign draft: a small model with its tokenizer (`own`) and the target's (`known`).

    It is neither trained nor registered, but used as it is.
    """

    family = "foreign"
    same_tokenizer = False
    drafts_trees = False

    def __init__(
        self, small: SmallDraft, own: TokenizerBridge, known: TokenizerBridge, ends: dict[int, int | None]
    ) -> None:
        """`ends`: the draft's special ids, which are no text, and the target's id that each stands for, if any."""
        super().__init__()
        self.model, self.lm = small.model, small.lm
        self.own, self.known, self.ends = own, known, ends

    @property
    def vocab_size(self) -> int:
        return self.lm.vocab_size

    @classmethod
    def from_tokenizers(
        cls, small: SmallDraft, own: PreTrainedTokenizerBase, known: PreTrainedTokenizerBase, known_size: int
    ) -> "ForeignDraft":
        """Bridge a small draft's own tokenizer and the target's (`known`, of `known_size` tokens).

        The two end-of-text tokens mean the same; other special tokens have no counterpart.
        """
        # Special tokens end a draft; the end-of-text ones also have the target's as their counterpart.
        ends: dict[int, int | None] = dict.fromkeys(own.all_special_ids)
        stops = small.model.generation_config.eos_token_id
        for token in (own.eos_token_id, *(stops if isinstance(stops, list) else [stops])):
            if token is not None:
                ends[token] = known.eos_token_id
        return cls(small, TokenizerBridge(own, small.vocab_size), TokenizerBridge(known, known_size), ends)
