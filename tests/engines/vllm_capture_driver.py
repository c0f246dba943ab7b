"""Runs inside vLLM's own environment: answers a mix with vLLM in this process, as a capture does.

python vllm_capture_driver.py job.json result.json
"""

import json
import sys
from pathlib import Path
from typing import Any

from draftforge.data.backends.base import open_engine
from draftforge.data.capture.budget import CaptureBudget
from draftforge.data.capture.plan import Prompts, plan_shards
from draftforge.data.capture.scheduler import answer_shards
from draftforge.data.conversation import Conversation
from draftforge.data.settings import CaptureSettings
from draftforge.specdec.sampling_settings import SamplingSettings
from draftforge.specdec.target_settings import TargetSettings
from draftforge.specdec.targets import Target


def run(job: dict[str, Any]) -> dict[str, Any]:
    target = Target.load(TargetSettings(model=job["target"]))
    settings = CaptureSettings.model_validate(job["settings"])
    conversations = [Conversation.model_validate(one) for one in job["mix"]]
    shards = plan_shards(conversations, settings, [SamplingSettings.model_validate(one) for one in job["scored"]])
    prompts = Prompts(target, shards, settings)
    meter = CaptureBudget(Path(), shards, [], prompts, settings, None)
    with open_engine(target, [answer for shard in shards for answer in shard.answers], prompts, settings) as engine:
        assert engine is not None
        found = [answers for _, answers in answer_shards(target, shards, prompts, settings, meter, engine=engine)]
        return {
            "about": engine.about,
            "answers": {sample.id: sample.answer_ids for answers in found for sample in answers.samples},
            "differences": [answers.logp_difference for answers in found],
        }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(run(json.loads(Path(sys.argv[1]).read_text()))))
