"""draftforge: train draft models for speculative decoding and pick them for serving.

    import draftforge as df

    target = df.Target.from_pretrained("./my-model")
    draft = df.Draft.from_pretrained("models:/draftforge-0123456789ab@champion", target, workdir="runs/demo")
    answer = target.generate("Where is my order?", draft, max_new_tokens=64)
    print(answer.text, answer.tau)

`docs/python.md` has the rest. A name is imported when it is first used: the package alone loads nothing heavy.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import Answer, AnswerStream, Draft, Target, distill, read_counts, tau
    from .errors import DraftforgeError
    from .recipe import Recipe, load_recipe

__version__ = "0.1.0"
# Threads of torch's CPU kernels spin while they wait. Two processes on the same cores then slow each other a
# hundredfold; spinning briefly costs nothing measurable alone. Read once, when torch is first imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

_OFFERED = {
    **dict.fromkeys(("Answer", "AnswerStream", "Draft", "Target", "distill", "read_counts", "tau"), "api"),
    **dict.fromkeys(("Recipe", "load_recipe"), "recipe"),
    "DraftforgeError": "errors",
}
"""Module of each name that Python users import."""
__all__ = [*_OFFERED, "__version__"]


if not TYPE_CHECKING:  # type checkers would take any name for one of the package's

    def __getattr__(name: str) -> Any:
        if name not in _OFFERED:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value = getattr(import_module(f".{_OFFERED[name]}", __name__), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_OFFERED})
