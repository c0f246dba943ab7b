"""Summaries in sentences: scores, benchmarks, decisions and served acceptance, every figure measured or fitted.

A gain or a loss is claimed where the whole interval of the speed-up (of a benchmark: every repeat) is on one side of 1,
the error of fitted times allowed for.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple

from ..specdec.serving_policy import ServingPolicy
from ..storage import size_text
from .acceptance import Estimate
from .bench.run import EVERY, BenchRow, LengthRow, Spread
from .engine_metrics import AcceptanceMismatch
from .leaderboard import DomainRow, Row
from .serving_load import BatchFigures, Candidate, LoadFigures, LoadTimes, policy_speedups
from .settings import ScoreSettings
from .table import interval, number

Record = Mapping[str, Any]
Outcome = Literal["gains", "loses", "no clear difference", "not measured"]


def outcome(speedup: Estimate, error: float = 0.0) -> Outcome:
    """Verdict on a speed-up: the side of 1 on which its whole interval lies.

    `error`: share by which fitted times may be off. Without an interval nothing is claimed where a reason says why, as
    that of too few clusters; else the value counts alone.
    """
    if math.isnan(speedup.value):
        return "not measured"
    if math.isnan(speedup.low) and speedup.reason:
        return "no clear difference"
    low, high = (speedup.value if math.isnan(end) else end for end in (speedup.low, speedup.high))
    if low * (1 - error) > 1:
        return "gains"
    return "loses" if high * (1 + error) < 1 else "no clear difference"


# --- a score: whether, how and up to which batch size to speculate ---


def serving_advice(rows: Sequence[Row], domains: Sequence[DomainRow], settings: ScoreSettings) -> list[str]:
    """Advice for serving the chosen row: whether, how and up to where to speculate, and where it does not pay."""
    # Without a chosen row there is nothing to serve.
    chosen = next((row for row in rows if row.chosen), None)
    if chosen is None:
        return []
    # 1) The load as a whole, then by batch size.
    error = 0.0 if chosen.load is None else chosen.load.fit_error
    sentences = [_overall(chosen, error)]
    if chosen.load is not None:
        sentences += [_by_batch_size(chosen.load, error), *_break_even_batch(chosen, chosen.load), _costs(chosen.load)]
    # 2) Domains, where there are several.
    mine = [row for row in domains if (row.draft, row.step) == (chosen.draft, chosen.step)]
    if len({(row.domain, row.setting) for row in mine}) > 1:
        sentences += _domains(mine, error)
    # 3) A baseline that does as well needs no training, so it is worth a sentence.
    for row in rows:
        if row.baseline and row.speedup.value >= chosen.speedup.value:
            speedup = interval(row.speedup, "x")
            sentences.append(f"{row.draft} at {row.config}, which takes no training, does as well: {speedup}.")
    return sentences


def _overall(row: Row, error: float) -> str:
    # Which draft and where.
    where = "at batch 1" if row.load is None else "at this load"
    which, speedup = f"{row.draft} step {row.step} at {row.config}", interval(row.speedup, "x")
    # From which tau, and which acceptance of a token, it pays.
    if math.isinf(row.break_even_tau):
        even = "and it pays at no tau"
    else:
        alpha = math.nan if row.load is None else row.load.break_even_alpha
        accepted = "" if math.isnan(alpha) else f" (each drafted token accepted with {alpha:.0%})"
        even = f"it pays from {row.break_even_tau:.2f}{accepted}"
    figures = f"{speedup}; tau {row.tau.value:.2f}, {even}."
    match outcome(row.speedup, error):
        case "gains":
            return f"{which} gains {where}: {figures}"
        case "loses":
            return f"Speculation loses {where}, do not serve it: the best is {which}, {figures}"
        case _:
            return f"No clear gain {where}: the best is {which}, {figures}"


def _by_batch_size(load: LoadFigures, error: float) -> str:
    """Sentence on the best K or tree by batch size; neighbours with the same advice share a clause."""

    def advised(one: BatchFigures) -> str:
        match outcome(one.speedup, error):
            case "gains":
                return str(one.config)
            case "loses":
                return "no speculation"
            case _:
                return f"{one.config} without a clear gain"

    # One clause a run of batch sizes with the same advice.
    clauses = []
    for advice, group in groupby(load.batches, key=advised):
        some = list(group)
        sizes = _first_to_last([str(one.batch_size) for one in some])
        speedups = _first_to_last([f"{one.speedup.value:.2f}x" for one in some])
        clauses.append(f"{advice} at batch {sizes} ({speedups})")
    return f"By batch size: {'; '.join(clauses)}."


def _first_to_last(words: Sequence[str]) -> str:
    return words[0] if words[0] == words[-1] else f"{words[0]} to {words[-1]}"


def _break_even_batch(row: Row, load: LoadFigures) -> Iterator[str]:
    point = load.break_even
    if point is None:
        return
    if point.above is None:
        yield f"{row.config} does not lose up to batch {point.largest}, the largest that was measured."
    elif point.above:
        yield f"Switch speculation off above batch {point.above}: there {row.config} loses."
    else:
        yield f"{row.config} loses at every batch size up to {point.largest}."


def _costs(load: LoadFigures) -> str:
    weights, caches = map(size_text, load.memory)
    return (
        f"Goodput {load.goodput.value:.0f} tokens/s, {load.plain_goodput:.0f} without a draft, which takes "
        f"{weights} of weights and {caches} of caches."
    )


def _domains(rows: Sequence[DomainRow], error: float) -> Iterator[str]:
    """Sentences on domains in which drafting does not pay, or pays up to some batch size only."""
    for row in rows:
        where = f"domain {row.domain!r} ({row.setting})"
        if outcome(row.speedup, error) == "loses":
            yield f"{where} does not pay: {interval(row.speedup, 'x')}."
        elif row.break_even is not None and row.break_even.above:
            yield f"{where} pays up to batch {row.break_even.above}."


def policy_summary(policy: ServingPolicy, times: LoadTimes, candidates: Sequence[Candidate]) -> str:
    """Sentence on a policy: K by range of batch sizes, with the expected speed-ups at its ends, and whose times these
    are."""
    speedups = policy_speedups(times, candidates)
    clauses = []
    for first, last, K in policy.ranges:
        sizes = _first_to_last([str(first), str(last)])
        gains = _first_to_last([f"{speedups[size - 1][K]:.2f}x" for size in (first, last)])
        clauses.append(f"K={K} at batch {sizes} ({gains})" if K else f"off at batch {sizes}")
    return f"policy: {'; '.join(clauses)}; times of {times.fit.hardware}, fitted to {times.fit.error:.0%}"


# --- a benchmark ---


def bench_summary(rows: Sequence[BenchRow], repeats: int, half: bool) -> list[str]:
    """Sentences of a benchmark, the shortest answer to "is it worth it?" first.

    `half`: the target runs below float32.
    """
    # 1) the fastest at each batch size
    sentences = [*_fastest(rows)]
    # 2) each method at each K or tree: batch sizes, then domains and answer lengths that do worse than the whole
    by_name: dict[str, list[BenchRow]] = {}
    for row in rows:
        if not row.setting.plain:
            by_name.setdefault(row.setting.label, []).append(row)
    for name, some in by_name.items():
        whole = _in_all_domains(some)
        sentences += [*_bench_batch_sizes(name, whole), *_losing_domains(name, some), *_losing_lengths(name, whole)]
    # 3) what is true of methods, answers and the benchmark itself
    sentences += [*_acceptance_ends(by_name), *_unequal_answers(by_name, half), *_empty_slots(rows)]
    if repeats == 1:
        sentences.append("One repeat: nothing says how much these figures vary from run to run; --repeats 3 does.")
    return sentences


def bench_speedup(speedup: Spread) -> str:
    """A measured speed-up with its repeats, such as "0.86x, repeats 0.84 to 0.88"."""
    if math.isnan(speedup.value) or speedup.low == speedup.high:
        return number(speedup.value, unit="x")
    return f"{speedup.value:.2f}x, repeats {speedup.low:.2f} to {speedup.high:.2f}"


def _in_all_domains(rows: Sequence[BenchRow]) -> list[BenchRow]:
    return [row for row in rows if row.domain == EVERY]


def _fastest(rows: Sequence[BenchRow]) -> Iterator[str]:
    """Sentences on the fastest method at each batch size, and whether it beats plain decoding."""
    # Known speed-ups only; the wording follows the repeats' spread.
    drafted = [row for row in _in_all_domains(rows) if not row.setting.plain]
    for batch_size in sorted({row.setting.batch_size for row in drafted}):
        some = [row for row in drafted if row.setting.batch_size == batch_size and not math.isnan(row.speedup.value)]
        best = max(some, key=lambda row: row.speedup.value, default=None)
        if best is None:
            continue
        which = f"{best.setting.label}, {bench_speedup(best.speedup)}"
        match outcome(best.speedup.estimate):
            case "gains":
                yield f"At batch {batch_size} the fastest is {which} over plain decoding."
            case "loses":
                yield f"At batch {batch_size} speculation loses, whatever drafts: the best is {which}."
            case _:
                yield f"At batch {batch_size} nothing is clearly faster than plain decoding: the best is {which}."


def _bench_batch_sizes(name: str, whole: Sequence[BenchRow]) -> Iterator[str]:
    """Sentence on one method: the batch sizes at which it loses, gains or is unclear, with the tau that it needs."""
    # Bad news first.
    clauses = []
    for kind in ("loses", "no clear difference", "gains", "not measured"):
        some = [row for row in whole if outcome(row.speedup.estimate) == kind]
        if some:
            each = (f"{row.setting.batch_size} ({bench_speedup(row.speedup)}{_needed_tau(row)})" for row in some)
            clauses.append(f"{kind} at batch {', '.join(each)}")
    if clauses:
        yield f"{name}: {'; '.join(clauses)}."


def _needed_tau(row: BenchRow) -> str:
    """Clause with the measured tau and the break-even tau of a round; empty where either is unknown."""
    if math.isnan(row.break_even_tau) or math.isnan(row.tau.value):
        return ""
    return f"; tau {row.tau.value:.2f}, a round pays from {row.break_even_tau:.2f}"


def _losing_domains(name: str, rows: Sequence[BenchRow]) -> Iterator[str]:
    """Sentences on domains that lose where all domains together do not, with the reason where it is known."""
    for row in rows:
        # Only domains that stand out from the whole.
        whole = next(one for one in _in_all_domains(rows) if one.setting == row.setting)
        loses, all_lose = (outcome(one.speedup.estimate) == "loses" for one in (row, whole))
        if row.domain == EVERY or not loses or all_lose:
            continue
        # The likely reason: rounds pay and so prompts take the time, or else low acceptance.
        speedup = f"{bench_speedup(row.speedup)}{_needed_tau(row)}"
        where = f"{name}, batch {row.setting.batch_size}: loses in {row.domain} ({speedup})"
        if row.tau.value >= row.break_even_tau:
            yield f"{where}: {_waiting_share(row)} of the time there passes before the first token."
        elif row.alphas and not math.isnan(row.alphas[0].value):
            yield f"{where}: {row.alphas[0].value:.0%} of first drafted tokens are accepted there."
        else:
            yield f"{where}."


def _losing_lengths(name: str, whole: Sequence[BenchRow]) -> Iterator[str]:
    """Sentences on answer lengths at which a method loses though not on the whole, or clearly gains less."""
    for row in whole:
        for some in row.lengths if len(row.lengths) > 1 else []:
            loses = outcome(some.speedup.estimate) == "loses" != outcome(row.speedup.estimate)
            if loses or some.speedup.high < row.speedup.low:
                yield (
                    f"{name}, batch {row.setting.batch_size}: {'loses' if loses else 'does worse'} on answers of "
                    f"{some.lengths} ({bench_speedup(some.speedup)}; on all {row.speedup.value:.2f}x): "
                    f"{_waiting_share(some)} of their time passes before the first token, which no draft shortens."
                )


def _waiting_share(row: BenchRow | LengthRow) -> str:
    return "an unknown part" if math.isnan(row.first_token_share) else f"{row.first_token_share:.0%}"


def _acceptance_ends(by_name: Mapping[str, Sequence[BenchRow]]) -> Iterator[str]:
    """Sentences on each method's domains of least and most acceptance of first drafted tokens."""
    seen: set[str] = set()
    for name, rows in by_name.items():
        # The first K and batch size stand for the method: a first token's acceptance depends little on them.
        setting = rows[0].setting
        firsts = [row for row in rows if row.domain != EVERY and row.setting == setting and row.alphas]
        known = sorted((row.alphas[0].value, row.domain) for row in firsts if not math.isnan(row.alphas[0].value))
        least, most = (f"{value:.0%}" for value, _ in (known[0], known[-1])) if known else ("", "")
        if least != most and setting.method not in seen:
            seen.add(setting.method)
            ends = f"least in {known[0][1]} ({least}), most in {known[-1][1]} ({most})"
            yield f"{name}: first drafted tokens are accepted {ends}."


