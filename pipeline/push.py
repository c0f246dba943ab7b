"""`draftforge push`: upload a draft with its model card to a repository of the Hugging Face hub."""

import ipaddress
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from urllib.parse import urlsplit

from huggingface_hub import CommitOperationAdd, HfApi, ModelCardData
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
)
from safetensors import SafetensorError, safe_open

from ..errors import FormatError, HubError, InputError, MissingFileError, RegistryError, one_line, spelt_out
from ..masking import holds_key, masked
from ..progress import say
from ..recipe import load_recipe
from ..registry.artifacts import pickles
from ..registry.connect import Tracking, mlflow_errors
from ..registry.lineage import Version, as_version, get_version
from ..registry.versions import champion, is_models_uri, resolve_models_uri
from ..specdec.formats import Format
from ..specdec.formats.layouts import NATIVE, layout_of
from ..specdec.gguf_header import read_header
from ..specdec.model_card import CARD_FILE, DraftFacts, card_files, facts_of, write_card
from ..specdec.serving_plan import PLAN_FILE, find_plan
from ..specdec.target_settings import TargetSettings
from ..storage import lies_inside, parse_json, read_object, size_text, utf8
from .cli_options import PushOptions
from .export import say_assumed, version_facts
from .registry_listing import open_store
from .staleness import is_hub_id
from .workspace import Workspace

_HUB_SECONDS = 10.0
_MOST_NAMES = 10  # of files left out, in one line
_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_LOCAL_PATH = re.compile(r"(?:/|~/|\.{1,2}/|[A-Za-z]:\\).+", re.DOTALL)
_PATH_INSIDE = re.compile(
    r"file://|(?<![\w./~-])~[\w.-]*/\w|(?<![A-Za-z])[A-Za-z]:[\\/](?!/)|\\\\[\w.-]+\\|\$\{?HOME\b|%USERPROFILE%"
    r"|(?<![\w./~-])/(?:home|Users|root|tmp|var|mnt|data|etc|opt|srv|scratch|work|workspace|private|Volumes|media|nfs)/"
)
"""A path of a machine within a sentence."""
_ADDRESS = re.compile(r"https?://[^\s\"'<>)]+", re.IGNORECASE)
_PRIVATE_NAMES = (".internal", ".local", ".lan", ".corp", ".intranet", ".home", ".private")
_WEIGHTS = re.compile(r".+\.(?:safetensors|gguf)")
_VOCABULARY = re.compile(r"tokenizer\.json|tekken\.json|vocab\.(?:json|txt)|merges\.txt|.+\.(?:model|tiktoken)")
"""Files of tokens, which may look like anything."""
_OF_THE_TOKENIZER = re.compile(
    r"(?:tokenizer_config|special_tokens_map|added_tokens)\.json|chat_template\.(?:jinja|json)"
)
"""Files that come with the target as they are: names such as `image_token` in them are no secrets."""
_OTHERS = re.compile(
    r"(?:config|generation_config|serve|draftforge|.+\.safetensors\.index)\.json"
    r"|README\.md|(?:LICENSE|LICENCE|NOTICE)(?:\.(?:md|txt))?"
)
_KINDS = (_WEIGHTS, _VOCABULARY, _OF_THE_TOKENIZER, _OTHERS)
"""Names of all files that go along."""
_LIBRARIES: dict[Format, str] = {"sglang": "sglang", "speculators": "speculators", "gguf": "gguf", "medusa": "medusa"}


class _Source(NamedTuple):
    """Draft to push: its folder, what is known of it, and its target where a recipe names that."""

    folder: Path
    facts: DraftFacts
    target: TargetSettings | None = None


