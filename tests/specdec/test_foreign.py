"""Drafts with another tokenizer than the target's: whatever they say, the output is the target's."""

import copy
import functools
from dataclasses import replace

import pytest
import torch
from byte_level import SPECIAL, byte_level_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from other_ids import under_other_ids
from stand_ins import llama
from trained import PROMPTS, Trained
from transformers import PreTrainedTokenizerFast

from draftforge.errors import InputError
from draftforge.specdec import decoder
from draftforge.specdec.decoder import generate
from draftforge.specdec.drafts.small import SmallDraft
from draftforge.specdec.kv_cache import CacheStep
from draftforge.specdec.models import CausalModel, States
from draftforge.specdec.proposers.base import Ask, Draft
from draftforge.specdec.proposers.cross_tokenizer import ForeignProposer
from draftforge.specdec.proposers.factory import make_proposer
from draftforge.specdec.proposers.tree_settings import StaticTree
from draftforge.specdec.replay.expected_rounds import count_rounds
from draftforge.specdec.replay.replay import replay
from draftforge.specdec.replay.target_trace import RecordedAnswer, trace_target
from draftforge.specdec.requests import Generation, Request
from draftforge.specdec.sampling_settings import SamplingSettings
from draftforge.specdec.tokenizer_bridge import ForeignDraft

GREEDY = SamplingSettings()
PENALISED = SamplingSettings(repetition_penalty=1.3)
WARM = SamplingSettings(temperature=0.8, top_k=20)
TEXT = ["The order has shipped. Grüße aus Köln: 日本語 🙂\n", "How do I reset my password? Open the settings.\n"]
THEIR_TEXT = ["Paris is a large city of two million people; the river runs on.\n", "def add(a, b):\n    return a + b\n"]


@functools.cache
def known() -> PreTrainedTokenizerFast:
    return byte_level_tokenizer(TEXT, 290)


@functools.cache
def theirs() -> PreTrainedTokenizerFast:
    return byte_level_tokenizer(THEIR_TEXT, 310)


@functools.cache
def target() -> CausalModel:
    return CausalModel(llama(vocab=290))


@functools.cache
def other() -> ForeignDraft:
    """A random model with a tokenizer of other words."""
    return ForeignDraft.from_tokenizers(SmallDraft(llama(layers=1, seed=3, vocab=310)), theirs(), known(), 290)


def shuffled(model: CausalModel, tokenizer: PreTrainedTokenizerFast) -> ForeignDraft:
    """The model itself under other ids."""
    draft, own = under_other_ids(model.model, tokenizer)
    return ForeignDraft.from_tokenizers(SmallDraft(draft), own, tokenizer, model.vocab_size)


def run(
    model: CausalModel, draft: ForeignDraft | None, requests: list[Request], rule: str = "greedy", **options: object
) -> list[Generation]:
    proposer = None if draft is None else ForeignProposer(draft)
    done = dict(generate(model, proposer, requests, rule=rule, decode=known().decode, **options))  # type: ignore[arg-type]
    return [done[index] for index in range(len(requests))]


def asked(texts: list[str], sampling: SamplingSettings = GREEDY, length: int = 24, **options: object) -> list[Request]:
    rows = [known()(text).input_ids or [3] for text in texts]
    return [
        Request(ids, sampling, n, length - 5 * (n % 3), **options)  # type: ignore[arg-type]
        for n, ids in enumerate(rows)
    ]


def accepted(answers: list[Generation]) -> int:
    return sum(one.accepted for answer in answers for one in answer.rounds)


texts = st.text(st.sampled_from(" \nabthe order ü日🙂"), max_size=60) | st.sampled_from(
    [*TEXT, *THEIR_TEXT, f"{SPECIAL[1]}user\nhi{SPECIAL[2]}\n{SPECIAL[1]}assistant\n", ""]
)


@pytest.mark.slow
@settings(max_examples=8)
@given(
    prompts=st.lists(texts, min_size=1, max_size=4),
    draft=st.sampled_from(["other", "shuffled"]),
    sampling=st.sampled_from([GREEDY, PENALISED]),
    K=st.integers(1, 5),
    batch_size=st.integers(1, 3),
)
def test_greedy_output_equals_plain_decoding(
    prompts: list[str], draft: str, sampling: SamplingSettings, K: int, batch_size: int
) -> None:
    """Random models say bytes that are no characters, and special tokens anywhere."""
    requests = asked(prompts, sampling, length=20)
    model = other() if draft == "other" else shuffled(target(), known())
    plain = run(target(), None, requests, batch_size=2)
    answers = run(target(), model, requests, draft_tokens=K, batch_size=batch_size)
    assert [(one.tokens, one.finish) for one in answers] == [(one.tokens, one.finish) for one in plain]
    for request, answer in zip(requests, answers):
        emitted = 1
        for one in answer.rounds:
            assert one.accepted <= one.drafted <= max(min(K, request.max_new_tokens - emitted - 1), 0)
            emitted += one.emitted


