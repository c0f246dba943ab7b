"""vLLM as a capture backend: a server (/v1/completions) or an engine in this process; token ids in and out.

Both interfaces get the same sampling arguments, and every reply passes the same checks. Log-probs must be raw ones
(before temperature and top-k), as they are teacher signals.

Shapes: n answer tokens, k top ids, M tail draws (none here).
"""

import math
import queue
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import EngineError, InputError, one_line
from ...http_replies import UnusableError
from ...specdec.continuous_batching import DecodedAnswer, QueuedRequest
from ...specdec.requests import Request
from ...specdec.sampling_settings import SamplingSettings
from ...specdec.targets import Target, locate
from ..settings import VllmBackend
from ..teacher_logprobs import FLOOR
from .http_json import JsonServer, RefusedError, key_in

_LEAST_TEMPERATURE = 0.01  # vLLM raises any lower one to this
_MOST_MASS = 1.01  # of the top-k probabilities, rounding included
_MOST_WORKERS = 512
_PROBE = "Where is my order? It cost 3.50 €: naïve, 你好.\n\n  def f(x):"  # several kinds of tokens
_TOKEN = "token_id:"
_PATH = "/v1/completions"
_REPLY_BYTES, _TOKEN_BYTES, _LOGPROB_BYTES = 1 << 20, 2048, 256
"""Most that a reply has of JSON: of itself, for each token and for each log-prob; several times what vLLM writes."""
_LONGEST_VERSION = 100  # characters
_NOT_RAW = "capture.backend: the engine's log-probs are not raw ones; set --logprobs-mode raw_logprobs"


class LogprobRequest(NamedTuple):
    """The log-probs that an engine is asked for, and how they are stored."""

    top_k: int
    """Likeliest tokens for each position; 0: the log-prob of the answer's own token alone."""
    vocab_size: int
    dtype: torch.dtype
    """Type of the stored top-k log-probs."""


def check_sampling(settings: Iterable[SamplingSettings]) -> None:
    """Raise InputError, naming it, for a setting under which vLLM would draw from another distribution."""
    for setting in dict.fromkeys(settings):
        if setting.greedy:
            continue
        if setting.temperature < _LEAST_TEMPERATURE:
            raise InputError(
                f"capture.backend: sampling {setting.key}: vLLM takes no temperature between 0 and {_LEAST_TEMPERATURE}"
            )
        if setting.min_p > 0 and setting.top_p < 1:
            raise InputError(f"capture.backend: sampling {setting.key}: vLLM applies min_p before top_p, not after it")


def sampling_arguments(request: Request, logprobs: int) -> dict[str, Any]:
    """The request's settings as both of vLLM's interfaces name them; nothing is left to a server's defaults.

    `ignore_eos`: only our own stop ids end an answer.
    """
    sampling = request.sampling
    drawn = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}

    # vLLM takes greedy decoding as temperature 0; the filters are turned off, as they would change nothing.
    greedy = {"temperature": 0.0, "top_k": 0, "top_p": 1.0}

    # Every argument is given, also those that our own decoder lacks.
    return {
        **(greedy if sampling.greedy else drawn),
        "min_p": 0.0 if sampling.greedy else sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": request.seed,
        "max_tokens": request.max_new_tokens,
        "stop_token_ids": sorted(request.stop_ids),
        "ignore_eos": True,
        "logprobs": logprobs,
    }


def checked_answer(
    queued: QueuedRequest,
    tokens: Sequence[int],
    finish: object,
    logp: Sequence[Mapping[int, float]],
    wanted: LogprobRequest,
) -> DecodedAnswer:
    """Validate an engine's reply and make an answer of it.

    `logp`: for each position, log-probs by token id: the answer token's and at least the `top_k` likeliest.

    Raises UnusableError for a reply that no engine should give to this request.
    """
    request = queued.request

    # 1) Tokens: as many as asked for, of the vocabulary, ended by the first stop token or by length.
    if not tokens or len(tokens) > request.max_new_tokens:
        raise UnusableError(f"{len(tokens)} tokens, must be 1 to {request.max_new_tokens}")
    _check_ids(tokens, wanted)
    stopped = tokens[-1] in request.stop_ids
    if finish not in ("stop", "length") or (finish == "stop" and not stopped):
        raise UnusableError(f"finish {finish!r} after token {tokens[-1]}")
    if not stopped and len(tokens) != request.max_new_tokens:
        raise UnusableError(f"{len(tokens)} tokens, {request.max_new_tokens} asked for")
    if any(token in request.stop_ids for token in tokens[:-1]):
        raise UnusableError("goes on after a stop token")

    # 2) A log-prob of every token.
    if len(logp) != len(tokens) or any(token not in by_id for token, by_id in zip(tokens, logp)):
        raise UnusableError(f"log-probs of {len(logp)} of {len(tokens)} tokens")
    _check_ids({token for by_id in logp for token in by_id}, wanted)
    own_n = torch.tensor([by_id[token] for token, by_id in zip(tokens, logp)], dtype=torch.float32)
    values = [value for by_id in logp for value in by_id.values()]
    if any(map(math.isnan, values)) or not own_n.isfinite().all():
        raise UnusableError("log-probs that are not finite")
    if max(values) > math.log(_MOST_MASS):
        raise InputError(_NOT_RAW)
    columns = {"logp_n": own_n, **(_top_columns(logp, wanted) if wanted.top_k else {})}
    return DecodedAnswer(queued.name, list(tokens), "stop" if stopped else "length", columns)


