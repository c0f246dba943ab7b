"""The independent draft with another tokenizer than the target's: it drafts by way of text (see spelling.py)."""

from torch import nn
from transformers import PreTrainedTokenizerBase

from .drafts.small import SmallDraft
from .spelling import Spelling


class ForeignDraft(nn.Module):
    """A small model, its tokenizer (`own`) and the target's (`known`). Neither trained nor registered: it serves as it
    is."""

    family = "foreign"

    def __init__(self, small: SmallDraft, own: Spelling, known: Spelling, ends: dict[int, int | None]) -> None:
        """`ends`: ids of the draft's that say no text, and the target's id that each stands for, if any."""
        super().__init__()
        self.model, self.lm = small.model, small.lm
        self.own, self.known, self.ends = own, known, ends

    @classmethod
    def of(
        cls, small: SmallDraft, own: PreTrainedTokenizerBase, known: PreTrainedTokenizerBase, known_size: int
    ) -> "ForeignDraft":
        """`known_size`: tokens that the target knows. Both ends of texts mean the same; other special tokens do not."""
        ends: dict[int, int | None] = dict.fromkeys(own.all_special_ids)
        stops = small.model.generation_config.eos_token_id
        for token in (own.eos_token_id, *(stops if isinstance(stops, list) else [stops])):
            if token is not None:
                ends[token] = known.eos_token_id
        return cls(small, Spelling(own, small.vocab_size), Spelling(known, known_size), ends)
