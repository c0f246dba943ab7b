"""Scoring: what is replayed, what is decoded, and that both agree."""

import math
import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import stand_ins
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from draftforge.data.store import Sample
from draftforge.errors import InputError
from draftforge.eval import score, target_pass_cache
from draftforge.eval.acceptance import tau
from draftforge.eval.counts import COUNTS_SCHEMA, values, where
from draftforge.eval.draft_configs import ProposerSpec
from draftforge.eval.leaderboard import serving
from draftforge.eval.score import perplexity
from draftforge.eval.settings import ScoreSettings
from draftforge.specdec.decoder import Request, generate
from draftforge.specdec.proposers.factory import make_proposer
from draftforge.specdec.proposers.prompt_lookup import PromptLookup
from draftforge.specdec.proposers.tree_settings import DynamicTree, OwnTree, StaticTree
from draftforge.specdec.replay.expected_rounds import RoundCounts
from draftforge.specdec.replay.target_trace import TargetTrace, trace_target
from draftforge.specdec.sampling_settings import SamplingSettings
from draftforge.specdec.targets import Target

GREEDY, WARM = SamplingSettings(), SamplingSettings(temperature=1.0, top_k=12)
STOP = frozenset({5, 17})
ME = score.Identity("small", 20)
SETTINGS = ScoreSettings(
    sampling=[GREEDY, WARM], rules=["token", "block"], draft_tokens=[1, 3], decode_conversations=4, batch_size=3
)


@pytest.fixture(scope="module")
def target() -> Target:
    model = cast(Any, stand_ins.target(4))
    model.stop_ids = STOP
    return cast(Target, model)


@pytest.fixture(scope="module")
def samples(target: Target) -> list[Sample]:
    """Twelve conversations in three domains, the first nine at T = 0, as a capture has them."""
    made = []
    for number, prompt in enumerate(stand_ins.prompts(12)):
        sampling = GREEDY if number < 9 else WARM
        ((_, answer),) = generate(target, None, [Request(prompt, sampling, number, 24, STOP)])
        made.append(
            Sample(
                id=f"c{number}/0/{sampling.key}",
                conversation=f"c{number}",
                turn=0,
                cluster=f"k{number // 2}",
                domain=("support", "code", "chat")[number % 3],
                split="selection",
                sampling=sampling,
                max_new_tokens=24,
                finish=answer.finish,
                prompt_ids=prompt,
                answer_ids=answer.tokens,
            )
        )
    return made


@pytest.fixture(scope="module")
def chains(target: Target) -> ProposerSpec:
    return ProposerSpec(partial(make_proposer, stand_ins.near_copy(target, noise=0.1), target), (1, 3))


def test_replay_covers_all_and_decoding_a_part(target: Target, samples: list[Sample], chains: ProposerSpec) -> None:
    result = score.score_draft(target, [chains], samples, SETTINGS, ME)
    table = result.counts
    assert table.schema.equals(COUNTS_SCHEMA) and set(values(table, "draft")) == {"small"}
    replayed, decoded = where(table, method="replay"), where(table, method="decode")
    assert len(replayed) == 9 * 2 + 3 * 4 * 2  # T = 0: greedy at each K; T > 0: every rule that it tells, at each K
    assert values(where(replayed, setting="t0"), "rule") == ["greedy"]
    assert values(where(replayed, setting=WARM.key), "rule") == ["block", "match", "onehot", "token"]
    assert len(values(decoded, "conversation")) == 4 and values(decoded, "draft_tokens") == [3]
    assert set(values(decoded, "domain")) == {"support", "code", "chat"}
    assert result.consistency.compared == len(where(decoded, setting="t0")) > 0
    assert result.consistency.mismatches == ()
    assert 1.0 < tau(where(replayed, setting="t0", draft_tokens=3), 0.95).value < 4.0


