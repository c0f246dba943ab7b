"""What draftforge says of served answers: its own counts of them, and the speed-ups that it promises."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import torch

from draftforge import fingerprint
from draftforge.data.store import Sample
from draftforge.errors import DraftforgeError
from draftforge.eval import counts
from draftforge.eval.acceptance import alphas, cluster_sums, tau, unclipped_tau
from draftforge.eval.cost_measurement import Grid, costs_file, measure_costs, most_context
from draftforge.eval.cost_table import cached_costs, cost_key
from draftforge.eval.draft_configs import DraftConfig, ProposerSpec
from draftforge.eval.score import Identity, score_draft
from draftforge.eval.serving_load import LoadTimes
from draftforge.eval.settings import SELECTION_SPLIT
from draftforge.eval.target_pass_cache import TargetPassCache
from draftforge.progress import say
from draftforge.scripts.served_results import Bench, Json, measured_key
from draftforge.scripts.vllm_servers import Draft, EngineTimes, Prompt, Setup, scoring
from draftforge.specdec.proposers.prompt_lookup import PromptLookup
from draftforge.specdec.proposers.training_free import LOOKUP
from draftforge.specdec.sampling_settings import SamplingSettings
from draftforge.specdec.stored_draft import StoredDraft
from draftforge.specdec.target_settings import TargetSettings
from draftforge.specdec.targets import Target


class Judge:
    """Replay of drafts on served answers, and their promised speed-up."""

    def __init__(
        self, bench: Bench, settings: TargetSettings, prompts: Sequence[Prompt], times: EngineTimes, asked: Json
    ) -> None:
        self._bench, self._prompts, self._asked = bench, prompts, asked
        self._target, self._settings = Target.load(settings), scoring(prompts, asked)
        self._engine_times = times
        self._traces = TargetPassCache(self._target, self._settings.trace_bytes, self._settings.replay_tokens)

    def judge(self, draft: Draft, setups: Sequence[Setup], base: str) -> Json:
        """Our figures for each measurement of a draft; `base`: the one whose answers the promise is counted on."""
        measured = [
            (measured_key(one, size), one.draft_tokens, size)
            for one in setups
            for size in self._asked["concurrency"]
            if one.draft == draft and measured_key(one, size) in self._bench.found["served"]
        ]
        answers = {key: self._bench.answers(key) for key in dict.fromkeys([base, *(key for key, *_ in measured)])}
        # 1) What is known already of these answers and times.
        table = self._engine_times.table(draft.key)
        told = [
            self._settings.model_dump(mode="json"),
            self._asked["own_times"],
            table and table.model_dump(mode="json"),
        ]
        served_by = fingerprint.of_json([draft.digest, *told, answers])
        known: Json = self._bench.found["ours"].get(draft.key, {})
        if known.get("of") == served_by:
            return known
        # 2) Every distinct answer is replayed once, at every K that was served.
        loaded = (
            StoredDraft.of_method(LOOKUP, self._target)
            if draft.folder is None
            else StoredDraft.load(draft.folder, self._target)
        )
        # vLLM copies what follows the first occurrence of the last tokens.
        proposer = partial(PromptLookup, occurrence="first") if draft.folder is None else loaded.proposer
        spec = ProposerSpec(proposer, tuple(sorted({K for _, K, _ in measured})))
        samples = {_answer_id(*one): self._sample(*one) for rows in answers.values() for one in rows}
        rounds = list(samples.values()), self._settings, Identity(draft.name, draft.step), self._traces
        table = score_draft(self._target, [spec], *rounds, checked=()).counts
        rows = list(zip(table["conversation"].to_pylist(), table["draft_tokens"].to_pylist(), strict=True))
        row_of = {row: number for number, row in enumerate(rows)}

        def given(key: str, K: int) -> pa.Table:
            """Counts of all answers of a measurement, one that was given again counted again."""
            return table.take([row_of[_answer_id(*one), K] for one in answers[key]])

        # 3) The promises: counts on the base's answers, times over the concurrencies, the engine's and our own.
        own = self._times(spec, loaded) if self._asked["own_times"] else None
        engine = self._times_of_engine(draft.key, spec, loaded)
        found: Json = {"of": served_by, "base": base, "times": own and own.description, "measurements": {}}
        found["engine_times"] = engine and engine.description
        confidence, reference = self._settings.confidence, set(map(_answer_id_of, answers[base]))
        for key, K, size in measured:
            mine, plain = given(key, K), given(base, K)
            reached, counted = [one.value for one in alphas(mine, confidence)], unclipped_tau(mine, confidence)
            figures: Json = {"tau": _known(counted.value), "tau_low": _known(counted.low)}
            figures |= {"tau_high": _known(counted.high), "answers": len(set(map(_answer_id_of, answers[key])))}
            figures["accepted_at"] = [_known(math.prod(reached[: k + 1])) for k in range(K)]
            promised, share = tau(plain, confidence).value, drafting_share(plain) if draft.folder is None else 1.0
            figures |= {"promised_tau": _known(promised), "drafted_share": share}
            for name, one in (("promised_speedup", own), ("promised_by_engine", engine)):
                figures[name] = one and _known(one.gain_at(size, DraftConfig(K), share).speedup(promised))
            figures["equal_answers"] = sum(_answer_id_of(one) in reference for one in answers[key]) / len(answers[key])
            found["measurements"][key] = figures
        return found

    def _sample(self, number: int, ids: list[int]) -> Sample:
        """An answer as a sample; the answers to one prompt are one cluster.

        vLLM drafts beyond an answer's end, so the last token is drafted, too, where a round begins before it.
        """
        name, prompt = _answer_id(number, ids), self._prompts[number]
        sampling = SamplingSettings()
        return Sample(
            prompt_ids=prompt.ids, answer_ids=ids, max_new_tokens=len(ids) + 1, id=f"{name}/0/{sampling.key}",
            conversation=name, turn=0, cluster=str(number), domain=prompt.domain, split=SELECTION_SPLIT,
            sampling=sampling, finish="length",
        )  # fmt: skip

    def _times(self, spec: ProposerSpec, draft: StoredDraft) -> LoadTimes:
        """Times of this draft's shape over the concurrencies, measured once for all its checkpoints."""
        settings, load = self._settings, self._settings.load
        assert load is not None
        key = cost_key(self._target, draft.module or draft.family, [spec], settings)
        room = most_context(self._target.max_positions, max(spec.depths), settings.costs.rounds)
        grid, prompts = Grid.around(load, room), [one.ids for one in self._prompts]

        def measure_here() -> Any:
            return measure_costs(key, self._target, [spec], prompts, settings, grid)

        return LoadTimes(cached_costs(self._bench.out / "costs" / costs_file(key, grid), key, measure_here), load)

    def _times_of_engine(self, name: str, spec: ProposerSpec, loaded: StoredDraft) -> LoadTimes | None:
        """Times of the engine's rounds with a draft at every K, if they were measured."""
        table, load = self._engine_times.table(name), self._settings.load
        assert load is not None
        if table is None or not set(spec.depths) <= {point.levels for point in table.points}:
            return None
        own = cost_key(self._target, loaded.module or loaded.family, [spec], self._settings)
        key = own.model_copy(update=table.key.model_dump(include={"hardware", "engine", "software"}))
        return LoadTimes(table.model_copy(update={"key": key}), load)


