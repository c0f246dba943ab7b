"""Objectives against enumeration: values and gradients; unbiased estimates from the stored signals."""

import itertools

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftforge.data.teacher_logprobs import Signals, teacher_signals
from draftforge.train.losses.objectives import (
    OBJECTIVES,
    Entries,
    LogProbsAt,
    acceptance,
    draft_index,
    live_entries,
    stored_entries,
    weighted_loss,
)
from draftforge.train.losses.schedule import FULL

V = 12
Logits = st.lists(st.floats(-8, 8), min_size=V, max_size=V).map(lambda row: torch.tensor([row], dtype=torch.float64))
Subset = st.sets(st.integers(0, V - 1), min_size=1).map(lambda ids: torch.tensor(sorted(ids)))


def live(logits: Tensor, draft_ids: Tensor | None = None) -> Entries:
    """What a live target's head says, cut to the draft's vocabulary."""
    kept = logits if draft_ids is None else logits[:, draft_ids]
    return live_entries(kept, logits.float().logsumexp(-1), draft_index(logits.argmax(-1), draft_ids))


def assume_one_likeliest(logits: Tensor) -> None:
    """A tie for the likeliest token may be broken either way."""
    assume(bool(logits.topk(2).values.diff().abs() > 1e-4))


def by_enumeration(name: str, p: Tensor, q: Tensor) -> Tensor:
    """The table of definitions, term by term over the draft's vocabulary."""
    terms = range(len(q))
    if name == "kl":
        return sum(p[v] * (p[v].log() - q[v].log()) for v in terms)  # type: ignore[return-value]
    if name == "tv":
        return 1 - sum(torch.minimum(p[v], q[v]) for v in terms)  # type: ignore[return-value]
    if name == "reverse_kl":
        return sum(q[v] * (q[v].log() - p[v].log()) for v in terms)  # type: ignore[return-value]
    if name == "jsd":
        m = [(p[v] + q[v]) / 2 for v in terms]
        of_p = sum(p[v] * (p[v].log() - m[v].log()) for v in terms)
        of_q = sum(q[v] * (q[v].log() - m[v].log()) for v in terms)
        return (of_p + of_q) / 2  # type: ignore[return-value]
    alpha = sum(torch.minimum(p[v], q[v]) for v in terms)
    if name == "lk":
        return -torch.as_tensor(alpha).log()
    if name == "lk_hybrid":
        share = float(torch.exp(-3.0 * torch.as_tensor(alpha.detach())))  # type: ignore[union-attr]
        return share * by_enumeration("kl", p, q) + (1 - share) * (1 - alpha)
    return -q[int(p.argmax())].log()


@given(Logits, Logits)
def test_live_objectives_equal_enumeration(target: Tensor, draft: Tensor) -> None:
    assume((target.softmax(-1) - draft.softmax(-1)).abs().min() > 1e-5)  # tv has no gradient where p = q
    assume_one_likeliest(target)
    entries = live(target)
    for name, objective in OBJECTIVES.items():
        ours = draft.clone().requires_grad_()
        value = objective(entries, ours.log_softmax(-1)).sum()
        theirs = draft.clone().requires_grad_()
        expected = by_enumeration(name, target.float().double().softmax(-1)[0], theirs.softmax(-1)[0])
        torch.testing.assert_close(value.double(), expected, atol=1e-5, rtol=1e-4)
        (gradient,), (wanted,) = torch.autograd.grad(value, ours), torch.autograd.grad(expected, theirs)
        torch.testing.assert_close(gradient, wanted, atol=1e-5, rtol=1e-4)


