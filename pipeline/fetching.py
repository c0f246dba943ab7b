"""`draftforge fetch`: a registered draft of exactly one target, in the layout that is asked for."""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from .. import fingerprint
from ..errors import DraftforgeError, InputError, RegistryError
from ..progress import say
from ..registry import models
from ..registry.connect import Tracking
from ..specdec.formats import Format, Verifier, check_family, known_format, needs_verifier
from ..specdec.formats.layouts import NATIVE
from ..specdec.gguf_tokenizer import as_the_file_says
from ..specdec.loading import load_tokenizer
from ..specdec.settings import TargetSettings
from ..specdec.targets import Source, locate, target_fingerprint
from ..storage import read_object
from .exporting import rewrite_draft
from .stores import open_store

_FIELD, _NO_ID = "target.model: ", "not a hub id (owner/name)"
_PREFIX = re.compile("[0-9a-f]{6,64}")


def fetch(
    out: Path,
    target: str,
    model: str | None,
    tracking_uri: str | None,
    workdir: Path | None,
    alias: str,
    layout: str | None,
    target_id: str | None,
) -> None:
    """A registered draft of exactly this target, in `out`.

    `target`: its model (folder, GGUF file or hub id), or at least 6 hex digits of its fingerprint. `layout`: a format
    of `draftforge.specdec.formats`; None: as it is stored, which is vLLM's.
    """
    chosen = None if layout is None else known_format(layout)
    tracking = open_store(model, tracking_uri, workdir)
    settings = _settings(target)
    with _as_given():
        found = _fingerprint(tracking, target) if settings is None else target_fingerprint(settings)
    if chosen is None or chosen == NATIVE:
        version = models.fetch(tracking, found, out, alias)
    else:
        version = models.require(tracking, found, alias)
        check_family(chosen, version.lineage.family)
        source = None if settings is None else locate(settings)
        verifier = _verifier(source, target, target_id) if needs_verifier(chosen) else None
        models.refuse_occupied(out)
        with tempfile.TemporaryDirectory() as beside:
            stored = Path(beside) / "stored"
            models.fetch(tracking, found, stored, alias)
            rewrite_draft(stored, out, chosen, verifier, _tokenizer(source, stored, chosen))
    written = f" as {chosen}, read back equal" if chosen else ""
    say(f"{version.reference}: {alias} of target {fingerprint.short(found)}, in {out}{written}")


@contextmanager
def _as_given() -> Iterator[None]:
    """Errors name the option, not the field of a recipe that nobody gave."""
    try:
        yield
    except DraftforgeError as error:
        before, field, rest = str(error).partition(_FIELD)
        if before or not field:
            raise
        rest = rest.replace(_NO_ID, f"{_NO_ID}, nor 6 hex digits or more of a fingerprint")
        raise type(error)(f"--target {rest}") from None


def _settings(target: str) -> TargetSettings | None:
    """The model that the words name; None where they are hex digits of a fingerprint."""
    is_digits = _PREFIX.fullmatch(target) is not None and not Path(target).exists()
    return None if is_digits else TargetSettings(model=target)


def _fingerprint(tracking: Tracking, prefix: str) -> str:
    """The registry's only target whose fingerprint begins so; a whole one is taken as it is."""
    if fingerprint.is_fingerprint(prefix):
        return prefix
    known = models.targets(tracking)
    found = [entry for entry in known if entry.fingerprint.startswith(prefix)]
    if len(found) == 1:
        return found[0].fingerprint
    listed = ", ".join(f"{entry.target_name} ({fingerprint.short(entry.fingerprint)})" for entry in found or known)
    problem = "is the beginning of several targets" if found else "is the beginning of no target here"
    raise RegistryError(f"--target {prefix}: {problem}: {listed or 'none is registered'}")


def _verifier(source: Source | None, target: str, target_id: str | None) -> Verifier:
    """The target under its hub id, with the architecture that its folder names."""
    name = target_id or target
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) or (target_id is None and Path(name).exists()):
        raise InputError(f"--target-id {name}: must be the target's hub id (owner/name), which the format names")
    if source is None:
        raise InputError(f"--target {target}: must be the target's model: the format names its architecture")
    config = read_object(source.folder / "config.json")
    return Verifier(name, [str(one) for one in config.get("architectures") or []])


def _tokenizer(source: Source | None, stored: Path, layout: Format) -> PreTrainedTokenizerBase | None:
    """The target's tokenizer, for the format that holds it; a small draft has the same beside its weights."""
    if layout != "gguf":
        return None
    if (stored / "tokenizer.json").is_file():
        return load_tokenizer(stored, str(stored), trust_remote_code=False)
    if source is None:
        raise InputError("--format gguf: holds the target's tokenizer: name the target's model with --target")
    file, where = source.gguf_file, f"{_FIELD}{source.folder}"
    with _as_given():
        if file is None:
            return load_tokenizer(source.folder, where, trust_remote_code=False)
        tokenizer = load_tokenizer(source.folder, where, trust_remote_code=False, gguf_file=file)
        return as_the_file_says(tokenizer, source.folder / file, where)
