"""`draftforge fetch` and `draftforge registry`: copy a registered draft out, and list what is registered."""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from .. import fingerprint
from ..errors import DraftforgeError, InputError, RegistryError
from ..fingerprint import short
from ..progress import say
from ..recipe import Recipe
from ..registry import versions
from ..registry.connect import Tracking
from ..registry.lineage import Version
from ..registry.listing import ListedTarget, ListedVersion, Listing, listing
from ..specdec.formats import Format, Verifier, check_family, known_format, needs_verifier
from ..specdec.formats.layouts import NATIVE
from ..specdec.loading import as_the_file_says, load_tokenizer
from ..specdec.model_card import write_card
from ..specdec.serve_commands import UNKNOWN_TARGET, ServeCommand
from ..specdec.serving_plan import find_plan
from ..specdec.target_settings import TargetSettings
from ..specdec.targets import Source, locate, target_fingerprint
from ..storage import read_object
from .cli_options import StoreOptions
from .export import rewrite_draft, say_assumed, show_command, version_facts
from .workspace import open_recipe_store, open_store

_FIELD, _NO_ID = "target.model: ", "not a hub id (owner/name)"
_PREFIX = re.compile("[0-9a-f]{6,64}")
_PIPED_COLUMNS = 160  # a file has no width to keep to


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

    def add_card(folder: Path, version: Version, stored: Path | None = None) -> None:
        plan, facts = find_plan(stored or folder), version_facts(tracking, version)
        command.append(write_card(folder, out, chosen or NATIVE, plan, facts, settings))

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
    return None if is_digits else TargetSettings(model=target).absolute()


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


def registry(recipe: Recipe | None, store: StoreOptions, target: str | None, decisions: bool, as_json: bool) -> None:
    """Print the registry's content: which draft serves which target, and for which targets each draft is registered.

    `target`: beginning of a fingerprint. `decisions`: the gate's too. The store is the recipe's, or that of `store`.
    """
    # 1) Options that fit each other, then the store.
    if target is not None and not re.fullmatch("[0-9a-f]{1,64}", target):
        raise InputError(f"--target {target}: must be the beginning of a fingerprint, hex digits")
    for option, given, key in (
        ("--model", store.model, "registry.model"),
        ("--tracking-uri", store.tracking_uri, "registry.tracking_uri"),
        ("--workdir", store.workdir, "workdir"),
    ):
        if recipe is not None and given is not None:
            raise InputError(f"{option} {given}: the recipe names the registry; give {key}={given} instead")
    tracking = open_store(store) if recipe is None else open_recipe_store(recipe)
    # 2) JSON for programs, tables for people.
    found = listing(tracking, target or "", decisions)
    if as_json:
        print(found.model_dump_json(indent=2))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _PIPED_COLUMNS)
    if not found.targets:
        console.print("no target has a draft here" + (f" (--target {target})" if target else ""))
        return
    # 3) Targets with their drafts, drafts with their targets, and why the gate decided as it did.
    console.print(_by_target(found))
    console.print(_by_draft(found))
    if decisions:
        for entry in found.targets:
            for version in entry.versions:
                _show_decisions(console, version)
            _show_moves(console, entry)


def _by_target(found: Listing) -> Table:
    """Table with a row for each alias of a target; the target is named in its first row."""
    table = Table(title="By target", title_justify="left")
    # Figures and versions must not be folded; long names may.
    for heading in (
        "target",
        "alias",
        "version",
        "draft",
        "tau",
        "speed-up",
        "registered",
        "run",
        "started from",
        "gate",
    ):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("tau", "speed-up", "version"))
    # Names from users are escaped: brackets would be read as markup.
    for entry in found.targets:
        for count, (alias, version) in enumerate(_shown(entry)):
            table.add_row(
                escape(f"{entry.target}\n{short(entry.fingerprint)}") if count == 0 else "",
                alias,
                version.reference.rpartition("/")[2],
                f"{version.family} {version.step} {version.plan}",
                "-" if version.tau is None else f"{version.tau:.2f}",
                "-" if version.speedup is None else f"{version.speedup:.2f}x",
                f"{version.registered:%Y-%m-%d %H:%M}",
                escape(version.run_name or version.run[:8]),
                (version.parent or "-").removeprefix(f"{entry.name}/"),
                _gate(version),
            )
        table.add_section()
    return table


def _shown(entry: ListedTarget) -> list[tuple[str, ListedVersion]]:
    """Versions to show of a target, with alias: those that have one or were rolled back; else the newest."""
    return entry.by_alias() or [("-", version) for version in entry.versions[:1]]


def _gate(version: ListedVersion) -> str:
    """Outcome of the gate for a version: the reasons of a refusal or rollback, or the choice that let it through."""
    if version.rolled_back is not None:
        return f"rolled back: {escape(version.rolled_back)}"
    promoted = f"promoted by choice: {version.by_choice}" if version.by_choice else "promoted"
    if version.rollback_undone is not None:
        promoted += f"; rolled back before: {escape(version.rollback_undone)}"
    return {"promote": promoted, "refuse": f"refused: {escape(version.reasons)}"}.get(version.decision, "-")


def _by_draft(found: Listing) -> Table:
    """Table with a row for each draft: one checkpoint may be registered for several targets."""
    table = Table(title="By draft", title_justify="left")
    for heading in ("draft", "family", "step", "run", "recipe", "registered for"):
        table.add_column(heading, overflow="fold")
    for draft in found.drafts:
        places = [
            f"{one.target} {short(one.fingerprint)}: {one.reference}" + "".join(f" @{alias}" for alias in one.aliases)
            for one in draft.serves
        ]
        cells = [draft.draft, draft.family, str(draft.step), draft.run_name or draft.run[:8], draft.recipe]
        table.add_row(*map(escape, cells), escape("\n".join(places)))
    return table


def _show_decisions(console: Console, version: ListedVersion) -> None:
    """Print the gate's decisions about a version: verdict, reasons, and gains over the champion in percent."""
    for record in version.decisions or []:
        verdict = "promoted" if record.promote else "refused"
        console.print(f"\n{record.version} {verdict} {record.at:%Y-%m-%d %H:%M} against {record.compared or 'none'}")
        for reason in record.reasons:
            console.print(f"  {reason}", markup=False, soft_wrap=True)
        gain = record.numbers.gain
        for name, one in [("all", gain), *((name, verdict.gain) for name, verdict in record.numbers.domains.items())]:
            if one is not None:
                figures = " ".join(f"{100 * value:+.1f}" for value in (one.value, one.low, one.high))
                console.print(f"  gain, {name}: {figures} % (value, low, high)", markup=False)


def _show_moves(console: Console, entry: ListedTarget) -> None:
    """Print the moves of a target's champion with their reasons, oldest first."""
    console.print(f"\nmoves of {entry.name}@champion")
    for move in entry.moves:
        start, to = (move.get(end) or "none" for end in ("from", "to"))
        line = (
            f"  {move.get('at', '')} {move.get('event', '')}: {start} to {to}: {move.get('why') or 'no reason given'}"
        )
        console.print(line, markup=False, soft_wrap=True)
