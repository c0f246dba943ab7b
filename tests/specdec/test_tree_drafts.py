"""What tree proposers draft, against references that read every path from its start, without cache or tree mask."""

import heapq
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from proposing import SHAPE
from stand_ins import near_copy, prompts, random_eagle3, target, taught_eagle, taught_medusa
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM

from draftforge.specdec.decoder import Request, generate
from draftforge.specdec.drafts.small import SmallDraft
from draftforge.specdec.kv_cache import KVCache
from draftforge.specdec.models import CausalModel
from draftforge.specdec.proposers.base import Ask, Draft, Proposer, Texts
from draftforge.specdec.proposers.dynamic_tree import DynamicProposer
from draftforge.specdec.proposers.factory import make_drafter, make_proposer
from draftforge.specdec.proposers.merged import MergedProposer, _one_path_each, _side_by_side
from draftforge.specdec.proposers.static_tree import StaticProposer
from draftforge.specdec.proposers.tree_shape import TreeShape
from draftforge.specdec.sampling import categorical, penalised, probabilities
from draftforge.specdec.sampling_settings import SamplingSettings
from draftforge.specdec.tree import DraftTree, TreeBatch

GREEDY = SamplingSettings()
WARM = SamplingSettings(temperature=0.8, top_k=6)
Way = tuple[int, ...]
After = Callable[[Way], Tensor]
"""Logits [V] that the draft gives after a way of drafted tokens."""


def started(proposer: Proposer, model: CausalModel, ids: list[int], levels: int) -> None:
    with torch.inference_mode():
        states = model.states(torch.tensor([ids[:-1]]), aux_layers=proposer.aux_layers)
        proposer.reserve(1, len(ids) + 1, levels)
        proposer.begin(torch.tensor([0]), Texts.of([ids]), states)


def small_after(model: CausalModel, ids: list[int]) -> tuple[Proposer, After]:
    draft = near_copy(model)

    def after(way: Way) -> Tensor:
        with torch.inference_mode():
            return draft.logits(draft(torch.tensor([[*ids, *way]]))[0, -1])

    return make_drafter(draft, model), after  # type: ignore[return-value]


def eagle3_after(model: CausalModel, ids: list[int]) -> tuple[Proposer, After]:
    """Each way is fed one token at a time, as a chain, to a cache of its own."""
    draft = random_eagle3(model)

    def after(way: Way) -> Tensor:
        with torch.inference_mode():
            states = model.states(torch.tensor([ids[:-1]]), aux_layers=draft.config.aux_layers)
            assert states.aux_BTA is not None
            cache = KVCache(1, 64, model.device)
            embeds = model.embed(torch.tensor([ids[1:]]))
            state = draft.decode(
                embeds, draft.fc(states.aux_BTA), cache.prefill(torch.tensor([0]), torch.tensor([len(ids) - 1]))
            )[:, -1:]
            for token in way:
                state = draft.decode(model.embed(torch.tensor([[token]])), state, cache.extend(1, 1))
                cache.keep(torch.tensor([1]))
            return draft.logits(state[0, 0])

    return make_drafter(draft, model), after  # type: ignore[return-value]


def eagle_after(model: CausalModel, ids: list[int]) -> tuple[Proposer, After]:
    draft = taught_eagle(model, steps=3)

    def after(way: Way) -> Tensor:
        with torch.inference_mode():
            hidden = model.states(torch.tensor([ids[:-1]])).hidden_BTH
            cache = KVCache(1, 64, model.device)
            step = cache.prefill(torch.tensor([0]), torch.tensor([len(ids) - 1]))
            state = draft.decode(model.embed(torch.tensor([ids[1:]])), hidden, step)[:, -1:]
            for token in way:
                state = draft.decode(model.embed(torch.tensor([[token]])), state, cache.extend(1, 1))
                cache.keep(torch.tensor([1]))
            return model.logits(state[0, 0])

    return make_drafter(draft, model), after  # type: ignore[return-value]


def medusa_after(model: CausalModel, ids: list[int]) -> tuple[Proposer, After]:
    draft = taught_medusa(model, heads=5, steps=3)

    def after(way: Way) -> Tensor:
        with torch.inference_mode():
            return draft.logits(model.states(torch.tensor([ids[:-1]])).hidden_BTH[0, -1], len(way))

    return make_drafter(draft, model), after  # type: ignore[return-value]


