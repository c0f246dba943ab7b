"""LiteLLM's StandardLoggingPayload and Langfuse's observations, as their field references list them."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from log_reading import SAMPLES, read_log, write_lines

from draftforge.errors import InputError
from draftforge.specdec.sampling import SamplingSettings

ASKED = [("system", "Be brief."), ("user", "What time is it?")]


def test_litellm_payloads() -> None:
    read = read_log(SAMPLES / "litellm.jsonl", "litellm")
    assert read.talks == [
        [*ASKED, ("assistant", "")],
        [("user", "Capital of France?"), ("assistant", "Paris.")],
        [("user", "Capital of Spain?"), ("assistant", "Madrid.")],
    ]
    first, second, cached = read.records
    assert first.sampling == SamplingSettings(temperature=0.4) and first.max_new_tokens == 99
    assert first.tools is not None and first.messages[2].tool_calls is not None
    assert first.template_args == {"enable_thinking": True} and first.group == "t-1"
    assert (first.started, first.ended, first.replica) == (1795860000.25, 1795860002.75, "d-0")
    assert (first.prompt_tokens, first.answer_tokens) == (38, 12)
    assert second.sampling is None and second.replica == "gpu-0:8000"  # and neither user nor password of the address
    assert (second.started, second.ended) == (1795860001.0, 1795860003.0)
    assert (cached.started, cached.ended) == (1795860000.25, None)  # LiteLLM's own cache answered: no engine was busy
    assert len(read.times) == 11 - 1 - 2  # nor with embeddings and what was passed through
    assert read.counts.left_out == {
        "failed request": 1,
        "no chat request": 2,
        "raw prompt": 1,
        "text redacted by the log": 1,
        "no text logged": 1,
        "text cut by the log": 1,
        "message part that is not text": 1,
    }


def test_litellm_labels_of_the_metadata_name_domain_and_replica() -> None:
    source = {"domain": None, "domain_field": "user_api_key_team_alias", "replica_field": "model_group"}
    read = read_log(SAMPLES / "litellm.jsonl", "litellm", **source)
    assert {record.domain for record in read.records} == {"shop"} and read.records[0].replica == "support"


def test_litellm_needs_a_call_type(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"l\.jsonl:1: has no call_type"):
        read_log(write_lines(tmp_path / "l.jsonl", '{"messages": []}'), "litellm")


@pytest.mark.parametrize("name", ["langfuse.jsonl", "langfuse.csv", "langfuse.parquet", "langfuse.jsonl.gz"])
def test_langfuse_exports(tmp_path: Path, name: str) -> None:
    path = SAMPLES / name
    if name.endswith(".parquet"):
        path = tmp_path / name
        lines = [json.loads(line) for line in (SAMPLES / "langfuse.jsonl").read_text().splitlines()]
        flat = [{key: value for key, value in line.items() if key != "tool_definitions" or value} for line in lines]
        pq.write_table(pa.Table.from_pylist([{"tool_definitions": None, **line} for line in flat]), path)
    elif name.endswith(".gz"):
        path = tmp_path / name
        path.write_bytes(gzip.compress((SAMPLES / "langfuse.jsonl").read_bytes()))
    read = read_log(path, "langfuse")
    assert read.talks == [
        [*ASKED, ("assistant", "Noon.")],
        [("user", "Which clock?"), ("assistant", "")],
        [("user", "Answer in JSON."), ("assistant", '{"colour": "red"}')],
    ]
    first, second, third = read.records
    assert first.sampling == SamplingSettings(temperature=0.7) and first.max_new_tokens is None
    assert second.tools is not None and second.messages[1].tool_calls is not None and second.sampling is None
    assert third.sampling == SamplingSettings() and third.max_new_tokens == 50
    assert [record.group for record in read.records] == ["s1", "tr2", "s1"]
    assert (first.started, first.ended, first.replica) == (1795860000.25, 1795860002.75, "gpu-3")
    assert (first.prompt_tokens, first.answer_tokens) == (38, 12)
    assert read.counts.left_out == {
        "no chat request": 1,
        "failed request": 1,
        "raw prompt": 1,
        "tools without their definitions": 1,
        "no text logged": 1,
    }


def test_langfuse_answers_of_its_api() -> None:
    read = read_log(SAMPLES / "langfuse_api.json", "langfuse")
    assert read.talks == [[*ASKED, ("assistant", "Noon.")]]
    (record,) = read.records
    assert record.sampling == SamplingSettings(temperature=0.7) and record.group == "tr1"
    assert (record.started, record.ended, record.prompt_tokens) == (1795860000.25, 1795860002.75, 38)
    assert read.counts.read == 2 and read.counts.left_out == {"no chat request": 1}


@pytest.mark.parametrize(
    "output, answer",
    [
        ("plain", "plain"),
        ("42", "42"),
        ('["a"]', '["a"]'),
        ({"role": "assistant", "content": "said"}, "said"),
        ([{"role": "assistant", "content": "said"}], "said"),
        ({"choices": [{"message": {"content": "said"}}]}, "said"),
        ("", None),
        (None, None),
    ],
)
def test_langfuse_answers(tmp_path: Path, output: Any, answer: str | None) -> None:
    line = {"type": "GENERATION", "input": [{"role": "user", "content": "Hi"}], "output": output}
    (talk,) = read_log(write_lines(tmp_path / "o.jsonl", json.dumps(line)), "langfuse").talks
    assert talk[1:] == ([] if answer is None else [("assistant", answer)])
