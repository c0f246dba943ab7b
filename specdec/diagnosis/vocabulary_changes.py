"""Changes of vocabulary map, embeddings and head."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..drafts.layers import vocabulary_maps
from ..drafts.medusa import MedusaDraft
from ..drafts.small import SmallDraft
from .reading import Change, Reading, Scene, put, shared_copy

_PROJECTED, _NEAREST = 256, 8
"""Width in which rows of heads are compared, and ids that a row may have."""


def vocabulary(reading: Reading, scene: Scene) -> Iterator[Change]:
    """Vocabulary map: as ids where it was read as offsets, and the other way; from t2d; sorted; none."""
    config = reading.draft.config
    size, whole = config.draft_vocab_size, config.vocab_size
    if size >= whole:
        return
    ids = reading.draft.draft_ids.cpu()
    at = torch.arange(size)
    maps = {
        "d2t holds ids, not offsets": ids - at,
        "d2t holds offsets, not ids": ids + at,
        "ids of the draft vocabulary ascend": ids.sort().values,
        "ids of the draft vocabulary one less": ids - 1,
        "ids of the draft vocabulary one more": ids + 1,
        "the draft vocabulary is the first ids of the target's": at,
    }
    if scene.vocabulary_marks is not None and int(scene.vocabulary_marks.sum()) == size:
        maps = {"d2t follows from t2d": scene.vocabulary_marks.nonzero().flatten(), **maps}
    table = scene.target.model.get_output_embeddings().weight[:whole]
    nearest = nearest_ids(getattr(reading.draft, "lm_head", None), table)
    if nearest is not None:
        maps["d2t is not of this head, whose rows began as rows of the target's: the ids of those"] = nearest
    seen = [ids]
    for what, other in maps.items():
        fits = int(other.min()) >= 0 and int(other.max()) < whole and len(other.unique()) == size
        if not fits or any(torch.equal(other, known) for known in seen):
            continue
        seen.append(other)
        draft = shared_copy(reading.draft)
        draft.d2t, draft.t2d = (part.to(ids.device) for part in vocabulary_maps(other, size, whole))
        yield Change(what, replace(reading, draft=draft))


def nearest_ids(head: Any, table: Tensor) -> Tensor | None:
    """Id of the target's row that each row of a draft's head is nearest to by angle [size], no id twice; None: the rows
    have other sizes. A head that began as rows of the target's is near them ever after. `table`: the target's [V, H].

    Angles are those of a random projection, which keeps them well enough.
    """
    if head is None or head.weight.shape[1] != table.shape[1] or len(head.weight) >= len(table):
        return None
    width = table.shape[1]
    draw = torch.randn(width, min(width, _PROJECTED), generator=torch.Generator().manual_seed(0))
    rows, others = (
        nn.functional.normalize(weight.detach().float() @ draw.to(weight.device), dim=1).cpu()
        for weight in (head.weight, table)
    )
    found = [(part @ others.T).topk(_NEAREST, dim=1) for part in torch.split(rows, 1024)]
    near, ids = (torch.cat([getattr(one, name) for one in found]) for name in ("values", "indices"))
    # The surest rows choose first; one whose nearest ids are all taken gets one that is left.
    taken, chosen = set[int](), [-1] * len(ids)
    for row in near[:, 0].argsort(descending=True).tolist():
        free = [one for one in ids[row].tolist() if one not in taken]
        if free:
            chosen[row] = free[0]
            taken.add(free[0])
    left = (one for one in range(len(table)) if one not in taken)
    return torch.tensor([next(left) if one < 0 else one for one in chosen])


def lent(reading: Reading, scene: Scene) -> Iterator[Change]:
    """The target's embeddings, head or both in the place of the draft's own."""
    draft, target = reading.draft, scene.target
    embeddings = _table(draft, "embed_tokens")
    rows = getattr(draft, "draft_ids", None)
    table: Tensor = target.model.get_input_embeddings().weight
    head: Tensor = target.model.get_output_embeddings().weight
    head = head if rows is None else head[rows.to(head.device)]
    fits_table = embeddings is not None and embeddings.shape == table.shape
    heads = _head_modules(draft)
    fits_head = bool(heads) and all(one.weight.shape == head.shape for one in heads)
    for with_table, with_head in ((True, False), (False, True), (True, True)):
        if (with_table and not fits_table) or (with_head and not fits_head):
            continue
        other = shared_copy(draft)
        if with_table:
            put(_embedding_module(other), "weight", table.detach())
        if with_head:
            for one in _head_modules(other):
                put(one, "weight", head.detach())
        names = [name for name, wanted in (("embeddings", with_table), ("head", with_head)) if wanted]
        yield Change(
            f"the target's {' and '.join(names)}, not those of the draft's file", replace(reading, draft=other)
        )


def _embedding_module(draft: Any) -> Any:
    return draft.model.get_input_embeddings() if isinstance(draft, SmallDraft) else getattr(draft, "embed_tokens", None)


def _table(draft: Any, name: str) -> Tensor | None:
    module = _embedding_module(draft)
    return None if module is None else module.weight


def _head_modules(draft: Any) -> list[Any]:
    if isinstance(draft, SmallDraft):
        return [draft.model.get_output_embeddings()]
    if isinstance(draft, MedusaDraft):
        return list(draft.lm_heads)
    head = getattr(draft, "lm_head", None)
    return [] if head is None else [head]


def tied(reading: Reading, scene: Scene) -> Iterator[Change]:
    """The draft's own embeddings as its head, and its head as its embeddings."""
    embeddings, heads = _table(reading.draft, "embed_tokens"), _head_modules(reading.draft)
    if embeddings is None or not heads or any(one.weight.shape != embeddings.shape for one in heads):
        return
    draft = shared_copy(reading.draft)
    for one in _head_modules(draft):
        one.weight = nn.Parameter(embeddings.detach(), requires_grad=False)
    yield Change("the head is the embeddings (tie_word_embeddings true)", replace(reading, draft=draft))
    draft = shared_copy(reading.draft)
    put(_embedding_module(draft), "weight", heads[0].weight.detach())
    yield Change("the embeddings are the head (tie_word_embeddings true)", replace(reading, draft=draft))


