"""Many answers replayed in one pass: what each of them counts alone, and what drafting says at every place of it."""

import random
from collections.abc import Sequence

import pytest
import torch
from proposing import CASCADES, CHAINS, COPIES, DECODED, proposer_named
from stand_ins import VOCAB, prompts, seen_before, target
from torch import Tensor

from draftforge.specdec.accept_rules import RULES
from draftforge.specdec.decoder import Request, generate
from draftforge.specdec.models import CausalModel, States
from draftforge.specdec.proposers import dflash as dflash_drafter
from draftforge.specdec.proposers import eagle as eagle_drafter
from draftforge.specdec.proposers import logits as rows_of_logits
from draftforge.specdec.proposers.base import UNRANKED, Drafter, Proposer, Texts
from draftforge.specdec.proposers.static_tree import StaticProposer
from draftforge.specdec.replay import dynamic
from draftforge.specdec.replay.replay import Counted, replay, replayable
from draftforge.specdec.replay.target_trace import RecordedAnswer, TargetTrace, trace_target
from draftforge.specdec.sampling import penalised, probabilities
from draftforge.specdec.sampling_settings import SamplingSettings

pytestmark = pytest.mark.slow

GREEDY = SamplingSettings()
DRY = SamplingSettings(repetition_penalty=1.4)
WARM = SamplingSettings(temperature=1.0, top_k=12, repetition_penalty=1.2)
KS = [1, 3, 6]
TOGETHER = (
    "small-tree",
    "eagle3-tree",
    "medusa-tree",
    "dflash-tree",
    "eagle-dynamic",
    "small-merged",
    "small-sampled",
    "suffix",
)


def mix(model: CausalModel, seed: int, count: int = 7) -> list[RecordedAnswer]:
    """Answers of all lengths, in any order, the shortest among them; some leave what the target says half way."""
    draw = random.Random(seed)
    asked = prompts(count)
    done = dict(generate(model, None, [Request(ids, GREEDY, 0, 24) for ids in asked], batch_size=count))
    lengths = [1, 2, 24, *(draw.randint(1, 24) for _ in range(count - 3))]
    draw.shuffle(lengths)
    answers = []
    for index, (ids, length) in enumerate(zip(asked, lengths)):
        own = done[index].tokens[: length if index % 3 else draw.randint(1, length)]
        answer = [*own, *(draw.randrange(VOCAB) for _ in range(length - len(own)))]
        answers.append(RecordedAnswer(ids, answer, length + draw.randint(0, 4)))
    return answers


def traced_by(
    model: CausalModel, proposer: Proposer, setting: SamplingSettings, answers: list[RecordedAnswer]
) -> TargetTrace:
    return trace_target(model, answers, setting, proposer.aux_layers, proposer.needs_hidden_states)


def check_alike(together: Sequence[Counted], alone: Sequence[Counted], exact: bool) -> None:
    for one, other in zip(together, alone, strict=True):
        assert one[:2] == other[:2]
        if exact:
            assert one == other
        for ours, theirs in zip(one.counts, other.counts):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-4), one[:2]


NAMES = [name for name in (*CHAINS, *TOGETHER) if name not in DECODED]


