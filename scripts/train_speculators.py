"""Train an EAGLE-3 head with speculators 0.9.0 on captured rows, without vLLM and without a network.

    python -m venv PEER && PEER/bin/pip install speculators==0.9.0
    PEER/bin/python scripts/train_speculators.py prepare --rows rows.safetensors --target FOLDER --data DATA
    PEER/bin/python scripts/train_speculators.py train --target FOLDER --data DATA --out RUN --steps 3800

It runs in the environment of speculators, not in draftforge's; `bench_peer.py` starts it. `prepare` writes what
speculators' own tools get out of vLLM: the rows, and the target's hidden states in a file a row. `train` is
speculators' own training at its own settings; flags behind `--` are handed on and win over those set here.
`compile` trains two steps on random rows of the same shapes, so that a later training finds its kernels compiled.

Rows are a safetensors file: ids of all rows end to end, offsets, and the length of each row's prompt. Layer k is the
residual stream after k layers; the last column of the hidden states is the one before the final norm.

RUN/progress.jsonl has a line an epoch: steps, positions (tokens of the rows that were read) and seconds of the steps so
far, validation and checkpoints not counted. Checkpoints lie in RUN/checkpoints by epoch. A SIGTERM ends the training
with one more, `interrupted`. Without an accelerator, on which 0.9.0 cannot train at all, its device is replaced by the
CPU, to rehearse.

Shapes: B rows a batch, T tokens, H width of the target, A read layers and the last one.
"""

import argparse
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SEQUENCE = 8192
"""Tokens of a step: speculators packs rows into one sequence of so many."""
_VALIDATION_ROWS = 16
_PASS_TOKENS = {"cuda": 1 << 16, "cpu": 1 << 12}  # of one pass of the target, padding included
_LEAST_EQUAL = 0.98  # share of tokens whose likeliest successor the written states must give again
_RANDOM_ROW, _COMPILED_STEPS = 512, 2
_PROGRESS_STEPS = 100


class Row(NamedTuple):
    """A prompt and its answer."""

    ids: Tensor
    prompt_tokens: int


def read_rows(path: Path) -> list[Row]:
    """Rows of a file, cut to what speculators can pack."""
    stored = load_file(path)
    ends, prompts = stored["offsets"].tolist(), stored["prompt_tokens"].tolist()
    parts = [stored["ids"][start : min(end, start + SEQUENCE)].long() for start, end in itertools.pairwise(ends)]
    return [Row(ids, prompt) for ids, prompt in zip(parts, prompts, strict=True)]


class Verifier:
    """The target, with the hidden states that speculators wants of it."""

    def __init__(self, folder: Path, dtype: str) -> None:
        """Load the target onto the first visible device."""
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        auto = import_module("transformers").AutoModelForCausalLM
        self.model = auto.from_pretrained(folder, dtype=getattr(torch, dtype)).to(self.device).eval()
        # Hooks keep what each read layer puts out, and what the final norm is given.
        self._kept: dict[int, Tensor] = {}
        decoder, layers = self.model.base_model, layer_ids(folder)
        for place, layer in enumerate(layers):
            decoder.layers[layer - 1].register_forward_hook(self._keeper(place))
        decoder.norm.register_forward_pre_hook(lambda _, given: self._kept.update({len(layers): given[0]}))

    def _keeper(self, place: int) -> Callable[[Any, Any, Any], None]:
        def keep(module: Any, given: Any, found: Any) -> None:
            self._kept[place] = found[0] if isinstance(found, tuple) else found

        return keep

    @torch.inference_mode()
    def states(self, ids_BT: Tensor) -> Tensor:
        """Hidden states of the read layers and of the last one, [B, T, A, H] in bfloat16."""
        self.model.base_model(ids_BT.to(self.device), use_cache=False)
        return torch.stack([self._kept[place] for place in sorted(self._kept)], 2).bfloat16()

    @torch.inference_mode()
    def share_equal(self, ids_BT: Tensor, states_BTAH: Tensor) -> float:
        """Share of tokens whose likeliest successor is the same from the last state as from the model itself."""
        last_BTH = states_BTAH[:, :, -1].to(self.model.dtype)
        logits_BTV = self.model.get_output_embeddings()(self.model.base_model.norm(last_BTH))
        own_BTV = self.model(ids_BT.to(self.device), use_cache=False).logits
        return float((logits_BTV.argmax(-1) == own_BTV.argmax(-1)).float().mean())


