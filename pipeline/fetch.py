"""`draftforge fetch`: copy a registered draft out of the registry, in an engine's format; no recipe is needed."""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from .. import fingerprint
from ..errors import DraftforgeError, InputError, RegistryError
from ..progress import say
from ..registry import versions
from ..registry.connect import Tracking
from ..registry.lineage import Version
from ..specdec.formats import Format, Verifier, check_family, known_format, needs_verifier
from ..specdec.formats.layouts import NATIVE
from ..specdec.loading import as_the_file_says, load_tokenizer
from ..specdec.model_card import DraftFacts, write_card
from ..specdec.serve_commands import UNKNOWN_TARGET, ServeCommand
from ..specdec.serving_plan import find_plan
from ..specdec.target_settings import TargetSettings, named_target
from ..specdec.targets import Source, locate, target_fingerprint
from ..storage import read_object
from .cli_options import StoreOptions
from .export import rewrite_draft, say_assumed, show_command, version_facts
from .registry_listing import open_store

_FIELD, _NO_ID = "target.model: ", "not a hub id (owner/name)"
_PREFIX = re.compile("[0-9a-f]{6,64}")


def fetch(
    out: Path,
    target: str,
    store: StoreOptions,
    alias: str = versions.CHAMPION,
    layout: str | None = None,
    target_id: str | None = None,
) -> None:
    """Copy a registered draft of exactly this target to `out`.

    `target`: the target's model (folder, GGUF file or hub id), or at least 6 hex digits of its fingerprint. `layout`: a
    format of `draftforge.specdec.formats`; None: as it is stored, which is vLLM's.
    """
    # 1) Which target? Its model, or the first digits of its fingerprint.
    chosen = None if layout is None else known_format(layout)
    tracking = open_store(store)
    settings = _settings(target)
    with _naming_option():
        found = _fingerprint(tracking, target) if settings is None else target_fingerprint(settings)
    # 2) Copy the draft as it is stored, or fetch it aside and write it in the other format; with how it is served.
    command: list[ServeCommand] = []
    known: list[DraftFacts] = []

    def add_card(folder: Path, version: Version, stored: Path | None = None) -> None:
        plan, facts = find_plan(stored or folder), version_facts(tracking, version)
        known.append(facts)
        command.append(write_card(folder, str(out.absolute()), chosen or NATIVE, plan, facts, settings))

    if chosen is None or chosen == NATIVE:
        version = versions.fetch(tracking, found, out, alias, add_card)
    else:
        # Whatever can be refused without the draft's files is, before they are downloaded.
        version = versions.require(tracking, found, alias)
        check_family(chosen, version.lineage.family)
        source = None if settings is None else locate(settings)
        verifier = _verifier(source, target, target_id) if needs_verifier(chosen) else None
        versions.refuse_occupied(out)
        with tempfile.TemporaryDirectory() as beside:
            stored = Path(beside) / "stored"
            versions.fetch(tracking, found, stored, alias)
            tokenizer = _tokenizer(source, stored, chosen)
            rewrite_draft(stored, out, chosen, verifier, tokenizer, lambda beside: add_card(beside, version, stored))
    written = f" as {chosen}, read back equal" if chosen else ""
    say(f"{version.reference}: {alias} of target {fingerprint.short(found)}, in {out}{written}")
    for name, words in (("expected speed-up", known[0].worth), ("the gate", known[0].decision)):
        if words:
            say(f"{name}: {words}")
    if settings is None and UNKNOWN_TARGET in command[0].text:
        say(f"{UNKNOWN_TARGET}: {version.lineage.target_name}, the model with that fingerprint")
    say_assumed(out)
    show_command(command[0])


@contextmanager
def _naming_option() -> Iterator[None]:
    """Rename `target.model` in errors to --target: there is no recipe whose field it could be."""
    try:
        yield
    except DraftforgeError as error:
        before, field, rest = str(error).partition(_FIELD)
        if before or not field:
            raise
        rest = rest.replace(_NO_ID, f"{_NO_ID}, nor 6 hex digits or more of a fingerprint")
        raise type(error)(f"--target {rest}") from None


def _settings(target: str) -> TargetSettings | None:
    """Settings of the model that --target names; None where it is hex digits of a fingerprint."""
    is_digits = _PREFIX.fullmatch(target) is not None and not Path(target).exists()
    return None if is_digits else named_target(target).absolute()


def _fingerprint(tracking: Tracking, prefix: str) -> str:
    """Fingerprint of the registry's only target that begins with `prefix`; a whole one is taken as it is.

    Raises RegistryError where no target begins so, or several do, and lists them.
    """
    if fingerprint.is_fingerprint(prefix):
        return prefix
    # A short form must be unambiguous: a draft of another target must never be fetched.
    known = versions.targets(tracking)
    found = [entry for entry in known if entry.fingerprint.startswith(prefix)]
    if len(found) == 1:
        return found[0].fingerprint
    listed = ", ".join(f"{entry.target_name} ({fingerprint.short(entry.fingerprint)})" for entry in found or known)
    problem = "is the beginning of several targets" if found else "is the beginning of no target here"
    raise RegistryError(f"--target {prefix}: {problem}: {listed or 'none is registered'}")


def _verifier(source: Source | None, target: str, target_id: str | None) -> Verifier:
    """Verifier of a format that names its target: hub id, and the architecture from the target's config.

    Raises InputError where either is unknown.
    """
    # A local folder that looks like owner/name is no hub id: the engine would look it up there.
    name = target_id or target
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) or (target_id is None and Path(name).exists()):
        raise InputError(f"--target-id {name}: must be the target's hub id (owner/name), which the format names")
    if source is None:
        raise InputError(f"--target {target}: must be the target's model: the format names its architecture")
    config = read_object(source.folder / "config.json")
    return Verifier(name, [str(one) for one in config.get("architectures") or []])


def _tokenizer(source: Source | None, stored: Path, layout: Format) -> PreTrainedTokenizerBase | None:
    """Tokenizer of the target, for the format that embeds it (GGUF); a small draft has the same beside its weights."""
    if layout != "gguf":
        return None
    # The stored draft's own, else that of the target's folder or GGUF file.
    if (stored / "tokenizer.json").is_file():
        return load_tokenizer(stored, str(stored), trust_remote_code=False)
    if source is None:
        raise InputError("--format gguf: holds the target's tokenizer: name the target's model with --target")
    file, where = source.gguf_file, f"{_FIELD}{source.folder}"
    with _naming_option():
        if file is None:
            return load_tokenizer(source.folder, where, trust_remote_code=False)
        tokenizer = load_tokenizer(source.folder, where, trust_remote_code=False, gguf_file=file)
        return as_the_file_says(tokenizer, source.folder / file, where)