def push(source: str, repository: str, options: PushOptions) -> None:
    """Upload the draft `source` to `repository` (owner/name) in one commit, and print the commit's address.

    `source`: a recipe, whose champion it is; a draft's folder; or `models:/name/number` or `models:/name@alias` of the
    store that the options name. Raises InputError for what must not leave this machine; HubError where the hub cannot
    be asked.
    """
    if not _REPOSITORY.fullmatch(repository):
        raise InputError(f"{repository}: must be a repository of the hub, owner/name")
    base_model = options.base_model
    if base_model is not None and (not _REPOSITORY.fullmatch(base_model) or Path(base_model).exists()):
        raise InputError(f"--base-model {base_model}: must be the target's hub id (owner/name), no local path")
    with tempfile.TemporaryDirectory() as temporary:
        downloads, beside = Path(temporary, "downloads"), Path(temporary, "beside")
        beside.mkdir()
        draft = _find(source, options, downloads)
        # 1) Card and plan, as they stand in the repository; all other files are taken from where they lie.
        target, layout = _served_target(draft.target, base_model), layout_of(draft.folder)
        data = _card_data(draft.facts.family, layout, target, options.license)
        files = _files(draft.folder)
        write_card(beside, repository, layout, find_plan(draft.folder), draft.facts, target, data)
        if CARD_FILE in files:
            say(f"{draft.folder / CARD_FILE}: somebody else's card, which is pushed as it is")
        made = {path.relative_to(beside).as_posix(): path for path in beside.rglob("*") if path.is_file()}
        say_assumed(draft.folder)
        # 2) Nothing of this machine goes along.
        for folder, names in ((draft.folder, list(files)), (beside, list(made))):
            if found := pickles(folder, names):
                raise InputError(f"{found[0]}: is a pickle; it is not pushed")
        files = made | files
        left = sorted(name for name in files if not any(kind.fullmatch(Path(name).name) for kind in _KINDS))
        if left:
            more = ", ..." if len(left) > _MOST_NAMES else ""
            say(f"left out, as no part of a draft: {len(left)} files ({', '.join(left[:_MOST_NAMES])}{more})")
        files = {name: path for name, path in files.items() if name not in left}
        for name, path in files.items():
            if not lies_inside(beside if made.get(name) == path else draft.folder, path):
                raise InputError(f"{name}: is a link out of the draft's folder; put a copy there before it is pushed")
        for name, path in files.items():
            _check_private(name, path)
        # 3) Show it, or send it.
        for name, path in sorted(files.items()):
            say(f"{size_text(path.stat().st_size):>10}  {name}")
        total = size_text(sum(path.stat().st_size for path in files.values()))
        if options.dry_run:
            say(f"dry run: {len(files)} files, {total}, for {repository}; the card:")
            card = files[CARD_FILE].read_text(encoding="utf-8")  # perhaps a stranger's, which controls no terminal
            print(spelt_out(card, kept="\n"), end="")
            return
        print(spelt_out(_send(files, repository, options.private, draft.facts)))


def _find(source: str, options: PushOptions, downloads: Path) -> _Source:
    """Find the draft, download what the registry holds. Raises InputError or MissingFileError, naming the source."""
    if is_models_uri(source):
        tracking = open_store(options)
        version = _version(tracking, source)
        return _Source(resolve_models_uri(tracking, version.uri, downloads), version_facts(tracking, version))
    place = Path(source)
    if place.is_dir():
        return _Source(place, facts_of(place, _named_target(place)))
    if place.suffix not in (".yaml", ".yml"):
        raise MissingFileError(f"{source}: must be a recipe (.yaml), a draft's folder or models:/NAME/NUMBER")
    # A recipe: the champion for its target.
    space = Workspace(load_recipe(place), read_only=True)
    now = champion(space.tracking, space.target_fingerprint)
    if now is None:
        raise RegistryError(f"{source}: no draft is the champion for its target; name a draft's folder instead")
    folder = resolve_models_uri(space.tracking, now.uri, downloads)
    return _Source(folder, version_facts(space.tracking, now), space.recipe.target)


