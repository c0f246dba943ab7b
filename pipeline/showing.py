"""`draftforge registry`: the listing as tables or JSON."""

import re
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..errors import InputError
from ..fingerprint import short
from ..recipe import Recipe
from ..registry.listing import ListedTarget, ListedVersion, Listing, listing
from .stores import open_store, store_of

_PIPED_COLUMNS = 160  # a file has no width to keep to


def registry(
    recipe: Recipe | None,
    model: str | None,
    tracking_uri: str | None,
    workdir: Path | None,
    target: str | None,
    decisions: bool,
    as_json: bool,
) -> None:
    """Print which draft serves which target, and where each draft serves."""
    if target is not None and not re.fullmatch("[0-9a-f]{1,64}", target):
        raise InputError(f"--target {target}: must be the beginning of a fingerprint, hex digits")
    options = {"--model": (model, "registry.model"), "--tracking-uri": (tracking_uri, "registry.tracking_uri")}
    for option, (given, field) in {**options, "--workdir": (workdir, "workdir")}.items():
        if recipe is not None and given is not None:
            raise InputError(f"{option} {given}: the recipe names the registry; give {field}={given} instead")
    tracking = open_store(model, tracking_uri, workdir) if recipe is None else store_of(recipe)
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
    console.print(_by_target(found))
    console.print(_by_draft(found))
    if decisions:
        for entry in found.targets:
            for version in entry.versions:
                _show_decisions(console, version)


def _by_target(found: Listing) -> Table:
    table = Table(title="By target", title_justify="left")
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
    """The versions with an alias; where none has one, the newest."""
    return entry.named() or [("-", version) for version in entry.versions[:1]]


def _gate(version: ListedVersion) -> str:
    if version.rolled_back is not None:
        return f"rolled back: {escape(version.rolled_back)}"
    return {"promote": "promoted", "refuse": f"refused: {escape(version.reasons)}"}.get(version.decision, "-")


def _by_draft(found: Listing) -> Table:
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
