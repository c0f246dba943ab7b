"""Engines' own counters: each format, differences, restarts, replicas, and what is refused."""

import json

import pytest

from draftforge.errors import InputError
from draftforge.eval.engine_metrics import Counters, parse

VLLM = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 1000.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 500.0
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 3000.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="m"} 1500.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 1200.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="m"} 600.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 700.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 350.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 350.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="1"} 175.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 150.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="2"} 75.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
"""
SGLANG = """\
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{model_name="m"} 2100.0
# TYPE sglang:num_requests_total counter
sglang:num_requests_total{model_name="m"} 100.0
# TYPE sglang:spec_verify_calls_total counter
sglang:spec_verify_calls_total{model_name="m"} 800.0
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{model_name="m"} 9.9
"""
LLAMA = """\
# TYPE llamacpp:spec_decode_num_drafts_total counter
llamacpp:spec_decode_num_drafts_total 40
llamacpp:spec_decode_num_draft_tokens_total 150
llamacpp:spec_decode_num_accepted_tokens_total 60
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 30
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 20
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="2"} 10
"""


def test_vllm_adds_its_engines() -> None:
    found = parse(VLLM, "v")
    assert found == Counters("vllm", "unclipped", 1500.0, 1800.0, 4500.0, (1050.0, 525.0, 225.0))
    assert found.tau == pytest.approx(1 + 1800 / 1500)
    assert sum(found.accepted_at) == found.accepted


def test_sglang_counts_tokens_after_each_first_one() -> None:
    found = parse(SGLANG, "s")
    assert (found.engine, found.booking, found.rounds) == ("sglang", "rounds", 800.0)
    assert found.tau == pytest.approx((2100 - 100) / 800)  # not the gauge


def test_llama_cpp_metrics_and_responses() -> None:
    found = parse(LLAMA, "l")
    assert found == Counters("llama.cpp", "drafts", 40.0, 60.0, 150.0, (30.0, 20.0, 10.0))
    answers = [
        {"content": "x", "timings": {"predicted_n": 41, "draft_n": 30, "draft_n_accepted": 20}},
        {"timings": {"predicted_n": 11, "draft_n": 12, "draft_n_accepted": 6}},
        {"timings": {"predicted_n": 5}},  # nothing was drafted
    ]
    for text in (json.dumps(answers), "\n".join(map(json.dumps, answers))):
        found = parse(text, "l")
        assert found.booking == "rounds" and found.accepted == 26 and found.drafted == 42
        assert found.tau == pytest.approx((40 + 10 + 4) / (20 + 4 + 4))
    assert parse(json.dumps(answers[0]), "l").rounds == 20


def test_two_looks_give_what_lies_between() -> None:
    before = Counters("vllm", "unclipped", 100.0, 80.0, 300.0, (60.0, 20.0))
    after = Counters("vllm", "unclipped", 160.0, 100.0, 480.0, (70.0, 27.0, 3.0))
    assert after.since(before) == Counters("vllm", "unclipped", 60.0, 20.0, 180.0, (10.0, 7.0, 3.0))
    fresh = Counters("vllm", "unclipped", 7.0, 5.0, 21.0, (4.0, 1.0))
    assert fresh.since(before) == Counters("vllm", "unclipped", 7.0, 5.0, 21.0, (4.0, 1.0), restarted=True)
    assert before.since(before).rounds == 0 and before.since(before).tau != before.since(before).tau


def test_replicas_add_up_and_engines_do_not_mix() -> None:
    one, two = parse(VLLM, "a"), parse(VLLM, "b")
    both = one.plus(two)
    assert both.rounds == 3000 and both.tau == one.tau and both.accepted_at[0] == 2100
    with pytest.raises(InputError, match=r"counts of vllm \(unclipped\) and sglang \(rounds\): only one engine's"):
        one.plus(parse(SGLANG, "s"))
    with pytest.raises(InputError, match="only one engine's"):
        one.since(parse(LLAMA, "l"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "here: holds no counts of speculative decoding"),
        ("# TYPE x counter\nx_total 1\n", "here: holds no counts of speculative decoding"),
        ("<html>not found</html>", "here: (not Prometheus text|holds no counts)"),
        ('vllm:x{a="1" nonsense', "here: not Prometheus text"),
        ("# TYPE sglang:spec_accept_length gauge\nsglang:spec_accept_length 2.5\n", "without sglang:spec_verify_calls"),
        (
            "# TYPE sglang:spec_verify_calls_total counter\nsglang:spec_verify_calls_total 2\n",
            "generation_tokens_total",
        ),
        ("{}", "response 1: has no timings with predicted_n"),
        ("[1]", "response 1: has no timings with predicted_n"),
        ('{"timings": {"predicted_n": "9"}}', "response 1: predicted_n, draft_n, draft_n_accepted"),
        ('{"timings": {"predicted_n": -9}}', "response 1: predicted_n, draft_n, draft_n_accepted"),
        ('{"timings": {"predicted_n": 9}}\n{"broken', "line 2: not valid JSON"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        parse(text, "here")
