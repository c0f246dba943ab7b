"""One migrated MLflow database a session; each test gets its own model prefix in it, and draft folders to register."""

import dataclasses
import json
import secrets
from collections.abc import Callable
from pathlib import Path

import pytest

from draftforge.registry.connect import Tracking, open_tracking
from draftforge.registry.lineage import Lineage, Version
from draftforge.registry.settings import RegistrySettings
from draftforge.registry.tracking import start_run
from draftforge.registry.versions import register_version

TARGET = "a" * 64
Register = Callable[..., Version]
MakeDraft = Callable[..., Path]


@pytest.fixture(scope="session")
def shared_tracking(tmp_path_factory: pytest.TempPathFactory) -> Tracking:
    """A local store, opened (and migrated) once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        return open_tracking(RegistrySettings(), tmp_path_factory.mktemp("registry"))


@pytest.fixture
def tracking(shared_tracking: Tracking) -> Tracking:
    """The shared store under a model prefix that no other test uses."""
    settings = RegistrySettings(model=f"m{secrets.token_hex(4)}")
    return dataclasses.replace(shared_tracking, settings=settings)


def lineage_of(target: str = TARGET, **changes: object) -> Lineage:
    """A complete record, with changes."""
    fields: dict[str, object] = {
        "target_fingerprint": target,
        "target_name": f"target-{target[:2]}",
        "tokenizer_digest": "t" * 64,
        "mix_fingerprint": "1" * 64,
        "capture_fingerprint": "2" * 64,
        "counts_digest": "3" * 64,
        "recipe_fingerprint": "4" * 64,
        "family": "small",
        "step": 60,
    }
    return Lineage.model_validate(fields | changes)


@pytest.fixture
def make_draft(tmp_path: Path) -> MakeDraft:
    """Write a small draft folder; the same word gives the same bytes."""

    def make(word: str = "one") -> Path:
        folder = tmp_path / f"draft-{word}"
        (folder / "nested").mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"word": word}))
        header = json.dumps({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + word.encode()[:4])
        (folder / "nested" / "chat_template.jinja").write_text("{{ messages }}")
        return folder

    return make


@pytest.fixture
def register(tracking: Tracking, make_draft: MakeDraft) -> Register:
    """Register a draft named by a word, in a run of its own."""

    def do(word: str = "one", target: str = TARGET, clusters: tuple[str, ...] = ("c1",), **changes: object) -> Version:
        with start_run(tracking, f"train {word}") as run:
            return register_version(tracking, run.id, make_draft(word), lineage_of(target, **changes), clusters)

    return do