@given(Logits, st.data())
def test_mass_outside_a_reduced_vocabulary_counts_as_rejected(target: Tensor, data: st.DataObject) -> None:
    ids = data.draw(Subset)
    draft = torch.tensor([data.draw(st.lists(st.floats(-8, 8), min_size=len(ids), max_size=len(ids)))])
    entries, logq = live(target, ids), draft.log_softmax(-1)
    p, q = target.float().softmax(-1)[0], draft.softmax(-1)[0]
    alpha = sum(float(torch.minimum(p[token], q[place])) for place, token in enumerate(ids.tolist()))
    assert abs(float(acceptance(entries, logq)) - alpha) < 1e-5
    assert float(acceptance(entries, logq)) <= float(p[ids].sum()) + 1e-5  # the ceiling
    assert abs(float(OBJECTIVES["tv"](entries, logq)) - (1 - alpha)) < 1e-5
    draft.requires_grad_()
    (gradient,) = torch.autograd.grad(OBJECTIVES["kl"](entries, draft.log_softmax(-1)).sum(), draft)
    wanted = p[ids].sum() * q - p[ids]  # p is not renormalised over the subset
    torch.testing.assert_close(gradient[0], wanted, atol=1e-5, rtol=1e-4)


@given(Logits, st.data())
def test_objectives_of_overlap_on_a_reduced_vocabulary(target: Tensor, data: st.DataObject) -> None:
    """The draft gives nothing to tokens outside; p keeps its mass there."""
    ids = data.draw(Subset)
    draft = torch.tensor([data.draw(st.lists(st.floats(-8, 8), min_size=len(ids), max_size=len(ids)))])
    entries, logq = live(target, ids), draft.log_softmax(-1)
    p, q = target.float().softmax(-1)[0].double(), torch.zeros(V, dtype=torch.float64)
    q[ids] = draft.double().softmax(-1)[0]
    m = (p + q) / 2
    expected = 0.5 * ((p * (p / m).log()).sum() + torch.special.xlogy(q, q / m).sum())
    torch.testing.assert_close(OBJECTIVES["jsd"](entries, logq)[0].double(), expected, atol=1e-5, rtol=1e-4)
    overlap = torch.minimum(p, q).sum()
    torch.testing.assert_close(OBJECTIVES["lk"](entries, logq)[0].double(), -overlap.log(), atol=1e-5, rtol=1e-4)
    assert -1e-6 <= float(OBJECTIVES["jsd"](entries, logq)) <= 0.6932


def test_lk_hybrid_turns_from_kl_to_tv() -> None:
    target = torch.tensor([[9.0, 0.0, 0.0]])
    entries, far, near = live(target), torch.tensor([[-9.0, 9.0, 0.0]]), target * 1.01
    for draft, name in ((far, "kl"), (near, "tv")):
        logq = draft.log_softmax(-1).requires_grad_()
        (found,) = torch.autograd.grad(weighted_loss({"lk_hybrid": 1.0}, entries, logq, eta=50.0).sum(), logq)
        (wanted,) = torch.autograd.grad(OBJECTIVES[name](entries, logq).sum(), logq)
        torch.testing.assert_close(found, wanted, atol=1e-2, rtol=1e-2)


def test_ce_is_silent_where_the_draft_cannot_say_the_token() -> None:
    target = torch.tensor([[0.0, 5.0, 1.0], [5.0, 0.0, 1.0]])
    draft = torch.zeros(2, 2, requires_grad=True)
    entries = live(target, torch.tensor([0, 2]))
    assert entries.best_N.tolist() == [-1, 0]
    loss = OBJECTIVES["ce"](entries, draft.log_softmax(-1))
    (gradient,) = torch.autograd.grad(loss.sum(), draft)
    assert loss[0] == 0 and gradient[0].abs().sum() == 0 and gradient[1].abs().sum() > 0


@given(Logits, Logits)
def test_signals_that_cover_the_vocabulary_are_exact(target: Tensor, draft: Tensor) -> None:
    assume_one_likeliest(target)
    signals = teacher_signals(target.float(), torch.tensor([0]), torch.rand(1, 3), top_k=V)
    entries, ids = stored_entries(signals)
    logq = draft.float().log_softmax(-1)
    exact = live(target)
    for name in OBJECTIVES.keys() - FULL:
        objective = OBJECTIVES[name]
        torch.testing.assert_close(
            objective(entries, logq.gather(-1, ids)), objective(exact, logq), atol=2e-4, rtol=1e-3
        )