def test_decoded_counts_equal_replayed_ones(target: Target, samples: list[Sample], chains: ProposerSpec) -> None:
    greedy = [sample for sample in samples if sample.sampling.greedy]
    settings = ScoreSettings(draft_tokens=[1, 3], decode_draft_tokens=[1, 3], decode_conversations=99)
    table = score.score_draft(target, [chains], greedy, settings, ME).counts
    columns = [name for name in COUNTS_SCHEMA.names if name != "method"]
    order = [("conversation", "ascending"), ("draft_tokens", "ascending")]
    one, two = (where(table, method=method).select(columns).sort_by(order) for method in ("replay", "decode"))
    assert len(one) == 18 and one.equals(two)


def test_a_proposer_that_cannot_be_replayed_is_decoded(target: Target, samples: list[Sample]) -> None:
    class Unreplayable(PromptLookup):
        replayable = False

    lookup = ProposerSpec(Unreplayable, (1, 3))
    result = score.score_draft(target, [lookup], samples, SETTINGS, score.Identity("lookup", 0))
    assert values(result.counts, "method") == ["decode"]
    assert len(result.counts) == 12 * 2 and values(result.counts, "rule") == ["greedy", "onehot"]
    assert result.consistency.compared == 0
    assert not any(math.isnan(rounds) for rounds in result.counts["rounds"].to_pylist())


TREES: dict[str, OwnTree] = {
    "wide": StaticTree(kind="static", widths=[3, 2, 1]),
    "grown": DynamicTree(kind="dynamic", levels=3, top_k=3, nodes=7),
    "drawn": StaticTree(kind="static", widths=[2, 2], drawn="iid"),
    "apart": StaticTree(kind="static", widths=[3, 1], drawn="without_replacement"),
}


def tree_of(target: Target, name: str) -> ProposerSpec:
    draft = stand_ins.near_copy(target, noise=0.1)
    return ProposerSpec(partial(make_proposer, draft, target, TREES[name]), (TREES[name].levels,), name, TREES[name])


@pytest.mark.slow
def test_trees_are_scored_like_chains(target: Target, samples: list[Sample], chains: ProposerSpec) -> None:
    """Trees whose siblings are chosen are replayed and equal decoding; drawn ones are replayed at T = 0 only."""
    ways = [chains, *(tree_of(target, name) for name in TREES)]
    settings = ScoreSettings(sampling=[GREEDY, WARM], rules=["token", "match"], decode_conversations=99)
    result = score.score_draft(target, ways, samples, settings, ME)
    assert result.consistency.mismatches == () and result.consistency.compared == 9 * 5
    warm = where(result.counts, setting=WARM.key)
    ways_of = {name: where(warm, tree=name) for name in ("", *TREES)}
    scored = {name: set(zip(*(one[c].to_pylist() for c in ("rule", "method")))) for name, one in ways_of.items()}
    replayed = {("match", "replay"), ("onehot", "replay")}
    assert scored == {
        "": replayed | {("token", "replay"), ("block", "replay")},
        "wide": replayed,
        "grown": replayed,
        "drawn": {("match", "decode")},
        "apart": {("match", "decode")},
    }
    t0 = where(result.counts, setting="t0", method="replay")
    taus = {name: tau(where(t0, tree=name), 0.95).value for name in TREES}
    assert taus["wide"] > tau(where(t0, tree="", draft_tokens=3), 0.95).value > 1.0
    assert all(value > 1.0 for value in taus.values())


def test_a_lossy_rule_is_decoded_and_never_decides(target: Target, samples: list[Sample], chains: ProposerSpec) -> None:
    settings = ScoreSettings(sampling=[WARM], rules=["token", "typical"], draft_tokens=[1, 3], decode_conversations=0)
    table = score.score_draft(target, [chains], samples[9:], settings, ME).counts
    assert values(where(table, rule="typical"), "method") == ["decode"]
    assert values(where(table, rule="token"), "method") == ["replay"]
    assert values(serving(table, settings), "rule") == ["token"]
    with pytest.raises(ValidationError, match="typical is lossy: drafts are picked by a lossless rule"):
        ScoreSettings(sampling=[WARM], rules=["typical", "token"])


