"""`draftforge registry`: which draft serves which target, and why. MLflow is imported once there is a store to open."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError
from rich.markup import escape
from rich.table import Table

from ..errors import InputError, MissingFileError, refused_value
from ..fingerprint import short
from ..progress import Console
from ..registry.settings import RegistrySettings
from ..registry.store_address import DATABASE_NAME, store_exists
from .cli_options import StoreOptions

if TYPE_CHECKING:
    from ..recipe import Recipe
    from ..registry.connect import Tracking
    from ..registry.listing import ListedTarget, ListedVersion, Listing

_PIPED_COLUMNS = 160  # a file has no width to keep to

NOTHING_YET = "nothing is registered yet; `draftforge distill RECIPE` does it"


def open_store(options: StoreOptions) -> "Tracking":
    """Open the store that the options name, else the environment's, else the one in a work folder.

    Raises InputError for an unfit `model` (first part of registered names), MissingFileError where there is none.
    """
    settings, home = require_store(options)
    from ..registry.connect import open_tracking

    return open_tracking(settings, home.resolve())


def require_store(options: StoreOptions) -> tuple[RegistrySettings, Path]:
    """Settings and home of the store that `open_store` opens, which exists; nothing is made. Raises as there."""
    # An absent option must not override the default of the settings.
    try:
        named = {} if options.model is None else {"model": options.model}
        settings = RegistrySettings.model_validate({"tracking_uri": options.tracking_uri, **named})
    except ValidationError as error:
        raise refused_value(error, "--") from None
    home = options.workdir or Path("runs")
    if not store_exists(settings, home.resolve()):
        raise MissingFileError(
            f"--workdir {home}: holds no {DATABASE_NAME}: {NOTHING_YET}, or name its work folder or a store"
        )
    return settings, home


def registry(recipe: "Recipe | None", store: StoreOptions, target: str | None, decisions: bool, as_json: bool) -> None:
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
    if recipe is None:
        tracking = open_store(store)
    else:
        home = recipe.workdir.resolve()
        if not store_exists(recipe.registry, home):
            raise MissingFileError(f"workdir {recipe.workdir}: {NOTHING_YET}")
        from ..registry.connect import open_tracking

        tracking = open_tracking(recipe.registry, home)
    # 2) JSON for programs, tables for people.
    from ..registry.listing import listing

    found = listing(tracking, target or "", decisions)
    if as_json:
        print(found.model_dump_json(indent=2))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _PIPED_COLUMNS)
    if not found.targets:
        console.print("no target has a draft here" + (f" (--target {target})" if target else ""), markup=False)
        return
    # 3) Targets with their drafts, drafts with their targets, and why the gate decided as it did.
    console.print(_by_target(found))
    console.print(_by_draft(found))
    if decisions:
        for entry in found.targets:
            for version in entry.versions:
                _show_decisions(console, version)
            _show_moves(console, entry)


def _by_target(found: "Listing") -> Table:
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
    # What the registry holds is escaped: brackets would be read as markup.
    for entry in found.targets:
        for count, (alias, version) in enumerate(_shown(entry)):
            cells = (
                f"{entry.target}\n{short(entry.fingerprint)}" if count == 0 else "",
                alias,
                version.reference.rpartition("/")[2],
                f"{version.family} {version.step} {version.plan}",
                "-" if version.tau is None else f"{version.tau:.2f}",
                "-" if version.speedup is None else f"{version.speedup:.2f}x",
                f"{version.registered:%Y-%m-%d %H:%M}",
                version.run_name or version.run[:8],
                (version.parent or "-").removeprefix(f"{entry.name}/"),
                _gate(version),
            )
            table.add_row(*map(escape, cells))
        table.add_section()
    return table


def _shown(entry: "ListedTarget") -> "list[tuple[str, ListedVersion]]":
    """Versions to show of a target, with alias: those that have one or were rolled back; else the newest."""
    return entry.by_alias() or [("-", version) for version in entry.versions[:1]]


def _gate(version: "ListedVersion") -> str:
    """Outcome of the gate for a version: the reasons of a refusal or rollback, or the choice that let it through."""
    if version.rolled_back is not None:
        return f"rolled back: {version.rolled_back}"
    promoted = f"promoted by choice: {version.by_choice}" if version.by_choice else "promoted"
    if version.rollback_undone is not None:
        promoted += f"; rolled back before: {version.rollback_undone}"
    return {"promote": promoted, "refuse": f"refused: {version.reasons}"}.get(version.decision, "-")


def _by_draft(found: "Listing") -> Table:
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


def _show_decisions(console: Console, version: "ListedVersion") -> None:
    """Print the gate's decisions about a version: verdict, reasons, and gains over the champion in percent."""
    for record in version.decisions or []:
        verdict = "promoted" if record.promote else "refused"
        head = f"\n{record.version} {verdict} {record.at:%Y-%m-%d %H:%M} against {record.compared or 'none'}"
        console.print(head, markup=False)
        for reason in record.reasons:
            console.print(f"  {reason}", markup=False, soft_wrap=True)
        gain = record.numbers.gain
        for name, one in [("all", gain), *((name, verdict.gain) for name, verdict in record.numbers.domains.items())]:
            if one is not None:
                figures = " ".join(f"{100 * value:+.1f}" for value in (one.value, one.low, one.high))
                console.print(f"  gain, {name}: {figures} % (value, low, high)", markup=False)


def _show_moves(console: Console, entry: "ListedTarget") -> None:
    """Print the moves of a target's champion with their reasons, oldest first."""
    console.print(f"\nmoves of {entry.name}@champion", markup=False)
    for move in entry.moves:
        start, to = (move.get(end) or "none" for end in ("from", "to"))
        line = (
            f"  {move.get('at', '')} {move.get('event', '')}: {start} to {to}: {move.get('why') or 'no reason given'}"
        )
        console.print(line, markup=False, soft_wrap=True)
