"""Plans: written, read where they are carried to, and what is assumed for a draft without one."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from draftforge.errors import FormatError
from draftforge.fingerprint import file_digests, of_json
from draftforge.specdec.proposers.tree_settings import DynamicTree, MergedTree, StaticTree
from draftforge.specdec.serving_plan import (
    PLAN_FILE,
    ServingPlan,
    find_plan,
    holds_plan,
    read_plan,
    stored_plan,
    write_plan,
)

TREES = [
    None,
    StaticTree(kind="static", choices=[[0], [1], [0, 0]]),
    DynamicTree(kind="dynamic", levels=3, top_k=2, nodes=6),
]


@pytest.mark.parametrize("tree", TREES)
def test_a_plan_is_read_as_it_was_written(tmp_path: Path, tree: Any) -> None:
    name = "" if tree is None else "wide"
    plan = ServingPlan(draft_tokens=3, tree_name=name, tree=tree, chain_tokens=2, rule="onehot")
    write_plan(tmp_path, plan, {"tau": 2.5})
    assert read_plan(tmp_path) == stored_plan(tmp_path) == plan and find_plan(tmp_path).assumed == ""
    assert json.loads((tmp_path / PLAN_FILE).read_text())["tau"] == 2.5
    assert holds_plan(tmp_path, plan) and not holds_plan(tmp_path, ServingPlan.chain(3, "onehot"))
    assert str(plan) == ("K=3" if tree is None else "tree wide")
    assert plan.as_chain == ServingPlan.chain(2, "onehot")
    assert plan.prefer(["onehot", "token"]) == ["onehot", "onehot", "token"]
    assert ServingPlan.chain(2).prefer(["token"]) == ["token"]  # temperature 0 alone was scored


def test_drafts_of_a_merged_tree_travel_with_the_folder(tmp_path: Path) -> None:
    """A folder and a bare file, named by absolute paths in the recipe: the carried copy needs neither."""
    folder, file = tmp_path / "helper", tmp_path / "models" / "tiny.gguf"
    for path, text in ((folder / "config.json", "{}"), (folder / "w.safetensors", "w"), (file, "gguf")):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    tree = MergedTree.model_validate({"kind": "merged", "levels": 2, "drafts": [str(folder), str(file)]})
    plan = ServingPlan(draft_tokens=2, tree_name="both", tree=tree, chain_tokens=4)
    write_plan(tmp_path / "draft", plan)
    assert str(tmp_path) not in (tmp_path / "draft" / PLAN_FILE).read_text()

    moved = (tmp_path / "draft").rename(tmp_path / "elsewhere")
    shutil.rmtree(folder)
    file.unlink()
    found = read_plan(moved)
    assert found is not None and found.identity == plan.identity and found != plan
    assert isinstance(found.tree, MergedTree)
    assert found.tree.drafts == [moved / "parts" / "0", moved / "parts" / "1" / "tiny.gguf"]
    assert [of_json(file_digests(part)) for part in found.tree.places] == found.tree.digests == tree.digests
    assert holds_plan(moved, plan)

    write_plan(tmp_path / "again", found)  # a copy of the copy
    assert holds_plan(tmp_path / "again", plan)
    (moved / "parts" / "0" / "w.safetensors").write_text("damaged")
    assert not holds_plan(moved, plan)


@pytest.mark.parametrize(
    ("files", "K", "words"),
    [
        ({}, 4, "as nothing in it says"),
        ({"draftforge.json": {"draft_tokens": 6}}, 6, "what it was trained for"),
        (
            {
                "config.json": {"speculators_config": {"proposal_methods": [{"speculative_tokens": 5}]}},
                "draftforge.json": {"draft_tokens": 6},
            },
            5,
            "the speculative_tokens of its config.json",
        ),
        ({"config.json": {"dflash_config": {}, "block_size": 8}}, 7, "its block_size without the anchor"),
        ({"config.json": {"model_type": "medusa", "num_heads": 3}}, 3, "the number of its heads"),
        ({"config.json": {"medusa_num_heads": 2}}, 2, "the number of its heads"),
        ({"config.json": {"num_heads": 12, "block_size": 64}}, 4, "as nothing in it says"),
        ({"config.json": {"speculators_config": {"proposal_methods": []}}}, 4, "as nothing in it says"),
        ({"draftforge.json": {"draft_tokens": True}}, 4, "as nothing in it says"),
    ],
)
def test_what_is_assumed_without_a_plan(tmp_path: Path, files: dict[str, Any], K: int, words: str) -> None:
    for name, value in files.items():
        (tmp_path / name).write_text(json.dumps(value))
    found = find_plan(tmp_path)
    assert found.plan == ServingPlan.chain(K)
    assert found.assumed.startswith(f"the draft has no serve.json: K={K} is assumed, ") and words in found.assumed


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({}, "plan: Input should be"),
        ({"plan": {"draft_tokens": 0, "chain_tokens": 1}}, "plan.draft_tokens: Input should be greater"),
        ({"plan": {"draft_tokens": 1, "chain_tokens": 1, "rule": "luck"}}, "plan.rule: Input should be"),
    ],
)
def test_a_plan_that_is_none_is_named(tmp_path: Path, value: Any, words: str) -> None:
    (tmp_path / PLAN_FILE).write_text(json.dumps(value))
    with pytest.raises(FormatError) as caught:
        find_plan(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / PLAN_FILE}: ") and words in str(caught.value)
    assert not holds_plan(tmp_path, ServingPlan.chain(1))


@pytest.mark.parametrize(
    "name",
    ["{out}", "{out}/key", "../out", "/dev/zero", "pipe", "linked", "part", "parts/0", "missing", "a\0b", "ring", 5],
)
@pytest.mark.parametrize("digests", [["0"], []])
def test_a_stored_plan_names_no_draft_outside_its_folder(tmp_path: Path, name: Any, digests: list[str]) -> None:
    """A stranger's plan: nothing beside it is read or copied, whatever its merged tree names."""
    out, folder = tmp_path / "out", tmp_path / "draft"
    (out / "inner").mkdir(parents=True)
    (out / "key").write_text("private")
    (folder / "part").mkdir(parents=True)
    (folder / "parts" / "0" / "inner").mkdir(parents=True)
    (folder / "linked").symlink_to(out)
    (folder / "part" / "model.safetensors").symlink_to(out / "key")
    (folder / "parts" / "0" / "inner" / "key").symlink_to("../../../../out/key")
    (folder / "ring").symlink_to("ring")
    os.mkfifo(folder / "pipe")
    drafts = [name.format(out=out) if isinstance(name, str) else name]
    tree = {"kind": "merged", "drafts": drafts, "levels": 2, "digests": digests}
    plan = {"draft_tokens": 2, "chain_tokens": 2, "tree_name": "m", "tree": tree}
    (folder / PLAN_FILE).write_text(json.dumps({"plan": plan}))
    with pytest.raises(FormatError, match=r"serve\.json: plan\.tree.* must be ") as caught:
        find_plan(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["/dev/zero", "pipe", "choices.json", 5])
