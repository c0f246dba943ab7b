"""Made-up logs of every kind: conversations with something to redact, copies, requests that hold none, broken lines."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Line = dict[str, Any]
_NAMES = ("Ada", "Bo", "Cleo", "Dan", "Eve", "Finn", "Gus")


def _question(i: int) -> str:
    name = _NAMES[i % 7]
    return f"{name} asks number {i * 37} of {i % 11} things about topic{i} and part{i * 3}, mail {name}{i}@acme.org"


def _talk(i: int) -> list[Line]:
    """A conversation of one to three turns; every ninth is a copy of the one before it."""
    i -= i % 9 == 8
    messages: list[Line] = [{"role": "system", "content": f"You are bot {i % 3}."}]
    for turn in range(1 + i % 3):
        messages.append({"role": "user", "content": _question(i * 3 + turn)})
        messages.append({"role": "assistant", "content": f"Well, {i}."})
    return messages


def _messages(i: int) -> list[str]:
    times = {"started": 1.8e9 + i, "ended": 1.8e9 + i + 5, "replica": f"r{i % 2}"}
    return [json.dumps({"messages": _talk(i), "domain": f"d{i % 3}", **times})]


def _sharegpt(i: int) -> list[str]:
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    return [json.dumps({"conversations": [{"from": names[m["role"]], "value": m["content"]} for m in _talk(i)]})]


def _turns(i: int) -> list[str]:
    return [json.dumps({"turns": [m["content"] for m in _talk(i) if m["role"] == "user"]})]


def _prompts(i: int) -> list[str]:
    return [_question(i - (i % 9 == 8)), *([""] if i % 20 == 0 else [])]


def _openai(i: int) -> list[str]:
    *asked, answer = _talk(i)
    pair: Line = {"request": {"messages": asked, "temperature": 0.5}, "response": {"choices": [{"message": answer}]}}
    pair |= {"domain": "a", "started": 1.8e9 + i, "ended": 1.8e9 + i + 3}
    failed = {"request": {"messages": asked}, "response": {"error": {"message": "no"}}}
    return [json.dumps(pair), *([json.dumps(failed)] if i % 10 == 0 else [])]


def _litellm(i: int) -> list[str]:
    *asked, answer = _talk(i)
    call = {"call_type": "acompletion", "messages": asked, "response": {"choices": [{"message": answer}]}}
    other = {"call_type": "aembedding", "messages": "x", "response": {}}
    return [json.dumps(call), *([json.dumps(other)] if i % 10 == 0 else [])]


def _langfuse(i: int) -> list[str]:
    *asked, answer = _talk(i)
    seen = {"id": f"o{i}", "type": "GENERATION", "input": asked, "output": answer, "session_id": f"s{i}"}
    page = {"data": [seen, {"id": f"e{i}", "type": "SPAN"}]}
    return [json.dumps(page if i % 10 == 0 else seen)]


def _rendered(i: int) -> tuple[str, str]:
    *asked, answer = _talk(i)
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in asked)
    return f"{turns}<|im_start|>assistant\n", answer["content"]


def _vllm(i: int) -> list[str]:
    """The answer stands some lines after its request, and every seventh is missing."""
    start = f"INFO 11-28 10:{i // 60 % 60:02}:{i % 60:02} [logger.py:1]"
    params = "SamplingParams(n=1, temperature=0.5, max_tokens=9)"
    prompt = f"prompt: {_rendered(i)[0]!r}, prompt_token_ids: [1, 2], prompt_embeds shape: None."
    lines = [
        f"{start} Request c-{i} details: {prompt}",
        f"{start} Received request c-{i}: params: {params}, lora_request: None.",
    ]
    before = i - 3
    if before >= 0 and before % 7:
        said = f"output: {_rendered(before)[1]!r}, output_token_ids: [1, 2], finish_reason: stop"
        lines.append(f"{start} Generated response c-{before}: {said}")
    return lines


def _sglang(i: int) -> list[str]:
    asked = _talk(i)[:-1]
    text, said = _rendered(i)
    finished = {"obj": {"rid": f"r{i}", "text": text}, "out": {"text": said, "meta_info": {"e2e_latency": 2.0}}}
    time = f"2026-11-28T10:{i // 60 % 60:02}:{i % 60:02}"
    return [
        json.dumps({"timestamp": time, "event": "request.received.openai", "obj": {"messages": asked}}),
        json.dumps({"timestamp": time, "event": "request.finished", "rid": f"r{i}", **finished}),
    ]


LINES: dict[str, Callable[[int], list[str]]] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "turns": _turns,
    "prompts": _prompts,
    "openai": _openai,
    "litellm": _litellm,
    "langfuse": _langfuse,
    "vllm": _vllm,
    "sglang": _sglang,
}
"""Lines of the i-th request, by kind of source."""
_BROKEN = {"prompts": "\udcff", "vllm": "\udcff", "sglang": "{"}


def write_log(folder: Path, kind: str, requests: int, broken: tuple[int, ...] = (), first: int = 0) -> Line:
    """Write a log of the requests from `first` on, and give the recipe's source that reads it.

    A broken line stands before each request of `broken`. Requests of different numbers ask different things.
    """
    lines: list[str] = []
    for i in range(requests):
        if i in broken:
            lines.append(_BROKEN.get(kind, "{"))
        lines += LINES[kind](first + i)
    (folder / f"{kind}.log").write_bytes("".join(line + "\n" for line in lines).encode(errors="surrogateescape"))
    return {"kind": kind, "path": f"{kind}.log", **({} if kind == "messages" else {"domain": "d"})}
