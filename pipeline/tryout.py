"""`draftforge try`: what drafts are worth, in about two minutes: one that is trained now, and prompt lookup.

The recipe is configs/try.yaml. Its mix, capture and training are stages like those of `draftforge distill`, so that the
next call finds the draft; answers are decoded and shown like those of `draftforge generate`.
"""

import json
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

from rich.table import Table
from rich.text import Text

from ..data.chat_template import render
from ..data.conversation import Message
from ..data.mix import load_mix
from ..errors import InputError, MissingFileError
from ..progress import Advance, Console, bar, say
from ..recipe import load_recipe
from ..specdec.answers import Answer
from ..specdec.serving_plan import ServingPlan
from ..specdec.stored_draft import StoredDraft
from ..storage import read_text
from .cli_options import TARGET, GenerateOptions
from .distill import run_to_training
from .generate import GeneratedAnswer, answer_ids, check_prompt, find_draft, show
from .stages import Stages, check_capture, check_training
from .workspace import Workspace, open_workspace

RECIPE = Path(__file__).parents[1] / "configs" / "try.yaml"
SHIPPED = (
    "Correct the spelling and change nothing else: The parcell with the cast iron pan arived on Monday, but the box "
    "of the cast iron pan was openned.",
    "Write a Python function that returns the longest word of a sentence.",
    "Why is the sky blue? Answer in two sentences.",
)
"""Prompts where the user gives none: one whose answer copies from it, and two whose answers do not."""
_METHODS = ("lookup", "tiny")
_QUESTIONS, _WARM_UP, _PLAIN, _SHORT, _LONG = 4, 8, 16, 40, 48
"""Held-out questions that are answered, and the longest answers, in tokens: the one that nothing is made of, those of
plain decoding, whose passes are timed, those to these questions, and to the user's prompts."""


def read_prompts(given: Sequence[str], file: Path | None) -> list[str]:
    """Prompts of the arguments, or of a file with one a line; three shipped ones where neither is given."""
    if given and file is not None:
        raise InputError(f"--prompts {file}: is given beside prompts on the command line; give one of the two")
    prompts = list(given)
    if file is not None:
        prompts = [line for line in read_text(file, "--prompts").splitlines() if line.strip()]
        if not prompts:
            raise InputError(f"--prompts {file}: is empty; must hold a prompt a line")
    for prompt in prompts:
        check_prompt(prompt)
    return prompts or list(SHIPPED)


def try_out(given: Sequence[str], file: Path | None, target: str) -> None:
    """Train a tiny draft, or find it trained; show what it and prompt lookup are worth, on its traffic and on prompts.

    `given` or `file`: the prompts, see `read_prompts`. Raises MissingFileError without the default target.
    """
    started, prompts = time.monotonic(), read_prompts(given, file)
    if target == TARGET and not Path(target).exists():
        raise MissingFileError(
            f"--target {target}: no such folder here; `make target` fetches it, or name your own model"
        )
    say(
        f"a tiny draft is trained on a support bot's traffic, once; then it, prompt lookup and plain decoding answer "
        f"{_QUESTIONS} of the bot's questions and {len(prompts)} of {'yours' if given or file else 'ours'}: two minutes"
        " on two free cores, half a minute when it is trained"
    )
    recipe = load_recipe(RECIPE, [f"target.model={json.dumps(target)}"])
    # 1) A tiny draft for a support bot, by the stages of `draftforge distill`.
    space = open_workspace(recipe)
    stages = Stages(space)
    with space.alone():
        check_capture(stages)
        check_training(stages, recipe.drafts)
        run_to_training(stages, recipe.drafts)
        path = find_draft(space, "tiny")
        tiny = StoredDraft.load(path, space.target, recipe.score.draft_device, other_tokenizer=True)
        drafts = {"none": None, "lookup": StoredDraft.of_method("lookup", space.target), "tiny": tiny}
    # 2) Questions of its own traffic that it was not trained on, and prompts about which it knows nothing.
    held_out = [one for one in load_mix(stages.mix.folder) if one.split == "holdout"][:_QUESTIONS]
    asked = [[Message(role="user", content=prompt)] for prompt in prompts]
    with bar("answering", 1 + len(held_out) + len(asked), "prompts") as advance:
        _answers(space, drafts, held_out[0].messages, _WARM_UP, advance)  # of the first passes no time counts
        own = [_answers(space, drafts, one.messages, _SHORT, advance) for one in held_out]
        theirs = [_answers(space, drafts, messages, _LONG, advance) for messages in asked]
    # 3) An answer of each kind token by token, the table, and what to make of it.
    console = Console(highlight=False)
    best = max(_METHODS, key=lambda method: speedup_of(theirs[:1], method))
    for title, question, answer in (
        ("A question that the draft was not trained on", held_out[0].messages[-1].text, own[0]["tiny"]),
        ("The first of your prompts" if given or file else "The first of the prompts", prompts[0], theirs[0][best]),
    ):
        console.print(f"\n[bold]{title}[/]")
        console.print(question, style="italic", markup=False, soft_wrap=True)
        show(space.target, answer)
    console.print("green: drafted tokens that the target agreed with; plain: the target's own", style="dim")
    labels = [f"{len(own)} questions of the support bot", *prompts]
    rows = [own, *([one] for one in theirs)]
    console.print(_table(labels, rows))
    _headline(console, rows, time.monotonic() - started)