def _version(tracking: Tracking, address: str) -> Version:
    """The version of `models:/name/number` or `models:/name@alias`."""
    name, _, alias = address.removeprefix("models:/").partition("@")
    if not alias:
        return get_version(tracking, name)
    with mlflow_errors(tracking.uri):
        record = tracking.client.get_model_version_by_alias(name, alias)
    return as_version(record)


def _named_target(folder: Path) -> str:
    """Name of the target that a draft's `serve.json` holds; "its target" where there is none."""
    known = read_object(folder / PLAN_FILE) if (folder / PLAN_FILE).is_file() else {}
    name = known.get("target") or "its target"
    if not isinstance(name, str):
        raise FormatError(f"{folder / PLAN_FILE}: target: must be text")
    return Path(name).name


def _served_target(target: TargetSettings | None, base_model: str | None) -> TargetSettings | None:
    """Target as others find it: by its hub id, with nothing that names a place here; None: no hub id is known."""
    name = base_model or (target.model if target is not None and is_hub_id(target.model) else None)
    if name is None:
        say("the card names no base_model: nothing names the target's hub id; --base-model OWNER/NAME does")
        return None
    if target is None:
        return TargetSettings(model=name)
    same = target.model == name
    adapter = target.adapter and (target.adapter if is_hub_id(target.adapter) else Path(target.adapter).name)
    return TargetSettings(
        model=name,
        revision=target.revision if same else None,
        context=target.context,
        trust_remote_code=target.trust_remote_code,
        adapter=adapter,
    )


def _card_data(family: str, layout: Format, target: TargetSettings | None, license_id: str | None) -> str:
    """Metadata of the card, YAML between dashes: what the hub finds and shows it by."""
    library = "transformers" if family == "small" and layout in (NATIVE, "hf") else _LIBRARIES.get(layout, "vllm")
    terms = {"license": license_id} if license_id else {} if target is None else _license_of(target.model)
    fields: dict[str, Any] = {"base_model": target.model} if target is not None else {}
    fields |= {**terms, "library_name": library, "pipeline_tag": "text-generation"}
    data = ModelCardData(**fields, tags=["speculative-decoding", "draft-model", family, "draftforge"])
    if not terms:
        say("the card names no license: --license ID does, such as apache-2.0")
    return f"---\n{data.to_yaml()}\n---\n"


def _license_of(base_model: str) -> dict[str, str]:
    """License of the target as the hub knows it: the draft learned from it, and may hold parts of it."""
    try:
        card: Any = HfApi().model_info(base_model, timeout=_HUB_SECONDS).card_data
    except (RepositoryNotFoundError, HFValidationError):
        raise MissingFileError(f"--base-model {base_model}: the hub has no such model (or it is private)") from None
    except Exception as error:  # its transport has changed, and each has errors of its own
        say(f"{base_model}: the hub cannot be asked for its license ({one_line(error, clean=masked)})")
        return {}
    names = ("license", "license_name", "license_link")
    return {name: card[name] for name in names if isinstance(card.get(name), str)} if card else {}


def _files(folder: Path) -> dict[str, Path]:
    """Files of a draft by name, without hidden ones; of ours the card is written anew, and a policy names this disk."""
    ours = card_files(folder)
    named = {path.name: path for path in folder.iterdir() if path.is_file() and path.name not in ours}
    return {name: path for name, path in named.items() if not name.startswith(".")}