def drafting_share(table: pa.Table) -> float:
    """Share of the rounds that draft anything."""
    sums = cluster_sums(table, counts.values(table, "draft_tokens")[0])
    return float(sums.position("reached", 0).sum() / sums.column("rounds").sum())


def _answer_id(number: int, ids: list[int]) -> str:
    return f"{number}-{fingerprint.short(fingerprint.of_json(ids))}"


def _answer_id_of(answer: tuple[int, list[int]]) -> str:
    return _answer_id(*answer)


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def promises(
    bench: Bench, prompts: Sequence[Prompt], times: EngineTimes, setups: Sequence[Setup], draft: Draft, asked: Json
) -> Json:
    """Speed-ups promised from the engine's times for the rounds that a draft's servers counted, by measurement."""
    load = scoring(prompts, asked).load
    assert load is not None
    table, found = times.table(draft.key), dict[str, Json]()
    for setup in setups:
        for size in () if setup.draft != draft else asked["concurrency"]:
            served = bench.found["served"].get(key := measured_key(setup, size))
            if served is None:
                continue
            # A prompt's pass makes an answer's first token.
            later = sum(len(ids) - 1 for _, ids in bench.answers(key))
            found[key] = {"promised_tau": later / served["drafts"]}
            if table is not None and any(point.levels == setup.draft_tokens for point in table.points):
                gain = LoadTimes(table, load).gain_at(size, DraftConfig(setup.draft_tokens))
                found[key]["promised_by_engine"] = _known(gain.speedup(found[key]["promised_tau"]))
    return found


def judge_all(
    bench: Bench,
    target: TargetSettings,
    setups: Sequence[Setup],
    prompts: Sequence[Prompt],
    times: EngineTimes,
    asked: Json,
) -> None:
    """Our figures for every draft that was served; a draft that fails stops no other."""
    served, least = bench.found["served"], asked["concurrency"][0]
    pairs = [(one.draft, measured_key(one, size)) for one in setups for size in asked["concurrency"]]
    there = [(draft, key) for draft, key in pairs if key in served]
    drafts = list(dict.fromkeys(draft for draft, _ in there if draft is not None))
    if not drafts:
        return
    # Setups begin with the plain server, so its answers at the least concurrency are the first, if there are any.
    base = there[0][1]
    if base != measured_key(setups[0], least):
        say(f"there are no plain answers: promises are counted on those of {base}")
    if asked["accept"] is not None:
        for draft in drafts:
            bench.keep("ours", draft.key, {"measurements": promises(bench, prompts, times, setups, draft, asked)})
        return
    judge = Judge(bench, target, prompts, times, asked)
    for draft in drafts:
        try:
            bench.keep("ours", draft.key, judge.judge(draft, setups, base))
            bench.found["failed"].pop(f"replay of {draft.key}", None)
        except (DraftforgeError, torch.OutOfMemoryError) as error:
            bench.failed(f"replay of {draft.key}", str(error))
