"""llama.cpp's server inside this process, with the settings under which counts are comparable."""

import ctypes
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import requests
import xllamacpp
from engine_counts import EngineCounts

_PARSE = "_Z19common_params_parseiPPcR13common_params13llama_examplePFviS0_E"
_SERVER = 12  # LLAMA_EXAMPLE_SERVER


class Completion(NamedTuple):
    tokens: list[int]
    counts: EngineCounts


def parsed(command: str) -> Any:
    """What llama.cpp's own parser makes of a `llama-server` command, which `xllamacpp.Server` takes as it is.

    The wheel exports `common_params_parse` and no binding to it; the struct that it fills lies in the Python object,
    behind its header. Raises ValueError where the parser refuses, which says why on standard error.
    """
    words = [word.encode() for word in shlex.split(command)]
    params = xllamacpp.CommonParams()
    parse = ctypes.CDLL(xllamacpp.xllamacpp.__file__)[_PARSE]
    parse.restype = ctypes.c_bool
    at = ctypes.c_void_p(id(params) + object.__basicsize__)
    if not parse(len(words), (ctypes.c_char_p * (len(words) + 1))(*words, None), at, _SERVER, None):
        raise ValueError(command)
    return params


class LlamaServer:
    """One target, with or without a draft. It binds a loopback port and lives until it is collected."""

    def __init__(
        self,
        target: Path,
        draft: Path | None = None,
        kind: str = "DRAFT_SIMPLE",
        draft_tokens: int = 4,
        p_min: float = 0.0,
    ) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(target)
        params.n_ctx, params.n_parallel = 512, 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.warmup = False
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.endpoint_metrics = True
        if draft is not None:
            speculative = params.speculative
            speculative.types = [getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{kind}")]
            speculative.draft.mparams.path = str(draft)
            speculative.draft.n_max = draft_tokens
            speculative.draft.p_min = p_min
            speculative.draft.backend_sampling = False
            speculative.draft.cache_type_k = speculative.draft.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
            speculative.draft.cpuparams.n_threads = speculative.draft.cpuparams_batch.n_threads = 1
        self._start(params, draft_tokens if draft is not None else 0)

    @classmethod
    def of_command(cls, command: str) -> "LlamaServer":
        """Server of a `llama-server` command; one slot and one thread, as tests have little of either."""
        served = cls.__new__(cls)
        params = parsed(command)
        params.n_parallel, params.warmup = 1, False
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        served._start(params, params.speculative.draft.n_max)
        return served

    def _start(self, params: Any, draft_tokens: int) -> None:
        self._draft_tokens = draft_tokens
        self._server = xllamacpp.Server(params)
        self._address = self._server.listening_address
        self._session = requests.Session()
        self._session.trust_env = False  # loopback: no proxy

    def complete(self, prompt_ids: list[int], max_new_tokens: int, **options: Any) -> Completion:
        body = {"prompt": prompt_ids, "n_predict": max_new_tokens, "temperature": 0.0, "cache_prompt": False}
        body |= {"ignore_eos": True, "return_tokens": True, **options}
        before = self._counters()
        answer = self.post("/completion", body)
        after = self._counters()
        rounds, *accepted_K = (new - old for old, new in zip(before, after))
        timings = answer["timings"]
        counts = EngineCounts(rounds, timings.get("draft_n", 0), timings.get("draft_n_accepted", 0), tuple(accepted_K))
        return Completion(answer["tokens"], counts)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        reply = self._session.post(f"{self._address}{path}", json=body, timeout=60)
        reply.raise_for_status()
        return reply.json()  # type: ignore[no-any-return]

    def metrics(self) -> str:
        """What `/metrics` says."""
        return self._session.get(f"{self._address}/metrics", timeout=60).text

    def _counters(self) -> list[int]:
        """Rounds, and accepted tokens at each position, since the server began. The response does not hold them."""
        found = dict(re.findall(r"^llamacpp:spec_decode_num_(\S+) (\d+)$", self.metrics(), re.MULTILINE))
        names = [f'accepted_tokens_per_pos_total{{position="{k}"}}' for k in range(self._draft_tokens)]
        return [int(found.get(name, 0)) for name in ("drafts_total", *names)]
