"""The recipe: one YAML file, checked before any work starts.

Each subpackage defines the settings of its own section (`data/settings.py`, `train/settings.py` and so on). This file
composes them into `Recipe`, adds the sections of the pipeline (`promotion`, `retrain`), and reads the YAML. Every
problem is reported in one line: `recipe.yaml: drafts.small.steps = -3: must be >= 1`.
"""

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from .data.settings import CaptureSettings, MixSettings
from .errors import MissingFileError, RecipeError
from .eval.settings import ScoreSettings
from .masking import masked, masked_value
from .registry.settings import GateSettings, RegistrySettings
from .specdec.engine_features import ENGINES
from .specdec.proposers.training_free import TRAINING_FREE
from .specdec.proposers.tree_settings import DRAFT_NAME, MergedTree
from .specdec.target_settings import TargetSettings
from .storage import Access, expanded, write_bytes
from .train.settings import DraftSettings

M = TypeVar("M", bound=BaseModel)
Schema = dict[str, Any]
Keys = tuple[str | int, ...]

# Formats that a JSON schema gives to fields of type Path.
_PATH_FORMATS = {"path", "file-path", "directory-path"}
_ANY_KEY = "additionalProperties"
_REGISTRY = "models:/"  # an address in the registry, where a path may stand
_PATH_KEYS = {"path"}  # text that is a path whatever its type says
# Pydantic's messages and what replaces them in error lines; every pattern is applied, in this order.
_PLAIN_WORDS = [
    (re.compile(r"(Value|Assertion) error, "), ""),
    (re.compile(r"Input should be a valid string"), "must be text"),
    (re.compile(r"Input should be a valid integer.*"), "must be a whole number"),
    (re.compile(r"Input should be a valid number.*"), "must be a number"),
    (re.compile(r"Input should be a valid boolean.*"), "must be true or false"),
    (re.compile(r"Input should be a valid (dictionary|mapping).*"), "must be a mapping of keys to values"),
    (re.compile(r"Input should be a valid (list|tuple)"), "must be a list"),
    (re.compile(r"Input is not a valid path.*"), "must be a path"),
    (re.compile(r"Input should be "), "must be "),
    (re.compile(r"\b\w+ should (have|match) "), r"must \1 "),
    (re.compile(r"greater than or equal to"), ">="),
    (re.compile(r"less than or equal to"), "<="),
    (re.compile(r"greater than"), ">"),
    (re.compile(r"less than"), "<"),
]


_NAME = DRAFT_NAME
_REPLACED = {
    "gate.min_conversations": "is gate.min_clusters now: clusters of near-duplicates count, not conversations",
    "gate.min_domain_conversations": "is gate.min_domain_clusters now: clusters of near-duplicates count",
    "score.bootstrap_samples": "is gone: intervals are computed, not resampled; leave it out",
}
"""Keys that recipes had, and what became of them."""
_MOST_CHARACTERS, _MOST_NODES, _MOST_LEVELS = 1_000_000, 100_000, 50  # of a YAML file
_BASELINES = (*TRAINING_FREE, "none", "plain")  # what tables and `--draft` call decoding without a trained draft


