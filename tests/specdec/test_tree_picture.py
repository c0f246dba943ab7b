"""The picture of a tree and its mask in docs/ is what the decoder's code does now."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from draftforge.specdec.kv_cache import KVCache
from draftforge.specdec.tree import TreeBatch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_tree_mask", ROOT / "scripts" / "draw_tree_mask.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_picture_is_what_the_script_draws(script: ModuleType, tmp_path: Path) -> None:
    script.main(tmp_path / "drawn.svg")
    assert (tmp_path / "drawn.svg").read_text() == (ROOT / "docs" / "tree-mask.svg").read_text()
    assert "](tree-mask.svg)" in (ROOT / "docs" / "decoder.md").read_text()


def test_it_shows_what_each_entry_sees_and_what_stays(script: ModuleType) -> None:
    scene = script.play()
    past = len(script.PAST)
    ways = {-1: {0}}
    for node, parent in enumerate(script.PARENTS):
        ways[node] = {*ways[parent], node + 1}
    for entry, visible_L in enumerate(scene.visible_ML):
        assert {place for place, seen in enumerate(visible_L) if seen} == {
            *range(past),
            *(past + e for e in ways[entry - 1]),
        }
        assert scene.positions_M[entry] == past + len(ways[entry - 1]) - 1
    assert scene.before == [*script.PAST, script.LAST, *script.NODES]
    assert scene.after == [*script.PAST, "on", "the", "sofa"] != scene.before[: len(scene.after)]


@pytest.mark.parametrize("broken", ["mask", "compaction"])
def test_another_mask_or_cache_draws_another_picture(
    broken: str, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = script.draw(script.play())
    if broken == "mask":
        depths, lower = TreeBatch.below_one_root, torch.ones(1, 7, 7, dtype=torch.bool).tril()
        monkeypatch.setattr(TreeBatch, "below_one_root", lambda tree: (depths(tree)[0], lower))
    else:
        monkeypatch.setattr(KVCache, "keep_path", lambda cache, path_BD, counts: cache.keep(counts))
    assert script.draw(script.play()) != before
