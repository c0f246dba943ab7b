"""The command line under torchrun."""

import os
import subprocess
import sys
import time
from pathlib import Path

MORTAL = Path(__file__).resolve().parent / "mortal.py"
END_SECONDS = 60.0
SMALL = {
    "family": "small",
    "layers": 2,
    "steps": 6,
    "warmup_steps": 1,
    "tokens_per_step": 256,
    "save_every": 2,
    "zero_stage": 2,
    "precision": "float32",
}


def launch(arguments: list[str], log: Path, **options: object) -> subprocess.Popen[bytes]:
    """torchrun with what comes after its options."""
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "torch.distributed.run", *flags, *arguments]
    with log.open("wb") as stream:
        return subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=os.environ | {"DRAFTFORGE_DEBUG": ""}
        )


def wait_for(processes: list[subprocess.Popen[bytes]], seconds: float) -> list[int]:
    """Their exit codes. Kills what has not ended by then."""
    deadline = time.monotonic() + seconds
    try:
        return [process.wait(max(0.1, deadline - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
