"""Files beside a draft that is handed out: `serve.json`, with plan and serving command, and a model card, README.md."""

import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import ConfigDict, TypeAdapter, ValidationError

from .. import __version__
from ..errors import CorruptDataError, DraftforgeError, FormatError, MissingFileError
from ..fingerprint import short
from ..storage import read_object, write_bytes
from .formats import Format, meta_file, read_meta
from .formats.layouts import NATIVE, family_at
from .serve_commands import ServeCommand, serve_command
from .serving_plan import ASSUMED, PLAN_FILE, FoundPlan, find_plan, write_plan
from .serving_policy import POLICY_FILES, ServingPolicy
from .target_settings import TargetSettings

CARD_FILE = "README.md"


class DraftFacts(NamedTuple):
    """What a model card says of a draft beside its plan."""

    family: str
    target: str
    """Name of the target."""
    target_fingerprint: str = ""
    version: str = ""
    """Registered version, `name/number`; empty: it is not registered."""
    step: int | None = None
    tau: float | None = None
    """tau on the holdout; None: no gate has judged it."""
    speedup: float | None = None
    """Expected speed-up on the holdout."""
    measured: str = ""
    """Where the times behind the speed-up hold."""
    domains: Mapping[str, Mapping[str, float | None]] = MappingProxyType({})
    """`tau` and `speedup` on the holdout by domain."""
    speedup_interval: tuple[float, float] | None = None
    """Lower and upper end of the speed-up's interval; None: not known."""
    decision: str = ""
    """What the gate decided last, in words; empty: not known."""

    @property
    def worth(self) -> str:
        """Expected speed-up in words, with its interval and where its times hold; empty: not known."""
        if self.speedup is None:
            return ""
        ends = "" if self.speedup_interval is None else " [{:.2f}, {:.2f}]".format(*self.speedup_interval)
        return f"{self.speedup:.2f}x{ends} over plain decoding" + (f" ({self.measured})" if self.measured else "")


_FACTS = TypeAdapter(DraftFacts, config=ConfigDict(allow_inf_nan=False, str_max_length=1000))


def facts_of(folder: Path, target: str) -> DraftFacts:
    """Facts of a draft's own files: its lineage, and what an earlier `serve.json` said. `target`: its target's name.

    Raises FormatError where that says what is no such fact.
    """
    # An earlier copy may know the version and its figures.
    path = (folder.parent if folder.is_file() else folder) / PLAN_FILE
    try:
        known = read_object(path)
    except (MissingFileError, CorruptDataError):
        known = {}
    names = ("version", "tau", "speedup", "speedup_interval", "decision", "measured", "domains")
    carried = {name: known[name] for name in names if known.get(name)}
    if not meta_file(folder).is_file():
        return _checked(path, DraftFacts(family_at(folder), target, **carried))
    meta = read_meta(folder)
    return _checked(path, DraftFacts(meta.family, target, meta.target_fingerprint, step=meta.step, **carried))


def _checked(path: Path, facts: DraftFacts) -> DraftFacts:
    """The facts, each of its type. Raises FormatError naming the file and the fact."""
    try:
        return _FACTS.validate_python(facts._asdict())
    except ValidationError as error:
        first = error.errors()[0]
        where = ascii(".".join(map(str, first["loc"])))[1:-1]
        raise FormatError(f"{path}: {where}: {first['msg']}") from None


def card_files(folder: Path) -> set[str]:
    """Names of the files in a draft's folder that `write_card` wrote, which another copy writes anew."""
    if not (folder / PLAN_FILE).is_file():
        return set()
    return {PLAN_FILE, CARD_FILE, *(POLICY_FILES & {find_plan(folder).plan.policy})}


