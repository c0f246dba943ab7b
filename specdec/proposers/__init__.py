"""Ways of drafting behind one protocol (`base.Proposer`)."""

from ..drafts.eagle3 import Eagle3Draft
from ..drafts.small import SmallDraft
from ..models import CausalModel
from .base import Draft, Proposer, Trace
from .eagle3 import Eagle3Proposer
from .small import SmallProposer

__all__ = ["Draft", "Eagle3Proposer", "Proposer", "SmallProposer", "Trace", "make_proposer"]


def make_proposer(draft: SmallDraft | Eagle3Draft, target: CausalModel) -> Proposer:
    """The chain proposer of a trained draft."""
    if isinstance(draft, SmallDraft):
        return SmallProposer(draft)
    return Eagle3Proposer(draft, target)