def test_stored_estimates_are_unbiased() -> None:
    """The mean over every possible pair of tail draws, weighted by its probability, is the exact value."""
    torch.manual_seed(0)
    target, draft = torch.randn(1, V) * 2, torch.randn(1, V) * 2
    p, logp, logq = target.softmax(-1)[0], target.log_softmax(-1)[0], draft.log_softmax(-1)
    top = p.topk(4).indices
    tail = [token for token in range(V) if token not in top.tolist()]
    mass = p[tail].sum()
    mean = dict.fromkeys(OBJECTIVES.keys() - FULL, 0.0)
    for pair in itertools.product(tail, repeat=2):
        signals = Signals(
            logp_n=logp[:1],
            topk_ids_nk=top[None].int(),
            topk_logp_nk=logp[top][None],
            tail_logmass_n=mass.log()[None],
            tail_ids_nM=torch.tensor([pair], dtype=torch.int32),
            tail_logp_nM=logp[list(pair)][None],
        )
        entries, ids = stored_entries(signals)
        for name in mean:
            estimate = OBJECTIVES[name](entries, logq.gather(-1, ids))
            mean[name] += float(p[list(pair)].prod() / mass**2 * estimate)
    for name, value in mean.items():
        assert abs(value - float(by_enumeration(name, p, logq.exp()[0]))) < 1e-5, name


def test_without_tail_draws_the_top_k_stands_alone() -> None:
    """As with a reduced vocabulary: the sums over the top k, p not renormalised."""
    torch.manual_seed(0)
    logp, logq = (torch.randn(2, V) * 2).log_softmax(-1), torch.randn(2, V).log_softmax(-1)
    best, ids_2k = logp.topk(4)
    none = torch.empty(2, 0)
    tail = (1 - best.exp().sum(-1)).log()
    entries, ids = stored_entries(Signals(logp[:, 0], ids_2k.int(), best, tail, none.int(), none))
    assert torch.equal(ids, ids_2k)
    q = logq.gather(-1, ids)
    torch.testing.assert_close(OBJECTIVES["kl"](entries, q), (best.exp() * (best - q)).sum(-1))
    torch.testing.assert_close(OBJECTIVES["tv"](entries, q), 1 - torch.minimum(best, q).exp().sum(-1))
    torch.testing.assert_close(OBJECTIVES["ce"](entries, q), -q[:, 0])


def test_an_empty_tail_weighs_nothing() -> None:
    certain = torch.full((1, 64), -torch.inf)
    certain[0, 3] = 0.0
    entries, ids = stored_entries(teacher_signals(certain, torch.tensor([3]), torch.rand(1, 2), top_k=2))
    logq = torch.randn(1, 64).log_softmax(-1)
    value = OBJECTIVES["kl"](entries, logq.gather(-1, ids))
    torch.testing.assert_close(value, -logq[:, 3])


@settings(max_examples=50)
@given(st.integers(0, 10_000))
def test_log_probs_at_equals_log_softmax_and_gather(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, V, generator=generator, dtype=torch.float64) * 5
    ids = torch.randint(V, (3, 5), generator=generator)  # with repetitions
    weights = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    plain, ours = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    expected = plain.log_softmax(-1).gather(-1, ids)
    found, top = LogProbsAt.apply(ours, ids)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(top, logits.amax(-1))
    (wanted,) = torch.autograd.grad((expected * weights).sum(), plain)
    (gradient,) = torch.autograd.grad((found * weights).sum(), ours)
    torch.testing.assert_close(gradient, wanted)


def test_no_overlap_at_all_stays_finite() -> None:
    target, draft = torch.zeros(1, V), torch.zeros(1, V)
    target[0, 0], draft[0, 1] = 500.0, 500.0
    target[0, 2] = -torch.inf
    draft.requires_grad_()
    loss = weighted_loss(dict.fromkeys(OBJECTIVES, 1.0), live(target), draft.log_softmax(-1)).sum()
    (gradient,) = torch.autograd.grad(loss, draft)
    assert bool(loss.isfinite()) and bool(gradient.isfinite().all())
