"""A vLLM server in an environment of its own (scripts/make_vllm_venv.sh): float32, on a CPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from draftforge.eval.vllm_server import VllmLauncher
from draftforge.specdec.serve_commands import plain_command
from draftforge.specdec.target_settings import TargetSettings

VLLM = Path(os.environ.get("VLLM_VENV", Path(__file__).parents[2] / ".cache" / "vllm")) / "bin" / "python"
VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def environment() -> dict[str, str]:
    """Of a process that runs vLLM. Skips the test where there is none."""
    if not VLLM.is_file():
        pytest.skip(f"no vLLM at {VLLM}: `make test-vllm` builds it")
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return own | VARIABLES


@contextmanager
def served(model: Path, log: Path, **more: object) -> Iterator[str]:
    """The address of a server of a model. `more`: its options, with `_` for `-`."""
    environment()
    arguments = {"max_num_seqs": 4, **more}
    named = [part for name, value in arguments.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    launcher = VllmLauncher(VLLM, ["--enforce-eager", *named], start_seconds=300, variables=VARIABLES)
    command = plain_command("vllm", TargetSettings(model=str(model)))
    with launcher.serving(command, "float32", log) as address:
        yield address