def layer_ids(folder: Path) -> list[int]:
    """Layers that speculators reads of a target by default."""
    count = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    return [2, count // 2, count - 3]


def prepare(given: argparse.Namespace) -> None:
    """Write the hidden states of this process's share of the rows; the first share also writes the rows."""
    start = time.monotonic()
    part, parts = map(int, given.part.split("/"))
    rows, states = read_rows(given.rows), given.data / "hidden_states"
    states.mkdir(parents=True, exist_ok=True)
    if part == 0:
        write_rows(rows, given.data)

    # Rows of about one length share a pass, longest first; shares are of equal length.
    verifier = Verifier(given.target, given.dtype)
    mine = sorted(range(len(rows)), key=lambda row: -len(rows[row].ids))[part::parts]
    pending: list[Future[None]] = []
    with ThreadPoolExecutor(4, "states") as writers:
        for number, batch in enumerate(batches(rows, mine, _PASS_TOKENS[verifier.device.type])):
            ids_BT = torch.nn.utils.rnn.pad_sequence([rows[row].ids for row in batch], batch_first=True)
            states_BTAH = verifier.states(ids_BT)
            if number == 0 and (equal := verifier.share_equal(ids_BT[:2], states_BTAH[:2])) < _LEAST_EQUAL:
                sys.exit(f"{given.target}: the hidden states give only {equal:.3f} of the model's own choices again")
            # Padding stays on the device; the files of one batch are written while the next one is computed.
            flat = torch.cat([states_BTAH[place, : len(rows[row].ids)] for place, row in enumerate(batch)]).cpu()
            for done in pending:
                done.result()
            parts_of = torch.split(flat, [len(rows[row].ids) for row in batch])
            jobs = zip(batch, parts_of, strict=True)
            pending = [writers.submit(write_states, states, row, rows[row].ids, one) for row, one in jobs]
        for done in pending:
            done.result()
    link_validation(states, len(rows), set(mine))
    tokens = sum(len(rows[row].ids) for row in mine)
    print(
        f"part {part} of {parts}: {len(mine):,} rows, {tokens:,} tokens, {time.monotonic() - start:.1f} s", flush=True
    )


def batches(rows: Sequence[Row], order: Sequence[int], tokens: int) -> list[list[int]]:
    """Rows in turn, so many a batch as fit into that many tokens with padding; the first of a batch is the longest."""
    found, start = [], 0
    while start < len(order):
        count = max(1, tokens // len(rows[order[start]].ids))
        found.append(list(order[start : start + count]))
        start += count
    return found


def write_states(folder: Path, row: int, ids_T: Tensor, states_TAH: Tensor) -> None:
    """Write the file of one row."""
    save_file({"hidden_states": states_TAH.contiguous(), "token_ids": ids_T.contiguous()}, states_file(folder, row))


def states_file(folder: Path, row: int) -> Path:
    """File of a row's hidden states, as speculators looks for it."""
    return folder / f"hs_{row}.safetensors"


def write_rows(rows: Sequence[Row], folder: Path) -> None:
    """Write the rows as the data set that speculators loads: ids, and a mask that is 1 on the answer."""
    # speculators insists on a validation split, the last rows: copies of the first ones, so that all rows are trained.
    listed = [*rows, *rows[:_VALIDATION_ROWS]]
    columns = {
        "input_ids": [row.ids.tolist() for row in listed],
        "loss_mask": [[0] * row.prompt_tokens + [1] * (len(row.ids) - row.prompt_tokens) for row in listed],
        "seq_len": [len(row.ids) for row in listed],
    }
    table = import_module("datasets").Dataset.from_dict(columns)
    table.set_format(type="torch")
    table.save_to_disk(str(folder))


def link_validation(folder: Path, rows: int, mine: set[int]) -> None:
    """Give the copied rows the files of the rows that they are copies of."""
    for row in range(min(_VALIDATION_ROWS, rows)):
        if row in mine:
            os.link(states_file(folder, row), states_file(folder, rows + row))


def write_random(target: Path, folder: Path) -> None:
    """Write random rows that fill some steps: their shapes are what kernels are compiled for, their content is not."""
    config = json.loads((target / "config.json").read_text())
    rows, states = [], folder / "hidden_states"
    states.mkdir(parents=True)
    columns = len(layer_ids(target)) + 1
    for row in range((_COMPILED_STEPS + 1) * SEQUENCE // _RANDOM_ROW):
        rows.append(Row(torch.randint(config["vocab_size"], (_RANDOM_ROW,)), _RANDOM_ROW // 4))
        write_states(states, row, rows[row].ids, torch.randn(_RANDOM_ROW, columns, config["hidden_size"]).bfloat16())
    write_rows(rows, folder)
    link_validation(states, len(rows), set(range(len(rows))))


def train(given: argparse.Namespace) -> None:
    """Run speculators' own training for so many steps, and write down what they took."""
    command = import_module("speculators.train.cli")
    config = import_module("speculators.train.config").TrainConfig
    trainer = import_module("speculators.train.trainer")
    lengths = list(import_module("datasets").load_from_disk(str(given.data)).with_format(None)["seq_len"])
    trained = len(lengths) - min(_VALIDATION_ROWS, len(lengths) // 2)
    for left in (given.out / "checkpoints", given.out / "progress.jsonl"):  # of a training that did not end
        shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
    given.out.mkdir(parents=True, exist_ok=True)

    # 1) Only what has no default is set, the mask among it, which EAGLE-3 never reads, and what differs by intent: four
    # steps ahead, as ours; losses without Triton, whose fused ones torch 2.11 cannot compile; fewer log lines.
    flags = ["--speculator-type", "eagle3", "--verifier-name-or-path", str(given.target.resolve())]
    flags += ["--data-path", str(given.data), "--save-path", str(given.out / "checkpoints")]
    flags += ["--log-dir", str(given.out / "logs"), "--on-missing", "raise", "--no-resume-from-checkpoint"]
    flags += ["--train-data-ratio", repr((trained + 0.5) / len(lengths)), "--mask-token-id", "0"]
    flags += ["--target-layer-ids", *map(str, layer_ids(given.target)), "--total-seq-len", str(SEQUENCE)]
    flags += ["--ttt-steps", "4", "--loss-implementation", "eager", "--log-freq", "50"]
    if not torch.cuda.is_available():
        replace_device(trainer)
        flags += ["--draft-attn-impl", "eager", "--num-workers", "0"]
    flags += [*given.flags, "--max-steps", str(given.steps)]

    # 2) Epochs for so many steps, by speculators' own packing: `--max-steps` alone would begin later epochs too.
    chosen = config.resolve(flags).flatten()
    tokens = step_tokens(lengths[:trained], given.steps, chosen["total_seq_len"], chosen["seed"])
    epochs, positions = len(tokens), list(itertools.accumulate(itertools.chain.from_iterable(tokens)))

    # 3) Train.
    count_steps(trainer, positions, given.out / "progress.jsonl")
    print(f"{given.steps} steps in {epochs} epochs, {positions[given.steps - 1]:,} positions", flush=True)
    command.main(config.resolve([*flags, "--epochs", str(epochs)]))


def step_tokens(lengths: Sequence[int], steps: int, sequence: int, seed: int) -> list[list[int]]:
    """Tokens of each step, by epoch, of as many epochs as so many steps take."""
    module = import_module("speculators.train.distributed_batch_sampler")
    sampler = module.MultipackDistributedBatchSamplerV2(sequence, lengths, num_replicas=1, rank=0, seed=seed)
    found: list[list[int]] = []
    while sum(map(len, found)) < steps:
        sampler.set_epoch(len(found))
        found.append([sum(min(lengths[row], sequence) for row in batch) for batch in sampler])
    return found


def count_steps(trainer: Any, positions: Sequence[int], progress: Path) -> None:
    """Make speculators' trainer write down, after each epoch, the steps, positions and seconds so far."""
    wait: Callable[[], None] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    epoch_of, seconds, first = trainer.Trainer.train_epoch, 0.0, 0.0

    def train_epoch(self: Any, epoch: int, *, step_callback: Callable[[], None] | None = None) -> None:
        nonlocal seconds, first
        wait()
        start = time.perf_counter()

        def after_step() -> None:
            nonlocal first
            # The device is waited for at the first step, which compiles, and otherwise at the end of an epoch.
            if self.global_step == 1:
                wait()
                first = time.perf_counter() - start
            if self.global_step in (1, 2) or self.global_step % _PROGRESS_STEPS == 0:
                print(f"step {self.global_step}: {seconds + time.perf_counter() - start:.1f} s", flush=True)

        try:
            epoch_of(self, epoch, step_callback=after_step)
        finally:  # a SIGTERM ends the epoch as well
            wait()
            seconds += time.perf_counter() - start
            done = self.global_step
            line = {"epoch": epoch, "steps": done, "positions": positions[done - 1] if done else 0}
            with progress.open("a") as stream:
                stream.write(json.dumps({**line, "seconds": seconds, "first_step_seconds": first}) + "\n")

    trainer.Trainer.train_epoch = train_epoch


def replace_device(trainer: Any) -> None:
    """Make speculators' trainer use the CPU."""
    print("no accelerator: the device is replaced by the CPU, to rehearse", flush=True)
    trainer.get_local_rank = lambda: torch.device("cpu")
    torch.accelerator.synchronize = lambda *given: None
    start = trainer.Trainer.__init__

    def begin(self: Any, *given: Any, **named: Any) -> None:
        start(self, *given, **named)
        self.device_type = "cpu"

    trainer.Trainer.__init__ = begin


def compile_kernels(given: argparse.Namespace) -> None:
    """Train two steps on random rows."""
    given.data, given.steps = given.out / "data", _COMPILED_STEPS
    write_random(given.target, given.data)
    train(given)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    for work in (prepare, train, compile_kernels):
        verb = verbs.add_parser(work.__name__.split("_")[0], help=work.__doc__)
        verb.set_defaults(work=work)
        verb.add_argument("--target", type=Path, required=True, help="the target: a safetensors folder")
        if work is not compile_kernels:
            verb.add_argument("--data", type=Path, required=True, help="folder of prepared rows")
        if work is prepare:
            verb.add_argument("--rows", type=Path, required=True, help="captured rows")
            verb.add_argument("--dtype", default="bfloat16", help="precision of the target")
            verb.add_argument("--part", default="0/1", help="this process's share of the rows, such as 1/4")
            continue
        verb.add_argument("--out", type=Path, required=True, help="folder of the training")
        verb.add_argument("flags", nargs="*", help="flags of speculators, behind --")
        if work is train:
            verb.add_argument("--steps", type=int, required=True, help="optimizer steps")
    given = parser.parse_args()
    given.work(given)


if __name__ == "__main__":  # workers of the data loader import this file
    main()
