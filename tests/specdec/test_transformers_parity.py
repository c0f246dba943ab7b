"""Our counts against transformers' assisted generation, booked as transformers books: greedy, float32."""

import itertools
from typing import Any

import pytest
import torch
from engine_counts import EngineCounts, EngineRound, engine_rounds, matched_runs
from trained import PROMPTS, Trained
from transformers import AutoModelForCausalLM
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from draftforge.specdec.decoder import Request, generate
from draftforge.specdec.proposers.factory import make_proposer
from draftforge.specdec.sampling_settings import SamplingSettings

pytestmark = pytest.mark.slow


class Assisted:
    """transformers' own target and assistant. It returns nothing about acceptance, so the rounds are overheard."""

    def __init__(self, trained: Trained, K: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._rounds: list[EngineRound] = []
        self._target, self._assistant = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            for folder in (trained.target_folder, trained.draft_folders["small"])
        )
        settings = self._assistant.generation_config  # read there, not in the call
        settings.num_assistant_tokens = K
        settings.num_assistant_tokens_schedule = "constant"
        settings.assistant_confidence_threshold = 0.0
        for model in (self._target, self._assistant):
            model.generation_config.eos_token_id = None
        original = AssistedCandidateGenerator.update_candidate_strategy

        def listening(generator: Any, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: Any) -> None:
            self._rounds.append(EngineRound(scores.shape[1] - 1, int(num_matches)))
            original(generator, input_ids, scores, num_matches)

        monkeypatch.setattr(AssistedCandidateGenerator, "update_candidate_strategy", listening)

    def complete(self, ids: list[int], length: int) -> tuple[list[int], list[EngineRound]]:
        self._rounds.clear()
        output = self._target.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            assistant_model=self._assistant,
            max_new_tokens=length,
            do_sample=False,
            pad_token_id=0,
        )
        return output[0, len(ids) :].tolist(), list(self._rounds)


@pytest.mark.parametrize("K", [1, 5])
def test_rounds_and_tokens_equal_assisted_generation(
    trained_drafts: Trained, K: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = trained_drafts.target()
    proposer = make_proposer(trained_drafts.draft("small"), target)
    assisted = Assisted(trained_drafts, K, monkeypatch)
    shifted = 0
    prompts = [target.tokenizer(text).input_ids for text in PROMPTS]
    beyond = dict(generate(target, None, [Request(ids, SamplingSettings(), 0, 40 + K) for ids in prompts]))
    for (n, ids), length in itertools.product(enumerate(prompts), (1, 2, 3, 40)):
        ((_, ours),) = generate(target, proposer, [Request(ids, SamplingSettings(), 0, length)], draft_tokens=K)
        tokens, rounds = assisted.complete(ids, length)
        assert tokens == ours.tokens
        runs = matched_runs(target, proposer, ids, beyond[n].tokens[: length + K], K, known=0)
        assert rounds == engine_rounds("transformers", runs, K, length)
        assert [r[:2] for r in ours.rounds] == engine_rounds("draftforge", runs, K, length)
        shifted += EngineCounts.from_rounds(rounds, K) != EngineCounts.from_rounds(
            [EngineRound(*r[:2]) for r in ours.rounds], K
        )
    assert shifted  # drafting straight from the prompt is another walk
