"""Answers a second: transformers' own `generate`, and a capture with its signals written.

    python scripts/bench_capture.py --target FOLDER --prompts prompts.jsonl --out bench.json

Prompts are JSON lines with `turns`, a list of user texts, of which the first is asked: half of all answers greedy, half
at temperature 0.8. Only tokens up to an answer's stop count. Prints a table and writes the same as JSON.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from draftforge.data.capture.capture import capture_conversations
from draftforge.data.capture.plan import Prompts, ShardPlan, TurnRequest, plan_shards
from draftforge.data.capture.scheduler import answer_shards
from draftforge.data.chat_template import render
from draftforge.data.conversation import Conversation, Message
from draftforge.data.settings import CaptureSettings
from draftforge.data.store import Capture, Sample
from draftforge.progress import say
from draftforge.specdec.kernels.attention import NAME
from draftforge.specdec.sampling_settings import SamplingSettings
from draftforge.specdec.target_settings import TargetSettings
from draftforge.specdec.targets import Target

WARM = SamplingSettings(temperature=0.8)
PROFILED = range(60, 80)  # steps


class _DoneError(Exception):
    """The profiled steps are over."""


def read_conversations(path: Path, copies: int, limit: int | None) -> list[Conversation]:
    """Every prompt `copies` times, all of the train split; every other copy greedy."""
    texts = [json.loads(line)["turns"][0] for line in path.read_text().splitlines() if line.strip()][:limit]
    return [
        Conversation(
            id=f"{number}-{copy}",
            domain="bench",
            messages=[Message(role="user", content=text)],
            cluster=str(number),
            split="train",
            sampling=WARM if (number + copy) % 2 else SamplingSettings(),
        )
        for copy in range(copies)
        for number, text in enumerate(texts)
    ]


def time_generate(target: Target, conversations: Sequence[Conversation], batch: int, max_new_tokens: int) -> Any:
    """transformers' `generate` on one batch greedy and one at a temperature, after a short one to warm up."""
    model: Any = target.model
    model.set_attn_implementation("sdpa")
    stops = torch.tensor(sorted(target.stop_ids))
    tokens, seconds = 0, 0.0
    for temperature in (0.0, 0.8):
        asked = [c for c in conversations if c.sampling is not None and c.sampling.temperature == temperature]
        prompts = sorted((render(target.tokenizer, c.messages) for c in asked[:batch]), key=len)
        longest = len(prompts[-1])
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=target.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=target.device)
        how: dict[str, Any] = {"do_sample": temperature > 0, "pad_token_id": 0, "eos_token_id": stops.tolist()}
        how |= {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature > 0 else {}
        for length in (4, max_new_tokens):
            start = time.perf_counter()
            with torch.inference_mode():
                answers = model.generate(ids, attention_mask=mask, max_new_tokens=length, **how)[:, longest:].cpu()
        seconds += time.perf_counter() - start
        stopped = torch.isin(answers, stops).int()
        tokens += int((stopped.cumsum(1) - stopped == 0).sum())
    model.set_attn_implementation(NAME)
    return {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds, "batch": batch}


def time_capture(target: Target, conversations: Sequence[Conversation], settings: CaptureSettings) -> Any:
    """A whole capture into a folder that is thrown away; its time without and with rendering the prompts."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        capture_conversations(target, conversations, settings, [], Path(folder, "capture"))
        wall = time.perf_counter() - start
        found = Capture.open(Path(folder, "capture"), verify=False)
        tokens, seconds = found.manifest["tokens"], found.manifest["seconds"]
        size = sum(record["bytes"] for record in found.manifest["shards"])
    rates = {"tokens_per_second": tokens / seconds, "tokens_per_second_with_rendering": tokens / wall}
    return {"tokens": tokens, "seconds": seconds, "wall": wall, **rates, "bytes": size, "batch": settings.batch_size}


def profile_steps(target: Target, conversations: Sequence[Conversation], settings: CaptureSettings) -> Any:
    """Milliseconds a step of its parts, on the device (on a CPU: of the host), over some steps with full slots."""
    shards = plan_shards(conversations, settings, [])
    cuda = target.device.type == "cuda"
    profiler = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])])
    marks: list[float] = []

    def synchronized() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    class Steps:
        """Profiles the steps that are to be, and stops after them."""

        def __init__(self) -> None:
            self._counter = iter(range(1 << 30))

        def may_open(self, shard: ShardPlan) -> bool:
            return True

        def ended(self, answer: TurnRequest, sample: Sample | None) -> None:
            pass

        def emitted(self, tokens: int) -> None:
            step = next(self._counter)
            if step == PROFILED.start:
                profiler.start()
                marks.append(synchronized())
            elif step == PROFILED.stop:
                marks.append(synchronized())
                profiler.stop()
                raise _DoneError

    with suppress(_DoneError):
        for _ in answer_shards(target, shards, Prompts(target, shards, settings), settings, Steps()):
            pass
    if len(marks) < 2:
        say(f"--profile: fewer than {PROFILED.stop} steps; give more prompts or longer answers")
        return None
    kind = "device_time_total" if cuda else "cpu_time_total"
    step = (marks[1] - marks[0]) * 1e3 / len(PROFILED)
    events = [(event.key, getattr(event, kind) / 1e3 / len(PROFILED)) for event in profiler.key_averages()]
    spent = {part: max(ms for key, ms in events if key == part) for part in ("forward", "sampling", "signals")}
    return {"step_ms": step, **{f"{name}_ms": ms for name, ms in spent.items()}, "rest_ms": step - sum(spent.values())}


def table(rows: dict[str, Any]) -> str:
    lines = [f"{'':22} {'batch':>6} {'tokens':>9} {'seconds':>8} {'tokens/s':>9}"]
    for name, row in rows.items():
        lines.append(
            f"{name:22} {row['batch']:>6} {row['tokens']:>9} {row['seconds']:>8.1f} {row['tokens_per_second']:>9.0f}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="model folder")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--copies", type=int, default=2, help="answers to each prompt")
    parser.add_argument("--limit", type=int, help="prompts that are read")
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=2560, help="capture's")
    parser.add_argument("--generate-batch", type=int, default=1024, help="transformers'; 0 leaves it out")
    parser.add_argument("--profile", action="store_true", help="print the time of a step's parts")
    given = parser.parse_args(arguments)
    target = Target.load(TargetSettings(model=given.target))
    conversations = read_conversations(given.prompts, given.copies, given.limit)
    settings = CaptureSettings(max_new_tokens=given.max_new_tokens, batch_size=given.batch_size)
    rows: dict[str, Any] = {}
    if given.generate_batch:
        rows["transformers generate"] = time_generate(target, conversations, given.generate_batch, given.max_new_tokens)
    rows["capture"] = time_capture(target, conversations, settings)
    result = {"device": _device(target), "dtype": str(target.dtype), "answers": len(conversations), **rows}
    print(table(rows))
    if given.profile:
        result["profile"] = profile_steps(target, conversations, settings)
        print(" ".join(f"{name} {value:.2f}" for name, value in (result["profile"] or {}).items()))
    given.out.write_text(json.dumps(result, indent=2) + "\n")


def _device(target: Target) -> str:
    return torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else "cpu"


if __name__ == "__main__":
    main()
