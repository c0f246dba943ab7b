"""Model cards and what programs read beside them, for drafts of our making and of others'."""

import json
from pathlib import Path

import heads
import pytest
import stand_ins

from draftforge.specdec.drafts.base import DraftModule
from draftforge.specdec.formats import Format, Verifier, write_draft
from draftforge.specdec.formats.layouts import family_at, layout_of
from draftforge.specdec.model_card import DraftFacts, facts_of, write_card
from draftforge.specdec.proposers.tree_settings import StaticTree
from draftforge.specdec.serving_plan import FoundPlan, ServingPlan, find_plan
from draftforge.specdec.target_settings import TargetSettings

TARGET = TargetSettings(model="owner/model")
VERIFIER = Verifier("owner/model", ["LlamaForCausalLM"])
TREE = ServingPlan(
    draft_tokens=2, tree_name="wide", tree=StaticTree(kind="static", widths=[2, 1]), chain_tokens=3, rule="onehot"
)


def test_a_card_says_what_serves_the_draft_and_what_it_was_worth(tmp_path: Path) -> None:
    facts = DraftFacts("eagle3", "model", "ab" * 32, "drafts-ab/7", 240, 2.051, 1.187, "batch 1 on two cores")
    command = write_card(tmp_path, str(tmp_path / "there"), "vllm", FoundPlan(TREE), facts, TARGET)
    card, record = (tmp_path / "README.md").read_text(), json.loads((tmp_path / "serve.json").read_text())
    rows = dict(
        line.strip("| ").split(" | ") for line in card.splitlines() if line.startswith("| ") and " | " in line[2:-2]
    )
    assert rows == {
        "target": "model",
        "target's fingerprint": "abababababab",
        "registered version": "drafts-ab/7",
        "draft": "eagle3, step 240",
        "drafts": "tree wide, 2 levels; best chain K=3",
        "accept rule": "greedy at temperature 0, onehot above it",
        "tau on the holdout": "2.05",
        "expected speed-up": "1.19x over plain decoding (batch 1 on two cores)",
    }
    assert f"```bash\n{command.text}\n```" in card and f"- {command.notes[0]}" in card
    assert str(tmp_path / "there") in command.text
    assert find_plan(tmp_path) == FoundPlan(TREE)
    assert record["family"] == "eagle3" and record["notes"] == list(command.notes)

    # What the gate knows more, an interval and its decision, is said, and carried over to a copy's card.
    (tmp_path / "judged").mkdir()
    write_draft(heads.eagle3(), tmp_path / "judged", "vllm", 3, VERIFIER)
    more = facts._replace(speedup_interval=(1.06, 1.87), decision="refused: too few clusters to tell")
    write_card(tmp_path / "judged", str(tmp_path), "vllm", FoundPlan(TREE), more, TARGET)
    card = (tmp_path / "judged" / "README.md").read_text()
    assert "| expected speed-up | 1.19x [1.06, 1.87] over plain decoding (batch 1 on two cores) |" in card
    assert "| the gate | refused: too few clusters to tell |" in card
    record = json.loads((tmp_path / "judged" / "serve.json").read_text())
    assert (record["speedup_interval"], record["decision"]) == ([1.06, 1.87], more.decision)
    assert facts_of(tmp_path / "judged", "model").worth == more.worth

    # An engine's format has the chain that the engine drafts.
    (tmp_path / "x").mkdir()
    write_card(tmp_path / "x", str(tmp_path), "sglang", FoundPlan(TREE), facts, None)
    assert find_plan(tmp_path / "x") == FoundPlan(TREE.as_chain)


@pytest.mark.parametrize(
    ("make", "written", "layout", "family"),
    [
        (heads.eagle, "vllm", "vllm", "eagle"),
        (heads.eagle, "sglang", "sglang", "eagle"),
        (heads.eagle3, "speculators", "speculators", "eagle3"),
        (heads.dflash, "speculators", "speculators", "dflash"),
        (heads.dflash, "sglang", "vllm", "dflash"),
        (heads.medusa, "vllm", "vllm", "medusa"),
        (heads.medusa, "medusa", "medusa", "medusa"),
        (lambda: stand_ins.near_copy(stand_ins.target()), "hf", "vllm", "small"),
    ],
)
def test_somebody_elses_draft_is_known_by_its_files(
    make: type[DraftModule], written: Format, layout: Format, family: str, tmp_path: Path
) -> None:
    write_draft(make(), tmp_path, written, 3, VERIFIER)
    (tmp_path / "README.md").write_text("theirs")
    assert (layout_of(tmp_path), family_at(tmp_path)) == (layout, family)
    facts, found = facts_of(tmp_path, "model"), find_plan(tmp_path)
    assert facts == DraftFacts(family, "model") and found.assumed
    write_card(tmp_path, str(tmp_path), layout, found, facts, TARGET)
    assert (tmp_path / "README.md").read_text() == "theirs"  # their card says more than ours would
    assert find_plan(tmp_path) == found  # what was assumed stays an assumption
