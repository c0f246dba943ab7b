"""Acceptance of single requests: shapes that vLLM 0.32 and llama.cpp answer with, by domain; what tells none."""

import json
from typing import Any

import pytest

from draftforge.data.domain_rules import served_domain
from draftforge.data.settings import MixSettings
from draftforge.errors import InputError
from draftforge.eval.engine_metrics import Counters
from draftforge.eval.request_metrics import OTHER_DOMAINS, counters_of, parse_responses

SUMMARY = {
    "mean_acceptance_length": 1.2325581395348837,
    "draft_acceptance_rate": 0.07751937984496124,
    "acceptance_histogram": [39, 1, 0, 3],
    "num_spec_steps": 43,
    "num_accepted_draft_tokens": 10,
    "num_draft_tokens": 129,
    "num_spec_tokens": 3,
}
"""Of a request at K = 3, as vLLM's own description of the field shows it."""
ANSWER = {"object": "chat.completion", "choices": [], "metrics": {"speculative_decoding": SUMMARY}}
COUNTED = Counters("vllm", "unclipped", 43.0, 10.0, 129.0, (4.0, 3.0, 3.0), requests=1.0)
LLAMA = [
    {"content": "x", "timings": {"predicted_n": 41, "draft_n": 30, "draft_n_accepted": 20}},
    {"timings": {"predicted_n": 11, "draft_n": 12, "draft_n_accepted": 6}},
    {"predicted_n": 5},  # a log of timings; nothing was drafted
]


def test_llama_cpps_responses() -> None:
    for text in (json.dumps(LLAMA), "\n".join(map(json.dumps, LLAMA))):
        found = parse_responses(text, "l")
        assert found.convention == "rounds" and found.accepted == 26 and found.drafted == 42 and found.requests == 3
        assert found.tau == pytest.approx((40 + 10 + 4) / (20 + 4 + 4))
    assert parse_responses(json.dumps(LLAMA[0]), "l").rounds == 20


@pytest.mark.parametrize(
    "line",
    [
        ANSWER,
        {"request": {"messages": []}, "response": ANSWER},
        {"request": {}, "response": json.dumps(ANSWER)},
        {"request": {}, "response": {"status_code": 200, "body": ANSWER}},
        {"request": {}, "response_body": [{"choices": [{"delta": {}}]}, {"choices": [], "metrics": ANSWER["metrics"]}]},
        {"request": {}, "response": f'data: {{"choices": []}}\n\ndata: {json.dumps(ANSWER)}\n\ndata: [DONE]\n\n'},
    ],
)
def test_vllms_responses_whole_and_streamed(line: Any) -> None:
    """In all shapes the sums that the engine's own counters would show."""
    found = parse_responses(json.dumps(line), "v")
    assert found.domains == {"": COUNTED} and found.requests == 1 and found.uncounted == 0
    assert found.tau == SUMMARY["mean_acceptance_length"]
    assert found.accepted / (found.drafted or 0) == SUMMARY["draft_acceptance_rate"]


def test_what_tells_no_counts_is_counted() -> None:
    timing = {"choices": [], "metrics": {"tokens_per_second": 9.0, "speculative_decoding": None}}
    lines = [ANSWER, timing, {"error": {"code": 500}}, "text", {"request": {}, "response": None}]
    found = parse_responses("\n".join(map(json.dumps, lines)), "v")
    assert (found.requests, found.uncounted, found.rounds) == (1, 4, 43)


def mix(**changes: Any) -> MixSettings:
    sources = changes.pop("sources", [{"kind": "openai", "path": "a"}, {"kind": "prompts", "path": "b"}])
    return MixSettings(sources=sources, **changes)


RULES = {
    "rules": [
        {"match": "Traceback", "role": "user", "domain": "code"},
        {"match": "^shop", "field": "model", "domain": "shop"},
    ]
}


