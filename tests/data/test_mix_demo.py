"""The demo mix: committed as its script writes it, and split without a template on two sides."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from draftforge.data.conversation import Conversation
from draftforge.data.mix import build_mix, load_manifest, load_mix
from draftforge.data.settings import MixSettings

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "configs" / "demo"
DOMAINS = ("support", "code", "math", "writing")


@pytest.fixture(scope="module")
def mix_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo mix under the default salt and shares."""
    folder = tmp_path_factory.mktemp("demo") / "mix"
    kinds = {domain: "messages" if domain == "support" else "turns" for domain in DOMAINS}
    sources = [{"kind": kind, "path": f"{domain}.jsonl"} for domain, kind in kinds.items()]
    build_mix(MixSettings.model_validate({"sources": sources}), DEMO, folder)
    return folder


@pytest.fixture(scope="module")
def mix(mix_folder: Path) -> list[Conversation]:
    return load_mix(mix_folder)


def test_committed_files_are_what_the_script_writes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "make_demo_mix.py", tmp_path], check=True)
    assert {path.name for path in DEMO.glob("*.jsonl")} == {f"{domain}.jsonl" for domain in DOMAINS}
    for domain in DOMAINS:
        assert (tmp_path / f"{domain}.jsonl").read_bytes() == (DEMO / f"{domain}.jsonl").read_bytes()


def test_every_split_has_enough_of_every_domain(mix: list[Conversation]) -> None:
    counts = Counter((c.split, c.domain) for c in mix)
    for split in ("selection", "holdout"):
        assert counts[split, "support"] >= 30
        assert all(counts[split, domain] >= 6 for domain in DOMAINS)
    assert len(mix) >= 450 and counts["train", "support"] >= 150


def test_nothing_is_dropped_or_redacted(mix_folder: Path) -> None:
    manifest = load_manifest(mix_folder)
    assert not any(manifest["left_out"].values()) and not any(manifest["redacted"].values())


def test_no_template_lies_in_two_splits(mix: list[Conversation]) -> None:
    split_of = {(c.domain, c.messages[-1].content): c.split for c in mix}
    splits: dict[tuple[str, str], set[str]] = {}
    lines = [json.loads(text) for domain in DOMAINS for text in (DEMO / f"{domain}.jsonl").read_text().splitlines()]
    for line in lines:
        last = line["turns"][-1] if "turns" in line else line["messages"][-1]["content"]
        splits.setdefault((line["domain"], line["group"]), set()).add(split_of[line["domain"], last])
    assert all(len(found) == 1 for found in splits.values())
    assert sum(domain == "support" for domain, _ in splits) >= 50
    assert len({line["id"] for line in lines}) == len(lines)


def test_support_is_narrow_and_has_follow_ups(mix: list[Conversation]) -> None:
    support = [c for c in mix if c.domain == "support"]
    assert len({c.messages[0].content for c in support}) == 1 and support[0].messages[0].role == "system"
    assert sum(len(c.messages) == 3 for c in support) >= 20