def _answers(
    space: Workspace, drafts: Mapping[str, StoredDraft | None], messages: Sequence[Message], longest: int, done: Advance
) -> dict[str, GeneratedAnswer]:
    """Greedy answer by each method, each of its own decoding; they are equal where the arithmetic is exact.

    Plain decoding's is its beginning: it is there for the time of a pass, and adds no token of its own.
    """
    K, found = space.recipe.score.draft_tokens[-1], {}
    ids = render(space.target.tokenizer, messages)
    for name, draft in drafts.items():
        options = GenerateOptions(draft=name, max_new_tokens=min(longest, _PLAIN) if draft is None else longest)
        if draft is None:
            found[name] = answer_ids(space, ids, None, ServingPlan.chain(1), options)
            continue
        draft.check_context(len(ids) + longest)
        plan = draft.plan_for(K)
        found[name] = answer_ids(space, ids, draft.proposer(plan.tree), plan, options)
    done()
    return found


def tau_of(answers: Sequence[Answer]) -> float:
    """Tokens per round, pooled; an answer's first token comes from the prompt's pass, so no round emitted it."""
    rounds = sum(one.rounds for one in answers)
    return sum(len(one.tokens) - 1 for one in answers) / rounds if rounds else 1.0


def speedup_of(rows: Sequence[dict[str, GeneratedAnswer]], method: str) -> float:
    """Speed-up after the prompt: tau times the median seconds of a plain pass, over those of a round.

    A round holds a pass of the target, so that one which seems to take less is counted as one pass: no more than tau
    is claimed. 1 where nothing was decoded after the prompt's pass.
    """
    passes, rounds = (
        [later - sooner for row in rows for sooner, later in pairwise(row[name].generation.arrivals)]
        for name in ("none", method)
    )
    if not passes or not rounds:
        return 1.0
    return tau_of([row[method] for row in rows]) * min(median(passes) / median(rounds), 1.0)


def _table(labels: Sequence[str], rows: Sequence[Sequence[dict[str, GeneratedAnswer]]]) -> Table:
    """Table of tau and measured speed-up, a row for each prompt."""
    table = Table(box=None, pad_edge=False)
    table.add_column("prompt", max_width=38, no_wrap=True, overflow="ellipsis")
    for title in ("lookup tau", "speed", "tiny tau", "speed"):
        table.add_column(title, justify="right", no_wrap=True)
    for label, row in zip(labels, rows, strict=True):
        cells = []
        for method in _METHODS:
            cells.append(f"{tau_of([one[method] for one in row]):.2f}")
            cells.append(f"{speedup_of(row, method):.2f}x")
        table.add_row(Text(label), *cells)
    return table


def _headline(console: Console, rows: Sequence[Sequence[dict[str, GeneratedAnswer]]], seconds: float) -> None:
    """Print what was seen, and what to do next."""
    own, theirs = rows[0], [one for row in rows[1:] for one in row]
    tiny, lookup = (tau_of([one[method] for one in own]) for method in ("tiny", "lookup"))
    best = max(_METHODS, key=lambda method: speedup_of(theirs, method))
    yours, named = tau_of([one[best] for one in theirs]), "prompt lookup" if best == "lookup" else "the draft"
    pays = speedup_of(theirs, best) > 1
    found = f"{named} is the better one, {yours:.2f}" if pays else f"neither pays, at best {named} with {yours:.2f}"
    console.print(
        f"\n[bold]In {seconds:.0f} s: on the traffic that it learnt, a tiny draft gives {tiny:.2f} tokens a pass of "
        f"the target (prompt lookup {lookup:.2f}); on your prompts {found}.[/]",
        soft_wrap=True,
    )
    console.print(
        "tau is that number; speed is tau times a plain pass over a round, medians of few answers: a hint, and below "
        "1x drafting costs more than it saves. Next: `make demo` trains, scores and registers a draft; `draftforge "
        "distill RECIPE` does so with your logs.",
        soft_wrap=True,
    )
