"""Request logs of vLLM and of SGLang: what the RequestLogger of each writes, in text and in JSON."""

from pathlib import Path

import pytest
from log_reading import SAMPLES, read_log, write_lines

from draftforge.errors import InputError
from draftforge.specdec.sampling import SamplingSettings

CHATML = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
SPOKEN = [("system", 'You are it\'s "helper".'), ("user", "Line one,\nprompt: 'x', params: y")]
COLOURS = [("user", "Hi"), ("assistant", "Hello."), ("user", "Name a colour.")]
NEW_YEARS_EVE = 1798761590.0  # 2026-12-31 23:59:50


def received(name: str, when: str = "INFO 11-28 10:00:00", prompt: str = CHATML) -> str:
    return f"{when} [logger.py:40] Received request {name}: prompt: {prompt!r}, params: SamplingParams(n=1), x: None."


def generated(name: str, when: str = "INFO 11-28 10:00:02") -> str:
    return f"{when} [logger.py:60] Generated response {name}: output: 'Yes', output_token_ids: [1], finish_reason: stop"


def test_vllm_text_log() -> None:
    read = read_log(SAMPLES / "vllm.log", "vllm", year=2026)
    assert read.talks == [
        [*COLOURS, ("assistant", "Blue.")],
        [*SPOKEN, ("assistant", 'It\'s "fine".')],
        [("system", "Be kind."), ("user", "Tell a joke")],
    ]
    assert [record.sampling for record in read.records] == [
        SamplingSettings(),
        SamplingSettings(temperature=0.7, top_k=20, top_p=0.95),
        SamplingSettings(temperature=0.7, top_k=20, top_p=0.95, repetition_penalty=1.1),
    ]
    assert [record.max_new_tokens for record in read.records] == [16, 256, 256]
    assert [record.template_args for record in read.records] == [
        {},
        {"enable_thinking": False},
        {"date_string": "26 Jul 2024"},
    ]
    assert [(record.prompt_tokens, record.answer_tokens) for record in read.records] == [
        (3, None),
        (4, 3),
        (None, None),
    ]
    assert (read.records[1].started, read.records[1].ended) == (NEW_YEARS_EVE, NEW_YEARS_EVE + 15)
    assert read.counts.left_out == {
        "other log line": 2,
        "joined with another line": 7,
        "raw prompt": 1,
        "no chat request": 1,
        "no text logged": 1,
        "answer without its request": 1,
        "prompt in an unread markup": 1,
    }
    assert sorted(length for _, length, _ in read.times if length == length) == [1.0, 1.0, 2.0, 15.0]


def test_a_vllm_log_without_a_year_has_lengths_and_no_dates() -> None:
    read = read_log(SAMPLES / "vllm.log", "vllm")
    assert {(record.started, record.ended) for record in read.records} == {(None, None)}
    assert sorted(length for _, length, _ in read.times if length == length) == [1.0, 1.0, 2.0, 15.0]


def test_vllm_json_log_and_dockers() -> None:
    read = read_log(SAMPLES / "vllm_json.log", "vllm")
    assert read.talks == [[*COLOURS, ("assistant", "Red.")]]
    assert read.times == [(1795860000.25, 4.5, "vllm_json")] and read.records[0].started == 1795860000.25


def test_vllm_lines_behind_the_prefixes_of_containers(tmp_path: Path) -> None:
    lines = (
        "vllm-1  | " + received("chatcmpl-1", "2026-11-28T10:00:00.5Z (APIServer pid=1) INFO 11-28 10:00:00"),
        "vllm-1  | " + generated("chatcmpl-1", "2026-11-28T10:00:02.123456789Z (APIServer pid=1) INFO 11-28 10:00:02"),
    )
    read = read_log(write_lines(tmp_path / "pod.log", *lines), "vllm")
    ((start, length, server),) = read.times
    assert (start, server) == (1795860000.5, "pod") and length == pytest.approx(1.623456, abs=1e-6)
    assert read.records[0].ended == start + length


def test_times_of_unlike_kinds_make_no_length(tmp_path: Path) -> None:
    lines = (received("chatcmpl-1"), generated("chatcmpl-1", "2026-11-28T10:00:02Z INFO 11-28 10:00:02"))
    read = read_log(write_lines(tmp_path / "pod.log", *lines), "vllm")
    ((_, length, _),) = read.times
    assert length != length and read.traffic.untimed == 1 and read.talks[0][1] == ("assistant", "Yes")


def test_each_file_of_a_folder_is_a_vllm_replica_and_its_rotated_files_are_the_same_one(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write_lines(tmp_path / "a" / "server.log.2", received("chatcmpl-1"), received("chatcmpl-2"))
    write_lines(tmp_path / "a" / "server.log.1", generated("chatcmpl-1"))
    write_lines(tmp_path / "b.log", received("chatcmpl-1", prompt=CHATML.replace("Hi", "Ho")), generated("chatcmpl-1"))
    read = read_log(tmp_path, "vllm")
    assert sorted(name for _, length, name in read.times if length == 2) == ["a/server", "b"]
    assert sorted(read.talks) == sorted(
        [[("user", "Hi"), ("assistant", "Yes")], [("user", "Ho"), ("assistant", "Yes")], [("user", "Hi")]]
    )


def test_vllm_requests_that_never_end_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftforge.data.logs.vllm._MOST_WAITING", 2)
    lines = [received(f"chatcmpl-{i}", prompt=CHATML.replace("Hi", str(i))) for i in range(5)]
    read = read_log(write_lines(tmp_path / "v.log", *lines, generated("chatcmpl-4"), generated("chatcmpl-0")), "vllm")
    # The first three were given up to make room: the answer to number 0 comes too late.
    assert [talk[0][1] for talk in read.talks] == ["0", "1", "2", "4", "3"]
    assert read.counts.left_out == {"answer without its request": 1, "joined with another line": 1}


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


def test_sglang_json_log_takes_the_request_as_the_client_sent_it() -> None:
    read = read_log(SAMPLES / "sglang.jsonl", "sglang")
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
    "line, rule",
    [
        ('{"event": "request.finished"', "not valid JSON"),
        ('{"event": "request.finished", "obj": "my secret"}', "obj is not an object"),
        ("Receive OpenAI: obj=<Request my secret>", "obj is not an object"),
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
