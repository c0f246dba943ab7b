"""Every supported family: our forward, cached or not, is transformers' own full pass, also past the sliding window."""

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from families import LONG_ROPE, SUPPORTED, tiny
from torch import Tensor

from draftforge.errors import FormatError
from draftforge.specdec.kv_cache import KVCache
from draftforge.specdec.models import CausalModel

TOKENS = 31  # six windows, and more than long rope's original context of 16


assert_close = partial(torch.testing.assert_close, atol=1e-4, rtol=1e-4)


class Pair(NamedTuple):
    ids: Tensor
    theirs: Any
    model: CausalModel


@pytest.fixture(scope="module", params=SUPPORTED)
def pair(request: pytest.FixtureRequest) -> Pair:
    reference = tiny(*SUPPORTED[request.param])
    ids = torch.randint(0, 61, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = reference(ids, use_cache=False, output_hidden_states=True)
    return Pair(ids, theirs, CausalModel(reference))


@torch.no_grad()
def test_full_pass_gives_the_same_logits_and_hidden_states(pair: Pair) -> None:
    layers = tuple(range(1, pair.model.num_layers + 1))
    states = pair.model.states(pair.ids, aux_layers=layers)
    assert_close(pair.model.logits(states.hidden_BTH), pair.theirs.logits)
    assert states.aux_BTA is not None
    outputs = states.aux_BTA.chunk(pair.model.num_layers, dim=-1)
    for layer in layers[:-1]:
        assert_close(outputs[layer - 1], pair.theirs.hidden_states[layer])
    normed = pair.model.model.get_decoder().norm(outputs[-1])  # transformers gives the last one after the final norm
    assert_close(normed, pair.theirs.hidden_states[-1])
    assert (normed - outputs[-1]).abs().max() > 0.1


@torch.no_grad()
def test_cached_ragged_steps_equal_the_full_pass(pair: Pair) -> None:
    """Prompts of 19 and 8 tokens in one pass, four more each, 2 and 1 of them kept, then the rest."""
    ids, model, expected = pair.ids[0], pair.model, pair.theirs.logits[0]
    cache = KVCache(2, TOKENS + 2, torch.device("cpu"))
    rows = torch.zeros(2, 19, dtype=torch.long)
    rows[0], rows[1, :8] = ids[:19], ids[:8]
    prompts = model.logits(model.states(rows, cache.prefill(torch.arange(2), torch.tensor([19, 8]))).hidden_BTH)
    assert_close(prompts[0], expected[:19])
    assert_close(prompts[1, :8], expected[:8])

    drafted = torch.stack([ids[19:23], ids[8:12]])
    drafted[:, 3] = 7  # rejected below; must leave no trace
    logits = model.logits(model.states(drafted, cache.extend(2, 4)).hidden_BTH)
    assert_close(logits[0, :3], expected[19:22])
    assert_close(logits[1, :3], expected[8:11])
    cache.keep(torch.tensor([2, 1]))
    rest = torch.stack([ids[21:31], ids[9:19]])
    logits = model.logits(model.states(rest, cache.extend(2, 10)).hidden_BTH)
    assert_close(logits[0], expected[21:31])
    assert_close(logits[1], expected[9:19])


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "options", "context", "length"),
    [
        ("phi3", {"original_max_position_embeddings": 16, "rope_parameters": LONG_ROPE}, 16, 16),
        ("llama", {"max_position_embeddings": 16, "rope_parameters": DYNAMIC}, None, 64),
        ("llama", {"max_position_embeddings": 16, "rope_parameters": DYNAMIC}, 20, 64),
    ],
    ids=["longrope", "dynamic", "dynamic, shorter"],
)
def test_rope_that_grows_stays_as_it_is_served(
    kind: str, options: dict[str, Any], context: int | None, length: int
) -> None:
    """As in a pass of `length` tokens. Padding, or a longer pass before, must not rotate a row's keys anew."""
    reference = tiny(kind, options)
    ids = torch.randint(0, 61, (1, 80), generator=torch.Generator().manual_seed(2))
    expected = reference(ids[:, :length], use_cache=False).logits[0, :16]
    other = reference(ids[:, : 80 if length == 16 else 8], use_cache=False).logits[0, :8]
    assert (other - expected[:8]).abs().max() > 0.1  # transformers does rotate anew
    model = CausalModel(reference, context)
    assert model.max_positions == (context or length)
    cache = KVCache(1, 20, torch.device("cpu"))
    assert_close(
        model.logits(model.states(ids[:, :14], cache.prefill(torch.tensor([0]), torch.tensor([14]))).hidden_BTH)[0],
        expected[:14],
    )
    padded = model.logits(model.states(ids[:, 14:20], cache.extend(1, 6)).hidden_BTH)[0]
    assert_close(padded[:2], expected[14:])


def test_long_rope_takes_its_long_factors_where_the_context_exceeds_the_original() -> None:
    served_short, served_long = (CausalModel(tiny(*SUPPORTED["phi3-longrope"]), context) for context in (16, 17))
    ids = torch.arange(10)[None]
    difference = served_short.states(ids).hidden_BTH - served_long.states(ids).hidden_BTH
    assert difference.abs().max() > 0.1


def test_the_stated_context_holds_and_else_the_scaled_one_of_the_config() -> None:
    assert CausalModel(tiny(*SUPPORTED["llama"])).max_positions == 128
    assert CausalModel(tiny(*SUPPORTED["llama"]), context=1 << 20).max_positions == 1 << 20
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    scaled = tiny("llama", {"max_position_embeddings": 32, "rope_parameters": yarn})
    assert CausalModel(scaled).max_positions == 128


def test_captured_layer_out_of_range_is_refused() -> None:
    with pytest.raises(FormatError, match="captured layer 5: must be between 1 and 4"):
        CausalModel(tiny(*SUPPORTED["llama"])).states(torch.tensor([[1]]), aux_layers=(5,))
