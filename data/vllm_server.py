"""Answers from a vLLM server: one request an answer, token ids in and out, through /v1/completions."""

import os
import queue
import threading
from typing import Any

from ..errors import InputError
from ..specdec.plain import Answered, Asked
from ..specdec.requests import Request
from ..specdec.sampling import SamplingSettings
from ..specdec.targets import Target
from .backend_settings import VllmBackend
from .http_json import JsonServer, RefusedError, UnusableError
from .vllm_answers import Wanted, answer_of, check_raw, sampling_arguments

_MOST_WORKERS = 512
_PROBE = "Where is my order? It cost 3.50 €: naïve, 你好.\n\n  def f(x):"  # several kinds of tokens
_TOKEN = "token_id:"
_PATH = "/v1/completions"


class VllmServer:
    """A server that was checked: the model's name, context, tokenizer and kind of log-probs.

    `longest`: tokens of the longest prompt and answer together; `slots`: requests that it gets at once.
    """

    def __init__(
        self, backend: VllmBackend, url: str, target: Target, wanted: Wanted, longest: int, slots: int
    ) -> None:
        self._wanted = wanted
        self._server = JsonServer("capture.backend.url", url, _key(backend), backend.timeout_seconds, backend.retries)
        self._model, context = self._served(backend.model)
        if context is not None and context < longest:
            raise InputError(
                f"{self._server.name}: its context is {context} tokens, the longest conversation may take {longest}; "
                f"start it with --max-model-len {longest}"
            )
        self.about: dict[str, Any] = {
            "name": "vllm",
            "version": self._version(),
            "model": self._model,
            "signals": backend.signals,
            "tokenizer_compared": self._compare_tokenizer(target),
        }
        self._check_logprobs(target)
        self._tasks: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Answered | Exception] = queue.SimpleQueue()
        self._closed = False
        # Daemons: a thread that waits for a server that hangs must not keep the process alive.
        self._workers = [threading.Thread(target=self._work, daemon=True) for _ in range(min(slots, _MOST_WORKERS))]
        for worker in self._workers:
            worker.start()

    def submit(self, asked: Asked) -> None:
        """Ask it."""
        self._tasks.put(asked)

    def collect(self) -> list[Answered]:
        """Wait for an answer; give those that are there. Raises EngineError, InputError."""
        found = [self._done.get()]
        while not self._done.empty():
            found.append(self._done.get())
        for one in found:
            if isinstance(one, Exception):
                raise one
        return [one for one in found if isinstance(one, Answered)]

    def close(self) -> None:
        """Ask no more. Does not wait for replies that are still to come."""
        self._closed = True
        self._server.close()
        for _ in self._workers:
            self._tasks.put(None)

    def _work(self) -> None:
        while (asked := self._tasks.get()) is not None and not self._closed:
            try:
                self._done.put(self._answer(asked, self._wanted)[0])
            except Exception as error:  # raised again by who collects
                self._done.put(error)

    def _answer(self, asked: Asked, wanted: Wanted) -> tuple[Answered, list[dict[int, float]]]:
        """The answer, and the log-probs of each of its tokens by id."""

        def use(reply: Any) -> tuple[Answered, list[dict[int, float]]]:
            (choice,) = reply["choices"]
            if choice["prompt_token_ids"] != asked.request.prompt_ids:
                raise UnusableError("an answer to another prompt; vLLM must know return_token_ids")
            positions = choice["logprobs"]["top_logprobs"]
            logp = [{_id_of(name): float(value) for name, value in of.items()} for of in positions]
            return answer_of(asked, choice["token_ids"], choice["finish_reason"], logp, wanted), logp

        body = {
            "model": self._model,
            "prompt": asked.request.prompt_ids,
            **sampling_arguments(asked.request, wanted.top_k),
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        return self._server.post(_PATH, body, use)

    def _served(self, wanted: str | None) -> tuple[str, int | None]:
        """The model's name, and its context where the server tells it."""
        models = self._server.get("/v1/models", lambda reply: {str(one["id"]): one for one in reply["data"]})
        if wanted is None and len(models) > 1:
            raise InputError(f"{self._server.name}: serves {', '.join(models)}; name one in capture.backend.model")
        name = wanted or next(iter(models), "")
        if name not in models:
            raise InputError(f"{self._server.name}: serves {', '.join(models) or 'nothing'}, not {name!r}")
        context = models[name].get("max_model_len")
        return name, context if isinstance(context, int) else None

    def _version(self) -> str:
        try:
            return self._server.get("/version", lambda reply: str(reply["version"]))
        except RefusedError:  # hidden by a proxy
            return "unknown"

    def _compare_tokenizer(self, target: Target) -> bool:
        """Whether it could be compared. Raises InputError where it gives other ids than the target's."""
        body = {"model": self._model, "prompt": _PROBE, "add_special_tokens": False}
        try:
            theirs = self._server.post("/tokenize", body, lambda reply: list(reply["tokens"]))
        except RefusedError:
            return False
        if theirs != target.tokenizer(_PROBE, add_special_tokens=False)["input_ids"]:
            raise InputError(f"{self._server.name}: {self._model} has another tokenizer than the target")
        return True

    def _check_logprobs(self, target: Target) -> None:
        prompt = target.tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
        asked = Asked("probe", Request(prompt, SamplingSettings(temperature=2.0, top_k=1), 0, 1))
        wanted = self._wanted._replace(top_k=max(2, self._wanted.top_k))
        try:
            check_raw(self._answer(asked, wanted)[1][0])
        except RefusedError as error:
            hint = f"; it must take {wanted.top_k} log-probs (--max-logprobs)" if error.status == 400 else ""
            raise InputError(f"{error}{hint}") from None


def _id_of(name: str) -> int:
    if not name.startswith(_TOKEN):
        raise UnusableError(f"token {name!r}; vLLM must know return_tokens_as_token_ids")
    return int(name.removeprefix(_TOKEN))


def _key(backend: VllmBackend) -> str | None:
    if backend.api_key_env is None:
        return None
    key = os.environ.get(backend.api_key_env)
    if not key:
        raise InputError(f"capture.backend.api_key_env: the environment variable {backend.api_key_env} is not set")
    return key
