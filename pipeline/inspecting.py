"""`inspect-mix`: the mix beside the log that it comes from, as tables, and as pictures where they are asked for."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..data.conversation import SPLITS
from ..data.profile import DISTINCT, JOINT, LOG, MIX, QUANTILES, SIDES, Profile, Shares, profile
from ..data.strata import DAY, NONE
from ..eval.table import UNKNOWN, show_cells
from ..progress import say
from .beforehand import known_context
from .inspect_page import Table, check_place, write_page, write_pictures
from .stages import mix_stage
from .workspace import Workspace

_MOST_ROWS = 12
_TURNS = {
    "holdout_turns": "turns in the holdout",
    "asked_in_train": "of them asked in this mix's train",
    "asked_in_ancestors_train": "of them asked in an ancestor's train",
    "ancestors_without_turns": "ancestors' conversations whose turns are not known",
}
_NOT_TIMED = {"untimed": "without times", "zero_length": "of no length", "skewed": "ended before they started"}


def inspect_mix(space: Workspace, out: Path | None) -> None:
    """Show the recipe's mix, which is made where it is missing; write a page or pictures to `out`."""
    if out is not None:
        check_place(out)
    folder = mix_stage(space).folder
    if not space.first_rank:
        return
    found = profile(folder)
    tables = tables_of(found, known_context(space.recipe.target), space.recipe.retrain.old_share)
    for title, cells, note in tables:
        show_cells(title, cells, [""] * (len(cells) - 1), note, numeric=cells[0][1:])
    if out is None:
        return
    if out.suffix == ".html":
        write_page(out, space.recipe.name, tables, found)
    else:
        write_pictures(out, found)
    say(f"{out}: written")


def tables_of(found: Profile, context: int | None = None, old_share: float = 0.0) -> list[Table]:
    """Everything that a profile says; `context`: positions of the target; `old_share`: what a retraining adds."""
    shares = [one for one in found.shares if one.key != JOINT]
    return [
        _fates(found, context, old_share),
        *(_shares(one, found) for one in shares if len(one.labels) > 1 or one.key != DAY),
        _distances(found.shares),
        _lengths(found),
        *_in_flight(found),
        *_redacted(found),
        _contamination(found),
        *_clusters(found),
    ]


def _fates(found: Profile, context: int | None, old_share: float) -> Table:
    manifest = found.manifest
    sources = manifest["sources"]
    read, skipped = (sum(source[name] for source in sources) for name in ("read", "skipped"))
    rows = [["read", str(read)], ["broken, skipped", str(skipped)]]
    rows += [[f"left out: {reason}", str(count)] for reason, count in _left_out(sources).items()]
    over = read - skipped - sum(_left_out(sources).values()) - found.sizes[LOG]
    rows += [["over a source's limit", str(over)]] if over else []
    rows += [["the log, as compared below", str(found.sizes[LOG])]]
    names = {
        "exact_copies": "exact copies",
        "continued": "continued by a longer one",
        "near_copies": "near-copies",
        "over_share": "over the mix's shares or limit",
    }
    rows += [[names.get(name, "near an evaluation set"), str(count)] for name, count in manifest["left_out"].items()]
    rows += [[f"mix: {split}", str(found.sizes[split])] for split in SPLITS]
    if context is not None:
        long = int((found.tokens["prompt"][MIX] >= context).sum())
        rows.append([f"of the mix, prompts of {context} tokens or more", str(long)])
    clusters = ", ".join(f"{count} in {split}" for split, count in manifest["clusters"].items())
    note = f"clusters of near ones: {clusters}"
    if old_share:
        note += (
            f"\nretrain.old_share {old_share:g}: a retraining adds conversations of the champion's mix until they are "
            "this share of train; they are not counted here"
        )
    return Table("What became of the log", [["conversations", "count"], *rows], note)


def _left_out(sources: Sequence[Mapping[str, object]]) -> dict[str, int]:
    """Lines of logs that hold no conversation, by the reason, over all sources."""
    found: dict[str, int] = {}
    for source in sources:
        told = source.get("left_out")
        for reason, count in (told if isinstance(told, dict) else {}).items():
            found[reason] = found.get(reason, 0) + count
    return found


