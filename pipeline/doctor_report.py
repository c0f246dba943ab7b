"""Report of the doctor on a draft: verdict, figures, causes and evidence."""

from dataclasses import dataclass, field
from typing import Any, Literal

from rich.markup import escape
from rich.table import Table

from ..progress import Console

Verdict = Literal["healthy", "fault", "undertrained", "low", "engine"]
EXIT_CODES: dict[Verdict, int] = {"healthy": 0, "fault": 5, "undertrained": 5, "low": 5, "engine": 3}
"""Exit codes: 5 as of a draft that the gate refuses, 3 as where a server is at fault."""
_HEADS: dict[Verdict, str] = {
    "healthy": "healthy",
    "fault": "at fault",
    "undertrained": "undertrained",
    "low": "accepted too little; no hypothesis restores it",
    "engine": "healthy; the engine is at fault",
}


@dataclass
class Diagnosis:
    """Result of an examination, as `--json` prints it."""

    verdict: Verdict
    draft: str
    family: str
    layout: str
    target: str
    draft_tokens: int
    answers: int
    before: dict[str, Any] | None
    """Acceptance as the files are read; None where no reader takes them."""
    after: dict[str, Any] | None = None
    expected: dict[str, Any] = field(default_factory=dict)
    causes: list[dict[str, Any]] = field(default_factory=list)
    """What is wrong, in the order in which it was found, each with tau before and after."""
    corrected: str | None = None
    evidence: list[str] = field(default_factory=list)
    tried: dict[str, dict[str, float]] = field(default_factory=dict)
    served: dict[str, Any] | None = None


def print_diagnosis(found: Diagnosis) -> None:
    """Print a diagnosis for people."""
    # 1) The verdict, and acceptance as it is and as it is restored.
    console = Console(highlight=False)
    console.print(f"{_line(escape(found.draft))}: [bold]{_HEADS[found.verdict]}[/]", soft_wrap=True)
    about = f"family {found.family}, layout {found.layout}, K={found.draft_tokens}"
    about += f", {found.answers} answers of {found.target} at temperature 0"
    console.print(_line(about), style="dim", soft_wrap=True, markup=False)
    table = Table(box=None, pad_edge=False)
    for title in ("", "tau", "first token accepted", "by position"):
        table.add_column(title)
    for label, figures in (("as it is", found.before), ("corrected", found.after)):
        if figures is not None:
            by_position = " ".join(f"{share:.2f}" for share in figures["by_position"])
            table.add_row(label, _shown(figures["tau"], "{:.2f}"), _shown(figures["first"], "{:.0%}"), by_position)
    console.print(table)

    # 2) The causes, and what else was seen.
    lines = [f"its record: tau {found.expected['tau']:.2f}"] if "tau" in found.expected else []
    for one in found.causes:
        before = "unreadable" if one["tau_before"] is None else f"tau {one['tau_before']:.2f}"
        after = "not restored" if one["tau_after"] is None else f"tau {one['tau_after']:.2f}"
        lines.append(f"cause: {one['hypothesis']}: {one['what']} ({before} -> {after})")
    lines += [f"seen: {line}" for line in found.evidence]

    # 3) What the engine serves, and why it may be less; where the corrected draft is.
    if found.served is not None:
        taus = [_shown(found.served[name], "{:.2f}") for name in ("tau", "replayed")]
        unknown = f"; not judged: {found.served['unknown']}" if found.served["unknown"] else ""
        lines.append(f"served by {found.served['engine']}: tau {taus[0]}, replayed {taus[1]}{unknown}")
        causes = [*found.served["alike"], *found.served["causes"]]
        lines += [f"may be: {one['cause']}" + (f"; {one['cure']}" if one["cure"] else "") for one in causes]
    if found.corrected is not None:
        lines.append(f"the corrected draft: {found.corrected}")
    for line in lines:
        console.print(_line(line), soft_wrap=True, markup=False)


def _line(text: str) -> str:
    """A text as one line: names in it are strangers', and may hold newlines."""
    return text.replace("\n", "\\n")


def _shown(figure: dict[str, Any], form: str) -> str:
    if figure["value"] is None:
        return "-"
    low, high = figure["low"], figure["high"]
    between = "" if low is None or high is None else f" [{form.format(low)}, {form.format(high)}]"
    return form.format(figure["value"]) + between