FAMILIES = {"small": small_after, "eagle": eagle_after, "eagle3": eagle3_after, "medusa": medusa_after}


def ways(tree: TreeBatch) -> list[Way]:
    """The candidates of slot 0 as ways from the root."""
    known: dict[int, Way] = {-1: ()}
    for node, (token, parent) in enumerate(zip(tree.tokens_BN[0].tolist(), tree.parents_BN[0].tolist())):
        known[node] = (*known[parent], token)
    return [known[node] for node, ok in enumerate(tree.candidate_BN[0].tolist()) if ok]


def asked(
    proposer: Proposer,
    levels: int,
    uniforms: Callable[[int], Tensor] | None = None,
    sampling: SamplingSettings | None = None,
    seen_1V: Tensor | None = None,
) -> Draft:
    sampling = sampling or (GREEDY if uniforms is None else WARM)
    with torch.inference_mode():
        return proposer.propose(Ask(torch.tensor([levels]), levels, [sampling], uniforms, seen_1V))


def seen(model: CausalModel, ids: list[int]) -> Tensor:
    marks_V = torch.zeros(model.vocab_size, dtype=torch.bool)
    marks_V[ids] = True
    return marks_V


def likeliest(after: After, levels: int) -> list[Way]:
    """The nodes of SHAPE, each the token of its rank."""
    expected: dict[Way, Way] = {(): ()}
    for choice in SHAPE.cut(levels).choices:
        above = expected[choice[:-1]]
        expected[choice] = (*above, int(after(above).argsort(descending=True)[choice[-1]]))
    return list(expected.values())[1:]