def _unequal_answers(by_name: Mapping[str, Sequence[BenchRow]], half: bool) -> Iterator[str]:
    """Sentences on answers that differ from plain decoding's at temperature 0."""
    # The reason depends on the precision.
    half_why, float32_why = "near ties between two tokens flip", "all should: only an exact tie may flip"
    why = f"in half precision {half_why}" if half else f"in float32 {float32_why}"
    for name, rows in by_name.items():
        for row in _in_all_domains(rows):
            if not math.isnan(row.equal_answers) and row.equal_answers != 1:
                which = f"{row.equal_answers:.0%} of {row.prompts} answers"
                yield f"{name}, batch {row.setting.batch_size}: {which} equal plain decoding's; {why}."


def _empty_slots(rows: Sequence[BenchRow]) -> Iterator[str]:
    """Sentences on batch sizes that too few prompts keep less than half full."""
    for row in _in_all_domains(rows):
        batch_size = row.setting.batch_size
        if row.setting.plain and row.slots < batch_size / 2:
            yield (
                f"At batch {batch_size} only {row.slots:.1f} slots were in use on average: {row.prompts} prompts "
                "are too few for it."
            )


# --- acceptance as a serving engine counts it ---


def describe_mismatch(found: AcceptanceMismatch, margin: float) -> str:
    """Served and expected acceptance in one line, with numbers and the verdict."""
    if found.unknown:
        judged = f"not judged: {found.unknown} (margin {margin:.0%})"
    elif found.mismatch or found.as_expected:
        judged = f"is {'not ' if found.mismatch else ''}as expected (margin {margin:.0%})"
    else:
        needed = "more conversations of the holdout"
        if math.isfinite(found.more_rounds):
            needed = f"about {found.more_rounds:,.0f} more rounds"
        judged = f"no mismatch is shown, but the interval is too wide to tell {margin:.0%}: {needed} would"
    return (
        f"{found.engine} has tau {interval(found.served)} over {found.rounds:,.0f} rounds, expected is "
        f"{interval(found.expected)} in its counting: {interval(found.difference, sign='+')}; {judged}"
    )


