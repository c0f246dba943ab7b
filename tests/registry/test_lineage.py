"""Lineage: records survive the registry, ancestors are walked, training clusters are checked against a holdout."""

from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from draftforge.errors import CorruptDataError, RegistryError
from draftforge.registry import lineage
from draftforge.registry.connect import Tracking
from draftforge.registry.lineage import (
    CLUSTERS_NAME,
    LINEAGE_TAG,
    Lineage,
    Version,
    ancestors,
    clusters_file,
    get_version,
    git_commit,
    holdout_overlap,
    training_clusters,
)
from draftforge.specdec.serving_plan import ServingPlan

Register = Callable[..., Version]
OLD_TARGET, NEW_TARGET = "b" * 64, "c" * 64


def test_record_survives_the_registry(tracking: Tracking, register: Register) -> None:
    version = register("one", plan=ServingPlan.chain(3), git_commit="abc")
    again = get_version(tracking, version.reference)
    assert again == version and again.uri == f"models:/{version.name}/1"
    assert set(again.lineage.files) == {"config.json", "model.safetensors", "nested/chat_template.jinja"}
    assert again.lineage.plan == ServingPlan.chain(3) and again.lineage.git_commit == "abc"
    tags = tracking.client.get_model_version(version.name, "1").tags
    assert tags["draftforge.mix"] == "1" * 64 and tags["draftforge.counts"] == "3" * 64
    stored = tracking.client.list_artifacts(version.run_id, version.lineage.folder)
    assert {entry.path.rpartition("/")[2] for entry in stored} == {"lineage.json", CLUSTERS_NAME}


def test_records_of_later_versions_are_read(register: Register) -> None:
    record = register().lineage
    assert Lineage.model_validate(record.model_dump() | {"a_new_field": 1}) == record
    with pytest.raises(ValidationError, match="target_fingerprint"):
        Lineage.model_validate(record.model_dump() | {"target_fingerprint": "short"})


def test_ancestors_across_targets(tracking: Tracking, register: Register) -> None:
    grandparent = register("one", OLD_TARGET, ("a", "b"))
    parent = register("two", OLD_TARGET, ("c",), parent=grandparent.reference)
    child = register("three", NEW_TARGET, ("d",), parent=parent.reference)
    assert list(ancestors(tracking, child)) == [parent, grandparent]
    assert list(ancestors(tracking, grandparent)) == []
    assert holdout_overlap(tracking, child, ["x", "a", "c", "d"]) == 3
    assert holdout_overlap(tracking, parent, ["x", "d"]) == 0


def test_deleted_parent_is_said(tracking: Tracking, register: Register) -> None:
    parent = register("one")
    child = register("two", parent=parent.reference)
    tracking.client.delete_model_version(parent.name, str(parent.number))
    with pytest.raises(RegistryError, match=f"its parent {parent.reference} cannot be read"):
        holdout_overlap(tracking, child, ["a"])


def test_circle_of_ancestors_ends(tracking: Tracking, register: Register) -> None:
    first = register("one")
    second = register("two", parent=first.reference)
    looped = first.lineage.model_copy(update={"parent": second.reference}).model_dump_json()
    tracking.client.set_model_version_tag(first.name, "1", LINEAGE_TAG, looped)
    with pytest.raises(RegistryError, match="circle"):
        list(ancestors(tracking, second))


def test_a_line_of_ancestors_ends(tracking: Tracking, register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage, "_MOST_ANCESTORS", 2)
    versions = [register("one")]
    for word in ("two", "three", "four"):
        versions.append(register(word, parent=versions[-1].reference))
    assert len(list(ancestors(tracking, versions[2]))) == 2
    with pytest.raises(RegistryError, match="more than 2 ancestors"):
        list(ancestors(tracking, versions[3]))


def test_clusters_are_hashed_and_checked(tracking: Tracking, register: Register) -> None:
    assert clusters_file(["b", "a", "a"]) == clusters_file(("a", "b"))
    assert b"secret" not in clusters_file(["secret cluster"])
    version = register("one", clusters=("a", "b"))
    assert len(training_clusters(tracking, version)) == 2
    tracking.client.log_text(version.run_id, "0" * 16 + "\n", f"{version.lineage.folder}/{CLUSTERS_NAME}")
    with pytest.raises(CorruptDataError, match="recorded digest"):
        training_clusters(tracking, version)


def test_versions_of_others_are_named(tracking: Tracking, register: Register) -> None:
    version = register()
    tracking.client.delete_model_version_tag(version.name, "1", LINEAGE_TAG)
    with pytest.raises(RegistryError, match="not registered by draftforge"):
        get_version(tracking, version.reference)
    tracking.client.set_model_version_tag(version.name, "1", LINEAGE_TAG, '{"family": "small"}')
    with pytest.raises(RegistryError, match=r"tag draftforge\.lineage: target_fingerprint"):
        get_version(tracking, version.reference)
    with pytest.raises(RegistryError, match="must read name/number"):
        get_version(tracking, "latest")


def test_commit_is_of_this_checkout() -> None:
    has_git = (Path(__file__).resolve().parents[2] / ".git").exists()
    commit = git_commit()
    assert (commit is not None and len(commit) == 40) if has_git else commit is None


@pytest.mark.parametrize("name", ["/etc/hostname", "../x", "parts/../../x", "/nowhere", 5])
@pytest.mark.parametrize("digests", [[], ["0" * 64], None])
def test_a_recorded_plan_reads_no_file_of_this_disk(name: object, digests: object) -> None:
    tree = {"kind": "merged", "drafts": [name], "digests": digests}
    plan = {"draft_tokens": 2, "chain_tokens": 2, "tree_name": "m", "tree": tree}
    with pytest.raises(ValidationError, match=r"plan\n.*must be") as caught:
        Lineage.model_validate({"plan": plan})
    assert "no such draft" not in str(caught.value)
    plan["tree"] = {"kind": "static", "file": name}
    with pytest.raises(ValidationError, match=r"plan\n.*must be absent"):
        Lineage.model_validate({"plan": plan})


@pytest.mark.parametrize("reference", ["m/99999999999999999999", "m/-1", "m/x", "/1", "m"])
def test_a_version_has_a_number(reference: str, tracking: Tracking) -> None:
    with pytest.raises(RegistryError, match="must read name/number"):
        get_version(tracking, reference)
