"""Headline of `inspect-mix`: what needs attention in a mix, a sentence each. Text, page and JSON show the same ones.

What was done on purpose (shares, limits, threads that go on) needs none; a level below is a share that no log reaches
by a few odd lines.
"""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from ..data.conversation import SPLITS
from ..data.mix import CONTAMINATED, COPY, LEFT_OUT, NEAR_COPY
from ..data.record_outcomes import NO_CHAT, OVER_LIMIT
from ..data.traffic_profile import LOG, MIX, Profile
from ..recipe import Recipe

NOTHING = "Nothing needs attention."
_LEFT_OUT, _COPIES, _CUT, _UNFOLLOWED, _DOMINANT = 0.05, 0.3, 0.05, 0.05, 0.8
"""Shares above which records left out, copies, answers cut, fields not followed and one domain need attention."""
_MOST_NAMED = 5


class Notice(NamedTuple):
    """What needs attention: its subject, and what was found, with the key of the recipe that changes it."""

    about: str
    text: str


class PromptSample(NamedTuple):
    """Sample of turns whose prompts were compared with their log, and why some of them are not asked."""

    turns: int
    refused: Counter[str]


class Headline(NamedTuple):
    """What needs attention in a mix, what stops a draft first; and how far its prompts were looked at."""

    notices: list[Notice]
    note: str


def headline(
    found: Profile, recipe: Recipe, context: int | None = None, sample: PromptSample | None = None
) -> Headline:
    """Headline of a mix. `context`: positions of the target; `sample`: prompts that were compared; None: not known."""
    notices = [
        *_contamination(found),
        *_holdout(found, recipe),
        *_left_out(found),
        *(_prompts(sample) if sample else ()),
        *_cut(found, recipe, context),
        *_copies(found),
        *_dominant(found),
        *_clocks(found, recipe),
        *_unfollowed(found),
    ]
    if sample is None:
        return Headline(notices, "prompts were not compared with their log: the target's tokenizer is not on this disk")
    return Headline(notices, f"{sample.turns} turns were looked at for prompts that are not the logged ones")


def _contamination(found: Profile) -> Iterator[Notice]:
    """What the holdout shares with a train split, or the mix with an evaluation set."""
    told = found.manifest["contamination"]
    for name, words in (
        ("near_train", "clusters of the holdout are near this mix's train"),
        ("near_ancestors_train", "clusters of the holdout are near an ancestor's train"),
        ("asked_in_train", "turns of the holdout are asked in this mix's train"),
        ("asked_in_ancestors_train", "turns of the holdout are asked in an ancestor's train"),
    ):
        if told.get(name):
            yield Notice("contamination", f"{told[name]} {words}; there must be none: build the mix again")
    for name, count in told["near_evaluation_sets"].items():
        if count:
            yield Notice("contamination", f"{count} clusters of the holdout are near {name}")
    if count := found.manifest["left_out"].get(CONTAMINATED):
        yield Notice("contamination", f"{count} conversations were left out: they are near a set of mix.contamination")


def _holdout(found: Profile, recipe: Recipe) -> Iterator[Notice]:
    """What is too small for the gate to judge, or has nothing that the target is asked."""
    manifest, gate = found.manifest, recipe.gate
    if names := list(manifest["unanswered"]):
        yield Notice("no turns", f"nothing is asked of {_named(names)} (mix.may_be_unanswered allows it)")
    clusters = manifest["clusters"][SPLITS[2]]
    if clusters < gate.min_clusters:
        yield Notice(
            "few turns",
            f"the holdout has {clusters} clusters of near-duplicates; the gate lets no draft pass below "
            f"gate.min_clusters = {gate.min_clusters}",
        )
    holdout = manifest["conversations"][SPLITS[2]]
    names = sorted({name for by_domain in manifest["conversations"].values() for name in by_domain})
    few = [f"{name} ({holdout.get(name, 0)})" for name in names if holdout.get(name, 0) < gate.min_domain_clusters]
    if few:
        yield Notice(
            "few turns",
            f"few conversations in the holdout: {_named(few)}; below gate.min_domain_clusters = "
            f"{gate.min_domain_clusters} a domain is not judged by itself",
        )


