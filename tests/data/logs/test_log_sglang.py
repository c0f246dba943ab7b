"""Request logs of SGLang: what its RequestLogger writes, in text and in JSON."""

import json
from pathlib import Path
from typing import Any

import pytest
from log_reading import SAMPLES, asked, finished, read_log, write_lines

from draftforge.data.logs.parsing import prompt_digest
from draftforge.errors import InputError
from draftforge.specdec.sampling_settings import SamplingSettings

CHATML = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
SPOKEN = [("system", 'You are it\'s "helper".'), ("user", "Line one,\nprompt: 'x', params: y")]
COLOURS = [("user", "Hi"), ("assistant", "Hello."), ("user", "Name a colour.")]


def test_sglang_text_log() -> None:
    read = read_log(SAMPLES / "sglang.log", "sglang")
    assert read.talks == [[*SPOKEN, ("assistant", "Fine, (really).")], [*COLOURS, ("assistant", "Green.")]]
    first = read.records[0]
    assert first.sampling == SamplingSettings(temperature=0.6, top_p=0.95) and first.max_new_tokens == 128
    assert first.template_args == {"enable_thinking": False}
    assert (first.prompt_tokens, first.answer_tokens) == (31, 5)
    assert read.times[:2] == [(1795860000.5, 3.25, "sglang"), (1795860003.5, 1.5, "sglang")]
    assert read.counts.left_out == {
        "other log line": 2,
        "joined with another line": 1,
        "health check": 1,
        "text cut by the log": 1,
        "no text logged": 1,
        "raw prompt": 1,
    }
    assert len(read.times) == 5


@pytest.mark.parametrize("stamp", ["", "[2026-11-28 10:00:09] "])
def test_sglang_json_log_takes_the_request_as_the_client_sent_it(tmp_path: Path, stamp: str) -> None:
    """SGLang 0.5.23 (`utils/log_utils.py`) writes a stamp before JSON, too."""
    lines = (SAMPLES / "sglang.jsonl").read_text().splitlines()
    read = read_log(write_lines(tmp_path / "sglang.jsonl", *(stamp + line for line in lines)), "sglang")
    assert read.talks == [[("system", "Be brief."), ("user", "What time is it?")]]
    (record,) = read.records
    assert record.sampling == SamplingSettings(temperature=0.3) and record.max_new_tokens == 32
    assert record.tools is not None and record.template_args == {"enable_thinking": False}
    assert record.started == 1795860000.1 and record.ended is None
    assert read.times == [(1795860000.15, 2.0, "sglang")]  # of the finished line: one request, counted once
    assert read.counts.left_out == {
        "joined with another line": 1,
        "logged twice": 1,
        "text cut by the log": 1,
        "raw prompt": 1,
        "no chat request": 1,
    }


def test_sglang_requests_of_the_text_form(tmp_path: Path) -> None:
    start = "[2026-11-28 10:00:00] Receive OpenAI: obj="
    lines = (
        start + "{'model': 'm', 'messages': [{'role': 'user', 'content': \"it's\"}], 'top_k': 5}, headers={'x': 'y'}",
        start + "{'messages': [{'role': 'user', 'content': 'aa'}], 'x': 'aa' ... 'bb'}",
    )
    read = read_log(write_lines(tmp_path / "s.log", *lines), "sglang")
    assert read.talks == [[("user", "it's")]] and read.records[0].sampling == SamplingSettings(temperature=1, top_k=5)
    assert read.counts.left_out == {"text cut by the log": 1}


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"add_special_tokens": False}, "no chat request"),  # `/tokenize`
        (
            {"tools": [{"function": {"name": "f", "description": "a" * 1024 + "..." + "b" * 1024}}]},
            "text cut by the log",
        ),
        ({"messages": [*[{"role": "user", "content": "a"}] * 1024, "..."] * 2}, "text cut by the log"),
        ({"stop": [*["a"] * 1024, "...", *["b"] * 1024]}, "text cut by the log"),
    ],
)
def test_sglang_lines_that_look_like_a_chat_request(tmp_path: Path, fields: dict[str, Any], reason: str) -> None:
    """As `utils/request_logger.py` and `entrypoints/openai/serving_tokenize.py` of 0.5.23 write them at level 2."""
    obj = {"messages": [{"role": "user", "content": "a"}], "model": "m", **fields}
    obj["messages"] = obj["messages"][:2049]
    good = {"event": "request.received.openai", "obj": {"messages": [{"role": "user", "content": "b"}]}}
    line = {"event": "request.received.openai", "obj": obj}
    read = read_log(write_lines(tmp_path / "s.log", json.dumps(good), json.dumps(line)), "sglang")
    assert read.talks == [[("user", "b")]] and read.counts.left_out == {reason: 1}