def _check_private(name: str, path: Path) -> None:
    """Raise InputError where a file's text, or its weights' metadata, holds a secret or names a place of a network or
    machine; FormatError where it cannot be read."""
    own = _OTHERS.fullmatch(path.name) is not None
    values, text = [], ""
    if _WEIGHTS.fullmatch(path.name):
        values = list(_texts(_metadata_of(path)))
        text = "\n".join(f"{key}: {value}" for key, value in values if not key.startswith("tokenizer."))
    elif path.suffix not in (".model", ".tiktoken"):
        try:
            text = path.read_bytes().decode("utf-8")
            values = list(_texts(parse_json(text))) if path.suffix == ".json" else []
        except ValueError as error:
            raise FormatError(f"{name}: must be UTF-8 text, and valid JSON if it is .json ({error})") from None
    # Names say secret in files of ours; a tokenizer's have a meaning of their own.
    secret = masked(text) != text if own or _WEIGHTS.fullmatch(path.name) else holds_key(text)
    if secret or any(holds_key(value) for _, value in values):
        raise InputError(f"{name}: holds what looks like a secret; take it out before the draft is pushed")
    # Tokens and templates are text of the target's, with slashes of their own.
    if _VOCABULARY.fullmatch(path.name) or path.suffix == ".jinja":
        return
    if not values:
        values = [("text", line) for line in text.splitlines()]
    for key, value in values:
        if not own and re.search(r"(?:chat_)?template|(?:^|\.)content$|_tokens?(?:\.|$)", key):
            continue
        for one in (key, value):
            whole = key != "text" and _LOCAL_PATH.fullmatch(one)
            if whole or _PATH_INSIDE.search(one) or _names_private_host(one):
                rule = "is a path of this machine" if whole else "names a place of a machine or a private network"
                shown = utf8(f"{key} = {value[:200]}")
                raise InputError(f"{name}: {shown}: {rule}; take it out, or name a hub id")


def _metadata_of(path: Path) -> Any:
    """Metadata in the header of a safetensors or GGUF file. Raises FormatError."""
    if path.suffix == ".gguf":
        return read_header(path).keys
    try:
        with safe_open(path, "pt") as weights:
            return weights.metadata() or {}
    except (SafetensorError, OSError, ValueError) as error:
        raise FormatError(f"{path.name}: is no safetensors file ({one_line(error)})") from None


def _names_private_host(text: str) -> bool:
    """Whether a text holds an address of a host that only a private network knows; this machine's own is none."""
    for address in _ADDRESS.findall(text):
        try:
            host = urlsplit(address).hostname or ""
        except ValueError:  # brackets that hold no address
            return True
        try:
            number = ipaddress.ip_address(host)
        except ValueError:
            if host != "localhost" and ("." not in host or host.endswith(_PRIVATE_NAMES)):
                return True
        else:
            if number.is_private and not number.is_loopback and not number.is_unspecified:
                return True
    return False


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Texts of a JSON value with their dotted keys; of other values the keys alone."""
    if not isinstance(value, dict | list):
        yield key, value if isinstance(value, str) else ""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in pairs:
        yield from _texts(inner, f"{key}.{name}" if key else str(name))


def _send(files: Mapping[str, Path], repository: str, private: bool, facts: DraftFacts) -> str:
    """Make the repository where it does not exist, and commit the files. Returns the commit's address."""
    api = HfApi()
    with _hub_errors(repository):
        # As `push_to_hub` of transformers: None leaves it to the owner's own default.
        api.create_repo(repository, private=True if private else None, exist_ok=True)
        title = f"{facts.family} draft for {facts.target}" + (f", {facts.version}" if facts.version else "")
        operations = [CommitOperationAdd(name, path) for name, path in sorted(files.items())]
        return str(api.create_commit(repository, operations, commit_message=title).commit_url)


@contextmanager
def _hub_errors(repository: str) -> Iterator[None]:
    """Turn the hub's errors into one line: InputError for what it refuses, HubError where it cannot be asked."""

    def refuse(kind: type[InputError] | type[HubError], error: Exception, cure: str = "") -> NoReturn:
        raise kind(f"{repository}: the hub does not take it ({one_line(error, clean=masked)}){cure}") from None

    try:
        yield
    except LocalTokenNotFoundError as error:
        refuse(InputError, error, "; `hf auth login`, or HF_TOKEN, gives a token that may write")
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 500
        cure = "; HF_TOKEN, or `hf auth login`, must be of a token that may write there" if status in (401, 403) else ""
        refuse(InputError if status < 500 else HubError, error, cure)
    except Exception as error:  # its transport has changed, and each has errors of its own
        refuse(HubError, error)