def scaled(reading: Reading, scene: Scene) -> Iterator[Change]:
    """Embeddings scaled before the head reads them, as Gemma does by the root of its width."""
    table = _table(reading.draft, "embed_tokens")
    weight = scene.target.model.get_input_embeddings().weight if table is None else table
    root = math.sqrt(weight.shape[1])
    for factor in (root, 1 / root):
        draft = shared_copy(reading.draft)
        if table is None:
            draft.embed_tokens = nn.Embedding(weight.shape[0], weight.shape[1], device="meta")
            draft.embed_tokens.weight = nn.Parameter(weight.detach() * factor, requires_grad=False)
        else:
            put(draft.embed_tokens, "weight", table * factor)
        yield Change(f"embeddings times {factor:.4g}", replace(reading, draft=draft))


def tokenizer(reading: Reading, scene: Scene) -> Iterator[Change]:
    """Rows of embeddings and head in the order of the draft's own tokenizer, put into the target's."""
    ids, draft = scene.own_ids, shared_copy(reading.draft)
    if ids is None or getattr(getattr(draft, "config", None), "draft_vocab_size", len(ids)) != len(ids):
        return
    known = (ids >= 0).nonzero().flatten()
    modules = [module for module in (_embedding_module(draft), *_head_modules(draft)) if module is not None]
    for module in modules:
        weight = module.weight.detach().clone()
        weight[ids[known]] = module.weight.detach()[known]
        put(module, "weight", weight)
    if modules:
        yield Change(
            "rows of embeddings and head follow the draft's own tokenizer, not the target's",
            replace(reading, draft=draft),
        )
