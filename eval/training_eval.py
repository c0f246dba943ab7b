"""In-training score: tau of chains, replayed on a few conversations that are the same every time."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ..data.store import Sample
from ..errors import InputError
from ..specdec.formats import load_draft
from ..specdec.proposers.factory import make_proposer
from ..specdec.targets import Target
from .acceptance import acceptance, tau
from .draft_configs import ProposerSpec
from .leaderboard import serving
from .score import Identity, score_draft, stratified_conversations
from .settings import FEWEST_CLUSTERS, ScoreSettings
from .target_pass_cache import TargetPassCache

_DRAFTED = 3
"""Least tokens of an answer that gives figures: its first and its last token are not drafted."""


class SampledScore:
    """Scorer of draft folders during training: acceptance at one K, under the rule that drafts are picked by.

    No target pass is cached: between scores the memory is needed for training.
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
        # The same conversations at every step, so that scores of steps compare.
        chosen = stratified_conversations(samples, conversations)
        self._load_target = load_target
        self._samples = [sample for sample in samples if sample.conversation in chosen]
        # An interval needs several clusters with answers of which something is drafted.
        clusters = len({sample.cluster for sample in self._samples if len(sample.answer_ids) >= _DRAFTED})
        if clusters < FEWEST_CLUSTERS:
            raise InputError(
                f"draft.score_conversations {conversations}: of the selection split these are {clusters} cluster(s) of "
                f"conversations with answers of {_DRAFTED} tokens or more, must be at least {FEWEST_CLUSTERS} for an "
                "interval"
            )
        # Nothing is decoded, and the samples were limited above.
        self._settings = settings.model_copy(update={"decode_conversations": 0, "max_conversations": 0})
        self._draft_tokens = draft_tokens

    def __call__(self, folder: Path, step: int) -> dict[str, float]:
        """tau with its interval, and the share of drafted tokens that are accepted."""
        # 1) Load target and draft for this score only.
        target = self._load_target()
        draft = load_draft(folder, target.device, target.dtype).draft
        chains = ProposerSpec(partial(make_proposer, draft, target), (self._draft_tokens,))
        # 2) Replay, and keep the counts that decide.
        identity, traces = Identity("training", step), TargetPassCache(target, 0, self._settings.replay_tokens)
        counts = score_draft(target, [chains], self._samples, self._settings, identity, traces).counts
        deciding = serving(counts, self._settings)
        found = tau(deciding, self._settings.confidence)
        accepted = acceptance(deciding, self._settings.confidence)
        return {"tau": found.value, "tau_low": found.low, "tau_high": found.high, "acceptance": accepted.value}
