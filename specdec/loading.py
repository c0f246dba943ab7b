"""Models and tokenizers by transformers: loaded whole, or refused in one line that names where they were to come from.

transformers raises whatever its readers raise, prints a report of many lines, and leaves missing weights random.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..errors import DraftforgeError, FormatError, one_line
from ..progress import say

_OURS = (DraftforgeError, MemoryError, torch.OutOfMemoryError)


def load_model(source: str | Path, where: str, only_known: bool = False, **options: Any) -> PreTrainedModel:
    """A causal LM with every weight from the files. `where` begins the error's line; `only_known`: nothing unread.

    Raises FormatError.
    """
    with refused(where):
        model, info = AutoModelForCausalLM.from_pretrained(
            source, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    _check_weights(where, info, ("missing", "mismatched", "unexpected") if only_known else ("missing", "mismatched"))
    if info["unexpected_keys"] and not only_known:
        unread = sorted(info["unexpected_keys"])
        say(f"{where}: {len(unread)} tensors of its files are not part of the model, {unread[0]} for one")
    return model


def load_tokenizer(source: str | Path, where: str, **options: Any) -> PreTrainedTokenizerBase:
    """A tokenizer. Raises FormatError, its line beginning with `where`."""
    with refused(where):
        return AutoTokenizer.from_pretrained(source, **options)


@contextmanager
def refused(where: str) -> Iterator[None]:
    """Whatever a reader raises becomes one FormatError."""
    try:
        yield
    except _OURS:
        raise
    except Exception as error:
        raise FormatError(f"{where}: cannot be loaded: {type(error).__name__}: {one_line(error)}") from error


def _check_weights(where: str, info: dict[str, Any], kinds: tuple[str, ...]) -> None:
    for kind in kinds:
        if info[f"{kind}_keys"]:
            first = sorted(info[f"{kind}_keys"], key=str)[0]
            name, *shapes = first if isinstance(first, tuple) else (first,)
            sizes = f" (shape {tuple(shapes[0])}, must be {tuple(shapes[1])})" if len(shapes) == 2 else ""
            raise FormatError(f"{where}: the weights do not fit config.json: {kind} keys: {name}{sizes}")