@pytest.mark.parametrize(
    ("name", "setting", "pieces"),
    [
        *((name, GREEDY, False) for name in NAMES),
        *((name, DRY if number % 2 else WARM, True) for number, name in enumerate(NAMES)),
    ],
)
def test_answers_replayed_together_count_as_each_alone(
    name: str, setting: SamplingSettings, pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under every rule; `pieces`: with few logits, and few texts, at a time."""
    if pieces:
        monkeypatch.setattr(dynamic, "_MOST_LOGITS", 20 * VOCAB)
        monkeypatch.setattr(rows_of_logits, "MOST_LOGITS", 7 * VOCAB)
        for module in (eagle_drafter, dflash_drafter):
            monkeypatch.setattr(module, "MOST_PAIRS", 4000)
    model = target()
    proposer = proposer_named(name, model, noise=0.1)
    rules = [rule for rule in RULES if replayable(proposer, rule, setting)]
    answers = mix(model, seed=7)
    together = replay(proposer, traced_by(model, proposer, setting, answers), rules, KS)
    accepted = 0.0
    for answer, counted in zip(answers, together, strict=True):
        (alone,) = replay(proposer, traced_by(model, proposer, setting, [answer]), rules, KS)
        check_alike(counted, alone, exact=setting.greedy)
        assert [one[:2] for one in counted] == [(rule, K) for rule in rules for K in KS]
        accepted += sum(one.counts.accepted for one in counted)
    assert accepted > 0 or name in (*COPIES, "skipped")  # a random target says little without its layers


def test_answers_without_a_round() -> None:
    model = target()
    for name in ("small", "eagle", "medusa", "dflash", "lookup", "suffix", "small-dynamic"):
        proposer = proposer_named(name, model)
        traced = traced_by(model, proposer, GREEDY, [RecordedAnswer([3, 4], [5], 8), RecordedAnswer([1], [2], 1)])
        for (counted,) in replay(proposer, traced, ["greedy"], [2]):
            assert counted.counts == (0.0, 0.0, 0.0, 0.0, (0.0, 0.0), (0.0, 0.0))


def drafted(drafter: Drafter, states: States | None, ids: list[int], known: int, levels: int) -> list[Tensor]:
    """Logits [V] of each level of a round that starts with so many tokens known and drafts those that follow."""
    states = states or States(torch.zeros(1, len(ids), 0), None)
    drafter.reserve(1, len(ids) + 1, levels, levels)
    aux = None if states.aux_BTA is None else states.aux_BTA[:, : known - 1]
    texts = Texts.of([ids[:known]])
    drafter.begin(torch.tensor([0]), texts, States(states.hidden_BTH[:, : known - 1], aux))
    said = [drafter.open(1, chain=True)[0]]
    for depth, token in enumerate(ids[known : known + levels - 1]):
        said.append(drafter.expand(torch.tensor([[token]]), torch.tensor([[depth - 1]]), depth)[0, 0])
    return said


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        (name, setting)
        for number, name in enumerate(name for name in CHAINS if name not in (*COPIES, *DECODED, *CASCADES))
        for setting in (WARM, DRY if number % 2 else GREEDY)
    ],
)
@torch.inference_mode()
def test_a_trace_is_what_drafting_says_at_every_place(name: str, setting: SamplingSettings) -> None:
    """Ranks and probabilities of the answers' tokens, from the drafter's own steps along them."""
    with torch.inference_mode(False):  # some drafts are trained when they are first asked for
        model, levels = target(), 3
        proposer = proposer_named(name, model, noise=0.1)
    assert isinstance(proposer, StaticProposer)
    traced = traced_by(model, proposer, setting, mix(model, seed=4, count=5))
    trace = proposer.trace(traced.pack, levels, setting, traced.states)
    row = 0
    for index, (ids, start) in enumerate(traced.pack.texts):
        states = None
        if traced.states is not None:
            states = States(*(None if x is None else x[index, None] for x in traced.states))  # type: ignore[arg-type]
        for known in range(start, len(ids)):
            said = drafted(proposer._drafter, states, ids, known, levels)
            for level in range(levels):
                rank, q = int(trace.rank_RK[row, level]), float(trace.q_RK[row, level])
                if known + level >= len(ids):
                    assert (rank, q) == (UNRANKED, 0.0)
                    continue
                token, logits_1V = ids[known + level], said[level][None]
                seen_1V = seen_before(ids, known + level, VOCAB)
                scores_V = penalised(logits_1V, setting, seen_1V)[0]
                better = int((scores_V > scores_V[token] + 1e-4).sum()), int((scores_V > scores_V[token] - 1e-4).sum())
                assert better[0] <= rank <= better[1] if scores_V[token].isfinite() else rank == UNRANKED
                q_V = probabilities(logits_1V, setting, seen_1V)[0]
                assert q == pytest.approx(0.0 if rank == UNRANKED else float(q_V[token]), abs=1e-4)
            row += 1
    assert row == traced.pack.rounds


@torch.inference_mode()
def test_how_likely_the_target_found_each_token() -> None:
    model = target()
    traced = trace_target(model, mix(model, seed=5), WARM)
    assert traced.p_R is not None and traced.states is None
    expected = []
    for ids, start in traced.pack.texts:
        for known in range(start, len(ids)):
            logits_1V = model.logits(model.states(torch.tensor([ids[:known]])).hidden_BTH[:, -1])
            seen_1V = seen_before(ids, known, VOCAB)
            expected.append(float(probabilities(logits_1V, WARM, seen_1V)[0, ids[known]]))
    assert traced.p_R.tolist() == pytest.approx(expected, abs=1e-5)
