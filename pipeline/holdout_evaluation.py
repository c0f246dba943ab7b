"""The holdout: candidate, prompt lookup, champion and a retraining's start, measured on it as evidence for the gate.

Each at the K or tree that it was chosen at, on the selection split or before: a choice on the holdout would favour it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from ..errors import LostFilesError
from ..eval import counts
from ..eval.acceptance import Estimate, tau, tau_difference
from ..eval.draft_configs import DraftConfig, ProposerSpec
from ..eval.leaderboard import Row, Times, at_config, domain_rows, leaderboard, plain_row, serving, speedup_difference
from ..eval.report.page import holdout_record
from ..eval.score import Identity, scored_samples
from ..eval.settings import ScoreSettings
from ..eval.table import show_contexts, show_domains, show_leaderboard
from ..registry.gate import Baseline, DomainFigures, DomainResult, Evidence, Figures, Interval
from ..registry.lineage import Version, holdout_overlap
from ..registry.versions import resolve_models_uri
from ..specdec.proposers.training_free import LOOKUP
from ..specdec.proposers.tree_settings import tree_identity
from ..specdec.serving_plan import ServingPlan
from ..specdec.stored_draft import StoredDraft
from .draft_scorer import Scorer
from .estimates import Work, estimated
from .scoring import Scored, score_work
from .workspace import Workspace

CANDIDATE, CHAMPION, START, HEIR = "candidate", "champion", "start", "heir"


@dataclass(frozen=True)
class HoldoutScore:
    """Score of one draft on the holdout."""

    row: Row
    table: pa.Table
    times: Times
    lossless: bool | None

    def renamed(self, name: str) -> "HoldoutScore":
        """The same score under another name."""
        place = self.table.schema.get_field_index("draft")
        names = pa.array([name] * len(self.table), pa.string())
        table = self.table.set_column(place, "draft", names)
        return replace(self, row=replace(self.row, draft=name), table=table)


@dataclass(frozen=True)
class Measured:
    """All drafts of a decision, measured on the holdout."""

    candidate: HoldoutScore
    lookup: HoldoutScore
    champion: HoldoutScore | None = None
    champion_lost: str | None = None
    """What is wrong with the champion's files; None: they are sound, or there is no champion."""
    start: HoldoutScore | None = None
    """What the candidate's retraining started from, where that is not the champion of this target; None: it is, or the
    candidate is no heir."""
    heir: HoldoutScore | None = None
    """The heir that gives way to the candidate, its start."""

    def __iter__(self) -> Iterator[HoldoutScore]:
        known = (self.lookup, self.candidate, self.champion, self.start, self.heir)
        return (one for one in known if one is not None)

    @property
    def start_instead(self) -> "Measured":
        """The same with the start as candidate, in place of its heir."""
        assert self.start is not None
        return replace(self, candidate=self.start.renamed(CANDIDATE), start=None, heir=self.candidate.renamed(HEIR))


def measure_holdout(
    space: Workspace, scorer: Scorer, scored: Scored, version: Version, current: Version | None
) -> Measured:
    """Measure a registered candidate and what it is compared with. `current`: the champion of this target."""
    # 1) What there is to measure: the start of an heir only where it is not the champion itself.
    start, row, settings = scored.start, scored.start_row, scorer.settings
    champion_itself = current is not None and start is not None and start.version.reference == current.reference
    if row is None or scored.chosen.start or champion_itself:
        start = None
    drafts = 2 + (current is not None) + (start is not None)

    def answers_to_count() -> Work:
        return score_work(space, drafts * len(scored_samples(scorer.samples, settings)))

    like = "" if settings.race is not None else "score"  # a race counts less than all answers
    with estimated(space, "holdout", answers_to_count, scored.stage.folder, like) as reached:
        # 2) The candidate and prompt lookup.
        candidate = measure_version(space, scorer, version, CANDIDATE, scored.chosen.draft)
        reached(1 / drafts)
        lookup = _measure_lookup(scorer, next(row.config for row in scored.rows if row.draft == LOOKUP))
        reached(2 / drafts)
        # 3) The champion. Lost files of it must not block a better draft.
        rival, lost = None, None
        if current is not None:
            try:
                rival = measure_version(space, scorer, current, CHAMPION)
            except LostFilesError as error:
                lost = str(error)
            reached(3 / drafts)
        # 4) The start of an heir, at what is best for it on the selection split.
        measured = Measured(candidate, lookup, rival, lost)
        if start is not None and row is not None:
            identity, plan = Identity(START, start.version.lineage.step), scored.plan(row, settings)
            draft = scorer.load(start.folder)
            measured = replace(measured, start=_measure(scorer, draft, plan, identity, row.draft))
    return measured


def measure_version(
    space: Workspace, scorer: Scorer, version: Version, role: str, draft_name: str = ""
) -> HoldoutScore:
    """Score a registered version, from freshly downloaded files, at the tree or K of its plan.

    That is its own even where the recipe does not score it any more. `draft_name`: its draft's in the recipe, if any.
    """
    draft = scorer.load(resolve_models_uri(space.tracking, version.uri, space.root / "models", afresh=True))
    return _measure(scorer, draft, draft.plan, Identity(role, version.lineage.step), draft_name)


