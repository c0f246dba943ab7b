"""Repairs of strangers' files: those that fail are none, and none takes more memory than the files and the target."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftforge.specdec.diagnosis import repairs
from draftforge.specdec.diagnosis.repairs import Files

ROWS = 300
HEAD = SimpleNamespace(weight=torch.zeros(ROWS, 4))
TARGET: Any = SimpleNamespace(
    embedding_rows=ROWS,
    vocab_size=ROWS,
    hidden_size=4,
    num_layers=4,
    model=SimpleNamespace(get_output_embeddings=lambda: HEAD),
)
MAPS = [
    torch.zeros(ROWS, 1, dtype=torch.long),
    torch.tensor(5),
    torch.zeros(0),
    torch.full((ROWS,), torch.nan),
    torch.zeros(ROWS + 1, dtype=torch.long),
]


def tried(tensors: dict[str, torch.Tensor], why: str, **config: Any) -> tuple[Sequence[Files], list[str]]:
    """All that all repairs offer, and what is said of those that fail."""
    failed: list[str] = []
    files = Files(config, tensors)
    offered = [
        other for repair in repairs.REPAIRS for other in repairs._attempts(repair, files, why, TARGET, failed.append)
    ]
    held = max((tensor.numel() for other in offered for tensor in other.tensors.values()), default=0)
    assert held <= max(HEAD.weight.numel(), *(tensor.numel() for tensor in tensors.values()))
    return offered, failed


@pytest.mark.parametrize("name", ["d2t", "t2d"])
def test_only_vectors_of_ids_are_vocabulary_maps(name: str) -> None:
    for one in MAPS:
        for why in (f"tensor {name} has shape", "tensor lm_head.weight is missing d2t"):
            offered, failed = tried({name: one}, why)
            assert not failed and not [other for other in offered if "d2t" in other.done[0]]
    offered, _ = tried({name: torch.ones(3, dtype=torch.long)}, f"tensor {name} is wrong")
    assert offered


def test_scales_of_other_shapes_and_sizes_that_are_none_are_no_repair() -> None:
    codes = torch.zeros(200, 1, dtype=torch.int8)
    for scale in (torch.zeros(7), torch.zeros(200, 70), torch.zeros(200, 7, 3)):
        offered, failed = tried({"a.weight": codes, "a.weight_scale": scale}, "tensor a.weight is int8, must be")
        assert not offered and len(failed) == 1 and "dtypes" in failed[0]
    offered, failed = tried({"a.weight": codes, "a.weight_scale": torch.ones(200)}, "tensor a.weight is int8, must be")
    assert offered and not failed
    for size in ("96", -1, 10**10, [1]):
        offered, failed = tried({"a": torch.zeros(1)}, "tensor norm.weight is missing", hidden_size=size)
        assert not offered and len(failed) == 1 and "is no size" in failed[0]


def test_medusas_heads_are_counted_by_their_numbers() -> None:
    tensors = {"lm_heads.x.weight": torch.zeros(1), "lm_heads.2.weight": torch.zeros(1)}
    offered, failed = tried(tensors, "num_heads", model_type="medusa", medusa_fc_bias=False)
    assert not failed and [other.config["num_heads"] for other in offered] == [3]
