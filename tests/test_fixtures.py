"""The shared fixtures do what the other tests rely on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def test_tiny_target_is_a_chat_model_without_a_pad_token(tiny_target_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_target_folder)
    assert tokenizer.pad_token is None
    assert len(tokenizer) == 300
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\nthere é"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.endswith("Hi\nthere é<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 3


def test_tiny_target_is_peaked_and_the_same_every_time(
    tiny_target_folder: Path, make_tiny_target: Callable[[int], Path]
) -> None:
    ids = torch.arange(20, 60)[None]
    with torch.no_grad():
        logits, again, other = (
            AutoModelForCausalLM.from_pretrained(folder)(ids).logits
            for folder in (tiny_target_folder, make_tiny_target(0), make_tiny_target(1))
        )
    assert torch.equal(logits, again)
    assert not torch.equal(logits, other)
    assert logits.softmax(-1).max(-1).values.mean() > 10 / 300


def sum_over_ranks(offset: int) -> list[float]:
    value = torch.tensor([float(torch.distributed.get_rank() + offset)])
    torch.distributed.all_reduce(value)
    return [value.item(), torch.distributed.get_world_size()]


def fail_on_rank_1() -> None:
    assert torch.distributed.get_rank() != 1, "rank one gives up"


@pytest.mark.slow
def test_run_distributed_returns_what_each_rank_returned(run_distributed: Callable[..., list[Any]]) -> None:
    assert run_distributed(__file__, "sum_over_ranks", 2, [10]) == [[21.0, 2], [21.0, 2]]


@pytest.mark.slow
def test_run_distributed_fails_with_the_log_of_the_failing_rank(run_distributed: Callable[..., list[Any]]) -> None:
    with pytest.raises(pytest.fail.Exception, match="rank one gives up"):
        run_distributed(__file__, "fail_on_rank_1")
