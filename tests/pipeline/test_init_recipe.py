"""`draftforge init`: the kind of a log is found, the recipe loads and makes its mix, and nothing is guessed at."""

import gzip
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from made_logs import LINES, write_log

from draftforge.data.mix import load_manifest
from draftforge.data.sources import check_kinds, detect_kind, read
from draftforge.errors import InputError, MissingFileError, OwnershipError
from draftforge.pipeline.init_recipe import init
from draftforge.pipeline.stages import Stages, mix_stage
from draftforge.pipeline.workspace import Workspace
from draftforge.recipe import Recipe, load_recipe
from draftforge.specdec.sampling_settings import SamplingSettings

REQUESTS = 60


def made(folder: Path, log: Path, target: Path) -> Recipe:
    init(log, str(target), folder / "recipe.yaml")
    return load_recipe(folder / "recipe.yaml")


@pytest.mark.parametrize("kind", LINES)
def test_every_kind_of_log_is_found_and_read_whole(kind: str, tmp_path: Path, tiny_target_folder: Path) -> None:
    write_log(tmp_path, kind, REQUESTS)
    log = tmp_path / f"{kind}.{'txt' if kind == 'prompts' else 'log'}"
    (tmp_path / f"{kind}.log").rename(log)
    assert detect_kind(tmp_path, log.name) == (kind, kind in ("messages", "openai"))
    recipe = made(tmp_path, log, tiny_target_folder)
    (source,) = recipe.mix.sources
    assert source.kind == kind and recipe.target.model == str(tiny_target_folder)
    records, counts = read(source, tmp_path, 0)
    text = (tmp_path / "recipe.yaml").read_text()
    assert f"{counts.read} lines or requests read as kind {kind}: {len({one.id for one in records})} different" in text
    assert f"path: ./{log.name}" in text
    # Domains are those of the lines, or one that is assumed and said.
    domains = Counter(record.domain for record in records)
    assert ("assumed: one domain, chat" in text) == (set(domains) == {"chat"}) == (source.domain == "chat")
    named = kind in ("openai", "vllm")
    for sampling in recipe.score.sampling:
        assert sampling.temperature == (0.5 if named else 1.0)
    # What a training answer is captured at is what is scored.
    own = {record.sampling or recipe.capture.sampling for record in records}
    assert own == set(recipe.score.sampling) and ("capture.sampling" in text) != named


def test_the_recipe_makes_its_mix_at_once(tmp_path: Path, tiny_target_folder: Path) -> None:
    write_log(tmp_path, "openai", REQUESTS, broken=(7,))
    recipe = made(tmp_path, tmp_path / "openai.log", tiny_target_folder)
    recipe = recipe.changed(f"workdir={tmp_path / 'work'}")
    space = Workspace(recipe)
    with space.alone():
        manifest = load_manifest(mix_stage(Stages(space)).folder)
    assert sum(manifest["conversations"]["holdout"].values()) >= 5
    assert "1 broken" in (tmp_path / "recipe.yaml").read_text()
    (draft,) = recipe.drafts.values()
    assert draft.family == "eagle"
    assert "family eagle, as the target has 4 layers, and eagle3 needs 6" in (tmp_path / "recipe.yaml").read_text()


@pytest.mark.parametrize("end", ["\n", "\r", "\x85", "\u2028", "\u2029"])
def test_names_in_a_log_are_no_keys_of_the_recipe(end: str, tmp_path: Path, tiny_target_folder: Path) -> None:
    field = end.join(("team", "promotion:", "  command: [touch, x]", "#"))
    lines = [{"messages": [{"role": "user", "content": f"{i}?"}], field: "ab"[i % 2]} for i in range(20)]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
    recipe = made(tmp_path, tmp_path / "log.jsonl", tiny_target_folder)
    assert not recipe.promotion.command
    assert next(line for line in (tmp_path / "recipe.yaml").read_text().splitlines() if "touch" in line)[0] == "#"


@pytest.mark.parametrize("name", ["2024-05-01", "2024", "null", "1e4", "x" * 80])
def test_names_of_logs_are_text(name: str, tmp_path: Path, tiny_target_folder: Path) -> None:
    write_log(tmp_path, "turns", 20)
    log = (tmp_path / "turns.log").rename(tmp_path / f"{name}.jsonl")
    recipe = made(tmp_path, log, tiny_target_folder)
    assert recipe.name == name[:64]
    recipe.save(tmp_path / "saved.yaml")
    assert load_recipe(tmp_path / "saved.yaml") == recipe