def _left_out(found: Profile) -> Iterator[Notice]:
    """Requests that were left out for what they are, with the main reason."""
    counts = Counter({why: n for why, n in found.manifest["left_out"].items() if why not in (*LEFT_OUT, OVER_LIMIT)})
    lines = found.manifest["read"] - sum(counts.pop(why, 0) for why in NO_CHAT)
    if counts.total() > _LEFT_OUT * lines:
        (why, most), *others = counts.most_common()
        rest = f", and {len(others)} other reasons" if len(others) > 1 else f", else {others[0][0]}" if others else ""
        share = f"{counts.total() / lines:.0%} of the requests ({counts.total()} of {lines}) are left out"
        yield Notice("left out", f"{share}: {most} {why}{rest}")


def _prompts(sample: PromptSample) -> Iterator[Notice]:
    """Prompts that are not the served ones, or in doubt."""
    if refused := sample.refused.total():
        (why, most), *_ = sample.refused.most_common()
        yield Notice(
            "prompts in doubt",
            f"{refused} of {sample.turns} turns looked at are not asked, {most} of them as {why}; "
            "`inspect-mix --prompts` shows them",
        )


def _cut(found: Profile, recipe: Recipe, context: int | None) -> Iterator[Notice]:
    """Prompts beyond the target's context, and answers beyond the capture's limit."""
    prompts, answers, limit = found.tokens["prompt"][MIX], found.tokens["answer"][MIX], recipe.capture.max_new_tokens
    if context is not None and (long := int((prompts >= context).sum())):
        yield Notice("cut", f"{long} of {len(prompts)} prompts do not fit the target's context of {context} tokens")
    if (cut := int((answers > limit).sum())) > _CUT * len(answers):
        yield Notice(
            "cut",
            f"{cut / len(answers):.0%} of the logged answers are longer than capture.max_new_tokens = {limit}, where "
            "the target's are cut",
        )


def _copies(found: Profile) -> Iterator[Notice]:
    """Copies in the log; threads that a longer one continues are none."""
    copies, records = sum(found.manifest["left_out"].get(why, 0) for why in (COPY, NEAR_COPY)), found.sizes[LOG]
    if copies > _COPIES * records:
        yield Notice("duplicates", f"{copies / records:.0%} of the log ({copies} of {records} records) are copies")


def _dominant(found: Profile) -> Iterator[Notice]:
    """One domain beside which the others hardly count."""
    (domains,) = (one for one in found.shares if one.key == "domain")
    counts = domains.counts[MIX]
    if (counts > 0).sum() > 1 and counts.max() > _DOMINANT * counts.sum():
        name, share = domains.labels[int(counts.argmax())], counts.max() / counts.sum()
        yield Notice("one domain", f"{name} is {share:.0%} of the mix; mix.weights gives the others a larger share")


def _clocks(found: Profile, recipe: Recipe) -> Iterator[Notice]:
    """Times that are wrong, missing where they count, or of clocks that disagree."""
    manifest = found.manifest
    if odd := manifest["odd_clocks"]["count"]:
        some = ", ".join(manifest["odd_clocks"]["some"][:_MOST_NAMED])
        yield Notice("clocks", f"{odd} records have a time far from all others, taken for unknown ({some})")
    if recipe.mix.half_life_days and (unknown := manifest["without_time"]):
        yield Notice("clocks", f"{unknown} of {found.sizes[LOG]} records have no time, which mix.half_life_days needs")
    if manifest["in_flight"] and (skewed := manifest["in_flight"]["skewed"]):
        yield Notice("clocks", f"{skewed} requests have times of two clocks; the load does not count them")


def _unfollowed(found: Profile) -> Iterator[Notice]:
    """Fields that shaped logged answers, and that a capture does not follow."""
    counts = Counter[str]()
    for source in found.manifest["sources"]:
        counts.update(source["unfollowed"])
    for name, count in counts.most_common():
        if count > _UNFOLLOWED * found.sizes[LOG]:
            yield Notice("not followed", f"{name} shaped {count} logged answers; a capture does not follow it")


def _named(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
