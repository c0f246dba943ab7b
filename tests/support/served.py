"""A stand-in for a vLLM server: its HTTP interface, answered by our own decoder, with faults on demand.

Shapes: n tokens of an answer, V vocabulary.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from draftforge.specdec.decoder import Request, generate
from draftforge.specdec.sampling_settings import SamplingSettings
from draftforge.specdec.targets import Target


@dataclass
class Served:
    """What the server does, to be changed at any time."""

    target: Target
    url: str = ""
    model: str = "tiny"
    context: int = 512
    max_logprobs: int = 20
    mode: str = "raw_logprobs"
    key: str | None = None
    faults: deque[str] = field(default_factory=deque)
    """Taken one a completion, the probe excluded."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of completions, the probe excluded."""
    most_at_once: int = 0
    tokenizes: bool = True
    wrong_tokens: bool = False
    hang_seconds: float = 3.0

    def __post_init__(self) -> None:
        self.lock, self.now = threading.Lock(), 0

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """The reply to a completion."""
        greedy = body["temperature"] == 0
        sampling = SamplingSettings(
            temperature=body["temperature"],
            top_k=body["top_k"],
            top_p=body["top_p"],
            min_p=body["min_p"],
            repetition_penalty=body["repetition_penalty"],
        )
        stops = frozenset(body["stop_token_ids"])
        request = Request(body["prompt"], sampling, body["seed"] if not greedy else 0, body["max_tokens"], stops)
        with self.lock:
            ((_, answer),) = generate(self.target, None, [request])
            top = self._top(body["prompt"], answer.tokens, body["logprobs"], sampling)
        choice = {
            "index": 0,
            "text": "",
            "token_ids": answer.tokens,
            "prompt_token_ids": body["prompt"],
            "finish_reason": answer.finish,
            "logprobs": {"top_logprobs": top},
        }
        return {"object": "text_completion", "model": self.model, "choices": [choice]}

    @torch.no_grad()
    def _top(self, prompt: list[int], tokens: list[int], k: int, sampling: SamplingSettings) -> list[dict[str, float]]:
        hidden = self.target.states(torch.tensor([prompt + tokens])).hidden_BTH[0, len(prompt) - 1 : -1]
        logits_nV = self.target.logits(hidden)
        logp_nV = logits_nV.log_softmax(-1)
        if self.mode == "processed_logprobs":
            best_n1 = logits_nV.argmax(-1, keepdim=True)
            logp_nV = torch.full_like(logp_nV, -9999.0).scatter(-1, best_n1, 0.0)
        if self.mode == "raw_logits":
            logp_nV = logits_nV + 3.0
        rows = []
        for row, own in zip(logp_nV, tokens):
            values, ids = row.topk(k)
            named = dict(zip(ids.tolist(), values.tolist()))
            rows.append({f"token_id:{id}": value for id, value in ({own: float(row[own])} | named).items()})
        return rows


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served: Served

    def log_message(self, *ignored: object) -> None:
        pass

    def do_GET(self) -> None:
        if not self._allowed():
            return
        served = self.served
        if self.path == "/v1/models":
            self._reply(200, {"data": [{"id": served.model, "max_model_len": served.context}]})
        elif self.path == "/version":
            self._reply(200, {"version": "0.32.0"})
        else:
            self._reply(404, {"error": {"message": "Not Found"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        served = self.served
        if not self._allowed():
            return
        if self.path == "/tokenize" and served.tokenizes:
            ids = served.target.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]
            self._reply(200, {"tokens": ids[::-1] if served.wrong_tokens else ids})
        elif self.path != "/v1/completions":
            self._reply(404, {"error": {"message": "Not Found"}})
        elif body["model"] != served.model:
            self._reply(404, {"error": {"message": f"The model {body['model']} does not exist."}})
        elif body["logprobs"] > served.max_logprobs:
            said = f"Requested sample logprobs of {body['logprobs']}, which is greater than max allowed: 20"
            self._reply(400, {"error": {"message": said}})
        else:
            self._complete(body)

    def _complete(self, body: dict[str, Any]) -> None:
        served = self.served
        probe = body["temperature"] == 2.0
        fault = "" if probe or not served.faults else served.faults.popleft()
        if not probe:
            served.asked.append(body)
            served.now += 1
            served.most_at_once = max(served.most_at_once, served.now)
        try:
            self._faulty(fault, body)
        finally:
            served.now -= not probe

    def _faulty(self, fault: str, body: dict[str, Any]) -> None:
        if fault.isdigit():
            self._reply(int(fault), {"error": {"message": "no luck"}})
            return
        if fault == "hang":
            time.sleep(self.served.hang_seconds)
        reply = self.served.complete(body)
        choice = reply["choices"][0]
        if fault == "short":
            choice["token_ids"] = choice["token_ids"][:-1]
        if fault == "other":
            choice["prompt_token_ids"] = choice["prompt_token_ids"][1:]
        if fault == "long":
            choice["text"] = "x" * 2_000_000
        if fault == "abort":
            choice["finish_reason"] = "abort"
        self._reply(200, {"choices": []} if fault == "empty" else reply, cut=fault == "cut", lost=fault == "lost")

    def _allowed(self) -> bool:
        key = self.served.key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return True
        self._reply(401, {"error": "Unauthorized"})
        return False

    def _reply(self, status: int, value: Any, cut: bool = False, lost: bool = False) -> None:
        data = json.dumps(value).encode()
        data = data[: len(data) // 2] if cut else data
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data) + 100 * lost))
        self.end_headers()
        self.wfile.write(data)
        if lost:
            self.close_connection = True


@contextmanager
def serving(target: Target) -> Iterator[Served]:
    """A server on a free port of this machine."""
    served = Served(target)
    handler = type("Handler", (_Handler,), {"served": served})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    served.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
