"""A stand-in for vLLM's program: it serves answers and counts that a file states. Run by a wrapper as vLLM's Python.

    python vllm_stand_in.py STATE.json -m vllm.entrypoints.openai.api_server --model TARGET --port N ...

STATE.json: `answers`, ids by prompt; `rounds`, by draft and K, the accepted tokens of each draft of an answer, by
prompt; `broken`, methods whose server ends with an error. Each start is a line of `starts.txt` beside it. To other
prompts it answers zeros, and accepts nothing. By its counters a round takes 1 + K / 5 ms.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PREFIX = "vllm:spec_decode_num_"


def main() -> None:
    place, given = Path(sys.argv[1]), sys.argv[2:]
    state = json.loads(place.read_text())
    config: dict[str, Any] = {}
    if "--speculative-config" in given:
        config = json.loads(given[given.index("--speculative-config") + 1])
    method = config.get("method", "plain")
    with (place.parent / "starts.txt").open("a") as stream:
        stream.write(f"{method} {config.get('num_speculative_tokens', 0)}\n")
    if method in state["broken"]:
        print(f"ERROR ValueError: no {method} here")
        print("RuntimeError: Engine core initialization failed. See root cause above.")
        sys.exit(1)
    K = config.get("num_speculative_tokens", 0)
    rounds = state["rounds"].get(f"{config.get('model', method)} {K}", {})
    serve(int(given[given.index("--port") + 1]), state["answers"], rounds if config else None, K)


def serve(port: int, answers: dict[str, list[int]], rounds: dict[str, list[int]] | None, K: int) -> None:
    counted, requests, passes = list[int](), list[int](), list[int]()  # accepted of each draft; tokens; rounds

    def counters() -> dict[str, float]:
        seconds = (1 + K / 5) * 1e-3 * sum(passes)
        return {
            "num_requests_running": 0, "num_requests_waiting": 0, "time_to_first_token_seconds_count": len(requests),
            "request_success_total": len(requests), "inter_token_latency_seconds_count": sum(passes),
            "inter_token_latency_seconds_sum": seconds,
        }  # fmt: skip

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *ignored: object) -> None:
            pass

        def do_GET(self) -> None:
            if self.path == "/metrics":
                lines = [f"vllm:{name} {value}" for name, value in counters().items()]
                at = [sum(one >= k for one in counted) for k in range(1, K + 1)]
                if rounds is not None:
                    drafts = len(counted)
                    lines += [f"{PREFIX}drafts_total {drafts}", f"{PREFIX}draft_tokens_total {K * drafts}"]
                    lines += [f"{PREFIX}accepted_tokens_total {sum(counted)}"]
                    name = f"{PREFIX}accepted_tokens_per_pos_total"
                    lines += [f'{name}{{position="{k}"}} {count}' for k, count in enumerate(at)]
                self._reply(("\n".join(lines) + "\n").encode())
            else:
                self._reply(json.dumps({"version": "0.99"}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            key = json.dumps(body["prompt"])
            asked: int = body["max_tokens"]
            of_answer = (rounds or {}).get(key, [0] * (asked - 1))
            counted.extend(of_answer if rounds is not None else [])
            requests.append(asked)
            passes.append(len(of_answer))
            choice = {"token_ids": answers.get(key, [0] * asked)[:asked]}
            self._reply(json.dumps({"choices": [choice]}).encode())

        def _reply(self, data: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