@pytest.mark.parametrize("levels", [1, 3, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_static_trees_hold_the_likeliest_tokens_of_every_rank(family: str, levels: int) -> None:
    model, ids = target(), [7, 3, 19, 4]
    drafter, after = FAMILIES[family](model, ids)
    proposer = StaticProposer(drafter, SHAPE, "deterministic")  # type: ignore[arg-type]
    started(proposer, model, ids, levels)
    assert ways(asked(proposer, levels).tree) == likeliest(after, levels)


@pytest.mark.parametrize("limit", [1, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_chain_is_the_tree_of_one_branch(family: str, limit: int) -> None:
    """Its quick way through the levels and the one of trees draft the same."""
    model, ids, drafts = target(), [7, 3, 19, 4], []
    for shape in (None, TreeShape.chain(4)):
        drafter, _ = FAMILIES[family](model, ids)
        proposer = StaticProposer(drafter, shape)  # type: ignore[arg-type]
        started(proposer, model, ids, 4)
        with torch.inference_mode():
            drafts.append(proposer.propose(Ask(torch.tensor([limit]), 4, [GREEDY], None, None)).tree)
    assert drafts[0].depth == drafts[1].depth
    assert drafts[0].candidate_BN.tolist() == drafts[1].candidate_BN.tolist()
    for field in ("tokens_BN", "parents_BN"):
        one, other = (getattr(draft, field)[draft.candidate_BN] for draft in drafts)
        assert torch.equal(one, other)


def test_where_a_draft_falls_silent_its_chain_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = target(), [7, 3, 19, 4]
    drafter, _ = small_after(model, ids)
    proposer = StaticProposer(drafter)  # type: ignore[arg-type]
    started(proposer, model, ids, 4)
    silence = torch.full((1, 1, model.vocab_size), float("-inf"))
    monkeypatch.setattr(drafter, "expand", lambda *ignored: silence)
    assert asked(proposer, 4).tree.candidate_BN.tolist() == [[True, False, False, False]]


def best_of_frontiers(after: After, top_k: int, nodes: int, levels: int) -> set[Way]:
    """EAGLE-2's tree, way by way."""
    scores: dict[Way, float] = {(): 0.0}
    frontier: list[Way] = [()]
    for _ in range(levels):
        offered: dict[Way, float] = {}
        for way in frontier:
            best = after(way).log_softmax(-1).topk(top_k)
            offered |= {(*way, t): scores[way] + v for t, v in zip(best.indices.tolist(), best.values.tolist())}
        scores |= offered
        frontier = heapq.nlargest(top_k, offered, key=lambda way: offered[way])
    del scores[()]
    return set(heapq.nlargest(nodes, scores, key=lambda way: scores[way]))


@pytest.mark.parametrize(("top_k", "nodes", "levels"), [(3, 9, 4), (4, 30, 3), (2, 2, 3), (3, 100, 2)])
@pytest.mark.parametrize("family", FAMILIES)
def test_dynamic_trees_hold_the_best_of_what_the_frontiers_offer(
    family: str, top_k: int, nodes: int, levels: int
) -> None:
    model, ids = target(), [7, 3, 19, 4]
    drafter, after = FAMILIES[family](model, ids)
    proposer = DynamicProposer(drafter, top_k, nodes)  # type: ignore[arg-type]
    started(proposer, model, ids, levels)
    drafted = ways(asked(proposer, levels).tree)
    assert set(drafted) == best_of_frontiers(after, top_k, nodes, levels)
    assert all(way[:-1] in ((), *drafted[:place]) for place, way in enumerate(drafted))  # parents first


def check_draws(draft: Draft, after: After, shape: TreeShape, sampling: SamplingSettings, u_N: Tensor) -> None:
    """Each node is drawn from the processed q of its parent, which the draft tells."""
    assert draft.q_BNV is not None and bool(draft.tree.candidate_BN.all())
    drawn_ways: dict[tuple[int, ...], Way] = {(): ()}
    for node, choice in enumerate(shape.choices):
        above = drawn_ways[choice[:-1]]
        q = probabilities(after(above), sampling)
        torch.testing.assert_close(draft.q_BNV[0, node], q, atol=1e-5, rtol=1e-4)
        rest = q.clone()
        if draft.tree.drawn == "without_replacement":
            rest[[drawn_ways[(*choice[:-1], rank)][-1] for rank in range(choice[-1])]] = 0.0
        drawn_ways[choice] = (*above, int(categorical(rest, u_N[node])))
    assert ways(draft.tree) == list(drawn_ways.values())[1:]


@pytest.mark.parametrize("drawn", ["iid", "without_replacement"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_trees_draw_from_the_processed_draft(family: str, drawn: str) -> None:
    model, ids, shape = target(), [7, 3, 19, 4], TreeShape.branching([3, 2, 1])
    drafter, after = FAMILIES[family](model, ids)
    proposer = StaticProposer(drafter, shape, drawn)  # type: ignore[arg-type]
    started(proposer, model, ids, 3)
    numbers = torch.rand(1, len(shape), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    draft = asked(proposer, 3, lambda count: numbers[:, :count])
    assert draft.tree.drawn == drawn
    check_draws(draft, after, shape, WARM, numbers[0])


@pytest.mark.parametrize("kind", ["static", "dynamic", "sampled"])
@pytest.mark.parametrize("family", ["small", "eagle3"])
def test_a_penalty_falls_on_the_text_and_on_what_is_drafted_above(family: str, kind: str) -> None:
    """Answers do not tell: under any q that is told truly they follow the target, only seldom with the draft's help."""
    model, ids, shape = target(4), [0, 40, 8, 12, 41], TreeShape.branching([3, 2, 1])
    drafter, after = FAMILIES[family](model, ids)
    penal = SamplingSettings(temperature=1.5, repetition_penalty=3.0)
    known_V = seen(model, ids)

    def text_only(way: Way) -> Tensor:
        return penalised(after(way), penal, known_V)

    def whole(way: Way) -> Tensor:
        return penalised(after(way), penal, seen(model, [*ids, *way]))

    proposer: Proposer
    if kind == "sampled":
        proposer = StaticProposer(drafter, shape)  # type: ignore[arg-type]
        started(proposer, model, ids, 3)
        numbers = torch.rand(1, len(shape), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        draft = asked(proposer, 3, lambda count: numbers[:, :count], penal, known_V[None])
        bare = SamplingSettings(temperature=1.5)
        check_draws(draft, whole, shape, bare, numbers[0])
        for other in (after, text_only):
            with pytest.raises(AssertionError):
                check_draws(draft, other, shape, bare, numbers[0])
        return
    if kind == "static":
        proposer = StaticProposer(drafter, SHAPE, "deterministic")  # type: ignore[arg-type]
    else:
        proposer = DynamicProposer(drafter, 3, 9)  # type: ignore[arg-type]
    started(proposer, model, ids, 4)
    drafted = set(ways(asked(proposer, 4, None, penal, known_V[None]).tree))
    expected, *others = (
        set(likeliest(said, 4)) if kind == "static" else best_of_frontiers(said, 3, 9, 4)
        for said in (whole, text_only, after)
    )
    assert drafted == expected and expected not in others


def test_no_more_children_than_q_has_support() -> None:
    model, ids, shape = target(), [7, 3, 19, 4], TreeShape.branching([4, 1])
    proposer = StaticProposer(make_drafter(near_copy(model), model), shape, "without_replacement")
    started(proposer, model, ids, 2)
    numbers = torch.full((1, 8), 0.5, dtype=torch.float64)
    narrow = SamplingSettings(temperature=1.0, top_k=2)
    with torch.inference_mode():
        tree = proposer.propose(Ask(torch.tensor([2]), 2, [narrow], lambda count: numbers[:, :count], None)).tree
    assert tree.candidate_BN[0].tolist() == [True, True, False, False, True, True, False, False]


def test_several_drafts_stand_side_by_side_with_their_own_q() -> None:
    model, ids = target(), [7, 3, 19, 4]
    drafts = [near_copy(model), near_copy(model, noise=0.3, seed=9)]
    merged = MergedProposer([make_proposer(draft, model) for draft in drafts])
    numbers = torch.rand(1, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    started(merged, model, ids, 3)
    draft = asked(merged, 3, lambda count: numbers[:, :count])
    assert draft.tree.parents_BN[0].tolist() == [-1, 0, 1, -1, 3, 4] and draft.q_BNV is not None
    for place, one in enumerate(drafts):
        alone = make_proposer(one, model)
        started(alone, model, ids, 3)
        mine = slice(3 * place, 3 * place + 3)
        chain = asked(alone, 3, lambda count, mine=mine: numbers[:, mine][:, :count])  # type: ignore[misc]
        assert chain.tree.tokens_BN.tolist() == draft.tree.tokens_BN[:, mine].tolist()
        assert torch.equal(draft.q_BNV[:, mine], chain.q_BNV)  # type: ignore[arg-type]


def test_chosen_drafts_that_agree_share_their_nodes() -> None:
    """Chosen siblings must differ, or a rule that looks at p alone would count a token twice; drawn ones need not."""
    model, ids = target(), [7, 3, 19, 4]
    merged = MergedProposer([make_proposer(near_copy(model), model) for _ in range(2)])
    started(merged, model, ids, 3)
    assert asked(merged, 3).tree.candidate_BN[0].tolist() == [True] * 3 + [False] * 3
    started(merged, model, ids, 3)
    numbers = torch.full((1, 6), 0.5, dtype=torch.float64)
    drawn = asked(merged, 3, lambda count: numbers[:, :count]).tree
    assert drawn.tokens_BN[0, 0] == drawn.tokens_BN[0, 3] and bool(drawn.candidate_BN.all())


@given(
    chains=st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=4, max_size=4), st.integers(0, 4)), min_size=1, max_size=4
    ),
    chosen=st.booleans(),
)
def test_merged_trees_have_each_path_once(chains: list[tuple[list[int], int]], chosen: bool) -> None:
    """As a plain trie of the drafted chains has them; where nothing is chosen the trees stay as they are."""
    parts = [TreeBatch.chains(torch.tensor([row]), torch.tensor([count]), "deterministic") for row, count in chains]
    apart = _side_by_side(parts)
    merged = _one_path_each(apart, torch.tensor([chosen]))
    if not chosen:
        assert all(torch.equal(one, other) for one, other in zip(merged[:3], apart[:3]))
        return
    assert torch.equal(merged.tokens_BN, apart.tokens_BN)
    # DraftTree refuses parents that are no candidates and siblings that repeat a token.
    depth_N = merged.ancestors_BNN[0].sum(-1) - 1
    columns = (merged.tokens_BN[0], merged.parents_BN[0], depth_N, merged.candidate_BN[0])
    tokens_N, parents_N, position_N, candidate_N = (tuple(column.tolist()) for column in columns)
    DraftTree(tokens_N, parents_N, position_N, candidate_N, "deterministic")
    trie = {tuple(row[:depth]) for row, count in chains for depth in range(1, count + 1)}
    assert sorted(ways(merged)) == sorted(trie)


@pytest.mark.slow
def test_rounds_of_merged_drafts_are_those_of_a_plain_loop() -> None:
    """Each round's chains are said anew by whole passes; the answer is walked down the trie of them."""
    model, K, limit = target(), 3, 20
    drafts = [near_copy(model, noise=0.1, seed=seed) for seed in (1, 5)]
    merged = MergedProposer([make_proposer(draft, model) for draft in drafts])
    more = 0
    for ids in prompts(3):
        ((_, plain),) = generate(model, None, [Request(ids, GREEDY, 0, limit)])
        ((_, answer),) = generate(model, merged, [Request(ids, GREEDY, 0, limit)], "greedy", K)
        rounds, emitted = list[tuple[int, int, int, int]](), 1
        while emitted < limit:
            levels, left = min(K, limit - emitted - 1), plain.tokens[emitted:]
            chains = [chain_of(draft, [*ids, *plain.tokens[:emitted]], levels) for draft in drafts]
            trie = {chain[:depth] for chain in chains for depth in range(1, levels + 1)}
            run = max(depth for depth in range(levels + 1) if not depth or tuple(left[:depth]) in trie)
            deeper = any(len(way) > run and way[:run] == tuple(left[:run]) for way in trie)
            rounds.append((len(trie), run, run + 1, run + deeper))
            more += levels < len(trie) < 2 * levels
            emitted += run + 1
        assert answer.tokens == plain.tokens
        assert [tuple(one) for one in answer.rounds] == rounds
    assert more > 3  # chains that part below the first token


def chain_of(draft: SmallDraft, ids: list[int], levels: int) -> Way:
    said: list[int] = []
    with torch.inference_mode():
        for _ in range(levels):
            said.append(int(draft.logits(draft(torch.tensor([[*ids, *said]]))[0, -1]).argmax()))
    return tuple(said)


def test_a_shallow_draft_follows_a_deeper_one_to_the_end() -> None:
    """What the deeper one had accepted is read by both, also where the answers end and room is short."""
    model = target()
    shallow = StaticProposer(make_drafter(taught_eagle(model), model), TreeShape([[0]]))
    merged = MergedProposer([make_proposer(near_copy(model, noise=0.01), model), shallow])
    requests = [Request(prompt, GREEDY, n, 11 + n % 3) for n, prompt in enumerate(prompts(6))]
    plain = dict(generate(model, None, requests, batch_size=6))
    answers = dict(generate(model, merged, requests, "greedy", 8, batch_size=6))
    assert {n: one.tokens for n, one in answers.items()} == {n: one.tokens for n, one in plain.items()}
    assert max(one.accepted for answer in answers.values() for one in answer.rounds) > 3


def test_a_dynamic_tree_offers_no_more_than_there_is() -> None:
    model = target()
    head = random_eagle3(model, draft_vocab=5)
    proposer = DynamicProposer(make_drafter(head, model), top_k=1000, nodes=9)
    request = Request(prompts(1)[0], GREEDY, 0, 12)
    ((_, answer),) = generate(model, proposer, [request], "greedy", 3)
    assert all(1 <= one.drafted <= 9 for one in answer.rounds if one.drafted)


def test_a_node_of_merged_drafts_has_the_same_place_whatever_is_asked() -> None:
    """Its place is its random number, which must not hang on how many levels the batch's other slots draft."""
    model, ids = target(), [7, 3, 19, 4]
    merged = MergedProposer([make_proposer(near_copy(model, seed=seed), model) for seed in (1, 2)])
    for levels in (3, 1):
        started(merged, model, ids, 3)
        tree = asked(merged, levels, lambda count: torch.full((1, count), 0.9, dtype=torch.float64)).tree
        expected = [place % 3 < levels for place in range(6)]
        assert tree.candidate_BN[0].tolist() == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_trees_on_a_sliding_window(kind: str) -> None:
    """A key of the tree stands elsewhere than its position; the window counts positions."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=61, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=8, sliding_window=5, initializer_range=0.4, max_position_embeddings=256,
    )  # fmt: skip
    model = CausalModel(MistralForCausalLM(config).eval())
    drafter = make_drafter(near_copy(model), model)
    proposer: Proposer = DynamicProposer(drafter, 3, 12) if kind == "dynamic" else StaticProposer(drafter, SHAPE)
    requests = [Request(ids, GREEDY, 0, 24) for ids in prompts(6)]
    plain = dict(generate(model, None, requests))
    drafted = dict(generate(model, proposer, requests, batch_size=3))
    assert [drafted[i].tokens for i in range(6)] == [plain[i].tokens for i in range(6)]
    accepted = sum(r.accepted for answer in drafted.values() for r in answer.rounds)
    assert accepted > 20
