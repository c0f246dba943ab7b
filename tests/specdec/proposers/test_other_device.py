"""Drafts that lie elsewhere than the target.

Another precision stands in for another device where numbers matter; the meta device, which no operation shares with
the CPU and from which nothing can be copied, where only places do.
"""

import copy
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from proposing import taught
from stand_ins import llama, near_copy, prompts, random_eagle3, target
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftforge.eval.cost_table import cost_key
from draftforge.eval.draft_configs import ProposerSpec
from draftforge.eval.settings import ScoreSettings
from draftforge.specdec import kv_cache
from draftforge.specdec.decoder import Request, generate
from draftforge.specdec.drafts import DraftModule
from draftforge.specdec.models import CausalModel, States
from draftforge.specdec.proposers.base import Drafter, Proposer, Texts, Trace
from draftforge.specdec.proposers.dynamic_tree import DynamicProposer
from draftforge.specdec.proposers.factory import make_drafter, make_proposer
from draftforge.specdec.proposers.other_device import DraftDevice, OtherDeviceDrafter, device_of, remote_copy
from draftforge.specdec.proposers.static_tree import StaticProposer
from draftforge.specdec.proposers.tree_shape import ROOT, TreeShape
from draftforge.specdec.replay.expected_rounds import count_rounds
from draftforge.specdec.replay.packing import Pack, Text
from draftforge.specdec.replay.replay import replay
from draftforge.specdec.replay.target_trace import RecordedAnswer, trace_target
from draftforge.specdec.sampling_settings import SamplingSettings

CPU, META = torch.device("cpu"), torch.device("meta")
META_ROW = torch.zeros(1, dtype=torch.long, device=META)
GREEDY, WARM = SamplingSettings(), SamplingSettings(temperature=0.9, top_k=12)
DRAFTS: dict[str, Callable[[CausalModel], DraftModule]] = {
    "small": lambda model: near_copy(model),
    "eagle": lambda model: taught("eagle"),
    "eagle3": lambda model: taught("eagle3"),
    "eagle3-reduced": lambda model: taught("eagle3", 40),
    "medusa": lambda model: taught("medusa"),
    "dflash": lambda model: taught("dflash"),
}


class Apart(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """No operation but a conversion may read single and double precision together."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = [tensor for tensor in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        kinds = {tensor.dtype for tensor in read if tensor.is_floating_point() and tensor.dim()}
        assert len(kinds) < 2 or func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_), func
        return func(*args, **(kwargs or {}))


class Watched:
    """A drafter in double precision, with nothing in single precision beside it. Counts its calls."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.calls = drafter, list[str]()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.drafter, name)
        if not callable(value):
            return value

        def call(*args: Any, **options: Any) -> Any:
            self.calls.append(name)
            with Apart():  # type: ignore[no-untyped-call]
                result = value(*args, **options)
            assert not isinstance(result, Tensor) or result.dtype == torch.float64
            return result

        return call


def elsewhere(name: str, model: CausalModel) -> tuple[OtherDeviceDrafter, Watched]:
    drafter = make_drafter(copy.deepcopy(DRAFTS[name](model)).double(), model)
    assert isinstance(drafter, OtherDeviceDrafter) and drafter.needs_host_sync
    watched = drafter._drafter = Watched(drafter._drafter)
    return drafter, watched


WAYS: dict[str, Callable[[Drafter], Proposer]] = {
    "chain": StaticProposer,
    "tree": lambda drafter: StaticProposer(drafter, TreeShape.branching([3, 2, 1]), drawn="deterministic"),
    "dynamic": lambda drafter: DynamicProposer(drafter, top_k=3, nodes=9),
}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *(("small", way) for way in WAYS),
        ("eagle", "dynamic"),
        ("eagle3-reduced", "tree"),
        ("medusa", "tree"),
        ("dflash", "dynamic"),
    ],
)
def test_greedy_answers_are_the_targets_and_counted_alike(name: str, way: str) -> None:
    model = target()
    drafter, watched = elsewhere(name, model)
    proposer = WAYS[way](drafter)
    requests = [Request(ids, GREEDY, 0, 12, frozenset({5, 17})) for ids in prompts(4)]
    plain = dict(generate(model, None, requests))
    answers = dict(generate(model, proposer, requests, draft_tokens=3, batch_size=3))
    assert {n: answer.tokens for n, answer in answers.items()} == {n: answer.tokens for n, answer in plain.items()}
    recorded = [RecordedAnswer(one.prompt_ids, answers[n].tokens, 12) for n, one in enumerate(requests)]
    traced = trace_target(model, recorded, GREEDY, proposer.aux_layers, proposer.needs_hidden_states)
    replayed = [counted.counts for (counted,) in replay(proposer, traced, ["greedy"], [3])]
    assert replayed == [count_rounds(answers[n].rounds, 3) for n in range(len(requests))]
    assert {"begin", "open", "expand", "observe"} <= set(watched.calls)


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTS)
def test_it_drafts_what_it_would_draft_beside_the_target(name: str) -> None:
    model = target()
    requests = [Request(ids, WARM, seed, 10) for seed, ids in enumerate(prompts(3))]
    beside = dict(generate(model, make_proposer(DRAFTS[name](model), model), requests, rule="token"))
    apart = dict(generate(model, StaticProposer(elsewhere(name, model)[0]), requests, rule="token"))
    assert {index: answer.tokens for index, answer in beside.items()} == {i: one.tokens for i, one in apart.items()}
    assert {index: answer.rounds for index, answer in beside.items()} == {i: one.rounds for i, one in apart.items()}


