"""On a GPU, in float32: every way of drafting, in CUDA graphs, gives plain decoding's answers token for token.

Run there by `CUDA_VISIBLE_DEVICES=0 python -m pytest tests/specdec/test_on_cuda.py`; skipped elsewhere.
"""

from typing import NamedTuple

import pytest
import torch
from proposing import CHAINS, DRAWN_TREES, ON_DEVICE, TREES, WAITING, proposer_named, takes
from stand_ins import target

from draftforge.data.batches import collate
from draftforge.specdec.decoder import Generation, generate
from draftforge.specdec.kernels.attention import attention
from draftforge.specdec.kernels.block_attention import BlockMask, Sight, merged_blocks
from draftforge.specdec.kernels.column_attention import attend_columns
from draftforge.specdec.kernels.document_mask import PADDING, QueryMask
from draftforge.specdec.kernels.flash_decoding import attend_cached
from draftforge.specdec.kernels.fused import fuse
from draftforge.specdec.models import CausalModel, States
from draftforge.specdec.proposers.base import Ask, Texts
from draftforge.specdec.proposers.suffix import SuffixOnDevice, SuffixProposer
from draftforge.specdec.requests import Request
from draftforge.specdec.sampling_settings import SamplingSettings
from draftforge.train.families.ttt_alignment import Alignment

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


class Talk(NamedTuple):
    prompt_ids: list[int]
    answer_ids: list[int]


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
@pytest.mark.parametrize("name", dict.fromkeys([*CHAINS, *TREES, *WAITING, *ON_DEVICE]))
def test_greedy_answers_are_plain_decodings(model: CausalModel, name: str, batch: int) -> None:
    plain = answers(model, "plain", GREEDY, "greedy", batch)
    drafted = answers(model, name, GREEDY, "greedy", batch)
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]


@pytest.mark.parametrize("name", ["eagle3", "eagle3-tree", "small-dynamic", "suffix-here", "lookahead-here", "cascade"])
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


@pytest.mark.parametrize("vocab", [2, 12, 400])
def test_suffix_trees_of_long_texts_are_the_hosts(vocab: int) -> None:
    """Node by node, from texts of unlike lengths, among them a loop of one token."""
    generator = torch.Generator().manual_seed(vocab)
    rows = [torch.randint(vocab, (size,), generator=generator).tolist() for size in (1, 40, 700, 1500)]
    rows.append([7] * 900)
    limits, states = torch.tensor([4, 4, 3, 4, 4]), States(torch.zeros(1, 1, 1), None)
    found = []
    for proposer, device in ((SuffixProposer(), "cpu"), (SuffixOnDevice(), "cuda")):
        proposer.reserve(len(rows), 1600, 4)
        proposer.begin(torch.arange(len(rows), device=device), Texts.of(rows, device), states)
        draft = proposer.propose(Ask(limits.to(device), 4, [GREEDY] * len(rows), None, None))
        found.append([column.cpu() for column in draft.padded(16, 4).tree[:3]])
    (tokens, parents, candidates), (tokens_too, parents_too, candidates_too) = found
    assert torch.equal(candidates, candidates_too)
    assert torch.equal(tokens[candidates], tokens_too[candidates])
    assert torch.equal(parents[candidates], parents_too[candidates])


@pytest.mark.parametrize("name", ["plain", "lookup", "suffix-here", "lookahead-here", "jacobi", "cascade", "eagle3"])
def test_what_a_stopped_slot_says_in_a_round_ahead_is_dropped(model: CausalModel, name: str) -> None:
    """Rounds, too, are those of the same requests one by one."""
    whole = [one.tokens for one in answers(model, "plain", GREEDY, "greedy", 1)]
    requests = [
        Request(prompt, GREEDY, 7, TOKENS, frozenset({tokens[place]}))
        for prompt, tokens, place in zip(PROMPTS, whole, (20, 31, 9, 27))
    ]

    def run(batch: int) -> list[Generation]:
        proposer = None if name == "plain" else proposer_named(name, model)
        found = dict(generate(model, proposer, requests, draft_tokens=3, batch_size=batch))
        return [found[index] for index in range(len(requests))]

    alone, together = run(1), run(3)
    assert [one.finish for one in alone] == ["stop"] * len(requests)
    assert [(one.tokens, one.rounds) for one in together] == [(one.tokens, one.rounds) for one in alone]
    assert all(one.tokens == tokens[: len(one.tokens)] for one, tokens in zip(alone, whole))