def test_passes_of_the_target_are_shared_by_checkpoints(
    target: Target, samples: list[Sample], chains: ProposerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SETTINGS.model_copy(update={"decode_conversations": 0})
    answers: list[int] = []

    def counted(*args: Any) -> TargetTrace:
        answers.append(len(args[1]))
        return trace_target(*args)

    monkeypatch.setattr(target_pass_cache, "trace_target", counted)

    def passes(remembered: int, tokens: int) -> list[int]:
        """Answers of each pass that scoring two checkpoints takes."""
        answers.clear()
        cache = target_pass_cache.TargetPassCache(target, remembered, tokens)
        first, second = (score.score_draft(target, [chains], samples[9:], settings, ME, cache) for _ in range(2))
        assert first.counts.equals(second.counts)
        return answers.copy()

    assert passes(settings.trace_bytes, 0) == [3]
    assert passes(settings.trace_bytes, 1) == [1, 1, 1]
    assert passes(0, 0) == [3, 3]
    sizes = [trace_target(target, [one], WARM).nbytes for one in samples[9:]]
    assert len(passes(sum(sizes), 1)) == 3 and len(passes(sum(sizes) - 1, 1)) == 4


def test_a_false_replay_is_an_error_in_float32(
    target: Target, samples: list[Sample], chains: ProposerSpec, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def wrong(_: Any, traced: TargetTrace, *args: Any) -> list[Any]:
        return [[("greedy", 1, RoundCounts(1, 2, 1, 1, (1,), (1,)))] for _ in traced.answers]

    monkeypatch.setattr(target_pass_cache, "replay", wrong)
    settings, chains = ScoreSettings(draft_tokens=[1], decode_conversations=3), replace(chains, depths=(1,))
    with pytest.raises(score.ReplayMismatchError, match=r"differ on 3 of 3 answers; first: c\d+/0/t0, K=1: decoded"):
        score.score_draft(target, [chains], samples[:9], settings, ME)
    tolerant = settings.model_copy(update={"mismatch_limit": 3})
    result = score.score_draft(target, [chains], samples[:9], tolerant, ME)
    assert len(result.consistency.mismatches) == 3
    assert "replay and decoding differ on 3 of 3" in capsys.readouterr().err.replace("\n", " ")


def test_answers_of_another_target_are_found(target: Target, samples: list[Sample], chains: ProposerSpec) -> None:
    settings, chains = ScoreSettings(draft_tokens=[1], decode_conversations=3), replace(chains, depths=(1,))
    foreign = [replace(sample, answer_ids=[(sample.answer_ids[0] + 1) % stand_ins.VOCAB, 3, 5]) for sample in samples]
    with pytest.raises(score.ReplayMismatchError, match="the decoded answer leaves the recorded one at token 0"):
        score.score_draft(target, [chains], foreign[:9], settings, ME)


@torch.inference_mode()
def test_a_tie_of_the_target_is_counted_not_refused(
    target: Target, samples: list[Sample], chains: ProposerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = samples[0]
    ids = torch.tensor([sample.prompt_ids])
    logits = target.logits(target.states(ids).hidden_BTH[0, -1])
    gap = float(logits.topk(2).values.diff().abs())
    other = replace(sample, answer_ids=[int(logits.topk(2).indices[1]), *sample.answer_ids[1:]])
    chains = replace(chains, depths=(1,))
    settings = ScoreSettings(draft_tokens=[1], decode_conversations=1, tie_logits=gap * 1.01)
    consistency = score.score_draft(target, [chains], [other], settings, ME).consistency
    assert (consistency.compared, consistency.ties, consistency.mismatches) == (1, 1, ())
    strict = settings.model_copy(update={"tie_logits": gap * 0.99})
    with pytest.raises(score.ReplayMismatchError):
        score.score_draft(target, [chains], [other], strict, ME)


def test_conversations_are_spread_and_stable(samples: list[Sample]) -> None:
    domain = {sample.conversation: sample.domain for sample in samples}
    three = score.stratified_conversations(samples, 3)
    assert {domain[name] for name in three} == {"support", "code", "chat"}
    assert three < score.stratified_conversations(samples, 6) and len(score.stratified_conversations(samples, 6)) == 6
    assert three == score.stratified_conversations(list(reversed(samples)), 3)
    assert (
        score.stratified_conversations(samples, 0) == set() and len(score.stratified_conversations(samples, 99)) == 12
    )


def test_at_most_so_many_conversations(target: Target, samples: list[Sample], chains: ProposerSpec) -> None:
    settings, chains = ScoreSettings(decode_conversations=1, max_conversations=3), replace(chains, depths=(1,))
    counts = score.score_draft(target, [chains], samples[:9], settings, ME).counts
    assert set(values(counts, "conversation")) == score.stratified_conversations(samples[:9], 3)


def test_training_samples_and_empty_splits_are_refused(
    target: Target, samples: list[Sample], chains: ProposerSpec
) -> None:
    with pytest.raises(InputError, match="no samples to score"):
        score.score_draft(target, [chains], [], SETTINGS, ME)
    with pytest.raises(InputError, match="c0/0/t0: split train"):
        score.score_draft(target, [chains], [replace(samples[0], split="train")], SETTINGS, ME)


def test_answers_in_one_pass_are_worth_what_each_is_alone(target: Target, samples: list[Sample]) -> None:
    """Scores, perplexity and measured trees, of samples of both settings by turns."""
    mixed = [sample for pair in zip(samples[:3], samples[9:]) for sample in pair]
    medusa = stand_ins.taught_medusa(target, steps=20)
    for name, way in {"chains": None, "wide": TREES["wide"]}.items():
        make = partial(make_proposer, medusa, target, way)
        drafting = ProposerSpec(make, (1, 3), "" if way is None else name, way)
        packed, single = (
            (
                score.score_draft(target, [drafting], mixed, SETTINGS, ME, cache).counts.to_pylist(),
                perplexity(drafting.proposer, mixed, cache),
            )
            for cache in (target_pass_cache.TargetPassCache(target, 0), target_pass_cache.TargetPassCache(target, 0, 1))
        )
        assert packed[1] == pytest.approx(single[1]) and packed[1] is not None
        for one, other in zip(packed[0], single[0], strict=True):
            for column, value in one.items():
                exact = one["setting"] == "t0" or isinstance(value, str | int)
                assert value == (other[column] if exact else pytest.approx(other[column], abs=1e-4)), column


def test_packs_are_of_one_setting_and_within_their_tokens(target: Target, samples: list[Sample]) -> None:
    mixed = [*samples[9:], *samples[:9]]
    for tokens in (1, 60, 10_000):
        packs = target_pass_cache.TargetPassCache(target, 0, tokens).packs(mixed)
        assert sorted(index for pack in packs for index in pack) == list(range(len(mixed)))
        for pack in packs:
            lengths = [len(mixed[index].prompt_ids) + len(mixed[index].answer_ids) for index in pack]
            assert len({mixed[index].sampling for index in pack}) == 1
            assert len(pack) == 1 or len(pack) * max(lengths) <= tokens
    assert len(packs) == 2


@given(
    st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=40), st.integers(1, 120), st.randoms()
)
def test_whole_packs_are_packed_alike_without_the_others(
    lengths: list[tuple[int, bool]], tokens: int, draw: random.Random
) -> None:
    """So ranks that share packs make the passes that one rank makes."""
    cache = target_pass_cache.TargetPassCache(SimpleNamespace(device=torch.device("cpu")), 0, tokens)  # type: ignore[arg-type]
    every: list[Any] = [
        SimpleNamespace(prompt_ids=[1], answer_ids=[1] * length, sampling=WARM if warm else GREEDY)
        for length, warm in lengths
    ]
    kept = [pack for pack in cache.packs(every) if draw.random() < 0.5]
    mine = sorted(index for pack in kept for index in pack)
    again = [[mine[index] for index in pack] for pack in cache.packs([every[index] for index in mine])]
    assert sorted(again) == sorted(kept)