def _check_ids(ids: Collection[int], wanted: LogprobRequest) -> None:
    """Raise UnusableError unless all ids are of the vocabulary."""
    wrong = next((one for one in ids if type(one) is not int or not 0 <= one < wanted.vocab_size), None)
    if wrong is not None:
        raise UnusableError(f"token id {wrong!r:.40}, the vocabulary has {wanted.vocab_size}")


def _top_columns(logp: Sequence[Mapping[int, float]], wanted: LogprobRequest) -> dict[str, Tensor]:
    """Signal columns with a truncated tail: the mass beyond the top k is known, but there are no draws from it."""
    # The reply may list one token more than k (the answer's own), so the k best are picked here.
    k = min(wanted.top_k, wanted.vocab_size)
    best = [sorted(by_id.items(), key=lambda pair: -pair[1])[:k] for by_id in logp]
    if any(len(pairs) < k for pairs in best):
        raise UnusableError(f"log-probs of fewer than {k} tokens")

    # In fp64, as 1 - mass cancels. Raw probabilities add up to at most 1; processed log-probs or logits may not.
    topk_logp_nk = torch.tensor([[value for _, value in pairs] for pairs in best], dtype=torch.float64)
    mass_n = topk_logp_nk.exp().sum(-1)
    if bool((mass_n > _MOST_MASS).any()):
        raise InputError(_NOT_RAW)

    # Columns of the stored format, with tail draws of width 0.
    none_n0 = torch.empty(len(best), 0)
    return {
        "topk_ids_nk": torch.tensor([[token for token, _ in pairs] for pairs in best], dtype=torch.int32),
        "topk_logp_nk": topk_logp_nk.clamp_min(FLOOR).to(wanted.dtype),
        "tail_logmass_n": (1 - mass_n).clamp_min(0).log().clamp_min(FLOOR).float(),
        "tail_ids_nM": none_n0.int(),
        "tail_logp_nM": none_n0.to(wanted.dtype),
    }


def check_raw(logp: Mapping[int, float]) -> None:
    """Raise InputError unless the log-probs of one position are raw. The probe is drawn at temperature 2 and top-k 1.

    Processed log-probs would give that one token all the mass; logits would add up to anything.
    """
    values = sorted(logp.values(), reverse=True)
    if values[1] < -1e3 or sum(map(math.exp, values)) > _MOST_MASS:
        raise InputError(_NOT_RAW)