def test_of_a_hub_id_the_configs_alone_are_asked_for(
    tmp_path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        (tmp_path / "hub").mkdir()
        shutil.copy(tiny_target_folder / "config.json", tmp_path / "hub")
        (tmp_path / "hub/generation_config.json").write_text('{"temperature": 0.6}')
        return str(tmp_path / "hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    write_log(tmp_path, "turns", 20)
    init(tmp_path / "turns.log", "owner/model", tmp_path / "recipe.yaml")
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert asked == [("owner/model", ["config.json", "generation_config.json"])]
    assert recipe.target.model == "owner/model"
    assert recipe.score.sampling == [recipe.capture.sampling] == [SamplingSettings(temperature=0.6)]


def test_figures_are_those_of_the_log(
    tmp_path: Path, tiny_target_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sampling settings by share, and answers as long as 95 % of those logged."""
    lines = []
    for i in range(100):
        ask = {
            "messages": [{"role": "user", "content": f"question {i} " * (1 + i)}],
            "temperature": 0.0 if i < 70 else 0.7,
        }
        ask |= {"temperature": 1.3} if i >= 95 else {}
        usage = {"prompt_tokens": 5 * (i + 1), "completion_tokens": 100 if i < 90 else 200}
        answer = {"choices": [{"message": {"role": "assistant", "content": "Yes."}}], "usage": usage}
        lines.append(json.dumps({"request": ask, "response": answer}))
    (tmp_path / "in").mkdir()
    with gzip.open(tmp_path / "in/proxy.jsonl.gz", "wt") as file:
        file.write("\n".join(lines))
    recipe = made(tmp_path, tmp_path / "in", tiny_target_folder)
    assert recipe.score.sampling == [SamplingSettings(temperature=0.0), SamplingSettings(temperature=0.7)]
    assert recipe.capture.max_new_tokens == 256  # 200, in steps of 64
    said = capsys.readouterr().err
    assert "t0 70%, t0.7 25%" in said and "p50 and p95: 252 and 475; the target's context: 512" in said
    assert f"{sum(5 * (i + 1) + 256 > 512 for i in range(100))} prompts do not fit the context" in said


@pytest.mark.parametrize("suffix", ["log", "txt"])
def test_a_first_request_may_stand_behind_a_long_start(suffix: str, tmp_path: Path, tiny_target_folder: Path) -> None:
    write_log(tmp_path, "vllm", REQUESTS)
    start = "(EngineCore_DP0 pid=7) DEBUG 11-28 09:59:00 [utils.py:9] Loading weight model.layers.0.mlp\n" * 1500
    log = tmp_path / f"server.{suffix}"
    log.write_text(start + (tmp_path / "vllm.log").read_text())
    assert detect_kind(tmp_path, log.name) == ("vllm", False)
    (source,) = made(tmp_path, log, tiny_target_folder).mix.sources
    check_kinds([source], tmp_path)
    with pytest.raises(InputError, match="looks like kind vllm: so read, its beginning gives"):
        check_kinds([source.model_copy(update={"kind": "prompts", "year": None})], tmp_path)
    # Without a request its lines are nobody's prompts, whatever the name.
    log.write_text(start)
    with pytest.raises(InputError, match="looks like a server's log") as caught:
        detect_kind(tmp_path, log.name)
    assert "1500 read, 1500 other log line" in str(caught.value) and ".txt;" not in str(caught.value)
    assert "name the file" not in str(caught.value) and "--enable-log-requests" in str(caught.value)


def test_few_conversations_say_what_they_are_too_few_for(tmp_path: Path, tiny_target_folder: Path) -> None:
    """Epochs as a training counts them, where a step is an epoch at most; fields of a few values are proposed."""
    lines = [
        {
            "turns": [f"question {i} of {i * 7}"],
            "route": ("billing", "code")[i % 2],
            "model": "ab"[i % 2],
            "day": f"d{i}",
        }
        for i in range(19)
    ]
    (tmp_path / "few.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\nbroken")
    made(tmp_path, tmp_path / "few.jsonl", tiny_target_folder)
    text = (tmp_path / "recipe.yaml").read_text()
    assert "about 100 epochs" in text and "steps: 100\n" in text
    assert "30% judge: at most 5 clusters of near-duplicates, and the gate asks for 20" in text
    assert "distill will promote no draft: log 48 more" in text  # 30 % of 67 are 20
    proposed = [line for line in text.splitlines() if "or domain_field" in line]
    assert len(proposed) == 1 and "domain_field: route, in place of domain: chat" in proposed[0]
    assert "billing 10, code 9" in proposed[0]


def test_what_cannot_be_read_is_refused(tmp_path: Path, tiny_target_folder: Path) -> None:
    (tmp_path / "access.log").write_text('10.0.0.1 - - "GET /health HTTP/1.1" 200\n' * 9)
    (tmp_path / "empty.log").write_text("")
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n' * 9)
    out = tmp_path / "recipe.yaml"
    for name, words in (
        ("access.log", "no kind of log gives"),
        ("rows.jsonl", "no kind of log"),
        ("empty.log", "empty"),
    ):
        with pytest.raises(InputError, match=words):
            init(tmp_path / name, str(tiny_target_folder), out)
    with pytest.raises(MissingFileError, match=r"none\.log: no such file"):
        init(tmp_path / "none.log", str(tiny_target_folder), out)
    write_log(tmp_path, "turns", 40)
    with pytest.raises(MissingFileError, match=r"target\.model"):
        init(tmp_path / "turns.log", str(tmp_path / "nowhere"), out)
    assert not out.exists()
    out.write_text("mine")
    with pytest.raises(OwnershipError, match=r"recipe\.yaml: exists"):
        init(tmp_path / "turns.log", str(tiny_target_folder), out)
    assert out.read_text() == "mine"


def test_a_log_whose_name_has_lines_of_its_own_stays_one_path(tmp_path: Path, tiny_target_folder: Path) -> None:
    write_log(tmp_path, "openai", REQUESTS)
    log = (tmp_path / "openai.log").rename(tmp_path / "a\n\nname: other.log")
    recipe = made(tmp_path, log, tiny_target_folder)
    (source,) = recipe.mix.sources
    assert source.kind == "openai" and source.path == str(log) and recipe.name == "a-name-other"
