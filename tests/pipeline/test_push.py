"""`draftforge push` against a stand-in of the hub: files and card, what is refused, nothing of this machine in them."""

import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import heads
import pytest
import torch
import yaml
from hub import Hub, hub_stand_in
from safetensors.torch import save_file

from draftforge.cli import main
from draftforge.specdec.formats import write_draft
from draftforge.specdec.formats.gguf.file import GgufFile, write_gguf
from draftforge.specdec.model_card import DraftFacts, write_card
from draftforge.specdec.serving_plan import FoundPlan, ServingPlan

FACTS = DraftFacts(
    "eagle3",
    "model",
    "ab" * 32,
    "drafts-ab/7",
    240,
    2.051,
    1.187,
    "batch 1 on two cores",
    {"support": {"tau": 2.34, "speedup": 1.4}, "code": {"tau": 1.5, "speedup": None}},
)

WEIGHTS = {"a": torch.zeros(1)}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_stand_in(monkeypatch) as found:
        yield found


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """A draft as export leaves it: weights, and a card that names this machine's paths."""
    folder = tmp_path / "served-draft"
    folder.mkdir()
    write_draft(heads.eagle3(), folder, "vllm", 3)
    write_card(folder, str(folder), "vllm", FoundPlan(ServingPlan.chain(3)), FACTS, None)
    return folder


def metadata(card: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(card.split("---\n")[1])
    return found


def push(*words: object) -> int:
    """Exit code of the verb."""
    try:
        main(["push", *map(str, words)])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_a_folder_goes_to_a_new_repository_in_one_commit(
    draft: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert push(draft, "me/heads", "--base-model", "owner/model") == 0
    printed = capsys.readouterr()
    assert printed.out == f"{hub.url}/me/heads/commit/{'c' * 40}\n"
    sent = hub.files["me/heads"]
    assert sent.keys() == {"README.md", "config.json", "model.safetensors", "serve.json"}
    assert sent["model.safetensors"] == (draft / "model.safetensors").read_bytes()
    assert hub.titles == ["eagle3 draft for model, drafts-ab/7"]
    assert {"private", "visibility"}.isdisjoint(hub.repositories["me/heads"])  # as transformers: its owner's default

    card = sent["README.md"].decode()
    assert metadata(card) == {
        "base_model": "owner/model",
        "library_name": "vllm",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-model", "eagle3", "draftforge"],
    }
    assert "| expected speed-up | 1.19x over plain decoding (batch 1 on two cores) |" in card
    assert "| support | 2.34 | 1.40x |\n| code | 1.50 | - |\n" in card
    # The command serves both from the hub.
    words = shlex.split(re.findall(r"```bash\n(.*)\n```", card)[0])
    assert words[:3] == ["vllm", "serve", "owner/model"]
    assert json.loads(words[-1]) == {"method": "eagle3", "model": "me/heads", "num_speculative_tokens": 3}
    assert json.loads(sent["serve.json"])["command"] == shlex.join(words)
    for name in ("README.md", "serve.json", "config.json"):
        assert str(draft.parent).encode() not in sent[name] and hub.token.encode() not in sent[name]
    assert hub.token not in printed.err

    # Again, with another license: the same repository, a new commit.
    assert push(draft, "me/heads", "--base-model", "owner/model", "--license", "mit", "--private") == 0
    assert metadata(hub.files["me/heads"]["README.md"].decode())["license"] == "mit" and len(hub.titles) == 2


def test_a_private_repository_is_asked_for(draft: Path, hub: Hub) -> None:
    assert push(draft, "me/heads", "--base-model", "owner/model", "--private") == 0
    asked = hub.repositories["me/heads"]
    assert asked.get("visibility") == "private" or asked.get("private") is True  # by the version of huggingface_hub


def test_a_dry_run_lists_files_and_card_and_sends_nothing(
    draft: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert push(draft, "me/heads", "--dry-run") == 0
    printed = capsys.readouterr()
    assert not hub.repositories and not hub.files
    assert re.search(r"MB  model\.safetensors|kB  model\.safetensors", printed.err)
    assert "the card names no base_model" in printed.err and "the card names no license" in printed.err
    assert {"base_model", "license"}.isdisjoint(metadata(printed.out))
    assert "vllm serve TARGET " in printed.out and str(draft.parent) not in printed.out


@pytest.mark.slow
def test_champions_go_from_recipe_and_registry(crowned: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert push(crowned, "me/small", "--license", "mit") == 0
    printed = capsys.readouterr()
    assert "names no base_model" in printed.err
    card = hub.files["me/small"]["README.md"].decode()
    assert metadata(card)["library_name"] == "transformers" and "base_model" not in metadata(card)
    version = re.findall(r"\| registered version \| (\S+) \|", card)[0]
    assert [row.split(" | ")[0] for row in card.splitlines() if row.endswith("x |") and "expected" not in row] == [
        "| code",
        "| support",
    ]
    assert "MLmodel" not in hub.files["me/small"] and str(crowned.parent) not in card

    workdir = crowned.parent / "work"
    for address in (f"models:/{version}", f"models:/{version.split('/')[0]}@champion"):
        hub.files.clear()
        options = ["--workdir", workdir, "--base-model", "owner/model"]
        assert push(address, "me/small", *options) == 0
        assert metadata(hub.files["me/small"]["README.md"].decode())["base_model"] == "owner/model"


def test_what_must_not_leave_is_refused(draft: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((draft / "config.json").read_text())
    for name, value, said in (
        ("_name_or_path", str(draft), f"config.json: _name_or_path = {draft}: is a path of this machine"),
        ("api_key", "abcdef1234567890", "config.json: holds what looks like a secret"),
    ):
        (draft / "config.json").write_text(json.dumps({**config, name: value}))
        assert push(draft, "me/heads", "--base-model", "owner/model") == 2
        assert said in capsys.readouterr().err and not hub.repositories
    (draft / "config.json").write_text(json.dumps(config))
    (draft / "optimizer.bin").write_bytes(b"\x80\x04")
    assert push(draft, "me/heads") == 2
    assert "optimizer.bin: is a pickle; it is not pushed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere", "me/heads"], "nowhere: must be a recipe (.yaml), a draft's folder or models:/NAME/NUMBER"),
        (["DRAFT", "heads"], "heads: must be a repository of the hub, owner/name"),
        (["DRAFT", "me/heads", "--base-model", "DRAFT"], "must be the target's hub id (owner/name), no local path"),
        (["DRAFT", "me/heads", "--base-model", "owner/none"], "owner/none: the hub has no such model"),
    ],
)
def test_what_cannot_be_is_refused(
    words: list[str],
    said: str,
    draft: Path,
    hub: Hub,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert push(*[str(draft) if word == "DRAFT" else word for word in words]) == 2
    assert said in capsys.readouterr().err and not hub.repositories


def test_a_hub_that_refuses_and_one_that_is_away(
    draft: Path,
    hub: Hub,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_" + "b" * 34)
    assert push(draft, "me/heads", "--license", "mit") == 2
    printed = capsys.readouterr().err
    assert "401" in printed and "must be of a token that may write there" in printed and "hf_b" not in printed
    monkeypatch.setenv("HF_TOKEN", hub.token)
    hub.down = True
    assert push(draft, "me/heads", "--license", "mit") == 3
    assert "me/heads: the hub does not take it (" in capsys.readouterr().err


def set_config(draft: Path, name: str, value: object) -> None:
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, name: value}))