class VllmServer:
    """A vLLM server, checked before use: the model's name, context, tokenizer and kind of log-probs.

    `longest`: tokens of the longest prompt and answer together; `slots`: requests in flight, one thread each.
    """

    def __init__(
        self, backend: VllmBackend, url: str, target: Target, wanted: LogprobRequest, longest: int, slots: int
    ) -> None:
        self._wanted = wanted
        self._server = JsonServer(
            "capture.backend.url",
            url,
            key_in(backend.api_key_env, "capture.backend.api_key_env"),
            backend.timeout_seconds,
            backend.retries,
            int(backend.reply_megabytes * 1e6),
        )

        # 1) The model that it serves, and whether its context holds the longest conversation.
        self._model, context = self._served(backend.model)
        if context is not None and context < longest:
            raise InputError(
                f"{self._server.name}: its context is {context} tokens, the longest conversation may take {longest}; "
                f"start it with --max-model-len {longest}"
            )

        # 2) What the manifest says of it; a tokenizer that differs from the target's is refused.
        self.about: dict[str, Any] = {
            "name": "vllm",
            "version": self._version(),
            "model": self._model,
            "signals": backend.signals,
            "tokenizer_compared": self._compare_tokenizer(target),
        }

        # 3) One probing request: its log-probs must be raw.
        self._check_logprobs(target)

        # 4) Workers that take requests from one queue and put answers, or their error, into another.
        self._tasks: queue.SimpleQueue[QueuedRequest | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[DecodedAnswer | Exception] = queue.SimpleQueue()
        self._closed = False

        # Daemons: a thread that waits for a server that hangs must not keep the process alive.
        self._workers = [threading.Thread(target=self._work, daemon=True) for _ in range(min(slots, _MOST_WORKERS))]
        for worker in self._workers:
            worker.start()

    def submit(self, queued: QueuedRequest) -> None:
        """Queue a request."""
        self._tasks.put(queued)

    def collect(self) -> list[DecodedAnswer]:
        """Block until at least one answer is there, and return all that are. Raises EngineError, InputError."""
        # Block for the first result, then take those that came meanwhile; a worker's error is raised here.
        results = [self._done.get()]
        while not self._done.empty():
            results.append(self._done.get())
        answers: list[DecodedAnswer] = []
        for result in results:
            if isinstance(result, Exception):
                raise result
            answers.append(result)
        return answers

    def close(self) -> None:
        """Stop the workers. Does not wait for replies that are still to come."""
        self._closed = True
        self._server.close()
        for _ in self._workers:
            self._tasks.put(None)

    def _work(self) -> None:
        while (queued := self._tasks.get()) is not None and not self._closed:
            try:
                self._done.put(self._answer(queued, self._wanted)[0])
            except Exception as error:  # raised again by who collects
                self._done.put(error)

    def _answer(self, queued: QueuedRequest, wanted: LogprobRequest) -> tuple[DecodedAnswer, list[dict[int, float]]]:
        """The answer, and the log-probs of each of its tokens by id."""

        def read(reply: Any) -> tuple[DecodedAnswer, list[dict[int, float]]]:
            # The server must have read the very ids that were sent; an old one ignores `return_token_ids`.
            (choice,) = reply["choices"]
            if choice["prompt_token_ids"] != queued.request.prompt_ids:
                raise UnusableError("an answer to another prompt; vLLM must know return_token_ids")
            # Log-probs of each position by token id: texts of tokens would be ambiguous.
            positions = choice["logprobs"]["top_logprobs"]
            logp = [{_id_of(name): float(value) for name, value in by_name.items()} for by_name in positions]
            return checked_answer(queued, choice["token_ids"], choice["finish_reason"], logp, wanted), logp

        body = {
            "model": self._model,
            "prompt": queued.request.prompt_ids,
            **sampling_arguments(queued.request, wanted.top_k),
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        # As many replies as there are workers are read at once: each only as far as an answer to its request may go.
        request = queued.request
        rows = request.max_new_tokens * (_TOKEN_BYTES + _LOGPROB_BYTES * wanted.top_k)
        return self._server.post(_PATH, body, read, _REPLY_BYTES + _TOKEN_BYTES * len(request.prompt_ids) + rows)

    def _served(self, wanted: str | None) -> tuple[str, int | None]:
        """Name of the served model that `wanted` (None: the only one) means, and its context where the server says."""
        models = self._server.get("/v1/models", lambda reply: {str(model["id"]): model for model in reply["data"]})
        if wanted is None and len(models) > 1:
            raise InputError(f"{self._server.name}: serves {', '.join(models)}; name one in capture.backend.model")
        name = wanted or next(iter(models), "")
        if name not in models:
            raise InputError(f"{self._server.name}: serves {', '.join(models) or 'nothing'}, not {name!r}")
        context = models[name].get("max_model_len")
        return name, context if isinstance(context, int) else None

    def _version(self) -> str:
        try:
            return self._server.get("/version", lambda reply: str(reply["version"])[:_LONGEST_VERSION])
        except RefusedError:  # hidden by a proxy
            return "unknown"

    def _compare_tokenizer(self, target: Target) -> bool:
        """Whether the tokenizer could be compared. Raises InputError where it gives other ids than the target's."""
        # `/tokenize` is optional; a proxy may hide it.
        body = {"model": self._model, "prompt": _PROBE, "add_special_tokens": False}
        try:
            theirs = self._server.post("/tokenize", body, lambda reply: list(reply["tokens"]))
        except RefusedError:
            return False
        if theirs != target.tokenizer(_PROBE, add_special_tokens=False)["input_ids"]:
            raise InputError(f"{self._server.name}: {self._model} has another tokenizer than the target")
        return True

    def _check_logprobs(self, target: Target) -> None:
        # One token at top-k 1 and temperature 2, with two log-probs at least: see `check_raw`.
        prompt = target.tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
        queued = QueuedRequest("probe", Request(prompt, SamplingSettings(temperature=2.0, top_k=1), 0, 1))
        wanted = self._wanted._replace(top_k=max(2, self._wanted.top_k))
        try:
            check_raw(self._answer(queued, wanted)[1][0])
        except RefusedError as error:
            hint = f"; it must take {wanted.top_k} log-probs (--max-logprobs)" if error.status == 400 else ""
            raise InputError(f"{error}{hint}") from None


def _id_of(name: str) -> int:
    if not name.startswith(_TOKEN):
        raise UnusableError(f"token {name!r}; vLLM must know return_tokens_as_token_ids")
    return int(name.removeprefix(_TOKEN))


def check_local(target: Target) -> tuple[Any, Path]:
    """The package vllm, and the model folder that it loads in this process. Raises InputError without either."""
    # vLLM is an optional dependency.
    try:
        import vllm
    except ImportError as error:
        reason = one_line(error, 100)
        raise InputError(
            f"capture.backend: vLLM cannot be imported here ({reason}); install it, or give a server's url"
        ) from None

    # It loads the folder itself, so an adapter or a GGUF file of ours would be missed.
    source = locate(target.settings)
    if target.settings.adapter is not None or source.gguf_file is not None:
        raise InputError(
            "capture.backend: vLLM in this process takes a plain model folder; merge target.adapter, or serve it"
        )
    return vllm, source.folder


class LocalVllm:
    """vLLM's engine in this process, stepped by `collect`.

    `longest`: tokens of the longest prompt and answer together; `slots`: answers decoded at once.
    """

    def __init__(self, backend: VllmBackend, target: Target, wanted: LogprobRequest, longest: int, slots: int) -> None:
        vllm, folder = check_local(target)
        # The engine, with raw log-probs and no sampling defaults of the model's `generation_config`.
        self._wanted, self._sampling = wanted, vllm.SamplingParams
        self._in_flight: dict[str, QueuedRequest] = {}
        on_gpu = target.device.type == "cuda"
        self._engine: Any = vllm.LLM(
            model=str(folder),
            dtype=str(target.dtype).removeprefix("torch."),
            trust_remote_code=target.settings.trust_remote_code,
            max_model_len=longest,
            max_num_seqs=slots,
            max_logprobs=max(1, wanted.top_k),
            logprobs_mode="raw_logprobs",
            tensor_parallel_size=backend.tensor_parallel or 1,
            generation_config="vllm",
            seed=0,
            **({"gpu_memory_utilization": backend.gpu_memory_share or 0.5} if on_gpu else {"enforce_eager": True}),
        ).llm_engine
        self.about: dict[str, Any] = {"name": "vllm", "version": str(vllm.__version__), "signals": backend.signals}

    def submit(self, queued: QueuedRequest) -> None:
        """Queue a request. Raises InputError where vLLM refuses."""
        self._in_flight[queued.name] = queued
        arguments = sampling_arguments(queued.request, self._wanted.top_k)
        prompt = {"prompt_token_ids": queued.request.prompt_ids}
        try:
            self._engine.add_request(queued.name, prompt, self._sampling(**arguments))
        except ValueError as error:
            raise InputError(f"capture.backend: vLLM refuses {queued.name}: {one_line(error)}") from None

    def collect(self) -> list[DecodedAnswer]:
        """Step the engine until at least one answer is finished. Raises EngineError."""
        found: list[DecodedAnswer] = []
        while not found:
            if not self._engine.has_unfinished_requests():
                raise EngineError(f"capture.backend: vLLM lost {len(self._in_flight)} requests")
            found += [self._answer(output) for output in self._engine.step() if output.finished]
        return found

    def close(self) -> None:
        """Forget what was asked, and give the memory back."""
        self._engine.abort_request(list(self._in_flight))
        self._in_flight.clear()
        self._engine.engine_core.shutdown()

    def _answer(self, output: Any) -> DecodedAnswer:
        # The same checks as for a server's reply; here a useless one is an error, as there is nobody to ask again.
        queued = self._in_flight.pop(output.request_id)
        (completion,) = output.outputs
        logp = [{token: float(entry.logprob) for token, entry in by_id.items()} for by_id in completion.logprobs]
        try:
            return checked_answer(queued, list(completion.token_ids), completion.finish_reason, logp, self._wanted)
        except UnusableError as error:
            raise EngineError(f"capture.backend: vLLM: answer to {queued.name}: {error}") from None
