"""SmolLM2-135M-Instruct itself: loaded from its folder, and decoded with and without drafts."""

from pathlib import Path

import pytest

from draftforge.data.chat_template import render
from draftforge.data.conversation import Message
from draftforge.specdec.decoder import Request, generate
from draftforge.specdec.proposers.prompt_lookup import PromptLookup
from draftforge.specdec.requests import TargetSettings
from draftforge.specdec.sampling import SamplingSettings
from draftforge.specdec.targets import Target

pytestmark = pytest.mark.real
QUESTIONS = ("Repeat this line three times: the order ships on Monday.", "Count from one to ten in words.")


def test_greedy_output_with_prompt_lookup_is_byte_equal(real_target: Path) -> None:
    target = Target.load(TargetSettings(model=str(real_target), device="cpu"))
    requests = [
        Request(
            render(target.tokenizer, [Message(role="user", content=question)], None, {}),
            SamplingSettings(),
            0,
            40,
            target.stop_ids,
        )
        for question in QUESTIONS
    ]
    plain = dict(generate(target, None, requests, batch_size=2))
    drafted = dict(generate(target, PromptLookup(), requests, batch_size=2))
    for index in plain:
        assert drafted[index].tokens == plain[index].tokens
        assert target.tokenizer.decode(drafted[index].tokens) == target.tokenizer.decode(plain[index].tokens)
    assert sum(one.accepted for one in drafted[0].rounds) > 0
