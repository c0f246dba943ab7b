"""`draftforge inspect-mix --prompts`: turns as the target reads them, where they come from, and what was left out."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from rich.text import Text

from ..data.chat_template import ids_of_prompt, turn_prompt
from ..data.conversation import Conversation, Turn, as_served, turns
from ..data.logged_prompts import PromptCheck
from ..data.mix import LEFT_OUT, ORIGINS, load_log, load_manifest, load_mix
from ..data.split import unit
from ..errors import DraftforgeError, InputError
from ..progress import Console, say
from ..recipe import Recipe
from ..specdec.targets import context_length, load_target_tokenizer, locate, prompts_in_doubt, sampling_defaults
from ..storage import expanded, read_object
from .mix_headline import PromptSample
from .stages import Stages, mix_stage
from .workspace import Workspace

Json = dict[str, Any]

_STAND_IN = "x"  # for an answer that the target has still to give
_MOST_PLACES = 5  # shown of each reason


def show_prompts(recipe: Recipe, count: int, domain: str | None, as_json: bool) -> None:
    """Print `count` turns of the recipe's mix, an even sample by hash, and places of what was left out.

    Raises InputError for a domain that the mix has not.
    """
    space = Workspace(recipe)
    with space.alone():
        folder = mix_stage(Stages(space)).folder
        if not space.first_rank:
            return
        shown = [*_prompts(recipe, folder, count, domain), *_left_out(folder, domain)]
    if as_json:
        for record in shown:
            print(json.dumps(record, ensure_ascii=False))
        return
    console = Console(highlight=False)
    for record in shown:
        _print(console, record)


def sample_prompts(recipe: Recipe, folder: Path, count: int) -> PromptSample | None:
    """Compare the prompts of at most `count` turns of a mix, an even sample by hash, with what its log tells of them.

    None: the target's tokenizer is not on this disk, or cannot be read.
    """
    if not expanded(recipe.target.model).exists():
        return None
    mix = load_mix(folder)
    try:
        tokenizer, own_code = load_target_tokenizer(recipe.target), prompts_in_doubt(recipe.target) is not None
    except DraftforgeError:
        return None
    check = PromptCheck(tokenizer, mix, own_code, recipe.capture.ask_unproven)
    sample = _sampled(mix)[:count]
    found = (check.refusal(one, turn.index) for one, turn in sample)
    # Numbers of tokens in a reason differ from turn to turn.
    return PromptSample(len(sample), Counter(reason.partition(" (")[0] for reason in found if reason is not None))


def _sampled(conversations: Sequence[Conversation]) -> list[tuple[Conversation, Turn]]:
    """Turns that count in the order of their hashes: the first ones are an even sample."""
    asked = [(one, turn) for one in conversations for turn in turns(one) if turn.counts]
    return sorted(asked, key=lambda pair: unit("shown prompts", pair[0].id, str(pair[1].index)))


def _prompts(recipe: Recipe, folder: Path, count: int, domain: str | None) -> Iterator[Json]:
    """Yield the records of some turns."""
    # 1) The conversations, as the target's server completes their settings.
    defaults = sampling_defaults(recipe.target)
    mix = as_served(load_mix(folder), defaults)
    conversations = [one for one in mix if domain in (None, one.domain)]
    if not conversations:
        known = sorted({name for of in load_manifest(folder)["conversations"].values() for name in of})
        raise InputError(f"--domain {domain}: the mix has no such domain; it has {', '.join(known)}")

    # 2) What is told of each: the prompt, how it is answered, where it was logged, and what was changed.
    tokenizer = load_target_tokenizer(recipe.target)
    own_code = prompts_in_doubt(recipe.target)
    check = PromptCheck(tokenizer, mix, own_code is not None, recipe.capture.ask_unproven)
    for line in (_default_penalties(recipe), own_code, *check.lines(sampled=True)):
        if line is not None:
            say(line)
    context = context_length(recipe.target)
    redacted = {row["id"]: json.loads(row["redacted"]) for row in pq.read_table(folder / ORIGINS).to_pylist()}
    log = load_log(folder)
    stands_for: dict[str, dict[str, int]] = {}
    for original, fate in zip(log.column("original").to_pylist(), log.column("fate").to_pylist()):
        if fate in LEFT_OUT:
            of = stands_for.setdefault(original, {})
            of[fate] = of.get(fate, 0) + 1
    for one, turn in _sampled(conversations)[:count]:
        yield {
            "kind": "prompt",
            "where": one.where,
            "domain": one.domain,
            "split": one.split,
            "turn": turn.index,
            **({"asked_at": _iso(asked_at)} if (asked_at := one.time_of(turn.index)) is not None else {}),
            **_rendered(tokenizer, check, one, turn, context),
            **_answered(recipe, one, defaults),
            "changed": _changed(one, turn, redacted[one.id], stands_for.get(one.id, {})),
        }


def _default_penalties(recipe: Recipe) -> str | None:
    """A sentence for penalties in the target's generation_config.json, which a capture does not follow; None: none."""
    path = locate(recipe.target).folder / "generation_config.json"
    known = read_object(path) if path.is_file() else {}
    found = [f"{name} {known[name]}" for name in ("presence_penalty", "frequency_penalty") if known.get(name)]
    return f"{path}: {', '.join(found)}: vLLM draws so where a request names none; not followed" if found else None


