"""Scorer: acceptance counts, times and perplexity of one draft, with what all drafts of a target share."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path

import pyarrow as pa

from ..data.store import Capture, Sample
from ..eval.cost_measurement import Grid, costs_file, draft_memory, measure_costs, most_context, rounds_to_time
from ..eval.cost_table import CostKey, CostTable, cached_costs, cost_key, hardware_name, table_for, timed_rule
from ..eval.counts import Method
from ..eval.draft_configs import ProposerSpec
from ..eval.engine_costs import EngineMeasurement, EngineServers, plain_key
from ..eval.leaderboard import Times
from ..eval.score import Identity, measured_tree, perplexity, score_draft, stratified_conversations
from ..eval.serving_load import LoadTimes
from ..eval.settings import LoadSettings, ScoreSettings
from ..eval.target_pass_cache import TargetPassCache
from ..specdec.proposers.prompt_lookup import PromptLookup
from ..specdec.proposers.training_free import LOOKUP
from ..specdec.proposers.tree_settings import MeasuredTree, MergedTree, StaticTree, Tree, TreeSettings, is_tree_of
from ..specdec.stored_draft import StoredDraft
from .estimates import Work, conditions_of, estimated
from .stages import Stage, last_checkpoint, training_address
from .workspace import Workspace, require_whole

_MEASURED_CONVERSATIONS = 64  # whose answers shape a measured tree


class Scorer:
    """Scorer of drafts of one target, on one split of one capture; all drafts share the target's passes."""

    def __init__(self, space: Workspace, captured: Stage, split: str) -> None:
        require_whole(space.recipe, "a score")
        self._space, self._captured = space, captured
        self._data = Capture.open(captured.folder, verify=False)
        self.device = space.target.device
        self.settings: ScoreSettings = space.recipe.score
        self.samples: list[Sample] = self._data.samples(split)  # type: ignore[arg-type]
        self.traces = TargetPassCache(space.target, self.settings.trace_bytes, self.settings.replay_tokens)

    def load(self, folder: Path | None, other_tokenizer: bool = False) -> StoredDraft:
        """Load a stored draft, checked against the target and the longest scored text; `folder` None: prompt lookup.

        `other_tokenizer`: accept a draft with another one than the target's.
        """
        if folder is None:
            return StoredDraft.of_method(LOOKUP, self._space.target)
        draft = StoredDraft.load(folder, self._space.target, self.settings.draft_device, other_tokenizer)
        draft.check_context(max((len(one.prompt_ids) + len(one.answer_ids) for one in self.samples), default=0))
        return draft

    def specs(self, draft: StoredDraft, name: str = "", fixed: Mapping[str, Tree] | None = None) -> list[ProposerSpec]:
        """Chains and trees that the recipe scores a draft with.

        `name`: the draft's in the recipe; empty: it is none of the recipe's. `fixed`: its trees, known from before.
        """
        known: Mapping[str, TreeSettings] = fixed or {}
        if fixed is None:
            known = {label: tree for label, tree in self.settings.trees.items() if is_tree_of(tree, name)}
        trees = {label: tree for label, tree in known.items() if draft.can_draft(tree)}
        return [self.chain_spec(draft), *(self.tree_spec(draft, label, tree, name) for label, tree in trees.items())]

    def chain_spec(self, draft: StoredDraft) -> ProposerSpec:
        """Draft chains of every K of the recipe; prompt lookup copies as the load's engine does."""
        make, load = draft.proposer, self.settings.load
        if draft.family == LOOKUP and load is not None and load.engine == "vllm":
            make = partial(PromptLookup, occurrence="first")
        return ProposerSpec(make, tuple(self.settings.draft_tokens))

    def tree_spec(self, draft: StoredDraft, label: str, tree: TreeSettings, name: str = "") -> ProposerSpec:
        """Draft tree of a draft; a measured one is shaped here, by acceptance on answers of the train split.

        `label`: the tree's name; `name`: the draft's in the recipe, which a merged tree that names drafts asks for.
        """
        fixed = self._measured(draft, tree) if isinstance(tree, MeasuredTree) else tree
        if isinstance(fixed, MergedTree) and fixed.names:
            fixed = self._merged(fixed, label, name)
        return ProposerSpec(partial(draft.proposer, fixed), (fixed.levels,), label, fixed)

    def _merged(self, tree: MergedTree, label: str, name: str) -> MergedTree:
        """Merged tree of the draft of that name: beside it the last checkpoints of the others that the tree names."""
        others = list(tree.names)
        others.remove(name)
        trained = {other: training_address(self._space, self._captured, other) for other in others}
        return tree.beside([last_checkpoint(trained[other], f"score.trees.{label}: {other}") for other in others])

    def _measured(self, draft: StoredDraft, tree: MeasuredTree) -> StaticTree:
        """Static tree shaped by acceptance on some train answers; the scored splits must not choose it."""
        samples = self._data.samples("train")
        kept = stratified_conversations(samples, _MEASURED_CONVERSATIONS)
        return measured_tree(
            self._space.target, draft.proposer(), [one for one in samples if one.conversation in kept], tree
        )

    def counts(
        self,
        specs: Sequence[ProposerSpec],
        identity: Identity,
        samples: Sequence[Sample] | None = None,
        checked: Collection[str] | None = None,
        only: Method | None = None,
    ) -> tuple[pa.Table, bool | None]:
        """Acceptance counts of one draft, and whether its decoding was lossless (None: nothing was decoded at T = 0).

        `samples`: count these instead of all that the recipe scores. `checked`: conversations whose decoding checks
        their replays; None: as many as the recipe says. `only`: count by replay or by decoding alone.
        """
        settings, some = self.settings, self.samples if samples is None else samples
        # Given samples are taken whole: the limit of conversations has chosen them already.
        if samples is not None:
            settings = settings.model_copy(update={"max_conversations": 0})
        score = score_draft(self._space.target, specs, some, settings, identity, self.traces, checked, only)
        return score.counts, score.consistency.lossless

    def perplexity(self, draft: StoredDraft) -> float | None:
        """Perplexity of recorded answers under the draft, for people only: nothing is decided by it.

        None for prompt lookup, and for a draft with another tokenizer than the target's.
        """
        if draft.module is None or not draft.same_tokenizer:
            return None
        chosen = stratified_conversations(self.samples, self.settings.decode_conversations or 1)
        samples = [sample for sample in self.samples if sample.conversation in chosen]
        return perplexity(draft.proposer(), samples, self.traces)

    def times(self, draft: StoredDraft, specs: Sequence[ProposerSpec]) -> Times:
        """Round times of this draft shape at the recipe's load, or at batch 1 where the recipe states none."""
        load = self.settings.load
        table = self.costs(draft, specs, load)
        return table if load is None else LoadTimes(table, load)

    def costs(self, draft: StoredDraft, specs: Sequence[ProposerSpec], load: LoadSettings | None = None) -> CostTable:
        """Cost table of this draft shape: seconds of a round at batch 1, or over the grid of a load.

        Measured once for each shape, on this machine or in the engine that the load names, or taken from the table of
        another machine that the recipe gives.
        """
        settings, target = self.settings, self._space.target
        key = cost_key(target, draft.module or draft.family, specs, settings)
        # 1) The points to measure at: batch sizes and contexts around the load, or batch 1 alone.
        grid = None
        if load is not None:
            if settings.costs.fit is not None:
                return table_for(key, self._space.given_times, settings.costs.fit)
            deepest = max(depth for spec in specs for depth in spec.depths)
            grid = Grid.around(load, most_context(target.max_positions, deepest, settings.costs.rounds))
            if load.costs is not None:
                (chains,) = specs  # recipes with trees are refused
                return self._engine_costs(draft, chains, key, grid)

        # 2) Measure, or read what another checkpoint or process of the same shape has measured.
        def to_time() -> Work:
            rounds = rounds_to_time(specs, len(self.samples), settings, grid)
            asked = [settings.costs.model_dump(mode="json"), settings.sampling[0].model_dump(), grid]
            how = conditions_of(self._space, target.device, target.settings.model, *asked)
            return Work(rounds, "rounds", how)

        def measure() -> CostTable:
            prompts = [sample.prompt_ids for sample in self.samples]
            with estimated(self._space, "times", to_time, self._costs_path(key, grid)) as reached:
                return measure_costs(key, target, specs, prompts, settings, grid, reached)

        return self._cached(key, grid, measure)

    def _engine_costs(self, draft: StoredDraft, spec: ProposerSpec, own: CostKey, grid: Grid) -> CostTable:
        """Cost table of this draft shape in the engine of the load; chains only. `own`: key of our own times."""
        servers, settings, target = self.engine, self.settings, self._space.target
        prompts = [sample.prompt_ids for sample in self.samples]
        found = {"hardware": servers.hardware, "engine": servers.engine, "software": servers.software}
        key = own.model_copy(update=found)
        # Rounds without a draft are measured once, for all drafts of the target.
        measurement, alone = EngineMeasurement(prompts, settings, grid, target.max_positions), plain_key(key)

        def measure_plain() -> CostTable:
            with servers.plain() as client:
                return measurement.plain(client, alone)

        plain = self._cached(alone, grid, measure_plain)

        def measure() -> CostTable:
            table = plain.model_copy(update={"key": key})
            for K in servers.depths(draft, spec):
                with servers.drafting(draft, K, timed_rule(spec, settings)) as client:
                    table = measurement.with_draft(table, client, K, draft.family)
            # The engine does not tell what the draft keeps: our own decoder's draft tells it.
            weights, kept = draft_memory(target, spec, prompts[0][-grid.context :], settings)
            return table.model_copy(update={"draft_bytes": weights, "cache_bytes_per_token": kept})

        return self._cached(key, grid, measure)

    @cached_property
    def engine(self) -> EngineServers:
        """Servers of the engine that `score.load.costs` names."""
        space, load = self._space, self.settings.load
        assert load is not None and load.costs is not None
        dtype = str(space.target.dtype).removeprefix("torch.")
        on_gpu, logs = self.device.type == "cuda", space.root / "costs" / "logs"
        hardware = hardware_name(self.device)
        return EngineServers(load.costs, space.target_settings, dtype, hardware, on_gpu, logs)

    def _cached(self, key: CostKey, grid: Grid | None, measure: Callable[[], CostTable]) -> CostTable:
        path = self._costs_path(key, grid)
        return cached_costs(path, key, measure, self.settings.costs.wait_seconds)

    def _costs_path(self, key: CostKey, grid: Grid | None) -> Path:
        return self._space.root / "costs" / costs_file(key, grid)
