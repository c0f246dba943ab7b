"""Commands that we print for vLLM, through its own parser and its own check of an engine's configuration.

`make test-vllm`: vLLM lives in an environment of its own. One process for all commands.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from trained import Trained
from vllm_served import VLLM, environment

from draftforge.specdec.formats import Verifier, convert_draft
from draftforge.specdec.model_card import DraftFacts, write_card
from draftforge.specdec.serve_commands import lookup_command, serve_command
from draftforge.specdec.serving_plan import FoundPlan, ServingPlan, write_plan
from draftforge.specdec.serving_policy import DraftRange, ServingPolicy
from draftforge.specdec.target_settings import TargetSettings

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
DRAFTS = ("small", "eagle", "eagle3", "medusa", "dflash")


def test_vllm_takes_every_command(trained_drafts: Trained, tmp_path: Path) -> None:
    target = TargetSettings(model=str(trained_drafts.target_folder))
    commands, wanted = [], []
    # 1) Every family in vLLM's own layout, and the rules that vLLM has.
    for name in DRAFTS:
        folder = str(trained_drafts.draft_folders[name])
        commands.append(serve_command("vllm", name, ServingPlan.chain(3), folder, target).text)
        wanted.append({"model": folder, "num_speculative_tokens": 3, "draft_sample_method": "greedy"})
    folder = str(trained_drafts.draft_folders["eagle3"])
    for rule, method in (("token", "standard"), ("block", "block")):
        plan = ServingPlan.chain(2, rule)  # type: ignore[arg-type]
        commands.append(serve_command("vllm", "eagle3", plan, folder, target).text)
        wanted.append({"draft_sample_method": "probabilistic", "rejection_sample_method": method})
    # 2) Folders that name K themselves: that of the plan, not what the draft was trained for.
    for name in ("eagle3", "dflash"):
        source, out = tmp_path / f"{name}-planned", tmp_path / f"{name}-speculators"
        source.mkdir()
        for path in trained_drafts.draft_folders[name].iterdir():
            (source / path.name).symlink_to(path)
        write_plan(source, ServingPlan.chain(2))
        out.mkdir()
        convert_draft(source, out, "speculators", Verifier("owner/model", ["LlamaForCausalLM"]))
        commands.append(serve_command("speculators", name, ServingPlan.chain(2), str(out), target).text)
        wanted.append({"method": name, "num_speculative_tokens": 2})
    # 3) K by batch size, in a file beside the draft; above the last range nothing is drafted.
    ranges = (DraftRange(1, 4, 4), DraftRange(5, 16, 2), DraftRange(17, 40, 0), DraftRange(41, 64, 1))
    for name in ("small", "eagle", "eagle3", "dflash"):
        place = tmp_path / f"{name}-by-batch"
        place.mkdir()
        for path in trained_drafts.draft_folders[name].iterdir():
            (place / path.name).symlink_to(path)
        policy, planned = ServingPolicy("vllm", ranges), FoundPlan(ServingPlan.chain(2, "token"))
        commands.append(
            write_card(place, str(place), "vllm", planned, DraftFacts(name, "tiny"), target, policy=policy).text
        )
        lookup = [K for first, last, K in ranges for _ in range(first, last + 1)]
        scheduled = [*lookup, *[0] * 16]
        wanted.append({"model": str(place), "num_speculative_tokens": 4, "scheduled": scheduled})
        wanted[-1] |= {"draft_sample_method": "probabilistic"}
    # 4) Prompt lookup.
    commands.append(lookup_command("vllm", 4, target).text)
    wanted.append({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3})

    for command, expected, found in zip(commands, wanted, configured(commands, tmp_path), strict=True):
        assert {name: found.get(name) for name in expected} == expected, command


def configured(commands: list[str], folder: Path) -> list[dict[str, Any]]:
    (folder / "commands.json").write_text(json.dumps(commands))
    files = [ROOT / "tests" / "engines" / "vllm_commands_driver.py", folder / "commands.json", folder / "result.json"]
    done = subprocess.run(
        [VLLM, *files], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    assert done.returncode == 0, done.stdout.decode()[-4000:]
    return json.loads((folder / "result.json").read_text())  # type: ignore[no-any-return]
