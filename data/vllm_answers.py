"""What vLLM is asked, and what its answers must hold; the same whether it is a server or runs in this process.

Shapes: n tokens of an answer, k likeliest tokens.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from ..specdec.plain import Answered, Asked
from ..specdec.requests import Request
from ..specdec.sampling import SamplingSettings
from .http_json import UnusableError
from .signals import FLOOR

_LEAST_TEMPERATURE = 0.01  # vLLM raises any lower one to this
_MOST_MASS = 1.01
_NOT_RAW = "capture.backend: the engine's log-probs are not raw ones; set --logprobs-mode raw_logprobs"


class Wanted(NamedTuple):
    """What is kept of an engine's log-probs."""

    top_k: int
    """Likeliest tokens a position; 0: the answer's own alone."""
    vocab_size: int
    dtype: torch.dtype
    """Of the stored top-k."""


def check_sampling(settings: Iterable[SamplingSettings]) -> None:
    """Raise InputError, naming it, for a setting under which vLLM would draw from another distribution."""
    for one in dict.fromkeys(settings):
        if one.greedy:
            continue
        if one.temperature < _LEAST_TEMPERATURE:
            raise InputError(
                f"capture.backend: sampling {one.key}: vLLM takes no temperature between 0 and {_LEAST_TEMPERATURE}"
            )
        if one.min_p > 0 and one.top_p < 1:
            raise InputError(f"capture.backend: sampling {one.key}: vLLM applies min_p before top_p, not after it")


def sampling_arguments(request: Request, logprobs: int) -> dict[str, Any]:
    """The request's settings as both of vLLM's interfaces name them; nothing is left to a server's defaults.

    `ignore_eos`: only our own stop ids end an answer.
    """
    sampling = request.sampling
    drawn = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    greedy = {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
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


def answer_of(
    asked: Asked, tokens: Sequence[int], finish: object, logp: Sequence[Mapping[int, float]], wanted: Wanted
) -> Answered:
    """An engine's reply as an answer. `logp`: of each token by id, its own and at least the `top_k` likeliest.

    Raises UnusableError for a reply that no engine should give to this request.
    """
    request = asked.request
    if not tokens or len(tokens) > request.max_new_tokens:
        raise UnusableError(f"{len(tokens)} tokens, must be 1 to {request.max_new_tokens}")
    if not all(0 <= token < wanted.vocab_size for token in tokens):
        raise UnusableError(f"token ids up to {max(tokens)}, the vocabulary has {wanted.vocab_size}")
    stopped = tokens[-1] in request.stop_ids
    if finish not in ("stop", "length") or (finish == "stop" and not stopped):
        raise UnusableError(f"finish {finish!r} after token {tokens[-1]}")
    if not stopped and len(tokens) != request.max_new_tokens:
        raise UnusableError(f"{len(tokens)} tokens, {request.max_new_tokens} asked for")
    if any(token in request.stop_ids for token in tokens[:-1]):
        raise UnusableError("goes on after a stop token")
    if len(logp) != len(tokens) or any(token not in of for token, of in zip(tokens, logp)):
        raise UnusableError(f"log-probs of {len(logp)} of {len(tokens)} tokens")
    own_n = torch.tensor([of[token] for token, of in zip(tokens, logp)], dtype=torch.float32)
    columns = {"logp_n": own_n, **(_top(logp, wanted) if wanted.top_k else {})}
    return Answered(asked.name, list(tokens), "stop" if stopped else "length", columns)


def _top(logp: Sequence[Mapping[int, float]], wanted: Wanted) -> dict[str, Tensor]:
    """The signals of a truncated tail: its mass is known, no draws from it are."""
    k = min(wanted.top_k, wanted.vocab_size)
    best = [sorted(of.items(), key=lambda pair: -pair[1])[:k] for of in logp]
    if any(len(one) < k for one in best):
        raise UnusableError(f"log-probs of fewer than {k} tokens")
    topk_logp_nk = torch.tensor([[value for _, value in one] for one in best], dtype=torch.float64)
    mass_n = topk_logp_nk.exp().sum(-1)
    if bool((mass_n > _MOST_MASS).any()):
        raise InputError(_NOT_RAW)
    none_n0 = torch.empty(len(best), 0)
    return {
        "topk_ids_nk": torch.tensor([[token for token, _ in one] for one in best], dtype=torch.int32),
        "topk_logp_nk": topk_logp_nk.clamp_min(FLOOR).to(wanted.dtype),
        "tail_logmass_n": (1 - mass_n).clamp_min(0).log().clamp_min(FLOOR).float(),
        "tail_ids_nM": none_n0.int(),
        "tail_logp_nM": none_n0.to(wanted.dtype),
    }


def check_raw(logp: Mapping[int, float]) -> None:
    """Raise InputError unless these log-probs, of a token drawn at temperature 2 from the best one alone, are raw.

    Processed ones would give that token all the mass; logits add up to anything.
    """
    values = sorted(logp.values(), reverse=True)
    if values[1] < -1e3 or sum(map(math.exp, values)) > _MOST_MASS:
        raise InputError(_NOT_RAW)
