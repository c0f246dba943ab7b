"""How fast a log becomes a mix: lines a second, processor time and memory, for any number of processes.

    python scripts/bench_mix.py                                    # 60,000 requests of an OpenAI-style proxy
    python scripts/bench_mix.py --kind vllm --requests 20000 --limit 5000 --processes 1 2 4

The log is made up, the same one each time: one to four user turns behind system prompts, a third with tools, every
fifth message with an address, a number or a key in it. Prints a line of JSON for each number of processes.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftforge.data.mix import MANIFEST, build_mix, load_manifest
from draftforge.data.settings import MixSettings
from draftforge.fingerprint import file_digests

Json = dict[str, Any]

_STARTED = 1_790_000_000
_PERSONAL = (
    "reach me at {word}.{number}@example-mail.org",
    "call +49 30 {number}55 or (212) 555-0{short}",
    "my card is 4111 1111 1111 1111, thanks",
    "the account is DE89 3704 0044 0532 0130 00",
    "api_key = sk-{word}{number}{word}{number}abc",
    "see https://{word}.internal.example.com/a/{number}?b=1 on 10.1.{short}.7",
    "password: hunter{number}!x",
)


class Chats:
    """Made-up requests. Equal seeds give equal ones."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        letters = "aeiou", "bcdfghklmnprstvw"
        syllables = [a + b for a in letters[1] for b in letters[0]]
        self._words = ["".join(self._random.choices(syllables, k=1 + i % 4)) for i in range(4000)]
        self._weights = [1 / (i + 3) for i in range(4000)]
        self._systems = [self.text(30 + 5 * i) for i in range(20)]
        self._tools = [
            {
                "type": "function",
                "function": {
                    "name": f"tool_{i}",
                    "description": self.text(14),
                    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
                },
            }
            for i in range(8)
        ]

    def text(self, words: int) -> str:
        """Some words, every sixteenth with a full stop."""
        drawn = self._random.choices(self._words, self._weights, k=words)
        return " ".join(word + "." if i % 16 == 15 else word for i, word in enumerate(drawn))

    def message(self) -> str:
        """What a user says; every fifth time with something to redact."""
        said = self.text(self._random.randint(6, 40))
        if self._random.random() < 0.2:
            number, short = self._random.randint(10_000, 99_999), self._random.randint(10, 99)
            said += " " + self._random.choice(_PERSONAL).format(
                word=self._words[number % 99], number=number, short=short
            )
        return said

    def request(self) -> Json:
        """A request body of one to four user turns."""
        messages: list[Json] = [{"role": "system", "content": self._random.choice(self._systems)}]
        for turn in range(self._random.choice((1, 1, 1, 2, 2, 3, 4))):
            if turn:
                messages.append({"role": "assistant", "content": self.text(30)})
            messages.append({"role": "user", "content": self.message()})
        tools = {"tools": self._random.sample(self._tools, 2)} if self._random.random() < 0.33 else {}
        temperature = self._random.choice((0.0, 0.7, 1.0))
        return {"model": "m", "messages": messages, "temperature": temperature, "max_tokens": 512, **tools}


def openai_lines(requests: int) -> Iterator[str]:
    """Pairs of request and response, as a proxy logs them."""
    chats = Chats(0)
    for i in range(requests):
        answer = {"role": "assistant", "content": chats.text(30)}
        response = {
            "choices": [{"index": 0, "message": answer}],
            "usage": {"prompt_tokens": 200, "completion_tokens": 80},
        }
        line = {"request": chats.request(), "response": response, "domain": f"team-{i % 7}"}
        yield json.dumps(
            {**line, "started": _STARTED + i / 10, "ended": _STARTED + i / 10 + 4, "replica": f"gpu-{i % 4}"}
        )


