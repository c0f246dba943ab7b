"""The context that a server admits, as vLLM derives it from a config."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftforge.errors import FormatError
from draftforge.specdec.served_context import longest_context, rotates, served_context
from draftforge.specdec.target_settings import TargetSettings
from draftforge.specdec.targets import Target, context_length


def config(length: int = 512, **rope: Any) -> dict[str, Any]:
    return {"max_position_embeddings": length, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", **rope}}


YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LONG: dict[str, Any] = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [4.0]}


@pytest.mark.parametrize(
    ("known", "longest", "served"),
    [
        (config(), 512, 512),
        (config(**YARN), 2048, 2048),
        (config(2048, **YARN), 2048, 2048),  # the length is the scaled one already
        (config(8192, **YARN), 8192, 8192),  # more than the factor makes of it: vLLM 0.29 admits 2048, 0.30 all of it
        (config(2048, **{**YARN, "rope_type": "deepseek_yarn"}), 2048, 2048),
        (config(**{**YARN, "original_max_position_embeddings": None}), 2048, 2048),
        ({"max_position_embeddings": 512, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 2048, 2048),
        (config(rope_type="linear", factor=2.0), 1024, 1024),
        (config(rope_type="dynamic", factor=4.0), 2048, 2048),
        (config(131072, rope_type="llama3", factor=8.0, original_max_position_embeddings=8192), 131072, 131072),
        ({**config(2048, **LONG), "original_max_position_embeddings": 512}, 2048, 512),
        (config(2048, **LONG, original_max_position_embeddings=512), 2048, 2048),
        ({**config(8192, rope_type="linear", factor=8.0), "model_type": "gemma3_text"}, 8192, 8192),
        (
            {
                "max_position_embeddings": 512,
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default"},
                    "full_attention": {"rope_type": "linear", "factor": 8.0},
                },
            },
            4096,
            4096,
        ),
        ({"n_positions": 1024}, 1024, 1024),
        ({"max_position_embeddings": 8192, "model_max_length": 131072}, 131072, 131072),
        ({}, None, None),
    ],
)
def test_context_of_a_config(known: dict[str, Any], longest: int | None, served: int | None) -> None:
    assert (longest_context(known), served_context(known)) == (longest, served)


@pytest.mark.parametrize("odd", ["x", [1], float("nan"), float("inf"), -1, {"a": 1}, True, 10**400])
def test_lengths_and_factors_that_are_none_are_refused(odd: Any) -> None:
    """A factor that is a text was multiplied by the length: as many characters, which took all memory."""
    for known in (
        config(10**12, rope_type="linear", factor=odd),
        {"max_position_embeddings": 512, "model_max_length": odd},
        config(**{**YARN, "original_max_position_embeddings": odd}),
        {**config(2048, **LONG), "original_max_position_embeddings": odd},
    ):
        with pytest.raises(FormatError, match=r"^config\.json: \w+ .{1,70}: must be a number above 0"):
            served_context(known)
    with pytest.raises(FormatError, match="max_position_embeddings '0': must be"):
        longest_context(config(0))


def test_positions_are_rotary_or_not() -> None:
    assert rotates(config()) and rotates({"rope_theta": 1e4}) and not rotates({"n_positions": 1024})


def test_a_target_is_served_under_the_scaled_context_or_the_stated_one(
    tiny_target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in tiny_target_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    known = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(known | {"rope_parameters": {"rope_theta": 1e4, **YARN}}))
    for stated, context in ((None, 2048), (1024, 1024), (2048, 2048), (4096, 4096)):
        settings = TargetSettings(model=str(tmp_path), context=stated)
        assert context_length(settings) == Target.load(settings).max_positions == context
        assert ("4096 is more than the 2048" in capsys.readouterr().err) == (context == 4096)
