"""Runs inside vLLM's own environment: what vLLM's own parser and engine configuration make of `vllm serve` commands.

    python vllm_commands_driver.py commands.json result.json

Commands are of local folders. A speculators folder, whose target is a hub id that cannot be asked here, is parsed, and
its config read as vLLM reads it; for the others the whole engine configuration is made.
"""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

BATCHES = 80
"""Batch sizes for which a policy is looked up."""


def configured(command: str) -> dict[str, Any]:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    # 1) `vllm serve …` as the console script parses it.
    program, *words = shlex.split(command)
    assert program == "vllm"
    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers(required=True))
    args = parser.parse_args(words)
    args.model = args.model_tag
    # 2) A folder that names its target and K.
    raw = json.loads((Path(args.model) / "config.json").read_text())
    if "speculators_model_type" in raw:
        return dict(SpeculatorsConfig.extract_vllm_speculative_config(raw))
    # 3) Everything else: the configuration of an engine, checked as at its start.
    args.dtype, args.enforce_eager, args.max_model_len = "float32", True, 512
    made = EngineArgs.from_cli_args(args).create_engine_config().speculative_config
    names = ("method", "model", "num_speculative_tokens", "draft_sample_method", "rejection_sample_method")
    found = {name: getattr(made, name) for name in (*names, "prompt_lookup_min", "prompt_lookup_max")}
    # 4) A policy, as the scheduler looks it up: K by batch size, from 1 on.
    schedule = made.num_speculative_tokens_per_batch_size
    if schedule is not None:
        lookup = build_dynamic_sd_schedule_lookup(schedule, BATCHES, made.num_speculative_tokens)
        found["scheduled"] = lookup[1:]
    return found


if __name__ == "__main__":
    found = [configured(command) for command in json.loads(Path(sys.argv[1]).read_text())]
    Path(sys.argv[2]).write_text(json.dumps(found))