@pytest.mark.parametrize(("steps", "window"), [(1, None), (4, None), (1, 50), (4, 50), (4, 4), (4, 2)])
def test_attention_of_training_in_half_precision(steps: int, window: int | None) -> None:
    """Values and gradients of the kernels for runs, beside one dense softmax in float32."""
    generator = torch.Generator().manual_seed(steps)
    sizes = [(int(prompt), int(answer)) for prompt, answer in torch.randint(1, 300, (24, 2), generator=generator)]
    batch = collate([Talk([1] * prompt, [2] * answer) for prompt, answer in sizes], row_tokens=1500)
    here, there = Alignment(batch).trained, Alignment(batch.to("cuda")).trained
    (rows, count), tokens = here.at_BM.shape, batch.ids_BT.shape[1]
    assert rows > 1 and here.runs is not None
    shapes = [(9, count), *[(3, tokens)] * 2, *[(3, count)] * (2 * (steps - 1))]
    drawn = [torch.randn(rows, heads, places, 64, generator=generator).bfloat16() for heads, places in shapes]
    weight = torch.randn(rows, count, 9, 64, generator=generator)
    meant = torch.zeros(rows * count, 1, 1).index_fill_(0, here.runs.queries_L, 1.0).view(rows, count, 1, 1)
    found = []
    for trained, device, dtype in ((there, "cuda", torch.bfloat16), (here, "cpu", torch.float32)):
        inputs = [one.to(device, dtype).requires_grad_() for one in drawn]
        keys, values = [inputs[1], *inputs[3::2]], [inputs[2], *inputs[4::2]]
        output = attend_columns(inputs[0], keys, values, trained, window).float().cpu() * meant
        grads = torch.autograd.grad((output * weight).sum(), inputs, materialize_grads=True)
        found.append([output.detach(), *(one.float().cpu() for one in grads)])
    for half, whole in zip(*found, strict=True):
        assert float((half - whole).norm()) <= 0.01 * float(whole.norm())


@pytest.mark.parametrize("width", [3, 8])
def test_attention_of_blocks_in_half_precision(width: int) -> None:
    """Values and gradients without a dense mask, beside one softmax with it in float32."""
    generator = torch.Generator().manual_seed(width)
    sizes = [(int(prompt), int(answer)) for prompt, answer in torch.randint(1, 300, (24, 2), generator=generator)]
    batch = collate([Talk([1] * prompt, [2] * answer) for prompt, answer in sizes], row_tokens=1500)
    found = []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        generator = torch.Generator().manual_seed(0)
        documents = batch.to(device).documents
        rows, tokens = documents.document_BT.shape
        at_BM = torch.arange(1, tokens - width, width).expand(rows, -1).to(device)
        mask = BlockMask(QueryMask(documents, at_BM), width)
        meant_BN = (documents.document_BT.gather(1, at_BM) != PADDING).repeat_interleave(width, 1).cpu()
        shapes = [(9, at_BM.shape[1] * width), *[(3, tokens)] * 2, *[(3, at_BM.shape[1] * width)] * 2]
        drawn = [torch.randn(rows, heads, places, 64, generator=generator).bfloat16() for heads, places in shapes]
        query, known, values, key, value = inputs = [one.to(device, dtype).requires_grad_() for one in drawn]
        if device == "cuda":
            output = merged_blocks(query, (known, values), key, value, mask)
        else:
            together = torch.cat([known, key], 2), torch.cat([values, value], 2)
            output = attention(query, *together, mask.dense(Sight(None, False)), None).transpose(1, 2)
        output = output.float().cpu() * meant_BN[..., None, None]
        weight = torch.randn(output.shape, generator=generator)
        grads = torch.autograd.grad((output * weight).sum(), inputs)
        found.append([output.detach(), *(one.float().cpu() for one in grads)])
    for half, whole in zip(*found, strict=True):
        assert float((half - whole).norm()) <= 0.01 * float(whole.norm())


def test_a_query_attends_alike_alone_and_in_a_chain() -> None:
    """To the bit in half precision, so that no near tie of plain decoding falls otherwise beside a draft."""
    generator, chain, past_B = torch.Generator().manual_seed(0), 5, torch.tensor([3, 126, 300, 511], device="cuda")
    shapes = (4, 9, chain, 64), (4, 3, 600, 64), (4, 3, 600, 64)
    query, keys, values = (torch.randn(*shape, generator=generator).bfloat16().cuda() for shape in shapes)
    at_BN = past_B[:, None] + torch.arange(chain, device="cuda")
    key, value = (x[torch.arange(4, device="cuda")[:, None], :, at_BN].transpose(1, 2) for x in (keys, values))
    together = attend_cached(query, key, value, keys, values, past_B)
    for n in range(chain):
        one = slice(n, n + 1)
        alone = attend_cached(query[:, :, one], key[:, :, one], value[:, :, one], keys, values, past_B + n)
        assert torch.equal(alone, together[:, :, one])
