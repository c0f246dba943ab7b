"""Runs inside vLLM's own environment: one engine start, a list of greedy requests, what it booked of each, as JSON.

    python vllm_driver.py job.json result.json

The job: {"target": folder, "speculative": vLLM's speculative_config, "requests": [{"prompt", "max_tokens", "stop"}]}.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def run(job: dict[str, Any]) -> dict[str, Any]:
    import vllm

    started = time.perf_counter()
    engine = vllm.LLM(
        model=job["target"],
        speculative_config=job["speculative"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=4,
        seed=0,
        disable_log_stats=False,
        per_request_spec_decode_metrics="detailed",
    )
    ready = time.perf_counter()
    answers = [answer(engine, request) for request in job["requests"]]
    seconds = {"start": ready - started, "requests": time.perf_counter() - ready}
    return {"version": vllm.__version__, "seconds": seconds, "answers": answers}


def answer(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    settings = SamplingParams(
        temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True, stop_token_ids=request["stop"]
    )
    (output,) = engine.generate({"prompt_token_ids": request["prompt"]}, settings, use_tqdm=False)
    metrics = output.outputs[0].spec_decode_metrics
    return {
        "tokens": list(output.outputs[0].token_ids),
        "finish": output.outputs[0].finish_reason,
        "drafted": list(metrics.per_step_drafted or []) if metrics is not None else [],
        "accepted": list(metrics.per_step_accepted or []) if metrics is not None else [],
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(run(json.loads(Path(sys.argv[1]).read_text()))))