def vllm_lines(requests: int) -> Iterator[str]:
    """Two lines for the start of a request and one for its answer, many requests at once."""
    chats, waiting = Chats(1), list[str]()
    for i in range(requests):
        request = chats.request()
        turns = (f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in request["messages"])
        prompt, ids = "".join(turns) + "<|im_start|>assistant\n", list(range(1000, 1100))
        stamp = time.strftime("%m-%d %H:%M:%S", time.gmtime(_STARTED + i // 10))
        params = f"SamplingParams(n=1, temperature={request['temperature']}, top_p=1.0, top_k=0, max_tokens=512)"
        yield f"DEBUG {stamp} [logger.py:34] Request chatcmpl-{i} details: prompt: {prompt!r}, prompt_token_ids: {ids}."
        yield f"INFO {stamp} [logger.py:45] Received request chatcmpl-{i}: params: {params}, lora_request: None."
        answer = f"output: {chats.text(30)!r}, output_token_ids: {ids[:80]}, finish_reason: stop"
        waiting.append(f"INFO {stamp} [logger.py:70] Generated response chatcmpl-{i}: {answer}")
        if len(waiting) > 16:
            yield waiting.pop(0)
    yield from waiting


def sglang_lines(requests: int) -> Iterator[str]:
    """A line for each finished request, with its rendered prompt and its answer."""
    chats = Chats(2)
    for i in range(requests):
        request = chats.request()
        turns = (f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in request["messages"])
        prompt, ids = "".join(turns) + "<|im_start|>assistant\n", list(range(1000, 1100))
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(_STARTED + i // 10))
        params = {"temperature": request["temperature"], "max_new_tokens": 512, "top_p": 1.0, "top_k": -1, "n": 1}
        obj = f"GenerateReqInput(rid='r{i}', text={prompt!r}, input_ids={ids}, sampling_params={params})"
        meta = {"e2e_latency": 2.5, "prompt_tokens": 200, "completion_tokens": 80, "finish_reason": {"type": "stop"}}
        out = {"text": chats.text(30), "output_ids": ids[:80], "meta_info": meta}
        yield f"[{stamp}] Finish: obj={obj}, out={out!r}"


LINES = {"openai": openai_lines, "vllm": vllm_lines, "sglang": sglang_lines}


def measure(folder: Path, kind: str, limit: int | None, processes: int) -> Json:
    """Build the mix of the log in `folder` once: seconds, processor seconds of all processes and of the one that
    collects, peak memory of that."""
    source: Json = {
        "kind": kind,
        "path": f"{kind}.log",
        "limit": limit,
        **({} if kind == "openai" else {"domain": "chat"}),
    }
    settings = MixSettings.model_validate({"sources": [source]})
    started, before = time.perf_counter(), os.times()
    build_mix(settings, folder, folder / f"mix-{processes}", processes=processes)
    seconds, after = time.perf_counter() - started, os.times()
    manifest = load_manifest(folder / f"mix-{processes}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "processes": processes,
        "seconds": seconds,
        "processor_seconds": sum(after[:4]) - sum(before[:4]),
        "of_the_first_process": sum(after[:2]) - sum(before[:2]),
        "lines_per_second": manifest["read"] / seconds,
        "megabytes": peak / 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=sorted(LINES), default="openai")
    parser.add_argument("--requests", type=int, default=60_000)
    parser.add_argument("--limit", type=int, help="the source's limit")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure is not None:  # one number of processes, in a process of its own
        print(json.dumps(measure(given.measure, given.kind, given.limit, given.processes[0])))
        return

    with tempfile.TemporaryDirectory() as made:
        log = Path(made) / f"{given.kind}.log"
        with log.open("w") as file:
            file.writelines(line + "\n" for line in LINES[given.kind](given.requests))
        print(f"{given.kind}: {given.requests} requests, {log.stat().st_size / 1e6:.0f} MB")
        for processes in given.processes:
            command = [sys.executable, __file__, "--measure", made, "--kind", given.kind, "--processes", str(processes)]
            command += [] if given.limit is None else ["--limit", str(given.limit)]
            print(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout, end="", flush=True)
        digests = {file_digests(Path(made) / f"mix-{processes}")[MANIFEST] for processes in given.processes}
        print("the same mix each time" if len(digests) == 1 else "mixes differ")


if __name__ == "__main__":
    main()
