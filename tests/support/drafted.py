"""What a draft says when it decodes; and drafts trained by their families on a target's own greedy answers."""

import copy
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftforge.data.batches import collate
from draftforge.specdec.decoder import Request, generate
from draftforge.specdec.drafts import DraftModule
from draftforge.specdec.drafts.eagle import EagleConfig, EagleDraft
from draftforge.specdec.drafts.medusa import MedusaConfig, MedusaDraft
from draftforge.specdec.formats import DraftMeta, save_draft
from draftforge.specdec.models import CausalModel
from draftforge.specdec.proposers.base import Texts
from draftforge.specdec.proposers.factory import make_drafter, make_proposer
from draftforge.specdec.proposers.tree_shape import ROOT
from draftforge.specdec.sampling_settings import SamplingSettings
from draftforge.specdec.targets import Target
from draftforge.train.families.base import Family
from draftforge.train.families.eagle import EagleFamily
from draftforge.train.families.initial_weights import layer_fields
from draftforge.train.families.medusa import MedusaFamily, copy_heads
from draftforge.train.losses.linear_head import LossSettings
from draftforge.train.settings import EagleSettings, MedusaSettings


@torch.no_grad()
def add_idle_layer(target: Path, folder: Path) -> None:
    """Write a Llama of one layer more, which does nothing, so that it says what this one says; with its tokenizer."""
    shutil.copytree(target, folder)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    layers = model.model.layers
    layers.append(copy.deepcopy(layers[-1]))
    layers[-1].self_attn.layer_idx = model.config.num_hidden_layers
    for idle in (layers[-1].self_attn.o_proj, layers[-1].mlp.down_proj):
        idle.weight.zero_()
    model.config.num_hidden_layers += 1
    model.save_pretrained(folder)


@torch.no_grad()
def drafted_logits(draft: DraftModule, target: CausalModel, ids: Sequence[int], chain: Sequence[int]) -> Tensor:
    """Logits [1 + len(chain), V] of what a round drafts after `ids`, were it to draft this chain."""
    drafter = make_drafter(draft, target)
    drafter.reserve(1, len(ids), 1 + len(chain), 1 + len(chain))
    states = target.states(torch.tensor([ids[:-1]], device=target.device), aux_layers=drafter.aux_layers)
    drafter.begin(torch.tensor([0]), Texts.of([ids]), states)
    logits = [drafter.open(1, chain=True)[0]]
    for depth, token in enumerate(chain):
        parent = torch.tensor([[ROOT + depth]])
        logits.append(drafter.expand(torch.tensor([[token]]), parent, depth)[0, 0])
    return torch.stack(logits)


def greedy_accepted(draft: DraftModule, target: CausalModel, prompts: Sequence[list[int]], draft_tokens: int) -> int:
    """Drafted tokens that greedy decoding accepts. What it says must be what the target says alone."""
    requests = [Request(prompt, SamplingSettings(), 0, 16) for prompt in prompts]
    plain = dict(generate(target, None, requests, batch_size=len(requests)))
    ours = dict(
        generate(target, make_proposer(draft, target), requests, batch_size=len(requests), draft_tokens=draft_tokens)
    )
    assert {index: answer.tokens for index, answer in ours.items()} == {i: one.tokens for i, one in plain.items()}
    return sum(one.accepted for answer in ours.values() for one in answer.rounds)


class Talk(NamedTuple):
    """A sample as batching knows it."""

    prompt_ids: list[int]
    answer_ids: list[int]


def talks(target: Target, texts: Sequence[str], length: int = 40) -> list[Talk]:
    """The target's own greedy answers to the beginnings of texts."""
    prompts = [target.tokenizer(text).input_ids[:12] for text in texts]
    requests = [Request(prompt, SamplingSettings(), 0, length) for prompt in prompts]
    answers = dict(generate(target, None, requests, batch_size=len(requests)))
    return [Talk(prompt, answers[index].tokens) for index, prompt in enumerate(prompts)]


def fit(family: Family, samples: Sequence[Talk], steps: int, rate: float = 3e-3) -> list[float]:
    """Train on random eights of the samples, as the loop does. Returns the mean loss of each step."""
    optimizer = torch.optim.AdamW(family.trainable().values(), lr=rate, betas=(0.9, 0.95))
    losses = []
    for family.step in range(steps):
        chosen = torch.randint(len(samples), (8,)).tolist()
        batch = collate([samples[index] for index in chosen])
        loss, _ = family(family.inputs(batch, chosen))
        mean = loss / batch.supervised
        optimizer.zero_grad()
        mean.backward()
        optimizer.step()
        losses.append(float(mean.detach()))
    return losses


def fresh_family(target: CausalModel, settings: EagleSettings | MedusaSettings) -> Family:
    """A fresh draft under training on a target."""
    loss = LossSettings(settings.objective_at(0))
    torch.manual_seed(0)
    if isinstance(settings, EagleSettings):
        return EagleFamily(EagleDraft(EagleConfig(**layer_fields(target))), settings, loss, target)  # type: ignore[arg-type]
    sizes: dict[str, Any] = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "fc_bias": False}
    draft = MedusaDraft(MedusaConfig(**sizes, num_heads=settings.draft_tokens, num_layers=settings.blocks))
    copy_heads(draft, target)
    return MedusaFamily(draft, settings, loss, target)  # type: ignore[arg-type]


def save(family: Family, target: Target, folder: Path) -> None:
    """A draft folder, as the loop writes it."""
    meta = DraftMeta(
        family=family.name,  # type: ignore[arg-type]
        target_fingerprint=target.fingerprint,
        tokenizer_digest=target.tokenizer_digest,
        step=1,
        draft_tokens=3,
        draftforge_version="0",
        extra={"warm_start_step": 7},
    )
    save_draft(family.export(), folder, meta)
    family.write_extra_files(folder)
