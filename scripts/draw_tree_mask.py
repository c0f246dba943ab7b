"""Draw a drafted tree, its attention mask and the cache before and after the round: docs/tree-mask.svg.

Usage: python scripts/draw_tree_mask.py [FILE]

Only the words are made up. Which cell is filled, every position, the accepted path and what the cache holds are read
from the decoder's own code: a TreeBatch, a step of a KVCache, and the verdict of rule `greedy`.

Shapes: N drafted nodes, M = N + 1 entries of the pass (the last token, the nodes), L cached positions.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from draftforge.specdec.kv_cache import CacheStep, KVCache
from draftforge.specdec.proposers.tree_shape import ROOT
from draftforge.specdec.tree import DraftTree, TreeBatch
from draftforge.specdec.verify_batch import verify_batch

FILE = Path(__file__).resolve().parent.parent / "docs" / "tree-mask.svg"
PAST = ["The", "cat", "sat"]
LAST = "on"
NODES = ["the", "a", "mat", "sofa", "warm", "and"]
PARENTS = [ROOT, ROOT, 0, 0, 1, 2]
SAYS = {"on": "the", "the": "sofa"}
"""What the target finds likeliest after a word; after any other, a full stop."""

CELL, LEFT, TOP = 36, 470, 88
WIDTH, HEIGHT = 868, 474
INK, GREY, LINE, PAPER = "#1f2328", "#59636e", "#d0d7de", "#ffffff"
SEEN_PAST, SEEN_TREE, KEPT = "#b6d4f0", "#3b78b8", "#d9822b"


class Scene(NamedTuple):
    """One round, as the decoder's code has it."""

    tree: TreeBatch
    visible_ML: list[list[bool]]
    positions_M: list[int]
    kept: list[int]
    """Entries of the accepted path, the last token first."""
    before: list[str]
    """Words whose keys the cache holds after the pass, and after the round."""
    after: list[str]


def play() -> Scene:
    """One round over `PAST` in the cache and `LAST` emitted."""
    tree = TreeBatch.of([DraftTree.of(range(len(NODES)), PARENTS, "deterministic")])
    cache = KVCache(1, len(PAST) + 1 + len(NODES), torch.device("cpu"))
    _write(cache, cache.prefill(torch.tensor([0]), torch.tensor([len(PAST)])), range(len(PAST)))
    step = cache.branch(*tree.below_one_root())
    assert step.visible_BNL is not None and step.positions_BN is not None
    _write(cache, step, range(len(PAST), cache.capacity))
    before = _words(cache, cache.capacity)
    logits_1MV = torch.zeros(1, len(NODES) + 1, len(NODES) + 1)
    for entry, word in enumerate([LAST, *NODES]):
        logits_1MV[0, entry, NODES.index(SAYS[word]) if word in SAYS else len(NODES)] = 1.0
    nothing = torch.zeros(1, 0)
    verdict = verify_batch("greedy", logits_1MV, None, tree, nothing, nothing)
    kept = [0, *(node + 1 for node in verdict.path_BD[0].tolist() if node >= 0)]
    cache.keep_path(torch.tensor([kept]), torch.tensor([len(kept)]))
    after = _words(cache, int(cache.lengths_S[0]))
    return Scene(tree, step.visible_BNL[0].tolist(), step.positions_BN[0].tolist(), kept, before, after)


def _write(cache: KVCache, step: CacheStep, words: range) -> None:
    key_BGND = torch.tensor([*words], dtype=torch.float32)[None, None, :, None]
    cache.write(0, step, key_BGND, key_BGND)


def _words(cache: KVCache, length: int) -> list[str]:
    keys_L: list[float] = cache.read(0, 1, length)[0].flatten().tolist()
    return [[*PAST, LAST, *NODES][int(key)] for key in keys_L]


