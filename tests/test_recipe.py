"""Recipes: paths, overrides, and one exact line for everything that can be wrong in one."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from forked import run
from limited import under_limits
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from draftforge import recipe
from draftforge.errors import MissingFileError, RecipeError


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class FileSource(Strict):
    kind: Literal["file"]
    path: Path


class HubSource(Strict):
    kind: Literal["hub"]
    dataset: str
    split: str = "train"


class Mix(Strict):
    sources: list[Annotated[FileSource | HubSource, Field(discriminator="kind")]] = []
    weights: dict[str, float] = {}


class Train(Strict):
    steps: int = Field(default=10, ge=1)
    learning_rate: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    precision: Literal["fp32", "bf16"] = "fp32"
    warm: int = 0
    init_from: Path | None = None

    @field_validator("init_from")
    @classmethod
    def _exists(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_dir():
            raise ValueError("must be a folder that exists")
        return value

    @model_validator(mode="after")
    def _warm_within_steps(self) -> "Train":
        if self.warm > self.steps:
            raise ValueError(f"warm = {self.warm} must be <= steps = {self.steps}")
        return self


class Small(Strict):
    name: str
    target: str = "owner/model"
    workdir: Path = Field(default=Path("runs"), json_schema_extra={"relative_to": "cwd"})
    mix: Mix = Mix()
    drafts: dict[str, Train] = {}
    train: Train | None = None


def read(folder: Path, text: str, *overrides: str) -> Small:
    (folder / "recipe.yaml").write_text("name: n\n" + text)
    return recipe.read(Small, folder / "recipe.yaml", overrides)


def lines(folder: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as raised:
        read(folder, text, *overrides)
    return str(raised.value).splitlines()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("train: {stesp: 3}", "train.stesp: unknown key; the nearest known one is train.steps"),
        ("trian: {steps: 3}", "trian: unknown key; the nearest known one is train"),
        ("drafts: {a: {step: 3}}", "drafts.a.step: unknown key; the nearest known one is drafts.a.steps"),
        (
            "mix: {sources: [{kind: hub, dataste: x}]}",
            "mix.sources.0.dataste: unknown key; the nearest known one is mix.sources.0.dataset",
        ),
        ("mix: {sources: [{kind: hub}]}", "mix.sources.0.dataset: required"),
        ("mix: {sources: [{kind: hbu}]}", "mix.sources.0: kind must be one of 'file', 'hub'"),
        ("mix: {sources: [{path: x}]}", "mix.sources.0: kind is required"),
        ("mix: {sources: 3}", "mix.sources = 3: must be a list"),
        ("mix: {weights: {chat: much}}", "mix.weights.chat = much: must be a number"),
        ("mix: 3", "mix = 3: must be a mapping of keys to values"),
        ("train: {steps: -3}", "train.steps = -3: must be >= 1"),
        ("train: {steps: 2.5}", "train.steps = 2.5: must be a whole number"),
        ("train: {steps: many}", "train.steps = many: must be a whole number"),
        ("train: {learning_rate: 0}", "train.learning_rate = 0: must be > 0"),
        ("train: {learning_rate: .nan}", "train.learning_rate = nan: must be finite"),
        ("train: {precision: fp8}", "train.precision = fp8: must be 'fp32' or 'bf16'"),
        ("train: {warm: 30, steps: 20}", "train: warm = 30 must be <= steps = 20"),
        ("target: 3", 'target = 3: must be text: quote it, "3"'),
        (f"train: {{precision: 'db://me:{'p' * 90}@h'}}", "train.precision = db://***@h: must be 'fp32' or 'bf16'"),
    ],
)
def test_one_line_for_one_mistake(tmp_path: Path, text: str, line: str) -> None:
    assert lines(tmp_path, text) == [f"recipe.yaml: {line}"]


@pytest.mark.timeout(20)
def test_a_long_value_is_quoted_in_no_time() -> None:
    """Patterns go over the whole of what a rule says, which may quote the value."""
    said = "a" * 900_000
    error: Any = {"type": "value_error", "input": {}, "msg": f"Value error, {said}"}
    assert recipe._rule(error) == said


def test_every_mistake_has_its_line(tmp_path: Path) -> None:
    assert lines(tmp_path, "train: {steps: 0, wram: 1}\ndrafts: {b: {steps: x}}") == [
        "recipe.yaml: train.wram: unknown key; the nearest known one is train.warm",
        "recipe.yaml: drafts.b.steps = x: must be a whole number",
        "recipe.yaml: train.steps = 0: must be >= 1",
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("train: [", "recipe.yaml: line 3: not valid YAML: expected the node content, but found '<stream end>'"),
        ("train: {}\ntrain: {}", "recipe.yaml: line 3: not valid YAML: key train twice"),
        ("train: {}\n? [a]\n: 1", "recipe.yaml: line 3: not valid YAML: a key is no text"),
        ("train: {steps: 1, steps: 2}", "recipe.yaml: line 2: not valid YAML: key steps twice"),
        ("train: !!python/name:os.system", "recipe.yaml: line 2: not valid YAML: the tag tag:yaml.org,2002:python"),
        ("train: {steps: !!float ''}", "recipe.yaml: line 2: not valid YAML: the tag tag:yaml.org,2002:float: a"),
        ("train: !!timestamp x", "recipe.yaml: line 2: not valid YAML: the tag tag:yaml.org,2002:timestamp"),
        ("train: !own [1]", "recipe.yaml: line 2: not valid YAML: the tag !own: a recipe has none"),
        ("train: ! x", "recipe.yaml: line 2: not valid YAML: the tag !: a recipe has none"),
    ],
)
def test_yaml_mistakes_name_the_line(tmp_path: Path, text: str, line: str) -> None:
    assert lines(tmp_path, text + "\n")[0].startswith(line)


def test_a_file_that_is_no_mapping_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(RecipeError, match=r"^list.yaml: must be a mapping of section names to settings$"):
        recipe.read(Small, tmp_path / "list.yaml")
    with pytest.raises(MissingFileError, match=r"none.yaml: no such file$"):
        recipe.read(Small, tmp_path / "none.yaml")
    with pytest.raises(RecipeError, match="not a readable text file"):
        recipe.read(Small, tmp_path)


@pytest.mark.slow
def test_aliases_are_followed_to_a_size_and_yaml_to_a_depth(tmp_path: Path) -> None:
    assert read(tmp_path, "drafts: {a: &a {steps: 3}, b: *a, c: {<<: *a, warm: 1}}").drafts["c"].steps == 3
    ended = run(under_limits, [100, 30, __file__, "_hostile_yaml", str(tmp_path)], tmp_path / "log")
    assert ended.code == 0, ended.said


def _hostile_yaml(folder: str) -> None:
    laughs = "\n".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10 if i else ['ha'])}]" for i in range(30))
    for text, said in (
        (laughs, "its aliases stand for more than 100,000 values"),
        ("a: &a [*a]", "nested deeper than 50 levels"),
        ("a: " + "[" * 60 + "]" * 60, "nested deeper than 50 levels"),
        ("a: " + "[" * 20_000, "nested deeper than 50 levels"),
        ("a: " + "x" * 1_000_000, "must have at most 1,000,000 characters"),
    ):
        (line,) = lines(Path(folder), text)
        assert line.startswith("recipe.yaml: ") and line.endswith(said), line
    with pytest.raises(RecipeError, match="nested deeper"):
        read(Path(folder), "", "train=" + "[" * 60 + "]" * 60)


def test_overrides_are_yaml_and_reach_sections_mappings_and_lists(tmp_path: Path) -> None:
    text = "mix: {sources: [{kind: hub, dataset: d}]}"
    overrides = ["train.steps=7", "drafts.a.learning_rate=1e-4", "mix.sources.0.split=test", "mix.weights={a: 1}"]
    settings = read(tmp_path, text, *overrides, "train.init_from=null", "target='3'")
    assert settings.train == Train(steps=7)
    assert settings.drafts == {"a": Train(learning_rate=1e-4)}
    assert settings.mix.sources == [HubSource(kind="hub", dataset="d", split="test")]
    assert settings.mix.weights == {"a": 1.0}
    assert settings.target == "3"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train", "override 'train': must be section.key=value"),
        ("train..steps=3", "override 'train..steps=3': must be section.key=value"),
        ("train.steps=[", "override 'train.steps=[': line 1: not valid YAML: expected the node content"),
        ("name.first=3", "override 'name.first=3': there is no section at first"),
        ("mix.sources.1.kind=hub", "override 'mix.sources.1.kind=hub': 1 must be an index below 1"),
        ("train.stesp=3", "recipe.yaml: train.stesp: unknown key; the nearest known one is train.steps"),
    ],
)
def test_override_mistakes(tmp_path: Path, override: str, line: str) -> None:
    assert lines(tmp_path, "mix: {sources: [{kind: hub, dataset: d}]}", override)[0].startswith(line)


def test_paths_are_relative_to_the_recipe_and_in_overrides_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    text = "target: ../model\nmix: {sources: [{kind: file, path: log.jsonl}]}\ntrain: {init_from: ./here}\n"
    settings = read(tmp_path, text, "drafts.a.init_from=../here")
    assert settings.target == str(tmp_path.parent / "model")
    assert settings.mix.sources == [FileSource(kind="file", path=tmp_path / "log.jsonl")]
    assert settings.train is not None and settings.train.init_from == tmp_path / "here"
    assert settings.drafts["a"].init_from == tmp_path / "here"
    assert settings.workdir == Path("runs")
    assert read(tmp_path, "target: owner/model").target == "owner/model"
    assert read(tmp_path, "workdir: out/x").workdir == Path("out/x")


def test_a_missing_path_is_shown_as_it_was_looked_for(tmp_path: Path) -> None:
    path = str(tmp_path / "nowhere")
    shown = path if len(path) <= 80 else f"{path[:77]}..."
    assert lines(tmp_path, "train: {init_from: nowhere}") == [
        f"recipe.yaml: train.init_from = {shown}: must be a folder that exists"
    ]


RECIPE = """\
name: demo
target: {model: ../model}
mix: {sources: [{kind: turns, path: demo/prompts.jsonl}]}
drafts:
  small: {family: small, layers: 6, steps: 60}
  eagle: {family: eagle3, steps: 40, draft_vocabulary: 8000}
