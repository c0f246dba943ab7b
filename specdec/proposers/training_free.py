"""Ways of drafting that need no training, under the names by which users ask for them."""

from collections.abc import Callable

from ..models import CausalModel
from .base import Proposer
from .cascade import Helper
from .lookahead import JacobiProposer, LookaheadProposer
from .prompt_lookup import PromptLookup
from .suffix import SuffixProposer

LOOKUP = "lookup"

TRAINING_FREE: dict[str, Callable[[CausalModel], Proposer]] = {
    LOOKUP: lambda target: PromptLookup(),
    "suffix": lambda target: SuffixProposer(),
    "lookahead": lambda target: LookaheadProposer(),
    "jacobi": lambda target: JacobiProposer(),
}
"""Makes a proposer of that name for a target."""

HELPERS: dict[str, Callable[[], Helper]] = {LOOKUP: PromptLookup}
"""Makes a helper of that name for a small draft (cascade.py)."""
