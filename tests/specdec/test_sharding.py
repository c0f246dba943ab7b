"""Targets whose layers lie spread over ranks: what they compute, hold, read and refuse."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.distributed.tensor import DTensor

from draftforge.errors import FormatError, InputError
from draftforge.specdec.sharding import FileWeights
from draftforge.specdec.target_settings import TargetSettings
from draftforge.specdec.targets import Target

RunDistributed = Callable[..., list[Any]]


def load(folder: str | Path, **options: Any) -> Target:
    return Target.load(TargetSettings(model=str(folder), device="cpu", **options))


def compare(folder: str) -> dict[str, float]:
    """What one rank finds: each has sequences of its own, and runs them equally often."""
    read: list[int] = []
    inner = FileWeights.rows

    def counted(self: FileWeights, name: str, shape: torch.Size, rows: slice) -> torch.Tensor:
        found = inner(self, name, shape, rows)
        read.append(found.numel() * found.element_size() * (".layers." in name))
        return found

    FileWeights.rows = counted  # type: ignore[method-assign]
    whole, target = load(folder), load(folder, shard=True)
    torch.manual_seed(torch.distributed.get_rank())
    apart = 0.0
    with torch.no_grad(), target.running():
        for length in (1, 9, 40):
            ids_BT = torch.randint(whole.vocab_size, (2, length + torch.distributed.get_rank()))
            ours, theirs = (one.states(ids_BT, aux_layers=(1, 3, 4)) for one in (target, whole))
            assert ours.aux_BTA is not None and theirs.aux_BTA is not None
            for one, other in zip((*ours, target.logits(ours[0])), (*theirs, whole.logits(theirs[0])), strict=True):
                assert one is not None and other is not None
                apart = max(apart, float((one - other).abs().max()))
    held, everything = (list(one.model.get_decoder().layers.parameters()) for one in (target, whole))
    return {
        "apart": apart,
        "held": sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in held),
        "whole": sum(x.nbytes for x in everything),
        "read": sum(read),
        "spread": sum(isinstance(parameter, DTensor) for parameter in target.model.parameters()),
    }


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_compute_what_the_whole_target_does_and_hold_a_share_each(
    tiny_target_folder: Path, run_distributed: RunDistributed, world: int
) -> None:
    """On three ranks no weight is cut evenly. Each rank reads from the files what it keeps and no more."""
    found = run_distributed(__file__, "compare", world, [str(tiny_target_folder)])
    for one in found:
        assert one["apart"] < 1e-4  # float32: products of the same numbers
        assert one["read"] == one["held"]
        assert one["held"] == pytest.approx(one["whole"] / world, rel=0.03)
        assert one["spread"] == 4 * 9  # all of the layers, nothing else
    assert sum(one["held"] for one in found) == found[0]["whole"]


def test_a_pass_outside_a_training_is_refused(tiny_target_folder: Path) -> None:
    """Before and after: one rank alone would wait for the others without end."""
    target, ids_BT = load(tiny_target_folder, shard=True), torch.tensor([[5, 6]])
    assert all(x.is_meta for x in target.model.get_decoder().layers.parameters())
    refusal = r"target\.shard = true: its layers run in a training alone"
    with pytest.raises(InputError, match=refusal):
        target.states(ids_BT)
    for _ in range(2):
        with target.running() as inside:
            assert inside.states(ids_BT).hidden_BTH.isfinite().all()
        with pytest.raises(InputError, match=refusal):
            target.states(ids_BT)


def test_what_cannot_be_spread_is_refused_in_one_line(tiny_target_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"shard true: cannot merge adapter there"):
        TargetSettings(model="owner/name", shard=True, adapter="there")
    with pytest.raises(ValidationError, match=r"shard true: cannot shard the GGUF file here\.gguf"):
        TargetSettings(model="here.gguf", shard=True)
    with pytest.raises(ValidationError, match=r"shard true: device cuda:1 is one for all ranks; must be auto"):
        TargetSettings(model="owner/name", shard=True, device="cuda:1")
    folder = tmp_path / "target"
    shutil.copytree(tiny_target_folder, folder)
    config = json.loads((folder / "config.json").read_text())

    def refused(changes: dict[str, Any], error: type[Exception], match: str) -> None:
        (folder / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(error, match=match) as raised, load(folder, shard=True).running():
            pass
        assert "\n" not in str(raised.value)

    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    refused({"quantization_config": fp8}, InputError, "is quantised; target.shard = true needs plain weights")
    shape = r"q_proj\.weight: shape \(128, 128\), must be \(256, 128\) as config\.json says"
    refused({"num_attention_heads": 8, "num_key_value_heads": 2}, FormatError, shape)
    refused({"num_hidden_layers": 5}, FormatError, r"no tensor model\.layers\.4\.")