def refused(draft: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> str:
    """Last line of a push that is refused, which sends nothing and ends in one line."""
    assert push(draft, "me/heads", "--license", "mit") == 2 and not hub.repositories
    said: str = capsys.readouterr().err.splitlines()[-1]
    return said


@pytest.mark.parametrize(
    "value",
    [
        *("see /scratch/ann/x", "file:///x", "~ann/x", "C:/ann", "\\\\srv\\share", "$HOME/x", "../x"),
        *("http://mlflow.internal:5000/x", "http://tracker/x", "at https://10.0.0.3/x", "http://[fd00::1]/"),
    ],
)
def test_no_place_of_a_machine_or_network_goes_along(
    value: str, draft: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    set_config(draft, "note", value)
    assert "config.json: note = " in refused(draft, hub, capsys)
    set_config(draft, "note", "")
    set_config(draft, value, 1)
    assert "config.json: " in refused(draft, hub, capsys)


def test_public_addresses_and_this_machines_own_go_along(draft: Path, hub: Hub) -> None:
    set_config(draft, "note", "https://huggingface.co/home/x, http://127.0.0.1:30000/v1 and http://localhost:8000/")
    (draft / "LICENSE").write_text("http://www.apache.org/licenses/ and/or others")
    assert push(draft, "me/heads", "--license", "mit") == 0
    assert "LICENSE" in hub.files["me/heads"]


def test_only_files_of_a_draft_go_along_and_the_others_are_named(
    draft: Path, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_text("private")
    for name in ("notes", "train.csv", "secrets.env", "x.yaml", "policy-vllm.yaml", "x.json"):
        (draft / name).write_text("api_key=abcdef123456")
    (draft / "extra").symlink_to(tmp_path / "key")
    (draft / "tokenizer_config.json").write_text(json.dumps({"image_token": "<image>", "chat_template": "/think"}))
    assert push(draft, "me/heads", "--license", "mit") == 0
    sent = {"README.md", "config.json", "model.safetensors", "serve.json", "tokenizer_config.json"}
    assert hub.files["me/heads"].keys() == sent
    assert "left out, as no part of a draft: 7 files (extra, notes, policy-vllm.yaml, " in capsys.readouterr().err


def test_a_link_out_of_the_folder_is_refused(
    draft: Path, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_text("private")
    (draft / "LICENSE").symlink_to(tmp_path / "key")
    assert "LICENSE: is a link out of the draft's folder" in refused(draft, hub, capsys)


def gguf_of(folder: Path, text: str | list[str]) -> None:
    """A GGUF file with a text of its makers, and tokens that look like paths, which are none."""
    write_gguf(
        folder / "b.gguf", GgufFile("llama", {"general.note": text, "tokenizer.ggml.tokens": ["/data/x"]}, WEIGHTS)
    )


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: save_file(
            {"a": torch.zeros(1)}, folder / "b.safetensors", {"cmd": "train --token hf_" + "a" * 20}
        ),
        lambda folder: save_file({"a": torch.zeros(1)}, folder / "b.safetensors", {"cmd": "train /scratch/ann/x"}),
        lambda folder: gguf_of(folder, "train --token hf_" + "a" * 20),
        lambda folder: gguf_of(folder, "trained in /scratch/ann/x"),
        lambda folder: gguf_of(folder, ["fine", "http://tracker.internal/x"]),
        lambda folder: (folder / "b.gguf").write_bytes(b"GGUF"),
        lambda folder: (folder / "LICENSE").write_text("nvapi-" + "a1B2" * 16),
        lambda folder: (folder / "LICENSE").write_text("npm_" + "a1B2" * 9),
        lambda folder: (folder / "LICENSE").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nabc"),
        lambda folder: (folder / "tokenizer_config.json").write_text('{"auth_token": "hf_' + "a" * 20 + '"}'),
        lambda folder: (folder / "tokenizer_config.json").write_text('{"name_or_path": "/scratch/ann/x"}'),
        lambda folder: (folder / "generation_config.json").write_text("{nope"),
        lambda folder: (folder / "generation_config.json").write_text("[" * 2000 + "]" * 2000),
        lambda folder: (folder / "generation_config.json").write_text("1" * 5000),
        lambda folder: (folder / "generation_config.json").write_bytes(b'\xff{"a": 1}'),
    ],
)
def test_what_weights_texts_and_configs_hold_is_read(
    write: Callable[[Path], object], draft: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    write(draft)
    assert re.search(r"(b\.safetensors|b\.gguf|LICENSE|_config\.json): ", refused(draft, hub, capsys))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("tau", value) for value in ("x", [1], float("inf"), float("nan"))),
        *(("domains", value) for value in ([1], {"a": 1}, "abc", {"a": {"tau": "x"}}, {"\ud800": {"tau": 1}})),
        *(("speedup", {"a": 1}), ("version", [1]), ("measured", "\ud800"), ("target", "\ud800"), ("target", {"a": 1})),
        *(("assumed", 5), ("assumed", "a\nb"), ("measured", "x" * 1001)),
    ],
)
def test_figures_that_are_none_are_refused(
    name: str, value: object, draft: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    known = json.loads((draft / "serve.json").read_text())
    (draft / "serve.json").write_text(json.dumps({**known, name: value}))
    assert f"serve.json: {name}" in refused(draft, hub, capsys)


def test_a_figure_that_is_larger_than_any_float_is_refused(
    draft: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    known = json.loads((draft / "serve.json").read_text())
    (draft / "serve.json").write_text(json.dumps({**known, "tau": 10**400}))
    assert "serve.json: not valid JSON (a number of 401 digits" in refused(draft, hub, capsys)


def test_a_strangers_words_are_text_in_the_card(draft: Path, hub: Hub) -> None:
    known = json.loads((draft / "serve.json").read_text())
    bad = "a | b\n---\n```\n<script>[x](http://e.org)"
    plan = {**known["plan"], "policy": "model.safetensors"}
    plan |= {"tree_name": bad, "tree": {"kind": "static", "widths": [2, 1]}}  # named in a note
    changed = {"target": bad, "version": bad, "measured": bad, "domains": {bad: {"tau": 1}}, "plan": plan}
    (draft / "serve.json").write_text(json.dumps({**known, **changed}))
    assert push(draft, "me/heads", "--license", "mit") == 0
    sent = hub.files["me/heads"]
    card = sent["README.md"].decode()
    assert "<script>" not in card and "](" not in card and card.count("---\n") == 2 and card.count("```") == 2
    assert "a \\| b --- \\`\\`\\` &lt;script&gt;[x]\\(http://e.org)" in card
    assert "model.safetensors" in sent  # a plan's policy is no other file


def test_a_strangers_card_controls_no_terminal(draft: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    (draft / "serve.json").unlink()
    (draft / "README.md").write_text("# Théa\n\x1b]0;x\x07\x9b31m\n")
    assert push(draft, "me/heads", "--license", "mit", "--dry-run") == 0
    assert capsys.readouterr().out == "# Théa\n\\x1b]0;x\\x07\\x9b31m\n"


def test_a_draft_without_a_plan_names_no_folder_of_this_disk(draft: Path, hub: Hub) -> None:
    for name in ("serve.json", "README.md"):
        (draft / name).unlink()
    assert push(draft, "me/heads", "--license", "mit") == 0
    record = json.loads(hub.files["me/heads"]["serve.json"])
    assert record["assumed"].startswith("the draft has no serve.json: K=") and draft.name not in json.dumps(record)