class RetrainSettings(BaseModel):
    """Retraining: when `draftforge retrain` takes the champion for stale, and how it trains the next draft."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    warm_start: bool = True
    """Start from the champion's weights where tokenizer and shapes allow it; false: always from the recipe's start."""
    steps: int | None = Field(default=None, ge=1)
    """Optimizer steps of a warm-started training; absent: the draft's own `steps`."""
    old_share: float = Field(default=0.25, ge=0, lt=1)
    """Least share of the training conversations that come from the champion's own training, answered anew; those that
    the logs no longer hold are taken from its mix in the work folder. 0: only what the sources hold now."""
    acceptance_margin: float = Field(default=0.05, ge=0, lt=1)
    """Relative fall of tau (tokens a target pass) that is tolerated: stale where it is shown to have fallen by more."""
    drift_margin: float = Field(default=0.1, ge=0, lt=1)
    """Share of the mix that may move between domains and sampling settings: stale where more is shown to have moved."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """Confidence of the one-sided tests that show a fall of tau or a drift of the mix."""
    probe_conversations: int = Field(default=128, ge=2)
    """New conversations that the target answers to measure the champion on; all where there are fewer."""
    lock_timeout_seconds: float = Field(default=0.0, ge=0)
    """How long to wait for another retraining of the same work folder to end; 0: give up at once."""


class PromotionSettings(BaseModel):
    """Command that runs after a promotion or a rollback, for instance to make the serving engine load the new draft."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    command: list[Annotated[str, Field(min_length=1)]] = []
    """A program and its arguments, run without a shell once the alias has moved; empty: none. Its environment says what
    happened: DRAFTFORGE_EVENT (promote, rollback), _VERSION, _URI, _TARGET, _DRAFT (a folder), _DECISION (a JSON
    file)."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """Longest run time of the command; after it the command is killed and counts as failed."""


class Recipe(BaseModel):
    """Everything that `draftforge distill` needs to know."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
    _base_dir: Path = PrivateAttr(default_factory=Path)

    name: str = Field(pattern=_NAME, max_length=64)
    """Name of the recipe: of its work folder and its runs."""
    workdir: Path = Field(default=Path("runs"), json_schema_extra={"relative_to": "cwd"})
    """Where everything is written, relative to the current folder; absent: runs/NAME."""
    workdir_access: Access = "owner"
    """Who may enter the work folder, which holds users' messages: `owner` (folders 0700, files 0600), `group` (0770,
    0660); `umask`: modes are left to the process's umask and to whoever made the folder."""
    seed: int = Field(default=0, ge=0)
    """Seed of fresh weights, of the order of training data and of dropout."""
    target: TargetSettings
    """The model that is served."""
    mix: MixSettings
    """Conversations that the target answers: training and scoring data are made of these answers."""
    capture: CaptureSettings = CaptureSettings()
    """Capture of the target's answers: how they are sampled, and which signals for training are kept."""
    drafts: dict[Annotated[str, Field(pattern=_NAME, max_length=64)], DraftSettings] = Field(min_length=1)
    """Drafts to train, by name."""
    score: ScoreSettings = ScoreSettings()
    """Scoring of checkpoints: acceptance on recorded answers, times of rounds, and the expected speed-up."""
    registry: RegistrySettings = RegistrySettings()
    """MLflow store of runs and registered versions."""
    gate: GateSettings = GateSettings()
    """Promotion gate: what a candidate must show on the holdout to become the champion."""
    promotion: PromotionSettings = PromotionSettings()
    """Command that runs after a promotion or a rollback."""
    retrain: RetrainSettings = RetrainSettings()
    """When a new draft is due, and how it starts."""

    @model_validator(mode="before")
    @classmethod
    def _work_folder_of_its_own(cls, raw: Any) -> Any:
        """Default `workdir` to runs/NAME, so that two recipes never share a work folder by accident."""
        if isinstance(raw, dict) and isinstance(raw.get("name"), str) and raw.get("workdir") is None:
            return {**raw, "workdir": f"runs/{raw['name']}"}
        return raw

    @model_validator(mode="before")
    @classmethod
    def _served_by_the_loads_engine(cls, raw: Any) -> Any:
        """Let drafts that name no `serving_engines` be for the engine of `score.load`, where that is one of others."""
        try:
            engine, drafts = raw["score"]["load"]["engine"], dict(raw["drafts"])
            heads = [name for name, draft in drafts.items() if draft["family"] == "eagle3" and engine in ENGINES]
        except (KeyError, TypeError, ValueError):
            return raw
        return {**raw, "drafts": drafts | {name: {"serving_engines": [engine], **drafts[name]} for name in heads}}

    @field_validator("drafts")
    @classmethod
    def _no_baselines_name(cls, drafts: dict[str, Any]) -> dict[str, Any]:
        """Refuse drafts named like a baseline: tables and `--draft` could not tell the two apart."""
        taken = next((name for name in _BASELINES if name in drafts), None)
        if taken is not None:
            raise ValueError(f"{taken}: is the name of a baseline; give the draft another")
        return drafts

    @model_validator(mode="after")
    def _merged_drafts_are_known(self) -> "Recipe":
        """Refuse merged trees that name a draft which is none of the recipe's, or only one draft in all."""
        for name, tree in self.score.trees.items():
            if not isinstance(tree, MergedTree):
                continue
            for number, draft in enumerate(tree.drafts):
                if isinstance(draft, str) and draft not in self.drafts:
                    raise ValueError(
                        f"score.trees.{name}.drafts.{number} = {draft}: must be one of the recipe's drafts "
                        f"({', '.join(self.drafts)}); write a folder as ./{draft}"
                    )
            if tree.names and len(tree.drafts) < 2:
                raise ValueError(f"score.trees.{name}.drafts = {tree.names}: must be two drafts or more")
        return self

    @model_validator(mode="after")
    def _a_spread_target_only_teaches(self) -> "Recipe":
        """Refuse draft settings that run a sharded target for scores, features or gradients of its own."""
        for name, draft in self.drafts.items() if self.target.shard else ():
            for field in ("score_conversations", "features_bytes", "backbone"):
                value = getattr(draft, field, None)
                if value:
                    shown = value if isinstance(value, int) else "..."
                    raise ValueError(
                        f"drafts.{name}.{field} = {shown}: must be absent where target.shard is true, as all ranks run "
                        "that target together, equally often, without gradients"
                    )
            if getattr(draft, "draft_vocabulary", None) == "auto":
                raise ValueError(
                    f"drafts.{name}.draft_vocabulary = auto: must be a size where target.shard is true, as rounds of "
                    "that target cannot be timed"
                )
        return self

    @property
    def base_dir(self) -> Path:
        """The recipe file's folder, absolute: what names without ./ (of local datasets) are relative to."""
        return self._base_dir

    def resolved(self) -> dict[str, Any]:
        """The recipe with every default in place and every path absolute: JSON-able, and a valid recipe itself."""
        return self.model_dump(mode="json")

    def public(self) -> dict[str, Any]:
        """The resolved recipe with its secrets masked: for people and logs."""
        found: dict[str, Any] = masked_value(self.resolved())
        return found

    def changed(self, *overrides: str) -> "Recipe":
        """The recipe with other values, each given as `section.key=value`, the value in YAML; checked as a file is.

        Relative paths are relative to the current folder. Raises RecipeError.
        """
        changed = _validated(Recipe, self._as_set(), overrides, self.name)
        changed._base_dir = self._base_dir
        return changed

    def save(self, path: str | Path) -> None:
        """Write the recipe as YAML: what was set, without defaults, paths absolute, secrets as they are.

        `load_recipe` reads it back. Names of local datasets without ./ are then looked for beside the new file.
        """
        write_bytes(Path(path), yaml_text(self._as_set()).encode())

    def _as_set(self) -> dict[str, Any]:
        found = self.model_dump(mode="json", exclude_unset=True)
        # The default follows the name, which may change.
        return {key: value for key, value in found.items() if (key, value) != ("workdir", f"runs/{self.name}")}


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read and check a recipe. `overrides` are `section.key=value`, the value in YAML.

    Relative paths in the file are relative to the file, those in overrides to the current folder. Raises RecipeError,
    with one line for each thing that is wrong, and MissingFileError.
    """
    path = Path(path)
    recipe = read(Recipe, path, overrides)
    recipe._base_dir = path.parent.resolve()
    return recipe


def schema() -> dict[str, Any]:
    """The JSON schema of recipes."""
    return Recipe.model_json_schema()


def read(model: type[M], path: Path, overrides: Sequence[str] = ()) -> M:
    """Read a YAML file and `section.key=value` overrides into a settings model.

    Relative paths in the file are relative to the file, those in overrides to the current folder. Raises RecipeError,
    with one line for each thing that is wrong, and MissingFileError.
    """
    # The JSON schema tells which values are paths, before pydantic has validated anything.
    schema = _schema(model)
    return _validated(model, _located(_read_yaml(path), [schema], schema, path.parent), overrides, path.name)


def _validated(model: type[M], raw: Any, overrides: Sequence[str], name: str) -> M:
    """Settings model of raw values, paths absolute, with overrides in them. `name`: what is read, for errors."""
    # 1) Overrides, each resolved against the schema nodes of its own section.
    schema = _schema(model)
    for override in overrides:
        keys, value = _parse_override(override)
        nodes = [schema]
        for key in keys[:-1]:
            nodes = _children(nodes, key, schema)
        _assign(raw, keys, _located({keys[-1]: value}, nodes, schema, Path())[keys[-1]], override)
    # 2) Validate, and explain every error in terms of the YAML keys.
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        problems = [f"{name}: {line}" for line in _explain(error.errors(), raw, schema)]
        raise RecipeError("\n".join(problems)) from None


@cache
def _schema(model: type[BaseModel]) -> Schema:
    return model.model_json_schema()


class _Loader(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys and tags, and that reads 1e-4 as a number."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        # PyYAML's constructors fail in many ways at a text that is none of its tag: `!!float ""`, `!!timestamp x`.
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if tag := getattr(event, "tag", None):
            raise yaml.constructor.ConstructorError(
                problem=f"the tag {tag[:80]}: a recipe has none", problem_mark=event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(problem="a key is no text", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(problem=f"key {key.value} twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """YAML dumper that quotes what `_Loader` would read as something else than text."""


# Without this, PyYAML (YAML 1.1) reads 1e-4 as text, since a number needs a dot in its mantissa there.
for _one in (_Loader, _Dumper):
    _one.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
    )


def yaml_text(section: Mapping[str, Any]) -> str:
    """Values as YAML that a recipe's reader reads back."""
    return str(yaml.dump(section, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def _parse_yaml(text: str, where: str) -> Any:
    """Parse YAML text. Raises RecipeError, which names `where` and the line."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_nodes(node, where)
        return loader.construct_document(node)
    except RecursionError:
        raise RecipeError(f"{where}: not valid YAML: nested deeper than {_MOST_LEVELS} levels") from None
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}:" if error.problem_mark else ""
        raise RecipeError(f"{where}:{line} not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise RecipeError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None


_NO_TEXT = re.compile("[\0\ud800-\udfff]")
_NUMBERS, _LONGEST_NUMBER = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"), 300


def _check_nodes(root: yaml.Node, where: str) -> None:
    """Raise RecipeError for a document that is too deep, or too large once its aliases are followed.

    An alias of aliases stands for any number of values: each counts as often as it would be read.
    """
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()

    def size(node: yaml.Node) -> int:
        if id(node) in sizes:
            return sizes[id(node)]
        # A node that is met inside itself has no end.
        if id(node) in open_nodes or len(open_nodes) >= _MOST_LEVELS:
            raise RecipeError(f"{where}: not valid YAML: nested deeper than {_MOST_LEVELS} levels")
        open_nodes.add(id(node))
        if isinstance(node, yaml.ScalarNode) and _NO_TEXT.search(node.value):
            line = node.start_mark.line + 1
            raise RecipeError(f"{where}: line {line}: {node.value[:80]!a}: holds a NUL or half of a character")
        if isinstance(node, yaml.ScalarNode) and node.tag in _NUMBERS and len(node.value) > _LONGEST_NUMBER:
            line = node.start_mark.line + 1
            raise RecipeError(
                f"{where}: line {line}: {node.value[:80]}…: is a number of more than {_LONGEST_NUMBER} signs"
            )
        inner = node.value if isinstance(node, yaml.SequenceNode | yaml.MappingNode) else ()
        pairs = inner if isinstance(node, yaml.MappingNode) else ((one,) for one in inner)
        sizes[id(node)] = 1 + sum(size(one) for pair in pairs for one in pair)
        open_nodes.remove(id(node))
        return sizes[id(node)]

    if size(root) > _MOST_NODES:
        raise RecipeError(f"{where}: not valid YAML: its aliases stand for more than {_MOST_NODES:,} values")


def _read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping. Raises MissingFileError or RecipeError, both naming the file."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MOST_CHARACTERS + 1)
    except FileNotFoundError:
        raise MissingFileError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: not a readable text file ({error})") from None
    if len(text) > _MOST_CHARACTERS:
        raise RecipeError(f"{path.name}: must have at most {_MOST_CHARACTERS:,} characters")
    raw = _parse_yaml(text, path.name)
    if not isinstance(raw, dict):
        raise RecipeError(f"{path.name}: must be a mapping of section names to settings")
    return raw


def _parse_override(override: str) -> tuple[Keys, Any]:
    """Keys and value of `section.key=value`."""
    name, equals, value = override.partition("=")
    if not equals or not all(name.split(".")):
        raise RecipeError(f"override {override!r}: must be section.key=value")
    keys = tuple(int(key) if re.fullmatch("[0-9]{1,9}", key) else key for key in name.split("."))
    return keys, _parse_yaml(value, f"override {override!r}")


def _assign(raw: dict[str, Any], keys: Keys, value: Any, override: str) -> None:
    """Put an override's value into the raw recipe, making missing sections on the way.

    Raises RecipeError where a key leads into a plain value, or a list index is out of range.
    """
    at: Any = raw
    for key, after in zip(keys, (*keys[1:], None)):
        # Lists take an index that exists, mappings take any key as text.
        if isinstance(at, list):
            if not isinstance(key, int) or key >= len(at):
                raise RecipeError(f"override {override!r}: {key} must be an index below {len(at)}")
        elif not isinstance(at, dict):
            raise RecipeError(f"override {override!r}: there is no section at {key}")
        else:
            key = str(key)
        # The last key is assigned; any other one is entered, and made where it is absent or null.
        if after is None:
            at[key] = value
        else:
            if isinstance(at, dict) and at.get(key) is None:
                at[key] = {}
            at = at[key]


def branches(node: Schema, root: Schema) -> list[Schema]:
    """Plain schema nodes that a node can stand for, with references and unions resolved."""
    if "$ref" in node:
        return branches(root["$defs"][node["$ref"].rpartition("/")[2]], root)
    union = [*node.get("anyOf", ()), *node.get("oneOf", ()), *node.get("allOf", ())]
    return [branch for member in union for branch in branches(member, root)] if union else [node]


def _children(nodes: Iterable[Schema], key: str | int, root: Schema) -> list[Schema]:
    """The plain schema nodes under a key or list index; none where the key is unknown."""
    found: list[Schema] = []
    for node in (branch for parent in nodes for branch in branches(parent, root)):
        # A declared property; else the element of a list, or the value of any key of a mapping.
        child = node.get("properties", {}).get(str(key)) or node.get("items" if isinstance(key, int) else _ANY_KEY)
        # Mappings whose keys must match a pattern, such as `drafts`, have their values elsewhere in the schema.
        named = [child] if isinstance(child, dict) else node.get("patternProperties", {}).values()
        found += [branch for value in named for branch in branches(value, root)]
    return found


def _located(value: Any, nodes: Iterable[Schema], root: Schema, base: Path) -> Any:
    """A raw value with relative paths made absolute: fields of type Path, and text that begins with ./ ../ or ~/."""
    nodes = list(nodes)
    # Sections and lists: go down in value and schema together.
    if isinstance(value, dict):
        return {
            key: _absolute(item, base)
            if key in _PATH_KEYS and isinstance(item, str)
            else _located(item, _children(nodes, key, root), root, base)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_located(item, _children(nodes, i, root), root, base) for i, item in enumerate(value)]
    # Plain values: left alone unless they are text, and where the field is relative to the current folder.
    if not isinstance(value, str) or not value or any(node.get("relative_to") == "cwd" for node in nodes):
        return value
    if value.startswith(_REGISTRY):
        return value
    # Text is a path where the schema knows no other text like it there, or where it is written like one.
    texts = [node for node in nodes if node.get("type") == "string" and re.search(node.get("pattern", ""), value)]
    is_path = bool(texts) and all(node.get("format") in _PATH_FORMATS for node in texts)
    return _absolute(value, base) if is_path or value.startswith(("./", "../", "~/")) else value


def _absolute(path: str, base: Path) -> str:
    return str((base / expanded(path)).resolve())


def _explain(errors: Iterable[ErrorDetails], raw: Any, schema: Schema) -> list[str]:
    """One line for each error, unknown keys first; a missing key whose misspelling was named is not named again."""
    unknown: list[str] = []
    other: dict[str, str] = {}
    meant: set[str] = set()
    # By dotted key: a union reports one error for each of its members, and the first one is enough.
    for error in errors:
        keys = _keys_of(error, raw)
        dotted = ".".join(str(key) if len(str(key)) <= 80 else f"{str(key)[:77]}..." for key in keys) or "recipe"
        if error["type"] == "extra_forbidden" and dotted in _REPLACED:
            unknown.append(f"{dotted}: {_REPLACED[dotted]}")
        elif error["type"] == "extra_forbidden":
            nearest = _nearest(keys, raw, schema)
            meant.add(nearest)
            unknown.append(f"{dotted}: unknown key; the nearest known one is {nearest}")
        elif error["type"] == "missing":
            other[dotted] = f"{dotted}: required"
        else:
            other.setdefault(dotted, f"{dotted}{_shown(error['input'])}: {_rule(error)}")
    return [*dict.fromkeys(unknown), *(line for dotted, line in other.items() if dotted not in meant)]


def _keys_of(error: ErrorDetails, raw: Any) -> Keys:
    """Keys of the YAML file that an error is about; pydantic's own `loc` also lists union tags and type names."""
    keys: list[str | int] = []
    at = raw
    # Follow the location through the raw values: a part that is not there is none of the file.
    for i, part in enumerate(error["loc"]):
        last = i == len(error["loc"]) - 1
        is_index = isinstance(at, list) and isinstance(part, int) and part < len(at)
        if is_index or (isinstance(at, dict) and part in at):
            keys.append(part)
            at = at[part]
        elif last and error["type"] == "missing":
            keys.append(part)
    return tuple(keys)


def _nearest(keys: Keys, raw: Any, schema: Schema) -> str:
    """The known key that is spelled most like the unknown one, in the section that the file's own values choose."""
    nodes, at = [schema], raw
    # Go down to the section that holds the unknown key.
    for key in keys[:-1]:
        nodes, at = _children(nodes, key, schema), at[key]
    # Of a tagged union, such as drafts by family, keep the members whose constants the file has.
    fields = [branch.get("properties", {}) for node in nodes for branch in branches(node, schema)]
    chosen = [
        names for names in fields if all(at.get(k, v["const"]) == v["const"] for k, v in names.items() if "const" in v)
    ]
    # Name the closest spelling with its whole path; cutoff 0 names one if the section has any.
    known = sorted({name for names in chosen or fields for name in names})
    close = difflib.get_close_matches(str(keys[-1]), known, n=1, cutoff=0.0)
    return ".".join(map(str, (*keys[:-1], *close))) if close else "none: this section has no keys"


def _shown(value: Any) -> str:
    """Value of an error line as ` = value`, shortened to 80 characters; empty for sections and lists.

    Secrets go first: half an address may no longer look like one.
    """
    if isinstance(value, Mapping | list | BaseModel):
        return ""
    text = masked(str(value) if isinstance(value, int | float | str) and value != "" else repr(value))
    return f" = {text if len(text) <= 80 else text[:77] + '...'}"


def _rule(error: ErrorDetails) -> str:
    """Rule that a value broke, in plain words instead of pydantic's."""
    if error["type"] == "union_tag_invalid":
        return f"{error['ctx']['discriminator'].strip(chr(39))} must be one of {error['ctx']['expected_tags']}"
    if error["type"] == "union_tag_not_found":
        return f"{error['ctx']['discriminator'].strip(chr(39))} is required"
    if isinstance(error["input"], float) and not math.isfinite(error["input"]):
        return "must be finite"
    if error["type"] == "string_type" and isinstance(error["input"], int | float):
        quoted = f', "{error["input"]}"' if not isinstance(error["input"], bool) else ""
        return f"must be text: quote it{quoted}"
    message = error["msg"]
    for pattern, plain in _PLAIN_WORDS:
        message = pattern.sub(plain, message)
    return " ".join(message.split())
