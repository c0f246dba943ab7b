"""SmolLM2-135M-Instruct itself: decoded plainly, with copies of its text, and with itself as a draft, helped by prompt
lookup or under a tokenizer of its own.
"""

from pathlib import Path

import pytest

from draftforge.data.chat_template import render
from draftforge.data.conversation import Message
from draftforge.specdec.decoder import Request, generate
from draftforge.specdec.drafts.small import SmallDraft
from draftforge.specdec.proposers.base import Proposer
from draftforge.specdec.proposers.cascade import CascadeProposer, LookupHelper
from draftforge.specdec.proposers.cross_tokenizer import ForeignProposer
from draftforge.specdec.proposers.prompt_lookup import PromptLookup
from draftforge.specdec.sampling_settings import SamplingSettings
from draftforge.specdec.target_settings import TargetSettings
from draftforge.specdec.targets import Target
from draftforge.specdec.tokenizer_bridge import ForeignDraft

pytestmark = [pytest.mark.real, pytest.mark.slow]
QUESTIONS = ("Repeat this line twice: the order ships on Monday from Köln.", "Translate to Japanese: good morning 🙂")


def test_greedy_output_is_byte_equal_and_nearly_all_drafts_are_right(real_target: Path) -> None:
    target = Target.load(TargetSettings(model=str(real_target), device="cpu"))
    tokenizer, itself = target.tokenizer, SmallDraft(target.model)
    asked = [render(tokenizer, [Message(role="user", content=text)], None, {}) for text in QUESTIONS]
    requests = [Request(ids, SamplingSettings(), 0, 20, target.stop_ids) for ids in asked]
    plain = dict(generate(target, None, requests, batch_size=2))
    cascade = CascadeProposer(itself, LookupHelper())
    by_text = ForeignProposer(ForeignDraft.from_tokenizers(itself, tokenizer, tokenizer, target.vocab_size))
    proposers: dict[str, Proposer] = {"lookup": PromptLookup(), "cascade": cascade, "by text": by_text}
    for name, proposer in proposers.items():
        answers = dict(generate(target, proposer, requests, draft_tokens=4, batch_size=2))
        assert {n: one.tokens for n, one in answers.items()} == {n: one.tokens for n, one in plain.items()}
        rounds = [one for answer in answers.values() for one in answer.rounds]
        assert sum(one.emitted for one in rounds) / len(rounds) > (1.0 if name == "lookup" else 3.0), name
    assert cascade.passes < cascade.passes_alone