def _measure(
    scorer: Scorer, draft: StoredDraft, plan: ServingPlan, identity: Identity, draft_name: str = ""
) -> HoldoutScore:
    """Score a draft at the tree or K of a plan; at its best chain where times are those of an engine without trees."""
    # 1) Count it.
    load = scorer.settings.load
    plan = plan.as_chain if load is not None and load.costs is not None else plan
    if plan.tree is None:
        own = ProposerSpec(draft.proposer, (plan.draft_tokens,))
    else:
        own = scorer.tree_spec(draft, plan.tree_name, plan.tree)
    table, lossless = scorer.counts([own], identity)
    # 2) Times of all that the recipe scores may be there already; those of another K or tree are measured alone.
    known, shape = scorer.specs(draft, draft_name), (own.tree, tree_identity(own.fixed))
    timed = any((one.tree, tree_identity(one.fixed)) == shape and {*own.depths} <= {*one.depths} for one in known)
    times = scorer.times(draft, known if timed else [own])
    (row,) = leaderboard([table], {identity: times}, scorer.settings)
    return HoldoutScore(replace(row, chosen=False), table, times, lossless)  # there was nothing to choose from


def _measure_lookup(scorer: Scorer, config: DraftConfig) -> HoldoutScore:
    """Score prompt lookup at one K."""
    draft = scorer.load(None)
    known = scorer.specs(draft)
    table, lossless = scorer.counts(known, Identity(LOOKUP, 0))
    table, times = at_config(table, config), scorer.times(draft, known)
    (row,) = leaderboard([table], {(LOOKUP, 0): times}, scorer.settings, [LOOKUP])
    return HoldoutScore(row, table, times, lossless)


def show_holdout(scorer: Scorer, measured: Measured) -> dict[str, Any]:
    """Show what was measured, overall, by domain and by context; returns the tables as a record."""
    # 1) Overall, plain decoding first.
    settings, scores = scorer.settings, [*measured]
    rows, tables = [one.row for one in scores], [one.table for one in scores]
    title, times = "On the holdout", measured.lookup.times
    show_leaderboard([plain_row(times), *rows], settings.confidence, title, times.description)
    # 2) By domain.
    domains = domain_rows(tables, rows, settings, {(one.row.draft, one.row.step): one.times for one in scores})
    show_domains(domains, settings.confidence, title="On the holdout, by domain")
    # 3) By length of the prompt.
    record = holdout_record(tables, rows, settings, domains)
    show_contexts(record["contexts"], "On the holdout, by context length")
    return record


def evidence(
    space: Workspace, scorer: Scorer, measured: Measured, version: Version, current: Version | None, start: str | None
) -> Evidence:
    """Evidence for the gate about the candidate.

    `version`: the candidate's, or that of its weights. `start`: the version, `name/number`, that its retraining started
    from; None: it is no heir.
    """
    # 1) What is known of the candidate and prompt lookup.
    settings, candidate, lookup = space.recipe.score, measured.candidate, measured.lookup
    found = Evidence(
        candidate=_figures(candidate.row),
        candidate_domains=_own_domains(candidate, settings),
        conversations=len(counts.values(candidate.table, "conversation")),  # those scored, not those there are
        clusters=len(counts.values(candidate.table, "cluster")),
        confidence=settings.confidence,
        fit_error=max(0.0 if one.row.load is None else one.row.load.fit_error for one in (candidate, lookup)),
        lookup=_baseline("prompt lookup", candidate, lookup, settings),
        lossless=candidate.lossless,
        export_reads_back=True,  # what was measured is the registered copy, downloaded and checked by its digests
        holdout_overlap=holdout_overlap(space.tracking, version, {sample.cluster for sample in scorer.samples}),
        compared=None if current is None else current.reference,
        champion_lost=measured.champion_lost,
    )
    # 2) What the comparisons with its start and with the champion add.
    rival, begun = measured.champion, measured.start or measured.champion
    more: dict[str, Any] = {}
    if start is not None and begun is not None:
        more["start"] = _baseline(start, candidate, begun, settings)
    if rival is not None:
        more["champion"] = _figures(rival.row)
        more["difference"] = Interval.of(_difference(candidate, rival, settings))
        more["domains"] = _by_domain(candidate, rival, settings)
    return found.model_copy(update=more)


def _baseline(name: str, candidate: HoldoutScore, other: HoldoutScore, settings: ScoreSettings) -> Baseline:
    return Baseline(
        name=name,
        draft_tokens=other.row.config.levels,
        speedup=Interval.of(other.row.speedup),
        difference=Interval.of(_difference(candidate, other, settings)),
    )


def _difference(first: HoldoutScore, second: HoldoutScore, settings: ScoreSettings) -> Estimate:
    """Paired difference of two drafts' expected speed-ups."""
    return speedup_difference([first.table, second.table], first.row, second.row, settings)


def _by_domain(candidate: HoldoutScore, rival: HoldoutScore, settings: ScoreSettings) -> dict[str, DomainFigures]:
    """Expected speed-ups of both drafts on each domain: the domain's own tau, at the round times of the whole."""
    tables = [serving(draft.table, settings) for draft in (candidate, rival)]
    speedups = [draft.row.gain.speedup for draft in (candidate, rival)]
    found: dict[str, DomainFigures] = {}
    for domain in sorted(counts.values(tables[0], "domain")):
        own, theirs = (counts.where(table, domain=domain) for table in tables)
        found[domain] = DomainFigures(
            conversations=len(counts.values(own, "conversation")),
            champion_speedup=float(speedups[1](tau(theirs, settings.confidence).value)),
            difference=Interval.of(tau_difference(own, theirs, settings.confidence, *speedups)),
        )
    return found


def _own_domains(candidate: HoldoutScore, settings: ScoreSettings) -> dict[str, DomainResult]:
    """tau of each domain, and the expected speed-up that it makes at the round times of the whole."""
    table, found = serving(candidate.table, settings), {}
    for domain in sorted(counts.values(table, "domain")):
        value = tau(counts.where(table, domain=domain), settings.confidence).value
        found[domain] = DomainResult(tau=value, speedup=float(candidate.row.gain.speedup(value)))
    return found


def _figures(row: Row) -> Figures:
    return Figures(tau=row.tau.value, speedup=Interval.of(row.speedup))