def write_card(
    folder: Path,
    place: str,
    layout: Format,
    found: FoundPlan,
    facts: DraftFacts,
    target: TargetSettings | None,
    metadata: str = "",
    policy: ServingPolicy | None = None,
) -> ServeCommand:
    """Write `serve.json` and the model card of a draft into its folder, and a policy's file; returns the command that
    serves it.

    `folder`: where the files lie now. `place`: where engines will find them, a path or a repository of the hub.
    `layout`: the folder's format. `target` None: only its fingerprint is known. `metadata` goes before the card.
    Somebody else's README.md is left as it is.
    """
    # An engine's format holds no tree: its plan is the best chain. A policy of before is not this command's.
    plan = found.plan if layout == NATIVE else found.plan.as_chain
    plan = plan.model_copy(update={"policy": "" if policy is None else policy.file})
    command = serve_command(layout, facts.family, found.plan, place, target, policy)
    if policy is not None:
        write_bytes(folder / policy.file, command.policy_text.encode())
    record: dict[str, Any] = facts._asdict() | {"domains": dict(facts.domains), ASSUMED: found.assumed}
    record = {name: value for name, value in record.items() if value not in (None, "", {})}
    record |= {"engine": command.engine, "command": command.text, "notes": list(command.notes)}
    try:
        write_plan(folder, plan, record)
    except ValueError as error:  # a registry's numbers
        if isinstance(error, DraftforgeError):
            raise
        raise FormatError(f"{place}: what is known of the draft holds what JSON has not ({error})") from None
    if not (folder / CARD_FILE).exists():
        write_bytes(folder / CARD_FILE, (metadata + _card(found, facts, command)).encode())
    return command


def _card(found: FoundPlan, facts: DraftFacts, command: ServeCommand) -> str:
    """Text of the model card, in Markdown."""
    # 1) What it is and for which target.
    plan = found.plan
    rows = [("target", facts.target)]
    rows += [("target's fingerprint", short(facts.target_fingerprint))] if facts.target_fingerprint else []
    rows += [("registered version", facts.version)] if facts.version else []
    step = "" if facts.step is None else f", step {facts.step}"
    rows.append(("draft", f"{facts.family}{step}"))
    # 2) How it drafts, and what it was worth.
    levels = "" if plan.tree is None else f", {plan.draft_tokens} levels; best chain K={plan.chain_tokens}"
    rows.append(("drafts", f"{plan}{levels}" + (" (assumed)" if found.assumed else "")))
    rule = "greedy at temperature 0" + ("" if plan.rule == "greedy" else f", {plan.rule} above it")
    rows.append(("accept rule", rule))
    rows += [] if facts.tau is None else [("tau on the holdout", f"{facts.tau:.2f}")]
    rows += [("expected speed-up", facts.worth)] if facts.worth else []
    rows += [("the gate", facts.decision)] if facts.decision else []
    domains = [
        f"| {_text(name)} | {_number(row.get('tau'))} | {_number(row.get('speedup'), 'x')} |"
        for name, row in facts.domains.items()
    ]
    by_domain = ["", "On the holdout, by domain:", "", "| domain | tau | expected speed-up |", "|---|---|---|"]
    # 3) How to serve it.
    language = "python" if command.engine == "transformers" else "bash"
    lines = [
        f"# Draft model for {_text(facts.target)}",
        "",
        "Drafts tokens for speculative decoding of this target alone: a changed target (weights, quantisation,",
        "adapter, tokenizer, template) needs its own draft.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {_text(value)} |" for name, value in rows),
        *([*by_domain, *domains] if domains else []),
        "",
        f"## Serve it with {command.engine}",
        "",
        f"```{language}",
        command.text,
        "```",
        *(["", *(f"- {_text(note)}" for note in command.notes)] if command.notes else []),
        "",
        f"Made by draftforge {__version__}; `{PLAN_FILE}` says the same for programs.",
    ]
    return "\n".join(lines) + "\n"


def _text(value: str) -> str:
    """A stranger's text on one line, as text: its Markdown and HTML mean nothing."""
    line = "".join(one if one.isprintable() else " " for one in " ".join(value.split()))
    return re.sub(r"[\\`|]|(?<=\])(?=\()", r"\\\g<0>", escape(line, quote=False))


def _number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.2f}{unit}"
