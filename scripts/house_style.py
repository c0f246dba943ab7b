"""A house style that a target is taught in a minute: made by code from its own answers, learned by a LoRA adapter.

What `bench_retraining.py` fine-tunes with: nobody has to write answers, and how far a draft falls is its style's doing.
"""

import random
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftforge import storage
from draftforge.data.store import Sample
from draftforge.errors import InputError
from draftforge.specdec.targets import Target, copy_tokenizer

Example = tuple[list[int], list[int]]
"""A prompt and its answer, as ids."""
TUNING_FILE = "tuning.json"
CLOSING = "That is the whole answer. Ask again if a step is unclear."
_MARK = re.compile(r"^\s*(?:\d+[.)]|[-*#•]+)\s+", re.MULTILINE)  # of lists and headings
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")
_RATE = 1e-3
_LONGEST = 768  # tokens of an example
_UNSEEN = 64  # examples that the loss is read on


def house_style(answer: str, cut: bool) -> str:
    """The answer as numbered steps with a closing line. `cut`: its last sentence has no end, and is left out."""
    sentences = [one.strip() for one in _SENTENCE_END.split(_MARK.sub("", answer)) if one.strip()]
    sentences = sentences[:-1] if cut and len(sentences) > 1 else sentences
    return "\n".join([*(f"Step {k}: {one}" for k, one in enumerate(sentences, 1)), CLOSING])


def in_style(answers: Sequence[Sample], target: Target) -> float:
    """Share of the answers that begin in the house style."""
    texts = [str(target.tokenizer.decode(list(one.answer_ids))) for one in answers]
    return sum(text.lstrip().startswith("Step 1:") for text in texts) / len(texts)


def tune(
    target: Target, answers: Sequence[Sample], base: Path, out: Path, steps: int, batch: int, most: int
) -> dict[str, Any]:
    """Teach the model of `base`, which `target` is, the style and write it to `out`, merged; how it went.

    `most`: answers that examples are made of. Does nothing where `out` is there.
    """
    if not out.is_dir():
        rows = examples(target, answers, most)
        unseen, seen = rows[:_UNSEEN], rows[_UNSEEN:] or rows
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=target.dtype).to(target.device)
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
        start = time.monotonic()
        before = unseen_loss(model, unseen)
        learn(model, seen, steps, batch)
        told = {"steps": steps, "batch": batch, "examples": len(seen), "loss_before": before}
        told |= {"loss_after": unseen_loss(model, unseen), "seconds": time.monotonic() - start}
        with storage.new_folder(out) as new:
            copy_tokenizer(base, new)
            model.float().merge_and_unload().save_pretrained(new)
            storage.write_json(new / TUNING_FILE, told | {"example": target.tokenizer.decode(rows[0][1])})
    return storage.read_object(out / TUNING_FILE)


def learn(model: Any, rows: Sequence[Example], steps: int, batch: int) -> None:
    """Train the adapter: AdamW, ten steps of warm-up, then down to a tenth of the rate."""
    weights, rng = [one for one in model.parameters() if one.requires_grad], random.Random(0)
    optimizer = torch.optim.AdamW(weights, weight_decay=0.0)
    model.train()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = _RATE * min(1.0, (step + 1) / 10) * (1 - 0.9 * step / steps)
        answer_loss(model, rng.choices(rows, k=batch)).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def examples(target: Target, answers: Sequence[Sample], most: int) -> list[Example]:
    """Prompts of some answers, and those answers in the house style. InputError where all are too long."""
    tokenizer: Any = target.tokenizer
    found = []
    for one in random.Random(0).sample(answers, min(most + _UNSEEN, len(answers))):
        text = tokenizer.decode(list(one.answer_ids), skip_special_tokens=True)
        said = tokenizer(house_style(text, one.finish == "length"), add_special_tokens=False)["input_ids"]
        row = (list(one.prompt_ids), [*said, min(target.stop_ids)])
        if len(row[0]) + len(row[1]) <= _LONGEST:
            found.append(row)
    if not found:
        raise InputError(f"no prompt with its answer has at most {_LONGEST} tokens: nothing to learn a style from")
    return found


@torch.no_grad()
def unseen_loss(model: Any, rows: Sequence[Example]) -> float:
    return float(answer_loss(model, rows))


def answer_loss(model: Any, rows: Sequence[Example]) -> Tensor:
    """Mean cross-entropy of the answers' tokens; rows are padded on the right, which nothing before it attends to."""
    longest = max(len(asked) + len(said) for asked, said in rows)
    ids_BT = torch.tensor([[*asked, *said, *[0] * (longest - len(asked) - len(said))] for asked, said in rows])
    learned_BT = torch.zeros(ids_BT.shape, dtype=torch.bool)
    for row_T, (asked, said) in zip(learned_BT, rows, strict=True):
        row_T[len(asked) : len(asked) + len(said)] = True
    inner = model.get_base_model()
    ids_BT, learned_BT = ids_BT.to(inner.device), learned_BT.to(inner.device)
    hidden_BTH = inner.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
    logits_NV = inner.get_output_embeddings()(hidden_BTH[:, :-1][learned_BT[:, 1:]])
    return torch.nn.functional.cross_entropy(logits_NV.float(), ids_BT[:, 1:][learned_BT[:, 1:]])
