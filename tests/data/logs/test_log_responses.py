"""Responses of chat APIs: failures told from answers, streams merged, tokens counted."""

import json
from pathlib import Path
from typing import Any

import pytest
from log_reading import read_log, write_lines

from draftforge.data.logs.response import answer_of, failed, response_of, tells_failure, usage_of

USER = {"role": "user", "content": "Hi"}
ANSWER = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "Blue."}, "finish_reason": "stop"}]}
REFUSED = {"object": "error", "message": "roles must alternate", "type": "BadRequestError", "param": None, "code": 400}


def chunk(index: int = 0, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": delta}]}


def call(id: str | None, name: str | None, arguments: str, index: int | None = 0) -> dict[str, Any]:
    part = {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return chunk(tool_calls=[{key: value for key, value in part.items() if value is not None}])


def wire(*chunks: Any, end: str = "\n\n", prefix: str = "") -> str:
    return "".join(f"{prefix}data: {json.dumps(one, ensure_ascii=False)}{end}" for one in chunks) + f"data: [DONE]{end}"


@pytest.mark.parametrize(
    "response",
    [
        REFUSED,
        {"error": {"message": "no", "type": "BadRequestError", "code": 400}},
        {"detail": "Not Found"},
        {"detail": [{"loc": ["body", "messages"], "msg": "field required"}]},
        {"message": "The model is overloaded", "code": 503},
        {"message": "no", "code": "404"},
        {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}},
        {"type": "error"},
        {"success": False, "message": "no"},
        {"status": "failed", "choices": []},
        {"status": {"code": "STATUS_CODE_ERROR"}},
        {"choices": [{"index": 0, "error": {"code": 502}, "message": {"content": ""}, "finish_reason": "error"}]},
        {"choices": [{"index": 0, "message": {"content": "Bl"}, "finish_reason": "error"}]},
        [chunk(content="Bl"), {"error": {"message": "engine died", "code": 500}}],
        wire(chunk(content="Bl"), {"error": {"message": "engine died"}}),
        "event: error\n" + wire({"type": "error", "error": {"type": "api_error"}}),
        wire(REFUSED),
        [json.dumps(chunk(content="Bl")), "data: " + json.dumps(REFUSED)],
        json.dumps(json.dumps(REFUSED)),
        str(REFUSED),
        "<html><body>502 Bad Gateway</body></html>",
        "Internal Server Error",
        "upstream connect error or disconnect/reset before headers",
        "429 Too Many Requests",
    ],
)
def test_failed_responses(tmp_path: Path, response: Any) -> None:
    assert failed(response_of(response))
    lines = [json.dumps({"request": {"messages": [USER]}, "response": item}) for item in (ANSWER, response)]
    for wrapped in ({"body": response}, {"body": response, "status": 200}):
        lines.append(json.dumps({"request": {"messages": [USER]}, "response": wrapped}))
    read = read_log(write_lines(tmp_path / "log.jsonl", *lines), "openai")
    assert read.counts.left_out == {"failed request": 3}


@pytest.mark.parametrize(
    "response",
    [
        ANSWER,
        {**ANSWER, "code": 400, "detail": "of the answer", "error": None},
        {"choices": [{"index": 1, "error": "x", "message": {}}, {"index": 0, "message": {"content": "Blue."}}]},
        {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "error 500"}]},
        [chunk(content="Error 500: no, that failed.")],
        wire(chunk(content="data: error"), {"choices": [], "usage": {}}),
        {"choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "abort"}]},
        None,
        [],
    ],
)
def test_answers_are_no_failures(response: Any) -> None:
    assert not failed(response_of(response))


@pytest.mark.parametrize(
    "status, failure",
    [
        *((status, True) for status in (400, 503, "500", "400 Bad Request", "HTTP/1.1 502 Bad Gateway", "failed")),
        *(
            (status, True)
            for status in ("error", "FAILURE", "STATUS_CODE_ERROR", "timeout", "timed out", "bad_request")
        ),
        *((status, True) for status in ({"code": 500}, "server error (503)", "unavailable")),
        *((status, False) for status in (200, "200", "200 OK", "ok", "success", "completed", "no error", "", None)),
        *(
            (status, False)
            for status in (True, 1795860000, "4000 tokens", "unfailing", {"code": 0}, 0, "STATUS_CODE_OK")
        ),
    ],
)
def test_statuses_in_numbers_and_words(status: Any, failure: bool) -> None:
    assert tells_failure({"status": status}) is failure and tells_failure({"status_code": status}) is failure


TEXT = "Line one\u2028line two and \x85 three\x0b end."
"""Separators that end a line for `str.splitlines`, and in no stream."""