"""


def write(folder: Path, text: str = RECIPE) -> Path:
    (folder / "demo.yaml").write_text(text)
    return folder / "demo.yaml"


def test_a_small_recipe_gets_every_default(tmp_path: Path) -> None:
    loaded = recipe.load_recipe(write(tmp_path), ["drafts.small.steps=20", "retrain.steps=5"])
    assert loaded.workdir == Path("runs/demo")
    assert loaded.base_dir == tmp_path
    assert loaded.target.model == str(tmp_path.parent / "model")
    assert loaded.mix.sources[0].kind == "turns" and loaded.mix.sources[0].path == str(tmp_path / "demo/prompts.jsonl")
    assert loaded.drafts["small"].steps == 20
    assert loaded.drafts["eagle"].family == "eagle3"
    assert loaded.retrain.steps == 5 and loaded.retrain.warm_start


def test_heads_are_for_the_engine_of_the_load(tmp_path: Path) -> None:
    load = "score.load={context_tokens: 64, answer_tokens: 8, engine: ENGINE}"

    def engines(*overrides: str) -> Any:
        return getattr(recipe.load_recipe(write(tmp_path), overrides).drafts["eagle"], "serving_engines", "none")

    assert engines() is None and engines(load.replace("ENGINE", "draftforge")) is None
    assert engines(load.replace("ENGINE", "sglang")) == ["sglang"]
    assert engines(load.replace("ENGINE", "sglang"), "drafts.eagle.serving_engines=[vllm]") == ["vllm"]
    with pytest.raises(RecipeError, match="norm_before_residual True: SGLang, of serving_engines, does not compute it"):
        engines(load.replace("ENGINE", "sglang"), "drafts.eagle.norm_before_residual=true")


def test_a_resolved_recipe_is_the_same_recipe(tmp_path: Path) -> None:
    loaded = recipe.load_recipe(write(tmp_path))
    other = tmp_path / "other"
    other.mkdir()
    again = recipe.load_recipe(write(other, yaml.safe_dump(loaded.resolved())))
    assert again.resolved() == loaded.resolved()


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("drafts={}", "demo.yaml: drafts: must have at least 1 item"),
        ("drafts.small.stesp=1", "drafts.small.stesp: unknown key; the nearest known one is drafts.small.steps"),
        ("gate.min_conversations=5", "gate.min_conversations: is gate.min_clusters now: clusters of near-duplicates"),
        ("score.bootstrap_samples=9", "score.bootstrap_samples: is gone: intervals are computed, not resampled"),
        ("drafts.small.lyers=1", "drafts.small.lyers: unknown key; the nearest known one is drafts.small.layers"),
        ("drafts.eagle.lyers=1", "drafts.eagle.lyers: unknown key; the nearest known one is drafts.eagle.layers"),
        (
            "drafts.small.family=tiny",
            "drafts.small: family must be one of 'small', 'medusa', 'eagle', 'eagle3', 'dflash'",
        ),
        ("drafts.Small={family: small, layers: 2}", "demo.yaml: drafts.Small"),
        ("drafts.lookup={family: small, layers: 2}", "lookup: is the name of a baseline; give the draft another"),
        ("drafts.suffix={family: small, layers: 2}", "suffix: is the name of a baseline; give the draft another"),
        ("mix.sources=[]", "mix.sources: must have at least 1 item"),
        ("target.model=", "target.model = None: must be text"),
        ("score.draft_tokens=[0]", "score.draft_tokens: K = 0: every K must be at least 1 and at most 64"),
        ("score.draft_tokens=[4, 100]", "score.draft_tokens: K = 100: every K must be at least 1 and at most 64"),
        ("gate.confidence=2", "gate.confidence = 2: must be < 1"),
        ("name=A b", "name = A b: must match pattern"),
    ],
)
def test_mistakes_in_real_sections(tmp_path: Path, override: str, line: str) -> None:
    with pytest.raises(RecipeError) as raised:
        recipe.load_recipe(write(tmp_path), [override])
    (said,) = str(raised.value).splitlines()
    assert line in said


@pytest.mark.parametrize(
    ("costs", "line"),
    [
        ("start: true, flags: [--share, 0.6]", 'load.costs.flags.1 = 0.6: must be text: quote it, "0.6"'),
        ("start: true, flags: [yes]", "load.costs.flags.0 = True: must be text: quote it"),
        ("", "load.costs: plain_url: required where servers run already, as rounds without a draft are timed on"),
        ("plain_url: http://a", "load.costs: draft_urls: required where servers run already, as rounds of each family"),
        (
            "plain_url: http://a, draft_urls: {lookup: {1: http://b}}",
            "hardware: required where servers run already, as they do not tell it (such as 1x H200), or set",
        ),
        ("draft_urls: {eagel3: {1: http://a}}", "draft_urls: eagel3: must be one of small, eagle, eagle3, medusa, dfl"),
        (
            "RUNNING, draft_urls: {eagle3: {1: http://a, 4: http://b}}",
            "lookup: has no server of K=1; must have the least and the largest of draft_tokens, K=1 and K=4; "
            "prompt lookup is scored beside every draft",
        ),
        (
            "RUNNING, draft_urls: {eagle3: {1: http://a}, lookup: {1: http://a, 4: http://b}}",
            "draft_urls.eagle3: has no server of K=4; must have the least and the largest of draft_tokens, K=1 and K=4",
        ),
        (
            "RUNNING, draft_urls: {lookup: {1: http://a, 3: http://c, 4: http://b}}",
            "draft_urls.lookup.3: must be among draft_tokens [1, 2, 4]: no draft has that K",
        ),
    ],
)
def test_mistakes_in_an_engines_servers(tmp_path: Path, costs: str, line: str) -> None:
    costs = costs.replace("RUNNING", "plain_url: http://a, hardware: 1x H200")
    load = f"{{engine: vllm, context_tokens: 64, answer_tokens: 8, costs: {{engine: vllm, {costs}}}}}"
    with pytest.raises(RecipeError) as raised:
        recipe.load_recipe(write(tmp_path), [f"score={{draft_tokens: [1, 2, 4], load: {load}}}"])
    (said,) = str(raised.value).splitlines()
    assert line in said


EVERYTHING: dict[str, Any] = {
    "name": "all",
    "target": {"model": "owner/model"},
    "mix": {
        "sources": [
            {"kind": "turns", "path": "x.jsonl", "template_args": {"deep": [{"depth": 1}]}},
            {"kind": "dataset", "name": "owner/data"},
            {"kind": "target", "count": 1},
        ],
        "weights": {"domain": {"code": 1.0}},
        "domains": {"clusters": 2},
        "sampling": [{"temperature": 1.0}],
    },
    "drafts": {
        "small": {"family": "small", "layers": 2, "lora": {}, "objective": {"kl": 1.0, "ce": 1.0, "tv": 1.0}},
        "listed": {"family": "small", "layers": [0, 2]},
        "eagle": {"family": "eagle3", "aux_layers": [1, 2, 3], "objective": {"kl": 1.0}},
        "phased": {
            "family": "eagle3",
            "objective": [{"until": 9, "objective": {"tv": {"weight": 1.0}}}, {"objective": {"kl": 1.0}}],
            "step_weights": [1.0, 1.0, 0.5, 0.5],
        },
    },
    "score": {
        "sampling": [{}],
        "draft_tokens": [1],
        "decode_draft_tokens": [1],
        "load": {"batch_sizes": {"1": 1.0}, "context_tokens": 64, "answer_tokens": 8},
        "race": {},
    },
}
"""A recipe with an entry in every list and mapping, so that every number of the schema has a place in it."""


def number_fields(nodes: list[recipe.Schema], at: Any, root: recipe.Schema) -> Iterator[tuple[Any, ...]]:
    """Places of all fields that may be numbers, present or not, by schema and by what `at` holds."""
    if any(node.get("type") in ("number", "integer") for node in nodes) or (isinstance(at, int) and not nodes):
        yield ()
    if any(node == {} for node in nodes) and isinstance(at, int):
        yield ()  # any JSON value
    names = list(at) if isinstance(at, dict) else list(range(len(at))) if isinstance(at, list) else []
    for node in nodes:
        known = node.get("properties", {})
        const = {name: field["const"] for name, field in known.items() if "const" in field}
        choices = {name: field["enum"] for name, field in known.items() if "enum" in field}
        if (
            not isinstance(at, list | float)
            and all(name in (at or {}) and at[name] == value for name, value in const.items())
            and all(at[name] in values for name, values in choices.items() if name in (at or {}))
        ):
            names += [name for name in known if name not in names]
    for name in names:
        inner = at[name] if isinstance(at, list) or name in (at or {}) else None
        for rest in number_fields(recipe._children(nodes, name, root), inner, root):
            yield name, *rest


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_no_number_of_a_recipe_may_be_infinite_or_nan(tmp_path: Path, value: float) -> None:
    schema = recipe.schema()
    places = {".".join(map(str, keys)): keys for keys in number_fields([schema], EVERYTHING, schema)}
    assert len(places) > 110
    assert places.keys() > {
        "mix.sources.0.template_args.deep.0.depth", "mix.sources.1.rows", "mix.sources.2.count", "mix.sampling.0.top_p",
        "mix.weights.domain.code", "drafts.small.lora.alpha", "drafts.small.objective.tv", "drafts.eagle.aux_layers.2",
        "drafts.eagle.step_weights","drafts.phased.step_weights.3",
        "drafts.phased.objective.0.until", "drafts.phased.objective.0.objective.tv.temperature",
        "drafts.phased.objective.1.objective.kl",
        "score.costs.wait_seconds", "score.draft_tokens.0", "capture.sampling.temperature",
        "gate.min_speedup", "registry.connect_seconds", "retrain.lock_timeout_seconds", "seed",
    }  # fmt: skip
    outer = {keys for keys in places.values() if any(keys == other[: len(keys)] != other for other in places.values())}
    for chosen in (outer, {*places.values()} - outer):  # a number where another recipe has a list of them
        raw = copy.deepcopy(EVERYTHING)
        for keys in chosen:
            at: Any = raw
            for key in keys[:-1]:
                at = at[key] if isinstance(at, list) else at.setdefault(key, {})
            at[keys[-1]] = value
        with pytest.raises(RecipeError) as raised:
            recipe.load_recipe(write(tmp_path, yaml.safe_dump(raw)))
        lines = {f"demo.yaml: {'.'.join(map(str, keys))} = {value}: must be finite" for keys in chosen}
        missing = lines - set(str(raised.value).splitlines())
        assert not missing, "\n".join(sorted(missing))


def test_the_schema_describes_its_keys() -> None:
    schema = recipe.schema()
    assert set(schema["required"]) == {"name", "target", "mix", "drafts"}
    assert schema["properties"]["workdir"]["description"].startswith("Where everything is written")
    bare = [
        f"{section}.{key}"
        for section, node in schema["$defs"].items()
        for key, value in node.get("properties", {}).items()
        if "description" not in value and "const" not in value
    ]
    assert not bare


@pytest.mark.parametrize(
    "path", sorted((Path(recipe.__file__).parent / "configs").glob("*.yaml")), ids=lambda path: path.name
)
def test_every_shipped_recipe_loads(path: Path) -> None:
    assert recipe.load_recipe(path).drafts


@pytest.mark.parametrize("value", ['"a\\0b"', '"\\ud800"'])
def test_text_that_no_file_can_hold_is_refused(tmp_path: Path, value: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"name: x\ntarget:\n  model: {value}\n")
    with pytest.raises(RecipeError, match=r"recipe\.yaml: line 3: .*: holds a NUL or half of a character"):
        recipe.load_recipe(path)


@pytest.mark.parametrize("value", ["0x" + "f" * 4_500, "1" + ":1" * 400, "1" + ":1" * 400 + ".5"])
def test_numbers_that_nothing_can_write_are_refused(tmp_path: Path, value: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"name: {value}\n")
    with pytest.raises(RecipeError, match=r"recipe\.yaml: line 1: .*: is a number of more than 300 signs"):
        recipe.load_recipe(path)


def test_the_home_of_a_user_whom_nobody_knows_is_a_plain_path(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text((Path(recipe.__file__).parent / "configs" / "demo.yaml").read_text())
    found = recipe.load_recipe(path, ["target.model=~nobody-has-it/m", "mix.sources.0.path=~nobody-has-it/w"])
    assert found.mix.sources[0].path == str(Path("~nobody-has-it/w").absolute())  # type: ignore[union-attr]
    assert found.target.absolute().model == "~nobody-has-it/m"