def _rendered(tokenizer: Any, check: PromptCheck, one: Conversation, turn: Turn, context: int | None) -> Json:
    """Text and ids of a prompt, or why it is not asked. Only the answer's tokens, behind it, are supervised."""
    answers = [_STAND_IN] * turn.index if turn.waits_for is not None else []
    waits = {"waits_for_answers": turn.index} if turn.waits_for is not None else {}
    try:
        refusal = check.refusal(one, turn.index)
        if refusal is not None:
            return {"refused": refusal, **waits}
        prompt = turn_prompt(tokenizer, *check.as_asked(one, turn), answers)
        ids = ids_of_prompt(tokenizer, prompt)
    except InputError as error:
        return {"refused": str(error), **waits}
    if context is not None and len(ids) >= context:
        return {"refused": f"the prompt has {len(ids)} tokens, the target's context {context}", **waits}
    return {"text": prompt.whole, "ids": ids, "supervised_from": len(ids), **waits}


def _answered(recipe: Recipe, one: Conversation, defaults: Mapping[str, float]) -> Json:
    """Sampling settings and token limit of a turn's answers; selection and holdout are answered at each scored one.
    `defaults`: the model's own settings, for what a request left to its server."""
    settings = recipe.capture
    sampling = [one.sampling or settings.sampling] if one.split == "train" else recipe.score.sampling
    limit = min(one.max_new_tokens or math.inf, settings.max_new_tokens)
    own = {name: defaults[name] for name in one.server_sampling if name in defaults and one.split == "train"}
    return {
        "sampling": [each.model_dump() for each in sampling],
        **({"from_generation_config": own} if own else {}),
        "max_new_tokens": int(limit),
    }


def _changed(one: Conversation, turn: Turn, redacted: Mapping[str, int], copies: Mapping[str, int]) -> Json:
    """What the mix made of the logged conversation."""
    joined = sum(isinstance(message.content, list) and len(message.content) > 1 for message in turn.messages)
    return {
        **({"redacted": dict(redacted)} if redacted else {}),
        **({"messages_of_several_parts": joined} if joined else {}),
        **({"stands_for": dict(copies)} if copies else {}),
    }


def _left_out(folder: Path, domain: str | None) -> Iterator[Json]:
    """Yield, for each reason, how many records were left out and where some of them stand."""
    # Lines without a record belong to no domain for certain; they are told for the whole mix.
    manifest, log = load_manifest(folder), load_log(folder)
    places: dict[str, list[str]] = {}
    for source in manifest["sources"] if domain is None else []:
        for reason, found in source["places"].items():
            places.setdefault(reason, []).extend(found)
    counts = dict(manifest["left_out"]) if domain is None else {}
    columns = (log.column(name).to_pylist() for name in ("where", "fate", "domain"))
    for where, fate, of in zip(*columns):
        if fate in LEFT_OUT and domain in (None, of):
            places.setdefault(fate, []).append(where)
            if domain is not None:
                counts[fate] = counts.get(fate, 0) + 1
    for reason, count in counts.items():
        some = sorted(places.get(reason, []), key=lambda where: unit("shown places", where))[:_MOST_PLACES]
        yield {"kind": "left_out", "reason": reason, "count": count, "where": some}


def _print(console: Console, record: Json) -> None:
    if record["kind"] == "left_out":
        some = f": {', '.join(record['where'])}" if record["where"] else ""
        console.print(f"left out, {record['reason']}: {record['count']}{some}", markup=False, soft_wrap=True)
        return
    # Where it comes from, the prompt between lines, then how it is answered.
    title = f"{record['where']}, turn {record['turn']} ({record['domain']}, {record['split']})"
    console.rule(Text(title), align="left")
    if "refused" in record:
        console.print(record["refused"], markup=False, soft_wrap=True)
        return
    console.print(record["text"], markup=False, soft_wrap=True)
    sampling = ", ".join(_short(each) for each in record["sampling"])
    lines = [
        f"ids: {_some(record['ids'])}",
        f"supervised: the answer, from token {record['supervised_from']} on, at most {record['max_new_tokens']}",
        f"sampling: {sampling}",
        *(f"from generation_config.json: {_short(own)}" for own in [record.get("from_generation_config")] if own),
        *(f"{name.replace('_', ' ')}: {_told(value)}" for name, value in record["changed"].items()),
    ]
    if "waits_for_answers" in record:
        lines.append(f"x stands for {record['waits_for_answers']} answers that the target has still to give")
    console.print("\n".join(lines), markup=False, soft_wrap=True, style="dim")


def _iso(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="seconds")


def _short(sampling: Mapping[str, Any]) -> str:
    return " ".join(f"{name} {value:g}" for name, value in sampling.items())


def _some(ids: Sequence[int]) -> str:
    shown = (
        " ".join(map(str, ids))
        if len(ids) <= 24
        else f"{' '.join(map(str, ids[:12]))} … {' '.join(map(str, ids[-8:]))}"
    )
    return f"{len(ids)}: {shown}"


def _told(value: Any) -> str:
    return ", ".join(f"{count} {name}" for name, count in value.items()) if isinstance(value, dict) else str(value)