@pytest.mark.parametrize(
    "line, rule",
    [
        ('{"event": "request.finished"', "not valid JSON"),
        ('{"event": "request.finished", "obj": "my secret"}', "obj is not an object"),
        ("Receive OpenAI: obj=<Request my secret>", "obj is not an object"),
        ("Receive OpenAI: obj={'messages': [], 'user': b'my secret'}", "obj is not an object"),
        ('{"event": "request.received.openai", "obj": {"messages": []}}', "messages is empty"),
    ],
)
def test_sglang_lines_that_break_the_schema(tmp_path: Path, line: str, rule: str) -> None:
    good = '{"event": "request.received.openai", "obj": {"messages": [{"role": "user", "content": "a"}]}}'
    path = write_lines(tmp_path / "s.log", good, line)
    with pytest.raises(InputError, match=rf"s\.log:2: {rule}") as caught:
        read_log(path, "sglang")
    assert "secret" not in str(caught.value)
    assert read_log(path, "sglang", skip_invalid=True).counts.skipped == 1


def test_sglang_requests_that_share_an_id_failed_or_hold_media(tmp_path: Path) -> None:
    refused = "{'type': 'abort', 'message': 'too long', 'status_code': 400, 'err_type': 'BadRequestError'}"
    lines = [finished("s", asked("a")), finished("s", asked("b")), finished("s", asked("c"), refused)]
    lines += [finished("s", asked("d"), "{'type': 'abort', 'message': 'client left'}")]
    lines += [finished("s", asked("e"), image_data="['x']")]
    read = read_log(write_lines(tmp_path / "s.log", *lines), "sglang")
    assert [talk[0][1] for talk in read.talks] == ["a", "b", "d"]
    assert read.counts.left_out == {"failed request": 1, "message part that is not text": 1}


def test_sglang_shows_served_prompts_apart_from_their_requests() -> None:
    """The sample is the output of SGLang 0.5.23's `RequestLogger` at level 3, in text and in JSON: requests of one id
    that end in another order, one of them with an error."""
    read = read_log(SAMPLES / "sglang_served.log", "sglang")
    assert [talk[0][1] for talk in read.talks] == ['it\'s "first"', "second\n", "refused"] * 2
    assert read.counts.left_out == {"logged twice": 4, "failed request": 2}
    prompts = {'<user>it\'s "first"<new>': True, "<user>second\n<new>": True, "<user>refused<new>": False}
    assert read.counts.served == {bytes.fromhex(prompt_digest(text)): prompts[text] for text in prompts}


@pytest.mark.parametrize(
    "name, text, shown",
    [
        ("r", "'<user>a<new>'", True),
        ("r", f"'{'a' * 1024}' ... '{'b' * 1024}'", False),
        ("r", f"'{'a' * 1024}...{'b' * 1024}'", False),
        ("r", "None", False),
        ("r", "['a', 'b']", False),
        ("resp_1", "'<user>a<new>'", False),
        ("HEALTH_CHECK_1", "'a'", False),
    ],
)
def test_sglang_shows_no_served_prompt_by_a_text_that_is_cut_or_of_another_api(
    tmp_path: Path, name: str, text: str, shown: bool
) -> None:
    received = "[2026-11-28 10:00:00] Receive OpenAI: obj={'messages': [{'role': 'user', 'content': 'a'}]}"
    lines = (received, f"[2026-11-28 10:00:04] Finish: obj=GenerateReqInput(rid='{name}', text={text}), out={{}}")
    for order in (lines, lines[::-1]):
        read = read_log(write_lines(tmp_path / "s.log", *order), "sglang")
        assert len(read.counts.served) == shown


def test_sglang_servers_that_log_requests_stand_beside_those_that_do_not(tmp_path: Path) -> None:
    received = "[2026-11-28 10:00:00] Receive OpenAI: obj={'messages': [{'role': 'user', 'content': 'new'}]}"
    write_lines(tmp_path / "new.log", received, finished("r1", asked("new")))
    write_lines(tmp_path / "old.log", finished("r2", asked("old")))
    # What came by `/v1/responses`, `/generate` or Ollama's API is logged at its end alone; only chat and completions
    # set the flag always (`entrypoints` of 0.5.23).
    flags: tuple[dict[str, str], ...] = ({}, {"return_text_in_logprobs": "True"}, {"return_text_in_logprobs": "False"})
    ends = [finished(f"r{i}", asked(f"end {i}"), **flag) for i, flag in enumerate(flags)]
    write_lines(tmp_path / "other.log", received, *ends, finished("resp_1", asked("other")))
    read = read_log(tmp_path, "sglang")
    assert [talk[0][1] for talk in read.talks] == ["new", "old", "new", "end 2", "other"]
    assert read.counts.left_out == {"logged twice": 3}
