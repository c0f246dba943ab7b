"""Ways of drafting that need no training, under the names by which users ask for them.

A recipe is checked against the names, so the proposers' own modules are imported when one is made.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..models import CausalModel
    from .base import Proposer
    from .cascade import Helper, LookupHelper
    from .prompt_lookup import PromptLookup

LOOKUP = "lookup"


def _lookup(target: "CausalModel") -> "PromptLookup":
    from .prompt_lookup import PromptLookup

    return PromptLookup()


def _lookup_helper() -> "LookupHelper":
    from .cascade import LookupHelper

    return LookupHelper()


def _suffix(target: "CausalModel") -> "Proposer":
    from ..kv_cache import runs_triton
    from .suffix import SuffixOnDevice, SuffixProposer

    return SuffixOnDevice() if runs_triton(target.device) else SuffixProposer()


def _lookahead(target: "CausalModel") -> "Proposer":
    from ..kv_cache import runs_triton
    from .lookahead import LookaheadOnDevice, LookaheadProposer

    return LookaheadOnDevice() if runs_triton(target.device) else LookaheadProposer()


def _jacobi(target: "CausalModel") -> "Proposer":
    from .lookahead import JacobiProposer

    return JacobiProposer()


TRAINING_FREE: dict[str, Callable[["CausalModel"], "Proposer"]] = {
    LOOKUP: _lookup,
    "suffix": _suffix,
    "lookahead": _lookahead,
    "jacobi": _jacobi,
}
"""Makes a proposer of that name for a target."""

HELPERS: dict[str, Callable[[], "Helper"]] = {LOOKUP: _lookup_helper}
"""Makes a helper of that name for a small draft (cascade.py)."""
