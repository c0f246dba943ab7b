"""On a GPU, in float32: every way of drafting, in CUDA graphs, gives plain decoding's answers token for token.

Run there by `CUDA_VISIBLE_DEVICES=0 python -m pytest tests/specdec/test_on_cuda.py`; skipped elsewhere.
"""

import pytest
import torch
from proposing import CHAINS, DRAWN_TREES, TREES, WAITING, proposer_named, takes
from stand_ins import target

from draftforge.specdec.decoder import Generation, generate
from draftforge.specdec.kernels.fused import fuse
from draftforge.specdec.models import CausalModel
from draftforge.specdec.requests import Request
from draftforge.specdec.sampling_settings import SamplingSettings

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

GREEDY, WARM = SamplingSettings(), SamplingSettings(temperature=0.9, top_k=12, top_p=0.95)
PROMPTS = [[5, 9, 2], [17, 3, 8, 8, 1, 40], [33], [4, 12, 12, 50]]
TOKENS = 48  # rounds are recorded as graphs in their second turn, and replayed from then on


@pytest.fixture(scope="module")
def model() -> CausalModel:
    return CausalModel(target().model.cuda())


@pytest.fixture(scope="module")
def fused(model: CausalModel) -> CausalModel:
    found = CausalModel(target().model.cuda().requires_grad_(False))
    fuse(found.model)
    return found


def answers(model: CausalModel, name: str, sampling: SamplingSettings, rule: str, batch: int) -> list[Generation]:
    requests = [Request(prompt, sampling, 7 + i, TOKENS - i) for i, prompt in enumerate(PROMPTS)]
    proposer = None if name == "plain" else proposer_named(name, model)
    found = dict(generate(model, proposer, requests, rule=rule, draft_tokens=3, batch_size=batch))
    return [found[index] for index in range(len(requests))]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", dict.fromkeys([*CHAINS, *TREES, *WAITING]))
def test_greedy_answers_are_plain_decodings(model: CausalModel, name: str, batch: int) -> None:
    plain = answers(model, "plain", GREEDY, "greedy", batch)
    drafted = answers(model, name, GREEDY, "greedy", batch)
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]


@pytest.mark.parametrize("name", ["eagle3", "eagle3-tree", "small-dynamic", "suffix", "lookahead", "cascade"])
def test_fused_ones_too(fused: CausalModel, name: str) -> None:
    plain = answers(fused, "plain", GREEDY, "greedy", 3)
    assert [one.tokens for one in answers(fused, name, GREEDY, "greedy", 3)] == [one.tokens for one in plain]


@pytest.mark.parametrize("name", ["small", "eagle3", "medusa", "dflash", *DRAWN_TREES])
def test_drawn_tokens_are_those_of_a_cpu(model: CausalModel, name: str) -> None:
    """Random numbers do not depend on the device; a sum that rounds otherwise may flip one draw in very many."""
    rule = "token" if takes("token", name) else "recursive" if takes("recursive", name) else "multiround"
    there = answers(model, name, WARM, rule, 3)
    here = answers(target(), name, WARM, rule, 3)
    same = sum(one.tokens == other.tokens for one, other in zip(there, here))
    assert same >= len(PROMPTS) - 1
