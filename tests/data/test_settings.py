"""The section that names an engine: what it refuses, and what of it counts as content."""

from typing import Any

import pytest
from pydantic import ValidationError

from draftforge.data.settings import CaptureSettings

VLLM = {"kind": "vllm", "url": "http://localhost:8000/v1/"}


def test_only_what_decides_the_content_is_part_of_the_identity() -> None:
    """Captures that were made before there were engines keep their identity."""
    plain = CaptureSettings()
    assert "backend" not in plain.identity() and "budget" not in plain.identity()
    served = CaptureSettings.model_validate({"backend": VLLM | {"model": "m", "retries": 1, "api_key_env": "KEY"}})
    assert served.identity() == plain.identity() | {"backend": {"kind": "vllm", "signals": "target"}}
    assert served.engine is not None and served.engine.url == "http://localhost:8000"
    local = CaptureSettings.model_validate({"backend": {"kind": "vllm", "gpu_memory_share": 0.3}})
    assert local.identity() == served.identity()
    for settings in (plain, served, local):  # as resolved recipes show it
        assert CaptureSettings.model_validate(settings.model_dump(mode="json")) == settings


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        (VLLM | {"url": "ftp://host"}, "must be an address such as"),
        (VLLM | {"url": "localhost:8000"}, "must be an address such as"),
        (VLLM | {"url": "http://me:pw@host"}, "must hold no user name or password; name the key's variable"),
        (VLLM | {"api_key_env": "sk-123"}, "pattern"),
        ({"kind": "vllm", "model": "m"}, "model is the server's; give its url"),
        (VLLM | {"tensor_parallel": 2}, "tensor_parallel is of a vLLM in this process"),
        ({"kind": "sglang"}, "tag 'sglang' found using 'kind' does not match"),
        ({"kind": "transformers", "url": "http://h"}, "Extra inputs are not permitted"),
    ],
)
def test_what_does_not_go_together_is_refused(backend: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        CaptureSettings.model_validate({"backend": backend})


def test_recorded_answers_need_the_targets_signals() -> None:
    with pytest.raises(ValidationError, match=r"set backend\.signals to target"):
        CaptureSettings.model_validate({"backend": VLLM | {"signals": "engine"}, "answers": "some/folder"})