def test_rounds_of_few_sizes_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: rounds cover slots that are free, and trees are padded."""
    requests = asked([*TEXT, "The order", "日本", "a"], length=20)
    draft = shuffled(target(), known())
    expected = run(target(), draft, requests, draft_tokens=3, batch_size=3)
    monkeypatch.setattr(decoder, "takes_graphs", lambda model: True)
    monkeypatch.setattr("draftforge.specdec.cuda_graphs._FEWEST", 2)
    answers = run(target(), draft, requests, draft_tokens=3, batch_size=3)
    assert [(one.tokens, one.rounds) for one in answers] == [(one.tokens, one.rounds) for one in expected]


def trained_requests(tokenizer: PreTrainedTokenizerFast, length: int = 60) -> list[Request]:
    return [Request(tokenizer(text).input_ids, GREEDY, 0, length) for text in PROMPTS]


@pytest.mark.slow
def test_the_same_model_under_other_ids_is_nearly_always_right(trained_drafts: Trained) -> None:
    """The text that it says is the target's, so that only words that the end of a draft cuts are lost."""
    model = trained_drafts.target()
    requests = trained_requests(model.tokenizer, 100)
    draft = shuffled(model, model.tokenizer)
    plain = run(model, None, requests)
    answers = run(model, draft, requests, draft_tokens=4, batch_size=3)
    assert [one.tokens for one in answers] == [one.tokens for one in plain]
    rounds = [one for answer in answers for one in answer.rounds]
    assert sum(one.emitted for one in rounds) / len(rounds) > 4.0
    assert accepted(answers) / sum(one.drafted for one in rounds) > 0.9


