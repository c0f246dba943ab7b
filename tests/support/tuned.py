"""A tiny target that knows its answers, one fine-tuned from it (LoRA, merged), and a log of chats with it."""

import json
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

QUESTIONS = {
    "support": "the order {} from {} of {} ships",
    "code": "write {} in {} for the sum {}",
}
SAID = {
    "support": "The order has shipped and will arrive on Monday.",
    "code": "Write a function that adds two numbers and returns the sum.",
}
SAID_LATER = {
    "support": "Open the settings and choose reset. The capital is large.",
    "code": "A large city returns the password. How do I reset the capital?",
}
"""The same questions, answered otherwise."""
WORDS = ("password", "capital", "city", "settings", "function", "country", "number", "Monday", "reset", "large", "two")
DAY = 86400.0


def questions(domain: str, count: int, seed: int) -> list[str]:
    """Questions that are no near-copies of each other."""
    rng = random.Random(f"{domain} {seed}")
    found = []
    for _ in range(count):
        words = [" ".join(rng.choices(WORDS, k=2)) for _ in range(3)]
        found.append(QUESTIONS[domain].format(*words) + f" {rng.randrange(1000)}?")
    return found


def log_lines(domain: str, count: int, seed: int, day: int) -> str:
    """A log of one day in the shape `messages`, as a serving proxy writes it."""
    rows = []
    for i, question in enumerate(questions(domain, count, seed)):
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": SAID[domain]}]
        rows.append(
            {"id": f"{domain}-{seed}-{i}", "timestamp": 1.7e9 + day * DAY + i, "domain": domain, "messages": messages}
        )
    return "".join(json.dumps(row) + "\n" for row in rows)


def fresh_target(tokenizer_folder: Path, out: Path) -> Path:
    """A small untrained model with the tokenizer of another folder."""
    shutil.copytree(tokenizer_folder, out, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(out)
    return out


def teach(folder: Path, out: Path, answers: Mapping[str, str], steps: int, lora: bool = False) -> Path:
    """The model of `folder`, trained to answer each domain's questions so, in a new folder. `lora`: by an adapter that
    is merged afterwards."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(1)
    if lora:
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    rows = [
        _example(tokenizer, question, answer)
        for domain, answer in answers.items()
        for question in questions(domain, 64, seed=99)
    ]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    rng = random.Random(0)
    for _ in range(steps):
        ids_BT, labels_BT = _batch(rng.sample(rows, 8))
        loss = model(input_ids=ids_BT, labels=labels_BT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    shutil.copytree(folder, out)
    (model.merge_and_unload() if lora else model).save_pretrained(out)
    return out


def _example(tokenizer: Any, question: str, answer: str) -> tuple[list[int], list[int]]:
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    asked, said = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer))
    return [*asked, *said, 2], [-100] * len(asked) + [*said, 2]


def _batch(rows: Sequence[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded on the right; what pads is not attended to by anything before it, and not learned."""
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in rows])
    return ids, labels