@pytest.mark.parametrize(
    "stream",
    [
        [chunk(role="assistant"), chunk(content=TEXT[:5]), chunk(1, content="no"), chunk(content=TEXT[5:])],
        wire(chunk(content=TEXT[:5]), chunk(content=TEXT[5:])),
        wire(chunk(content=TEXT[:5]), chunk(1, content="no"), chunk(content=TEXT[5:]), end="\r\n\r\n"),
        wire(chunk(content=TEXT[:5]), chunk(content=TEXT[5:]), end="\n"),
        wire(chunk(content=TEXT), end="\n\n", prefix=": ping\n\nevent: message\nid: 7\n"),
        "data: " + json.dumps(chunk(content=TEXT), indent=1, ensure_ascii=False).replace("\n", "\ndata: ") + "\n\n",
        ["data: " + json.dumps(chunk(content=TEXT[:5])), json.dumps(chunk(content=TEXT[5:])), "data: [DONE]"],
        [{"choices": [{"delta": {"content": TEXT}}]}],
    ],
)
def test_streams_are_split_at_line_feeds_alone(stream: Any) -> None:
    assert answer_of(stream) == {"role": "assistant", "content": TEXT, "reasoning": None, "tool_calls": None}


def test_calls_streamed_under_one_index_stay_apart() -> None:
    oslo, rome = '{"city": "Oslo"}', '{"city": "Rome"}'
    streams = [
        [call("a", "weather", oslo), call("b", "weather", rome)],
        [call("a", "weather", ""), call(None, None, oslo), call("b", "weather", ""), call(None, None, rome)],
        [call("a", "weather", oslo[:4]), call("a", None, oslo[4:]), call("b", "weather", rome)],
        [call("a", "weather", oslo, None), call("b", "weather", rome[:4], None), call(None, None, rome[4:], None)],
        [call("b", "weather", rome[:4], 1), call("a", "weather", oslo, 0), call(None, None, rome[4:], 1)],
        [call("a", "weather", oslo[:4]), call("x", None, oslo[4:]), call("b", "weather", rome, 1)],
    ]
    for stream in streams:
        answer = answer_of(stream)
        assert answer is not None and [
            (one["id"][:1], one["function"]["name"], one["function"]["arguments"]) for one in answer["tool_calls"]
        ] == [("x" if stream is streams[-1] else "a", "weather", oslo), ("b", "weather", rome)]


def test_reasoning_is_kept_apart_and_alone_is_no_answer() -> None:
    for name in ("reasoning", "reasoning_content"):
        thought = [{"choices": [{"index": 0, "delta": {name: piece}}]} for piece in ("hm", ".")]
        answer = answer_of([*thought, chunk(content="Blue.")])
        assert answer == answer_of({"choices": [{"message": {"content": "Blue.", name: "hm."}}]})
        assert answer is not None and (answer["content"], answer["reasoning"]) == ("Blue.", "hm.")
        assert answer_of(thought) is None


@pytest.mark.parametrize(
    "choices, answer",
    [
        ([{"index": 1, "message": {"content": "blue"}}, {"index": 0, "message": {"content": "red"}}], "red"),
        ([{"index": 0, "message": {"content": ""}}, {"index": 1, "message": {"content": "blue"}}], None),
        ([{"message": {"content": "red"}}, {"message": {"content": "blue"}}], "red"),
        ([None, {"index": 0}, {"index": 0, "message": {"content": "red"}}], "red"),
        ([], None),
    ],
)
def test_the_choice_with_index_0_is_the_answer(choices: list[Any], answer: str | None) -> None:
    found = answer_of({"choices": choices})
    assert (found and found["content"]) == answer


@pytest.mark.parametrize(
    "response, tokens",
    [
        ({**ANSWER, "usage": {"prompt_tokens": 9, "completion_tokens": 4}}, (9, 4)),
        ([chunk(content="x"), {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}}], (9, 4)),
        ({"content": [], "usage": {"input_tokens": 2, "cache_read_input_tokens": 7, "output_tokens": 4}}, (9, 4)),
        (
            [
                {"type": "message_start", "message": {"usage": {"input_tokens": 9, "output_tokens": 1}}},
                {"type": "message_delta", "usage": {"output_tokens": 4}},
            ],
            (9, 4),
        ),
        (ANSWER, (None, None)),
        ("no JSON", (None, None)),
    ],
)
def test_usage(response: Any, tokens: tuple[int | None, int | None]) -> None:
    assert usage_of(response) == tokens


@pytest.mark.parametrize(
    "response",
    [
        {"object": "response", "status": "completed", "output": []},
        [{"type": "response.created", "response": {}}, {"type": "response.output_text.delta", "delta": "Blue."}],
        "event: response.created\n" + wire({"type": "response.created", "response": {}}),
    ],
)
def test_what_the_responses_api_answered_is_no_chat_request(tmp_path: Path, response: Any) -> None:
    """It may continue a stored response, of which messages that a gateway made of its input tell nothing."""
    lines = [json.dumps({"request": {"messages": [USER]}, "response": one}) for one in (response, ANSWER)]
    read = read_log(write_lines(tmp_path / "l.jsonl", *lines), "openai")
    assert read.counts.left_out == {"no chat request": 1} and read.counts.taken == 1