# --- a report: the decision of a run, from its records ---

DecisionKind = Literal["promoted", "by-choice", "unproven", "refused", "scored", "nothing"]
"""What became of a draft. unproven: refused, as it is not shown to be worth serving; by-choice: champion all the same,
as gate.min_speedup asks for less."""


class Decision(NamedTuple):
    """Head of a report, and the rows that the report compares below it."""

    kind: DecisionKind
    title: str
    paragraph: str
    reasons: Sequence[str]
    """Reasons of the gate's decision."""
    split: str
    """Split of the figures below: the holdout once a gate has decided, else the selection split."""
    row: Record | None
    """Row of the draft that the decision is about; None: there is none."""
    compared: Sequence[Record]
    """Rows to compare: the decision's draft first, then its champion, baselines last."""
    domains: Sequence[Record]
    contexts: Sequence[Record]


def decision_summary(scores: Record, promotion: Record | None) -> Decision:
    """Decision of a run from its records: by the score alone, or by the gate where it has judged."""
    # 1) No checkpoint could be chosen.
    chosen = next((row for row in scores["rows"] if row["chosen"]), None)
    if chosen is None:
        why = "No checkpoint has a known speed-up: the scored split is too small. Give the mix more conversations."
        return Decision("nothing", "Nothing to choose", why, [], "selection", None, [], [], [])
    # 2) The score alone, on the selection split; or the gate's decision, on the holdout.
    kind: DecisionKind = "scored"
    if promotion is None or not promotion["holdout"]["rows"]:
        row, source, split = chosen, scores, "selection"
        reasons = [] if promotion is None else promotion["decision"]["reasons"]
        compared = [chosen, *(one for one in scores["rows"] if one["baseline"] and one["alphas"])]
        title = f"{draft_label(chosen)} has the best expected speed-up"
        paragraph = _worth(chosen, chosen, "On the selection split")
        if promotion is None:
            paragraph += " No gate has judged it on the holdout yet."
        else:
            # Runs from before there was such a gate have no such field.
            unmet = promotion["decision"].get("beats_start", False) is None
            why = "it does not meet today's gate" if unmet else "no heir is better"
            kind, title = "refused", f"{promotion['version']} stays the champion: {why}"
    else:
        source, split = promotion["holdout"], "holdout"
        compared = _candidate_first(source["rows"])
        row = next(one for one in compared if one["draft"] == "candidate")
        reasons, promoted = promotion["decision"]["reasons"], promotion["decision"]["promote"]
        kind, verdict = "promoted" if promoted else "refused", "is the champion" if promoted else "was refused"
        if promotion["decision"].get("worth_serving") is False:
            kind = "by-choice" if promoted else "unproven"
            verdict += " by choice: not shown to be worth serving" if promoted else ": not shown to be worth serving"
        if not promoted and promotion["decision"].get("compared") == promotion["version"]:  # the champion, judged again
            verdict = "stays the champion: it does not meet today's gate"
        title = f"{promotion['version']} {verdict}"
        paragraph = _worth(row, chosen, "On the holdout, which no draft was trained or picked on,")
        others = [one for one in source["rows"] if one is not row and one["speedup"]["value"] is not None]
        beside = [f"{o['draft']} has tau {interval(o['tau'])} and {interval(o['speedup'], 'x')}" for o in others]
        paragraph += f" Beside it, {joined(beside)}." if beside else ""
    return Decision(
        kind,
        title,
        paragraph,
        reasons,
        split,
        row,
        compared,
        _candidate_first(source["domains"], "domain", "setting"),
        _candidate_first(source["contexts"], "context_bucket"),
    )


