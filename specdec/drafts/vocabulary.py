"""Which tokens of the target a draft can say: `d2t` and `t2d`, as checkpoints store them.

Shapes: V target vocabulary, Vd draft vocabulary.
"""

import torch
from torch import Tensor


def vocabulary_maps(draft_ids: Tensor | None, draft_size: int, size: int) -> tuple[Tensor, Tensor]:
    """d2t [Vd], what to add to a draft id; t2d [V], which ids the draft knows. `draft_ids` [Vd]; None: all of them."""
    ids = torch.arange(draft_size) if draft_ids is None else draft_ids.long().cpu()
    known = torch.zeros(size, dtype=torch.bool)
    known[ids] = True
    return ids - torch.arange(draft_size), known


def ids_of(d2t: Tensor) -> Tensor:
    """[Vd] target id of each draft id."""
    return d2t + torch.arange(len(d2t), device=d2t.device)