@pytest.mark.parametrize(
    ("line", "changes", "domain"),
    [
        ({"domain": "chat"}, {}, "chat"),
        ({"request": {"domain": "chat"}}, {}, "chat"),
        ({"request": {"metadata": {"domain": "chat"}}}, {}, "chat"),
        ({"metadata": {"domain": "chat"}, "request": {}}, {}, "chat"),
        ({"request": {"extra_body": {"domain": "chat"}}}, {}, "chat"),
        (
            {"request": {"headers": {"X-Team": "chat"}, "body": {}}},
            {"sources": [{"kind": "openai", "path": "a", "domain_field": "x-team"}]},
            "chat",
        ),
        ({"request": {"model": "shop-1"}, "domain": "chat"}, {"domains": RULES}, "shop"),
        (
            {"request": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Traceback"}]}]}},
            {"domains": RULES},
            "code",
        ),
        ({"request": {"prompt": "a Traceback"}}, {"domains": RULES}, "code"),
        ({"request": {"messages": [{"role": "system", "content": "Traceback"}]}}, {"domains": RULES}, ""),
        ({"domain": "other"}, {"sources": [{"kind": "openai", "path": "a", "domain": "only"}]}, "only"),
        ({"domain": "not a label!"}, {}, ""),
        ({"domain": 3, "request": "text", "metadata": [1]}, {}, ""),
        ({}, {}, ""),
    ],
)
def test_the_domain_is_that_of_the_mixs_rules(line: Any, changes: dict[str, Any], domain: str) -> None:
    assert served_domain(mix(**changes), line) == domain


def test_counts_by_domain_add_up_over_replicas_and_looks() -> None:
    lines = [ANSWER | {"domain": name} for name in ("a", "b", "a")]
    first, second = (
        parse_responses("\n".join(map(json.dumps, some)), "v", lambda line: line.get("domain", ""))
        for some in (lines[:1], [*lines, ANSWER, {}])
    )
    assert {name: one.requests for name, one in second.domains.items()} == {"a": 2, "b": 1, "": 1}
    both, later = first.plus(second), second.since(first)
    assert {name: one.rounds for name, one in both.domains.items()} == {"a": 129, "b": 43, "": 43}
    assert {name: one.requests for name, one in later.domains.items()} == {"a": 1, "b": 1, "": 1}
    assert (later.requests, later.uncounted, later.rounds) == (3, 1, 129)
    for some in (first, second, both, later):
        assert sum(one.accepted for one in some.domains.values()) == some.accepted
        assert all(
            one.accepted_at == tuple(4.0 * one.requests if k == 0 else 3.0 * one.requests for k in range(3))
            for one in some.domains.values()
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "here: response 1: has no timings with predicted_n"),
        ("[1]", "response 1: has no timings with predicted_n"),
        ("[]", "response 1: has no timings with predicted_n"),
        ('{"timings": {"predicted_n": "9"}}', "response 1: predicted_n, draft_n, draft_n_accepted"),
        ('{"timings": {"predicted_n": -9}}', "response 1: predicted_n, draft_n, draft_n_accepted"),
        ('{"timings": {"predicted_n": 9}}\n{"broken', "line 2: not valid JSON"),
        (json.dumps([LLAMA[0], ANSWER]), "only one engine's can be put together"),
        (json.dumps({"metrics": {"speculative_decoding": {}}}), "acceptance_histogram, num_draft_tokens: counts"),
        (json.dumps({"metrics": {"speculative_decoding": SUMMARY | {"num_spec_steps": 42}}}), "must agree with"),
        (json.dumps({"metrics": {"speculative_decoding": SUMMARY | {"num_draft_tokens": 9}}}), "of 9 drafted: must"),
        (json.dumps({"metrics": {"speculative_decoding": SUMMARY | {"acceptance_histogram": [True]}}}), "counts"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        counters_of(text, "here")


def test_a_histogram_of_any_length_takes_no_time() -> None:
    """Beyond what any engine drafts it is unread and counted; below, each position is the sum of those after it."""
    telling = {"num_spec_steps": 3, "num_accepted_draft_tokens": 3 * 9_998, "num_draft_tokens": 10**6}
    answers = [
        {"metrics": {"speculative_decoding": telling | {"acceptance_histogram": [0] * size + [3]}}}
        for size in (9_998, 100_000)
    ]
    found = parse_responses("\n".join(map(json.dumps, answers)), "v")
    assert found.accepted_at == (3.0,) * 9_998 and found.requests == 1 and found.uncounted == 1
    for histogram in ([5, 2, 0, 1], [4], []):
        told = {
            "acceptance_histogram": histogram,
            "num_spec_steps": sum(histogram),
            "num_accepted_draft_tokens": sum(j * count for j, count in enumerate(histogram)),
            "num_draft_tokens": 99,
        }
        found = parse_responses(json.dumps({"metrics": {"speculative_decoding": told}}), "v")
        assert found.accepted_at == tuple(sum(histogram[j:]) for j in range(1, len(histogram)))


def test_domains_lines_and_lists_are_bounded() -> None:
    lines = "\n".join(json.dumps(ANSWER | {"domain": f"d{n}"}) for n in range(1_003))
    found = parse_responses(lines, "v", lambda line: str(line["domain"]))
    assert len(found.domains) == 1_001 and found.domains[OTHER_DOMAINS].requests == 3 and found.requests == 1_003
    with pytest.raises(InputError, match=r"v: 1,000,001 lines; must be 1,000,000 at most"):
        parse_responses("{" + "\n" * 1_000_001, "v")
    with pytest.raises(InputError, match=r"v: 4,000,001 lists and objects; must be"):
        parse_responses("[" * 4_000_001, "v")
