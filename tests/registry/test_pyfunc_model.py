"""Registered versions as MLflow models: loaded by MLflow itself, they answer as the decoder does."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import mlflow
import pandas as pd
import pytest
import yaml
from mlflow.models.utils import _enforce_params_schema
from mlflow.store.artifact.models_artifact_repo import REGISTERED_MODEL_META_FILE_NAME
from mlflow.types import DataType, ParamSchema, ParamSpec
from trained import Trained
from transformers import AutoTokenizer

from draftforge.data.chat_template import render
from draftforge.data.conversation import Message
from draftforge.errors import FormatError, InputError, StaleInputError
from draftforge.registry.champion_alias import move_champion
from draftforge.registry.connect import Tracking
from draftforge.registry.lineage import Lineage, Version
from draftforge.registry.tracking import start_run
from draftforge.registry.versions import (
    CODE_FILE,
    MODEL_FILE,
    TARGET_VARIABLE,
    aliases,
    fetch,
    register_version,
    wrap,
)
from draftforge.specdec.decoder import Request, generate
from draftforge.specdec.formats import read_meta
from draftforge.specdec.proposers.factory import make_proposer
from draftforge.specdec.proposers.tree_settings import StaticTree
from draftforge.specdec.sampling_settings import SamplingSettings
from draftforge.specdec.serving_plan import ServingPlan, write_plan
from draftforge.specdec.target_settings import TargetSettings
from draftforge.specdec.targets import Target
from draftforge.storage import read_object, write_json

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
PROMPTS = ["Order 3: Maria bought 4 red", "The blue kettle"]
MakeDraft = Callable[..., Path]


class Pair:
    """A target with a chat template, and a registered draft of it."""

    def __init__(self, tracking: Tracking, target: Target, draft: Path, version: Version) -> None:
        self.tracking, self.target, self.draft, self.version = tracking, target, draft, version

    def load(self, uri: str | None = None, **options: Any) -> Any:
        return mlflow.pyfunc.load_model(uri or f"models:/{self.version.name}@champion", **options)

    def decoded(self, messages: list[dict[str, str]], n: int, temperature: float, K: int, seed: int) -> list[int]:
        """Tokens by our own decoder."""
        ids = render(self.target.tokenizer, [Message.model_validate(one) for one in messages])
        request = Request(ids, SamplingSettings(temperature=temperature), seed, n, self.target.stop_ids)
        proposer = make_proposer(Trained(Path(), {"it": self.draft}).draft("it"), self.target)
        ((_, done),) = generate(
            self.target, proposer, [request], rule="token" if temperature else "greedy", draft_tokens=K
        )
        return done.tokens

    def text(self, tokens: list[int]) -> str:
        return str(self.target.tokenizer.decode([t for t in tokens if t not in self.target.stop_ids]))


@pytest.fixture(params=["small", "eagle3"])
def pair(
    request: pytest.FixtureRequest,
    tracking: Tracking,
    trained_drafts: Trained,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Pair:
    place = shutil.copytree(trained_drafts.target_folder, tmp_path / "target")
    tokenizer = AutoTokenizer.from_pretrained(place)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(place)
    settings = TargetSettings(model=str(place), dtype="float32", device="cpu")
    target = Target.load(settings)
    draft = shutil.copytree(trained_drafts.draft_folders[request.param], tmp_path / "draft")
    meta = read_meta(draft).model_copy(update={"target_fingerprint": target.fingerprint})
    write_json(draft / "draftforge.json", meta.model_dump())
    write_plan(draft, ServingPlan.chain(3))
    version = _registered(tracking, draft, target, settings)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking.uri)
    monkeypatch.delenv(TARGET_VARIABLE, raising=False)
    return Pair(tracking, target, draft, version)


def lineage_of(target_fingerprint: str) -> Lineage:
    digest = "1" * 64
    return Lineage(
        target_fingerprint=target_fingerprint,
        target_name="t",
        tokenizer_digest=digest,
        mix_fingerprint=digest,
        capture_fingerprint=digest,
        counts_digest=digest,
        recipe_fingerprint=digest,
        family="small",
        step=1,
        plan=ServingPlan.chain(3),
    )


def _registered(tracking: Tracking, draft: Path, target: Target, settings: TargetSettings) -> Version:
    with start_run(tracking, "train") as run:
        version = register_version(tracking, run.id, draft, lineage_of(target.fingerprint), ["c"], settings)
    current = aliases(tracking, version.name).get("champion")
    move_champion(tracking, version.name, current, version.number, "promote", "test")
    return version


@pytest.mark.slow
def test_predict_answers_as_our_decoder_does(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    model = pair.load()
    answers = model.predict(PROMPTS, params={"max_new_tokens": 24})
    assert len(answers) == 2
    for prompt, answer in zip(PROMPTS, answers):
        tokens = pair.decoded([{"role": "user", "content": prompt}], 24, 0.0, 3, 0)
        assert answer["text"] == pair.text(tokens) and answer["tokens"] == len(tokens)
        assert answer["tau"] == pytest.approx((len(tokens) - 1) / answer["rounds"])
        assert answer["accepted"] <= answer["drafted"] <= 3 * answer["rounds"]
    assert any(answer["accepted"] for answer in answers)

    chat = [{"role": "system", "content": "Order 12: "}, {"role": "user", "content": "Ivan bought"}]
    params = {"max_new_tokens": 12, "temperature": 0.8, "draft_tokens": 2, "seed": 5}
    wanted = pair.text(pair.decoded(chat, 12, 0.8, 2, 5))
    for asked in ([{"messages": chat}], pd.DataFrame({"messages": [chat]})):
        (answer,) = model.predict(asked, params=params)
        assert answer["text"] == wanted and answer["drafted"] <= 2 * answer["rounds"]
    table = model.predict(pd.DataFrame({"prompt": PROMPTS}), params={"max_new_tokens": 24})
    assert table == answers
    assert "pickle" not in capsys.readouterr().err


@pytest.mark.parametrize("pair", ["eagle3"], indirect=True)
def test_a_tree_is_drafted_as_the_plan_says_and_another_k_is_said(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = StaticTree(kind="static", widths=[2, 1])
    write_plan(pair.draft, ServingPlan(draft_tokens=2, tree_name="wide", tree=tree, chain_tokens=3))
    model = _registered(pair.tracking, pair.draft, pair.target, pair.target.settings)
    loaded = pair.load(f"models:/{model.reference}")
    capsys.readouterr()
    (answer,) = loaded.predict(PROMPTS[:1], params={"max_new_tokens": 24})
    assert 2 * answer["rounds"] < answer["drafted"] <= 4 * answer["rounds"]  # the tree has four nodes on two levels
    assert capsys.readouterr().err == ""
    (again,) = loaded.predict(PROMPTS[:1], params={"max_new_tokens": 24, "draft_tokens": 2})
    assert again["text"] == answer["text"] and again["drafted"] <= 2 * again["rounds"]
    assert "drafts K=2, as asked, not the tree wide of its plan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ([""], "row 0: must be a prompt"),
        (pd.DataFrame({"id": ["1"], "prompt": ["x"]}), r"columns \['id'\]: must be one, prompt or messages"),
        ([{"role": "user", "content": "x"}], r"columns \['role'\]: must be one"),
        ([{"messages": [{"role": 5, "content": "x"}]}], r"row 0: messages\[0\]: role is a JSON number"),
        ([{"messages": []}], "row 0: must be a prompt"),
        (["x" * 600], "max_position_embeddings"),
    ],
)
@pytest.mark.parametrize("pair", ["small"], indirect=True)
def test_what_cannot_be_answered_is_said(pair: Pair, asked: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        pair.load().predict(asked)


@pytest.mark.parametrize("pair", ["small"], indirect=True)
def test_unknown_parameters_are_refused_by_name(pair: Pair) -> None:
    """Also those that MLflow would drop before the model sees them; what it drops for other models is theirs."""
    model = pair.load()
    words = r"^params: max_tokens, top_k: not known; must be among max_new_tokens, temperature, draft_tokens, seed$"
    for predict in (model.predict, partial(model.unwrap_python_model().predict, None)):
        with pytest.raises(InputError, match=words):
            predict(["Q"], params={"max_new_tokens": 4, "top_k": 3, "max_tokens": 4})
    assert model.predict(["Q"], params={"max_new_tokens": 4})
    other = ParamSchema([ParamSpec("top_p", DataType.double, 1.0)])
    assert _enforce_params_schema({"top_k": 3}, other) == {"top_p": 1.0}


@pytest.mark.parametrize("pair", ["small"], indirect=True)
def test_the_target_is_looked_for_where_it_is_named(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = Path(pair.target.settings.model).rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match=r"target\.model"):
        pair.load()
    assert pair.load(model_config={"target": str(moved)}).predict(["Q"], params={"max_new_tokens": 4})
    monkeypatch.setenv(TARGET_VARIABLE, str(moved))
    assert pair.load().predict(["Q"], params={"max_new_tokens": 4})
    write_json(moved / "config.json", read_object(moved / "config.json") | {"max_position_embeddings": 500})
    with pytest.raises(StaleInputError, match="the draft was made for"):
        pair.load()


@pytest.mark.parametrize("pair", ["small"], indirect=True)
def test_what_is_put_beside_a_draft_is_no_part_of_it(pair: Pair, tmp_path: Path) -> None:
    fetch(pair.tracking, pair.target.fingerprint, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {path.name for path in pair.draft.iterdir()} and MODEL_FILE not in names
    assert set(pair.version.lineage.beside) == {MODEL_FILE, CODE_FILE}
    assert not set(pair.version.lineage.beside) & set(pair.version.lineage.files)
    again = _registered_again(pair)
    assert again == pair.version


def _registered_again(pair: Pair) -> Version:
    with start_run(pair.tracking, "again") as run:
        settings = TargetSettings(model="elsewhere")
        return register_version(pair.tracking, run.id, pair.draft, lineage_of(pair.target.fingerprint), ["c"], settings)


def test_a_draft_that_mlflow_loaded_is_still_what_was_registered(pair: Pair, tmp_path: Path) -> None:
    pair.load()
    assert (place_of(pair) / REGISTERED_MODEL_META_FILE_NAME).is_file()  # MLflow's, in the store itself
    fetch(pair.tracking, pair.target.fingerprint, tmp_path / "fetched")
    assert not (tmp_path / "fetched" / REGISTERED_MODEL_META_FILE_NAME).exists()


def place_of(pair: Pair) -> Path:
    return Path(unquote(urlsplit(pair.version.source).path))


def test_the_same_draft_is_wrapped_the_same_way(tmp_path: Path) -> None:
    lineage, target = lineage_of("a" * 64), TargetSettings(model="owner/model", adapter="owner/lora")
    digests = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        digests.append(wrap(tmp_path / name, lineage, target))
    assert digests[0] == digests[1]
    config = yaml.safe_load((tmp_path / "one" / MODEL_FILE).read_text())
    assert config["flavors"]["python_function"]["config"] == {
        "recorded_target": {"model": "owner/model", "adapter": "owner/lora"},
        "target": None,
    }
    assert {param["name"] for param in yaml.safe_load(config["signature"]["params"])} == {
        "max_new_tokens", "temperature", "draft_tokens", "seed",
    }  # fmt: skip
    taken = lineage.model_copy(update={"files": {MODEL_FILE: "0" * 64}})
    with pytest.raises(FormatError, match="MLmodel"):
        wrap(tmp_path, taken, None)
