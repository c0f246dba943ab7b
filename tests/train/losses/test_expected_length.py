"""Which rows make up a chain, and what a chain is worth."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from draftforge.data.batches import collate
from draftforge.train.families.ttt_alignment import Alignment
from draftforge.train.losses.expected_length import chain_loss, chains_of_runs, chains_of_steps

Alphas = st.lists(
    st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]) | st.floats(0, 1), min_size=4, max_size=4), min_size=3, max_size=3
)


class Talk:
    def __init__(self, prompt: int, answer: int) -> None:
        self.prompt_ids, self.answer_ids = list(range(prompt)), list(range(answer))


@given(alphas=Alphas, seed=st.integers(0, 1000))
def test_loss_and_slope_equal_autograd(alphas: list[list[float]], seed: int) -> None:
    alpha = torch.tensor(alphas, dtype=torch.float32, requires_grad=True)
    chains = torch.randperm(12, generator=torch.Generator().manual_seed(seed)).view(3, 4) - 3  # three rows are missing
    expected = torch.zeros(())
    for chain in chains.T.tolist():
        if chain[0] >= 0:
            product, expected = torch.ones(()), expected - 1.0
            for row in chain:
                if row < 0:
                    break
                product = product * alpha.flatten()[row]
                expected = expected - product
    found = chain_loss(alpha.detach(), chains)
    torch.testing.assert_close(found.loss_SN.sum(), expected.detach())
    (slope,) = torch.autograd.grad(expected, alpha)
    torch.testing.assert_close(found.slope_SN, slope)


def test_chains_stay_inside_their_sample() -> None:
    """Answers of 3, 1 and 2 tokens, the second after a prompt of one token: its first token has no draft."""
    batch = collate([Talk(3, 3), Talk(1, 2), Talk(2, 2)])
    at_SN, valid_SN = Alignment(batch).rows(3)
    assert at_SN.shape == (3, 7)
    step_SN = torch.arange(3)[:, None].expand(-1, 7)
    chains = chains_of_steps(step_SN, valid_SN, 3)
    assert chains.T.tolist() == [
        [0, 8, 16],  # (0, 0), (1, 1), (2, 2)
        [1, 9, -1],
        [2, -1, -1],
        [-1, -1, -1],
        [4, -1, -1],
        [5, 13, -1],
        [6, -1, -1],
    ]


def test_rows_of_blocks_make_chains_too() -> None:
    """One S, blocks side by side: steps 0 1 2, 0 1, and a block whose second row is not valid."""
    step_SN = torch.tensor([[0, 1, 2, 0, 1, 0, 1]])
    valid_SN = torch.tensor([[True, True, True, True, True, True, False]])
    assert chains_of_steps(step_SN, valid_SN, 3).T.tolist() == [
        [0, 1, 2], [-1, -1, -1], [-1, -1, -1], [3, 4, -1], [-1, -1, -1], [5, -1, -1], [-1, -1, -1],
    ]  # fmt: skip


def test_chains_of_steps_ask_for_no_values() -> None:
    """A device without values stands for a GPU that is not waited for."""
    step_SN = torch.zeros(2, 5, dtype=torch.int64, device="meta")
    assert chains_of_steps(step_SN, step_SN == 0, 2).shape == (2, 5)


def test_neighbours_make_chains_where_a_position_has_one_row() -> None:
    chains = chains_of_runs([0, 3, 3, 5], 2)
    assert chains.T.tolist() == [[0, 1], [1, 2], [2, -1], [3, 4], [4, -1]]