def drafts_seen(
    model: CausalModel, draft: ForeignDraft, requests: list[Request], batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> dict[int, list[list[int]]]:
    seen: dict[int, list[list[int]]] = {}
    original = decoder._Decoder._draft

    def listening(self: decoder._Decoder, rows: int, sampling: list[SamplingSettings]) -> Draft:
        drafted = original(self, rows, sampling)
        for slot, tokens, real in zip(self.slots, drafted.tree.tokens_BN, drafted.tree.candidate_BN):
            seen.setdefault(slot.number, []).append(tokens[real].tolist())
        return drafted

    monkeypatch.setattr(decoder._Decoder, "_draft", listening)
    run(model, draft, requests, draft_tokens=4, batch_size=batch_size)
    monkeypatch.setattr(decoder._Decoder, "_draft", original)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("which", ["other", "shuffled"])
def test_drafts_do_not_depend_on_the_batch(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots are refilled and move, and long prompts stand beside short ones."""
    requests = asked([*TEXT, *THEIR_TEXT, "The " * 70, "日本", "a", "the settings " * 9], length=24)
    draft = other() if which == "other" else shuffled(target(), known())
    alone, together = (drafts_seen(target(), draft, requests, size, monkeypatch) for size in (1, 3))
    assert alone == together and any(tokens for rows in alone.values() for tokens in rows)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["greedy", "onehot", "match"])
def test_replay_equals_decoding_count_by_count(rule: str, trained_drafts: Trained) -> None:
    model = trained_drafts.target()
    draft = ForeignDraft.from_tokenizers(
        trained_drafts.draft("small"), model.tokenizer, model.tokenizer, model.vocab_size
    )
    requests = trained_requests(model.tokenizer)
    answers = run(model, draft, requests, rule, draft_tokens=3)
    recorded = [RecordedAnswer(request.prompt_ids, answer.tokens, 60) for request, answer in zip(requests, answers)]
    replayed = replay(ForeignProposer(draft), trace_target(model, recorded, GREEDY), [rule], [3])
    assert [counted.counts for (counted,) in replayed] == [count_rounds(answer.rounds, 3) for answer in answers]


@pytest.mark.slow
def test_above_temperature_zero_drafts_are_judged_as_chosen(trained_drafts: Trained) -> None:
    """match gives the very tokens of plain sampling, and most drafts are right where the target is sure."""
    model = trained_drafts.target()
    requests = [replace(one, sampling=WARM, seed=n) for n, one in enumerate(trained_requests(model.tokenizer))]
    draft = shuffled(model, model.tokenizer)
    answers = run(model, draft, requests, "match", batch_size=3)
    assert [one.tokens for one in answers] == [one.tokens for one in run(model, None, requests)]
    for rule in ("match", "onehot"):
        judged = [one for answer in run(model, draft, requests, rule, batch_size=3) for one in answer.rounds]
        assert sum(one.accepted for one in judged) > 0.5 * sum(one.drafted for one in judged)


@pytest.mark.parametrize(("says", "drafted"), [(SPECIAL[2], [2]), (SPECIAL[1], [])])
def test_the_end_of_a_text_is_drafted_as_the_targets_own(
    says: str, drafted: list[int], trained_drafts: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft whose head says nothing but its eos; any other special token ends what it says without a word."""
    model = trained_drafts.target()
    draft = shuffled(model, model.tokenizer)
    head = draft.model.get_output_embeddings()
    (special,) = draft.own.encode(says)
    with torch.no_grad():
        head.weight.zero_()
    bias = torch.zeros(len(head.weight)).index_fill_(0, torch.tensor(special), 9.0)
    head.register_forward_hook(lambda module, args, output: output + bias)
    proposer = ForeignProposer(draft)
    seen: list[list[int]] = []
    propose = proposer.propose

    def listening(ask: Ask) -> Draft:
        draft = propose(ask)
        seen.append(draft.tree.tokens_BN[0].tolist())
        return draft

    monkeypatch.setattr(proposer, "propose", listening)
    list(generate(model, proposer, [Request([40, 41], GREEDY, 0, 6)]))
    assert seen and all(row == drafted for row in seen)


def test_stop_strings_and_stop_ids_end_an_answer_as_in_plain_decoding() -> None:
    whole = run(target(), None, asked(TEXT, length=30))
    stops = [known().decode(one.tokens[4:6]) for one in whole]
    for options in ({"stop_strings": tuple(stops)}, {"stop_ids": frozenset(one.tokens[7] for one in whole)}):
        requests = asked(TEXT, length=30, **options)
        plain, answers = (run(target(), draft, requests, batch_size=2) for draft in (None, shuffled(target(), known())))
        assert [(a.tokens, a.finish) for a in answers] == [(p.tokens, p.finish) for p in plain]
        assert {one.finish for one in answers} == {"stop"}


@pytest.mark.slow
def test_a_text_that_is_too_long_for_the_draft_is_read_from_its_middle_on(
    trained_drafts: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft of 64 positions beside a text of more than 200: drafts go on, and some are right."""
    model = trained_drafts.target()
    small = copy.deepcopy(trained_drafts.draft("small").model)
    small.config.max_position_embeddings = 64
    draft = ForeignDraft.from_tokenizers(SmallDraft(small), model.tokenizer, model.tokenizer, model.vocab_size)
    prompt = model.tokenizer(" ".join(PROMPTS) * 2).input_ids
    requests = [Request(ids, GREEDY, 0, 120) for ids in (prompt, prompt[:20])]
    read: list[int] = []
    states = draft.lm.states

    def listening(ids_BN: torch.Tensor, step: CacheStep) -> States:
        read.append(ids_BN.shape[1] if step.at_BN is None else 1 + int(step.at_BN.max()))
        return states(ids_BN, step)

    monkeypatch.setattr(draft.lm, "states", listening)
    answers = run(model, draft, requests, draft_tokens=4, batch_size=2)
    assert [one.tokens for one in answers] == [one.tokens for one in run(model, None, requests)]
    assert len(prompt) > 64 >= max(read) > 50
    late = [one for answer in answers for one in answer.rounds[-8:]]
    assert sum(one.accepted for one in late) > 0


def test_only_chains_are_drafted() -> None:
    with pytest.raises(InputError, match="another tokenizer than the target's drafts chains only"):
        make_proposer(other(), target(), StaticTree(kind="static", widths=[2]))
    assert isinstance(make_proposer(other(), target()), ForeignProposer)
    with pytest.raises(InputError, match="reads the draft's probabilities"):
        run(target(), other(), asked(TEXT, WARM), "token")