def draw(scene: Scene) -> str:
    """The whole picture, on paper of its own so that it reads on any page."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="system-ui, Segoe UI, DejaVu Sans, sans-serif" font-size="13" text-anchor="middle">',
        "<title>A drafted tree, what each of its nodes sees, and the cache before and after the round</title>",
        _box(0.5, 0.5, WIDTH - 1, HEIGHT - 1, PAPER, LINE, radius=8),
        *_tree(scene),
        *_mask(scene),
        *_cache(scene),
        *_legend(),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _tree(scene: Scene) -> list[str]:
    parents, across = scene.tree.parents_BN[0].tolist(), list(_across(scene.tree.parents_BN[0].tolist()))
    places = [(120 + 90 * x, TOP + 24 + 70 * (position - len(PAST))) for x, position in zip(across, scene.positions_M)]
    parts = [_text(190, 34, "The draft: a tree below the last token", weight=600)]
    for node, parent in enumerate(parents):
        (x1, y1), (x2, y2) = places[parent + 1], places[node + 1]
        stroke, width = (KEPT, 3) if node + 1 in scene.kept else (GREY, 1)
        parts.append(f'<path d="M{x1:g} {y1 + 15:g}L{x2:g} {y2 - 15:g}" stroke="{stroke}" stroke-width="{width}"/>')
    for entry, (word, (x, y)) in enumerate(zip([LAST, *NODES], places)):
        stroke, width = (KEPT, 3) if entry in scene.kept else (GREY, 1)
        parts.append(_box(x - 32, y - 15, 64, 30, PAPER, stroke, width, radius=15))
        parts.append(_text(x, y + 4.5, word))
    return parts


def _across(parents: list[int]) -> Iterator[float]:
    """Where each entry stands on its level: leaves side by side, a parent in the middle of its children."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    leaves = iter(range(len(parents)))

    def place(node: int) -> float:
        below = [place(child) for child in children.get(node, ())]
        across[node] = sum(below) / len(below) if below else float(next(leaves))
        return across[node]

    across: dict[int, float] = {}
    place(ROOT)
    return (across[node] for node in (ROOT, *range(len(parents))))


def _mask(scene: Scene) -> list[str]:
    columns, rows = [*PAST, LAST, *NODES], [LAST, *NODES]
    parts = [_text(LEFT + CELL * len(columns) / 2, 34, "The mask: what each row's query sees", weight=600)]
    parts += [_text(LEFT + CELL * (c + 0.5), TOP - 26, word, size=12) for c, word in enumerate(columns)]
    parts += [_text(LEFT + CELL * (c + 0.5), TOP - 10, str(c), GREY, 11) for c in range(len(columns))]
    parts.append(_text(LEFT - 12, TOP - 10, "cached at", GREY, 11, anchor="end"))
    for r, (word, position) in enumerate(zip(rows, scene.positions_M)):
        y = TOP + CELL * r
        parts.append(_text(LEFT - 12, y + 16, word, anchor="end"))
        parts.append(_text(LEFT - 12, y + 30, f"position {position}", GREY, 11, anchor="end"))
        for c, seen in enumerate(scene.visible_ML[r]):
            fill = PAPER if not seen else SEEN_PAST if c < len(PAST) else SEEN_TREE
            parts.append(_box(LEFT + CELL * c, y, CELL, CELL, fill, LINE))
    return parts


def _cache(scene: Scene) -> list[str]:
    y, kept = HEIGHT - 96, {len(PAST) + entry for entry in scene.kept}
    parts: list[str] = []
    for title, words, top in (("keys after the pass", scene.before, y), ("keys after the round", scene.after, y + 46)):
        parts.append(_text(LEFT - 12, top + 20, title, anchor="end", weight=600))
        for place, word in enumerate(words):
            stays = place in kept if words is scene.before else place >= len(PAST)
            stroke, width = (KEPT, 3) if stays else (LINE, 1)
            parts.append(_box(LEFT + CELL * place + 1.5, top, CELL - 3, 30, PAPER, stroke, width, radius=4))
            parts.append(_text(LEFT + CELL * place + CELL / 2, top + 19, word, size=11))
    return parts


def _legend() -> list[str]:
    parts: list[str] = []
    swatches = [
        (SEEN_PAST, LINE, 1, "sees: the text so far"),
        (SEEN_TREE, LINE, 1, "sees: the tree"),
        (PAPER, KEPT, 3, "accepted"),
    ]
    for row, (fill, stroke, line, label) in enumerate(swatches):
        y = HEIGHT - 98 + 28 * row
        parts += [_box(40, y, 18, 18, fill, stroke, line), _text(70, y + 14, label, anchor="start")]
    return parts


def _box(
    x: float, y: float, width: float, height: float, fill: str, stroke: str, line: float = 1, radius: float = 0
) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" fill="{fill}" '
        f'stroke="{stroke}" stroke-width="{line:g}"/>'
    )


def _text(
    x: float, y: float, text: str, fill: str = INK, size: int = 13, anchor: str = "middle", weight: int = 400
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{fill}" font-size="{size}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{text}</text>'
    )


def main(file: Path) -> None:
    """Write the picture."""
    file.write_text(draw(play()), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw a tree and its mask.")
    parser.add_argument("file", type=Path, nargs="?", default=FILE, help="where; default: docs/tree-mask.svg")
    main(parser.parse_args().file)
