"""Drafts of another size than the target's are refused before they run, by the field and both values."""

import re
from collections.abc import Callable
from pathlib import Path

import heads
import pytest
from stand_ins import llama, near_copy, random_eagle3, target, taught_medusa

from draftforge.errors import InputError
from draftforge.specdec.drafts import DraftModule
from draftforge.specdec.drafts.small import SmallDraft
from draftforge.specdec.models import CausalModel

TARGET = target(4)  # 61 tokens, hidden 48, four layers
WHERE = Path("served/draft")


@pytest.mark.parametrize(
    "draft",
    [
        near_copy(TARGET),
        random_eagle3(TARGET, 40),
        taught_medusa(TARGET, steps=1),
        heads.dflash(own_embeddings=True, own_head=True, target_hidden_size=48),
        heads.eagle3(own_embeddings=True, target_hidden_size=48),  # 24 wide on its own embeddings
    ],
    ids=lambda draft: draft.family,
)
def test_a_draft_that_fits(draft: DraftModule) -> None:
    draft.check_fits(TARGET, WHERE)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (lambda: SmallDraft(llama(vocab=64)), "vocab_size 64: must be 61, the target's"),
        (heads.medusa, "hidden_size 24: must be 48, the target's"),
        (heads.dflash, "target_hidden_size 24: must be 48, the target's"),
        (lambda: heads.dflash(own_head=True, target_hidden_size=48), "hidden_size 24: must be 48, the target's"),
        (lambda: heads.dflash(own_embeddings=True, target_hidden_size=48), "hidden_size 24: must be 48, the target's"),
        (heads.eagle, "hidden_size 24: must be 48, the target's"),
        (heads.eagle3, "target_hidden_size 24: must be 48, the target's"),
        (lambda: heads.eagle3(target_hidden_size=48), "hidden_size 24: must be 48, the target's"),
    ],
)
def test_a_draft_of_another_size(draft: Callable[[], DraftModule], message: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(f'{WHERE}: {message}')}$"):
        draft().check_fits(TARGET, WHERE)


def test_captured_layers_that_the_target_does_not_have() -> None:
    shallow = CausalModel(llama(layers=3))
    with pytest.raises(InputError, match=r"served/draft: captured layers \[1, 2, 4\]: the target has 3 layers"):
        random_eagle3(TARGET).check_fits(shallow, WHERE)
    with pytest.raises(InputError, match=r"served/draft: captured layers \[1, 2, 4\]: the target has 3 layers"):
        heads.dflash(hidden_size=48, target_hidden_size=48).check_fits(shallow, WHERE)