def run_description(
    recipe: str, target: str, drafts: Mapping[str, str], mix: Record | None, head: Decision | None
) -> str:
    """Description of a run, Markdown: target, drafts, data, and the result once there is one.

    `drafts`: family and steps of each, by name. `mix`: the mix's manifest.
    """
    lines = [f"Drafts for **{target}**, by recipe {recipe}.", ""]
    lines.append("- Drafts: " + ", ".join(f"{name} ({how})" for name, how in drafts.items()))
    if mix is not None:
        splits: Mapping[str, Mapping[str, int]] = mix["conversations"]
        sizes = ", ".join(f"{sum(counts.values()):,} {split}" for split, counts in splits.items())
        domains = sorted({domain for counts in splits.values() for domain in counts})
        lines.append(f"- Data: conversations of {joined(domains)}: {sizes}")
    if head is None:
        return "\n".join([*lines, "- Result: none yet"])
    lines.append(f"- Result: **{head.title}.** {head.paragraph}")
    return "\n".join([*lines, *(f"    - {reason}" for reason in head.reasons)])


def _worth(row: Record, chosen: Record, where: str) -> str:
    """Sentences on a draft's tau and speed-up, and whether it pays. `where`: the opening words."""
    # The figures first; the verdict needs a known break-even and an interval on one side of 1.
    speedup, even = row["speedup"], row["break_even_tau"]
    figures = (
        f"{where} {draft_label(chosen)} at {config_label(row)} emits {interval(row['tau'])} tokens per pass of the "
        f"target; measured round times make that {interval(speedup, 'x')} of plain decoding's speed."
    )
    if even is None or row["tau"]["value"] is None:
        return figures
    error = row["load"]["fit_error"] if row.get("load") else 0.0
    less = f", {error:.0%} for the error of fitted times allowed for" if error else ""
    if speedup["low"] is not None and speedup["low"] * (1 - error) > 1:
        return f"{figures} It pays: break-even is at tau {number(even)}, below the whole interval{less}."
    if speedup["high"] is not None and speedup["high"] * (1 + error) < 1:
        return (
            f"{figures} It does not pay on this machine: break-even is at tau {number(even)}, above the whole "
            f"interval{less}."
        )
    if speedup["low"] is None:
        return f"{figures} Break-even is at tau {number(even)}: whether it pays is not settled."
    return f"{figures} Break-even is at tau {number(even)}, inside the interval{less}: whether it pays is not settled."


def _candidate_first(rows: Sequence[Record], *columns: str) -> list[Record]:
    """Rows sorted by the columns, then candidate, champion, baselines."""

    def order(row: Record) -> tuple[Any, ...]:
        return (*(row[name] for name in columns), row["baseline"], row["draft"] != "candidate")

    return sorted(rows, key=order)


def config_label(row: Record) -> str:
    """Label of a record's K or tree: "K = 4", "tree wide", or "-" for plain decoding."""
    if not row["draft_tokens"]:
        return "-"
    return f"tree {row['tree']}" if row["tree"] else f"K = {row['draft_tokens']}"


def draft_label(row: Record) -> str:
    """Label of a record's draft in a legend, with its step where it was trained."""
    if row.get("start"):
        return f"{row['draft']}, the start"
    return f"{row['draft']}, step {row['step']}" if row["step"] and not row["baseline"] else str(row["draft"])


def joined(words: Sequence[str]) -> str:
    """Words joined as a list in a sentence: a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