@pytest.mark.parametrize("name", DRAFTS)
def test_nothing_of_the_targets_place_is_read_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft is on another device; an operation on tensors of both would fail."""
    kernel = SimpleNamespace(
        attend_cached=lambda query, *others, **options: query + sum(other.sum() for other in others[:5])
    )
    monkeypatch.setitem(sys.modules, "draftforge.specdec.kernels.flash_decoding", kernel)
    monkeypatch.setattr(kv_cache, "reads_lengths", lambda device: device == META)
    model = target()
    drafter = make_drafter(copy.deepcopy(DRAFTS[name](model)).to("meta"), model)
    assert isinstance(drafter, OtherDeviceDrafter)
    drafter._here = META  # from there no number comes back
    ids = [[3, 1, 4, 1, 5], [9, 2, 6]]
    drafter.reserve(2, 32, 8, 4)
    states = model.states(torch.tensor([[3, 1, 4, 1], [9, 2, 0, 0]]), aux_layers=drafter.aux_layers)
    drafter.begin(torch.tensor([0, 1]), Texts.of(ids), states)
    for tokens in ([[7], [8, 2]], [[1, 1, 1], [4]]):
        assert drafter.open(2, chain=False).device == META
        read = drafter.expand(torch.tensor([[5, 6], [7, 8]]), torch.full((2, 2), ROOT), 0)
        assert read.device == META and read.shape == (2, 2, model.vocab_size)
        drafter.expand(torch.tensor([[5], [8]]), torch.tensor([[1], [0]]), 1)
        most = max(map(len, tokens))
        drafter.observe(
            Texts.of(tokens), model.states(torch.ones(2, most, dtype=torch.long), aux_layers=drafter.aux_layers)
        )
    drafter.move(1, 0)
    along = (
        model.states(torch.tensor([[*ids[0], 2]]), aux_layers=drafter.aux_layers)
        if drafter.needs_hidden_states
        else None
    )
    for setting in (GREEDY, WARM):
        trace = drafter.trace(Pack([Text([*ids[0], 2], 3)], CPU), 2, setting, along)
        assert trace.rank_RK.device == trace.q_RK.device == META


class Stub:
    """Says on which devices its inputs are."""

    aux_layers, needs_hidden_states, nested, levels, width = (1,), True, True, None, 4

    def __init__(self) -> None:
        self.seen: list[torch.device] = []

    def begin(self, slots_R: Tensor, known: Texts, states: States) -> None:
        assert states.aux_BTA is not None
        self.seen += [slots_R.device, known.counts_B.device, states.hidden_BTH.device, states.aux_BTA.device]

    def open(self, batch: int, chain: bool) -> Tensor:
        return torch.zeros(batch, 4)

    def expand(self, tokens_BF: Tensor, parents_BF: Tensor, depth: int) -> Tensor:
        self.seen += [tokens_BF.device, parents_BF.device]
        return torch.zeros(*tokens_BF.shape, 4)

    observe = lambda self, new, states: self.begin(new.ids_BT, new, states)  # noqa: E731

    def trace(self, pack: Pack, count: int, sampling: SamplingSettings, states: States | None) -> Trace:
        assert states is not None
        self.seen += [pack.ids_BT.device]
        self.begin(META_ROW, Texts(META_ROW, META_ROW), states)
        return Trace(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1))


def test_what_crosses_in_which_direction() -> None:
    """There is the CPU, here the meta device; a draft that reads no states is sent none."""
    stub = Stub()
    drafter = OtherDeviceDrafter(stub, META, META)  # type: ignore[arg-type]
    states = States(torch.zeros(1, 1, 2), torch.zeros(1, 1, 2))
    one, slots_R = Texts.of([[1]]), torch.tensor([0])
    drafter.begin(slots_R, one, states)
    drafter.observe(one, states)
    assert drafter.open(1, chain=True).device == META
    assert drafter.expand(torch.zeros(1, 1), torch.zeros(1, 1), 0).device == META
    trace = drafter.trace(Pack([Text([1, 2], 1)], CPU), 1, GREEDY, states)
    assert {x.device for x in trace if x is not None} == {META}
    assert stub.seen == [META] * 15
    stub.needs_hidden_states, drafter.needs_hidden_states, stub.seen = False, False, []
    drafter.begin(slots_R, one, states)
    assert stub.seen == [META, META, CPU, CPU]


def tied() -> CausalModel:
    model = llama()
    model.lm_head.weight = model.model.embed_tokens.weight
    return CausalModel(model)


def storages(model: CausalModel) -> Iterator[int]:
    for module in (model._embedding, model._head):
        yield module.weight.data_ptr()  # type: ignore[operator]


@pytest.mark.parametrize("make", [target, tied], ids=["untied", "tied"])
def test_what_is_borrowed_is_copied_once_and_when_it_is_read(make: Callable[[], CausalModel]) -> None:
    model, place = make(), DraftDevice(CPU, torch.float64)
    there = remote_copy(model, place)
    assert remote_copy(model, place) is there and remote_copy(model, DraftDevice(META, torch.float32)) is not there
    ids, hidden = torch.tensor([[3, 1]]), torch.randn(2, 48)
    assert list(storages(there)) == list(storages(model))  # nothing is copied yet
    with torch.inference_mode():
        embedded = there.embed(ids)
    assert embedded.dtype == torch.float64 and torch.equal(embedded.float(), model.embed(ids))
    one, other = storages(there)
    assert one != next(storages(model)) and other == list(storages(model))[1]
    torch.testing.assert_close(there.logits(hidden.double()).float(), model.logits(hidden))
    first = list(storages(there))
    assert not set(first) & set(storages(model)) and (len(set(first)) == 1) == (make is tied)
    there.embed(ids), there.logits(hidden.double())
    assert list(storages(there)) == first
    assert model.dtype == torch.float32 and device_of(model) == (CPU, torch.float32)


def test_beside_the_target_nothing_is_between() -> None:
    model = target()
    for name, make in DRAFTS.items():
        assert not isinstance(make_drafter(make(model), model), OtherDeviceDrafter), name


def test_times_know_of_the_drafts_own_hardware() -> None:
    model = target()
    chains = [ProposerSpec(lambda: make_proposer(near_copy(model), model), (1,))]
    draft = random_eagle3(model)
    beside, apart = (cost_key(model, one, chains, ScoreSettings()) for one in (draft, copy.deepcopy(draft).to("meta")))
    assert apart.draft == {**beside.draft, "hardware": "meta"} and "hardware" not in beside.draft
    assert apart.digest != beside.digest