def _shares(one: Shares, found: Profile) -> Table:
    sizes = one.counts[LOG]
    order = sorted(range(len(one.labels)), key=lambda i: (-sizes[i], i))
    shown = sorted(order[:_MOST_ROWS]) if one.key != "system" else order[:_MOST_ROWS]
    characters = found.manifest["system_characters"]
    extra = ["characters"] if one.key == "system" else []
    cells = [[one.key, *extra, "in the log", *SIDES]]
    for i in shown:
        length = [str(characters.get(one.labels[i], 0)) if one.labels[i] != NONE else "-"] if extra else []
        percents = [_share(one.counts[side][i], one.counts[side].sum()) for side in SIDES]
        cells.append([one.labels[i], *length, str(sizes[i]), *percents])
    rest = order[_MOST_ROWS:]
    if rest:
        percents = [_share(one.counts[side][rest].sum(), one.counts[side].sum()) for side in SIDES]
        cells.append([f"{len(rest)} others", *["" for _ in extra], str(sizes[rest].sum()), *percents])
    return Table(f"By {one.key}", cells, f"{DISTINCT}: the log without copies")


def _share(count: int, total: int) -> str:
    return f"{count / total:.1%}" if total else UNKNOWN


def _distances(shares: Sequence[Shares]) -> Table:
    cells = [["label", *(f"{d.of} | {d.against}" for d in shares[0].distances)]]
    for one in shares:
        cells.append([one.key, *(_distance(d.variation, d.by_chance, d.p) for d in one.distances)])
    note = (
        "total variation distance (the part that would have to have another label), in brackets what a random sample "
        "of that size would have on average; p: chi-square test, told below 0.01"
    )
    return Table("Distances between shares", cells, note)


def _distance(value: float, by_chance: float, p: float) -> str:
    if math.isnan(value):
        return UNKNOWN
    told = f", p {p:.0e}" if p < 0.01 else ""
    return f"{value:.3f} ({by_chance:.3f}{told})"


def _lengths(found: Profile) -> Table:
    cells = [["tokens", *(f"p{q * 100:.0f}" for q in QUANTILES)]]
    for name, by_side in found.lengths.items():
        for side in (LOG, MIX, *SPLITS):
            values = by_side[side]
            cells.append([f"{name}, {side}", *(UNKNOWN if math.isnan(value) else f"{value:,.0f}" for value in values)])
    note = f"counted by the log for {found.counted:.0%} of its records, else estimated: four characters a token"
    return Table("Lengths", cells, note)


def _in_flight(found: Profile) -> list[Table]:
    told = found.manifest["in_flight"]
    if told is None:
        return []
    cells = [["replica", "p50", "p95", "most", "mean", "busy seconds"]]
    for name, level in [*told["replicas"].items(), ("all", told["all"])]:
        numbers = [str(level["p50"]), str(level["p95"]), str(level["most"]), f"{level['mean']:.1f}"]
        cells.append([name, *numbers, f"{level['busy_seconds']:,.0f}"])
    left = ", ".join(f"{told[name]} {words}" for name, words in _NOT_TIMED.items() if told[name])
    note = f"while any is, over {told['requests']} requests" + (f"; not counted: {left}" if left else "")
    return [Table("Requests in flight", cells, f"{note}\nto score drafts at this load:\n{told['load'].rstrip()}")]


def _redacted(found: Profile) -> list[Table]:
    kinds = found.manifest["redacted"]
    cells = [["kind", "replaced"], *([kind, str(count)] for kind, count in kinds.items())]
    return [Table("Personal data and secrets", cells, "in all that was read, copies included")] if kinds else []


def _contamination(found: Profile) -> Table:
    told = found.manifest["contamination"]
    rows = [
        ["clusters in the holdout", str(told["holdout_clusters"])],
        ["of them near this mix's train", str(told["near_train"])],
        ["of them near an ancestor's train", str(told["near_ancestors_train"])],
        *([f"of them near {name}", str(count)] for name, count in told["near_evaluation_sets"].items()),
        *([f"conversations near {name}", str(count)] for name, count in told["near_conversations"].items()),
        *([words, str(told[name])] for name, words in _TURNS.items() if name in told),
        *(
            [f"turns of {split} that count elsewhere", str(count)]
            for split, count in told.get("turns_asked_elsewhere", {}).items()
        ),
    ]
    return Table("The holdout", [["what", "count"], *rows], "what is near a train, or asked in one, must be 0")


def _clusters(found: Profile) -> list[Table]:
    told = found.manifest["domain_clusters"]
    if told is None:
        return []
    cells = [["domain", "words"], *([name, " ".join(words)] for name, words in told["terms"].items())]
    agreement = told["agreement_of_halves"]
    note = (
        "names of an ancestor's" if agreement is None else f"two halves of the log agree by {agreement:.2f} (1: fully)"
    )
    return [Table("Domains by clusters", cells, note)]
