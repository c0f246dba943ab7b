"""A cheap score while training: chains replayed on a few conversations, the same ones every time."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ..data.store import Sample
from ..errors import InputError
from ..specdec.formats import load_draft
from ..specdec.proposers import make_proposer
from ..specdec.targets import Target
from .acceptance import acceptance, tau
from .draft_configs import ProposerSpec
from .leaderboard import serving
from .score import Identity, score_draft, stratified_conversations
from .settings import ScoreSettings
from .target_pass_cache import TargetPassCache

_DRAFTED = 3
"""Tokens of the shortest answer of which one is drafted: neither the first nor the last is. Others give no figures."""


class SampledScore:
    """Acceptance of draft folders at one K, under the rule that drafts are picked by.

    No target pass is remembered: between scores the memory belongs to the training.
    """

    def __init__(
        self,
        load_target: Callable[[], Target],
        samples: Sequence[Sample],
        settings: ScoreSettings,
        draft_tokens: int,
        conversations: int,
    ) -> None:
        """Raises InputError where the samples have too few conversations for an interval."""
        chosen = stratified_conversations(samples, conversations)
        self._load_target = load_target
        self._samples = [sample for sample in samples if sample.conversation in chosen]
        clusters = len({sample.cluster for sample in self._samples if len(sample.answer_ids) >= _DRAFTED})
        if clusters < 2:
            raise InputError(
                f"draft.score_conversations {conversations}: of the selection split these are {clusters} cluster(s) of "
                f"conversations with answers of {_DRAFTED} tokens or more, must be at least 2 for an interval"
            )
        self._settings = settings.model_copy(update={"decode_conversations": 0, "max_conversations": 0})
        self._draft_tokens = draft_tokens

    def __call__(self, folder: Path, step: int) -> dict[str, float]:
        """tau with its interval, and the share of drafted tokens that are accepted."""
        target = self._load_target()
        draft = load_draft(folder, target.device, target.dtype).draft
        chains = ProposerSpec(partial(make_proposer, draft, target), (self._draft_tokens,))
        identity, traces = Identity("training", step), TargetPassCache(target, 0, self._settings.replay_tokens)
        counts = score_draft(target, [chains], self._samples, self._settings, identity, traces).counts
        deciding = serving(counts, self._settings)
        found = tau(deciding, self._settings.bootstrap)
        accepted = acceptance(deciding, self._settings.bootstrap)
        return {"tau": found.value, "tau_low": found.low, "tau_high": found.high, "acceptance": accepted.value}
