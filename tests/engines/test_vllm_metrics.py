"""What a real vLLM counts while it serves a head of ours, read from its metrics: the rounds that ours predict."""

import itertools
import json
import time
from pathlib import Path

import pytest
import requests
from engine_counts import EngineCounts, engine_rounds, matched_runs
from trained import PROMPTS, Trained
from vllm_served import served

from draftforge.eval.engine_metrics import Counters, parse
from draftforge.eval.request_metrics import parse_responses
from draftforge.eval.vllm_server import VllmClient
from draftforge.specdec.decoder import Request, generate
from draftforge.specdec.proposers.factory import make_proposer
from draftforge.specdec.sampling_settings import SamplingSettings

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]
K, LENGTHS = 4, (2, 17, 40)


def counters(address: str) -> Counters:
    return parse(requests.get(f"{address}/metrics", timeout=30).text, "metrics")


def settled(address: str) -> Counters:
    """Once nothing is added any more: the engine's process tells its server a step later."""
    found, again = counters(address), None
    while again != found:
        time.sleep(1)
        found, again = counters(address), found
    return found


def test_a_servers_own_counters_are_the_rounds_of_its_answers(trained_drafts: Trained, tmp_path: Path) -> None:
    target, draft = trained_drafts.target(), trained_drafts.draft("eagle3")
    asked = [(target.tokenizer(text).input_ids, length) for text, length in itertools.product(PROMPTS, LENGTHS)]
    speculative = {
        "method": "eagle3",
        "model": str(trained_drafts.draft_folders["eagle3"]),
        "num_speculative_tokens": K,
    }
    expected: list[EngineCounts] = []
    answers: list[str] = []
    with served(
        trained_drafts.target_folder,
        tmp_path / "log",
        served_model_name="tiny",
        max_model_len=512,
        speculative_config=json.dumps(speculative),
        per_request_spec_decode_metrics="summary",
    ) as address:
        before, client = settled(address), VllmClient("vLLM", address)
        idle, begun = client.read(), time.monotonic()
        for ids, length in asked:
            body = {"model": "tiny", "prompt": ids, "max_tokens": length, "temperature": 0.0, "ignore_eos": True}
            answer = requests.post(f"{address}/v1/completions", json=body | {"return_token_ids": True}, timeout=120)
            answer.raise_for_status()
            answers.append(json.dumps({"request": body, "response": answer.json()}))
            request = Request(ids, SamplingSettings(), 0, length + K, frozenset())
            ((_, own),) = generate(target, None, [request], draft_tokens=0)
            assert answer.json()["choices"][0]["token_ids"] == own.tokens[:length]
            runs = matched_runs(target, make_proposer(draft, target), ids, own.tokens, K)
            expected.append(EngineCounts.from_rounds(engine_rounds("vllm", runs, K, length), K))
        counted = settled(address).since(before)
        added, took = client.read().since(idle), time.monotonic() - begun
    assert (counted.engine, counted.convention, counted.restarted) == ("vllm", "unclipped", False)
    assert counted.rounds == sum(one.rounds for one in expected) > 0
    assert counted.accepted == sum(one.accepted for one in expected) > 0
    assert counted.drafted == sum(one.drafted for one in expected) > counted.accepted
    assert counted.accepted_at == tuple(map(sum, zip(*(one.accepted_K for one in expected))))
    # What costs are measured by: rounds with their seconds.
    assert (added.first_tokens, added.finished, added.engines) == (len(asked), len(asked), 1)
    assert added.rounds == added.drafts == counted.rounds and added.drafted == counted.drafted
    assert 0 < added.round_seconds < took
    # Each response tells its own share of these.
    told = parse_responses("\n".join(answers), "answers", lambda line: f"max_tokens {line['request']['max_tokens']}")
    assert (told.requests, told.uncounted) == (len(asked), 0)
    assert (told.rounds, told.accepted, told.drafted) == (counted.rounds, counted.accepted, counted.drafted)
    assert told.accepted_at == counted.accepted_at and told.convention == counted.convention
    for length in LENGTHS:
        mine = [one for one, (_, each) in zip(expected, asked) if each == length]
        assert told.domains[f"max_tokens {length}"].rounds == sum(one.rounds for one in mine)