def test_a_stored_plan_names_no_file_of_a_shape(tmp_path: Path, name: Any) -> None:
    """Not one beside it either: nobody has it checked, and a pipe would never end."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "choices.json").write_text("[[0]]")
    place = str(tmp_path / name) if isinstance(name, str) else name
    plan = {"draft_tokens": 1, "chain_tokens": 1, "tree_name": "s", "tree": {"kind": "static", "file": place}}
    (tmp_path / PLAN_FILE).write_text(json.dumps({"plan": plan}))
    with pytest.raises(FormatError, match=r"serve\.json: plan\.tree\.file: .* must be absent"):
        find_plan(tmp_path)


def test_a_part_may_be_a_link_to_a_blob_of_the_hubs_cache(tmp_path: Path) -> None:
    """A snapshot of the hub's cache holds links to `blobs` beside `snapshots`; a link in `blobs` leads out again."""
    repository = tmp_path / "models--me--draft"
    folder, blobs = repository / "snapshots" / "0f", repository / "blobs"
    (folder / "parts" / "0").mkdir(parents=True)
    blobs.mkdir()
    (blobs / "1a").write_text("w")
    (folder / "parts" / "0" / "w.safetensors").symlink_to("../../../../blobs/1a")
    tree = {"kind": "merged", "drafts": ["parts/0"], "levels": 2, "digests": ["0"]}
    plan = {"draft_tokens": 2, "chain_tokens": 2, "tree_name": "m", "tree": tree}
    (folder / PLAN_FILE).write_text(json.dumps({"plan": plan}))
    assert read_plan(folder) is not None

    (tmp_path / "key").write_text("private")
    (blobs / "2b").symlink_to(tmp_path / "key")
    (folder / "parts" / "0" / "key").symlink_to("../../../../blobs/2b")
    with pytest.raises(FormatError, match="must be a file or folder inside"):
        read_plan(folder)
