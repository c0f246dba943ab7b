"""`draftforge generate`: one answer by speculative decoding, with accepted tokens coloured, and its tau."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.text import Text

from ..data.chat_template import render
from ..data.conversation import OTHER_READINGS, Message
from ..data.records import Record, request_of
from ..errors import InputError, RegistryError, one_line
from ..eval.draft_configs import DraftConfig
from ..eval.settings import SELECTION_SPLIT
from ..progress import Console, say
from ..recipe import Recipe
from ..registry.champion_alias import last_decision
from ..registry.store_address import store_exists
from ..registry.versions import CANDIDATE, by_alias, champion, resolve_models_uri
from ..specdec.accept_rules import RULES
from ..specdec.answers import Answer, GrowingText, answer_run, answers
from ..specdec.proposers.base import Proposer
from ..specdec.proposers.cascade import CascadeProposer
from ..specdec.proposers.training_free import HELPERS, TRAINING_FREE
from ..specdec.proposers.tree_settings import MergedTree, is_fixed, is_tree_of
from ..specdec.requests import Generation
from ..specdec.sampling_settings import SamplingSettings
from ..specdec.serving_plan import ServingPlan
from ..specdec.stored_draft import StoredDraft
from ..specdec.targets import Target
from ..storage import parse_json, read_text
from .cli_options import GenerateOptions
from .draft_scorer import Scorer
from .stages import captured_stages, last_checkpoint
from .workspace import Workspace, require_whole

NO_DRAFT = "none"
DRAFTED = "bold green"
_FOLLOWED = {"messages", "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort", "documents"}
"""Fields of a request that shape its prompt."""
_NO_CHAMPION = "this target has no champion yet: run `draftforge distill`, or name a draft with --draft"


@dataclass(frozen=True)
class GeneratedAnswer(Answer):
    """Generated answer, with the draft and the K or tree that it was decoded with."""

    draft: str
    config: DraftConfig


def require_champion(recipe: Recipe, draft: str | None) -> None:
    """Raise RegistryError where no draft is named and no registry exists. Makes nothing."""
    if draft is None and not store_exists(recipe.registry, recipe.workdir.resolve()):
        raise RegistryError(_NO_CHAMPION)


def find_draft(space: Workspace, name: str | None, option: str = "--draft") -> Path:
    """Path of a draft: the champion (`name` None), the last checkpoint of a draft of the recipe, or a given path.

    Raises RegistryError without a champion; InputError, naming the option, for a name that means nothing.
    """
    # The champion, downloaded from the registry.
    if name is None:
        now = champion(space.tracking, space.target_fingerprint)
        if now is None:
            raise RegistryError(_no_champion(space))
        return resolve_models_uri(space.tracking, now.uri, space.root / "models")
    # A path. A draft of the recipe goes before a folder of the same name.
    if name not in space.recipe.drafts:
        if name and Path(name).exists():
            return Path(name)
        known = ", ".join(space.recipe.drafts)
        raise InputError(f"{option} {name}: must be a draft folder or one of the recipe's drafts ({known})")
    # A draft of the recipe: its training folder is named by the capture, which is made where it is missing.
    return last_checkpoint(captured_stages(space).training(name), f"{option} {name}")


def _no_champion(space: Workspace) -> str:
    """Words on a target without a champion: what the gate said of its candidate, and how to use that all the same."""
    candidate = by_alias(space.tracking, space.target_fingerprint, CANDIDATE)
    if candidate is None:
        return _NO_CHAMPION
    judged = "no gate has judged" if last_decision(space.tracking, candidate) is None else "the gate refused"
    names = [name for name, draft in space.recipe.drafts.items() if draft.draft_family == candidate.lineage.family]
    return (
        f"this target has no champion: {judged} version {candidate.number} (candidate); "
        f"`--draft {names[0] if len(names) == 1 else 'NAME'}` takes a draft's last checkpoint all the same"
    )


def generate(recipe: Recipe, prompt: str | None, options: GenerateOptions) -> None:
    """Answer a prompt, or the messages of a file, and show the answer and what the draft was worth.

    `prompt`: the user's message; `-` reads standard input; None: `options.messages` names a file. Raises InputError.
    """
    asked = _request(prompt, options)
    require_whole(recipe, "an answer")
    require_champion(recipe, options.draft)
    space = Workspace(recipe)
    show(space.target, _answer(space, asked, options))


def _request(prompt: str | None, options: GenerateOptions) -> Record:
    """What is asked: the prompt or the file's messages, with the system prompt before them."""
    # 1) One user message, or a request as an engine's client sends it.
    file = options.messages
    if prompt is not None:
        check_prompt(text := read_text(Path("-"), "PROMPT") if prompt == "-" else prompt)
        asked = request_of([{"role": "user", "content": text}], "PROMPT")
    elif file is None:
        raise InputError("PROMPT: is missing; give the user's message, or --messages FILE")
    else:
        where, text = f"--messages {file}", read_text(file, "--messages")
        try:
            body = parse_json(text)
        except ValueError as error:
            raise InputError(f"{where}: not JSON ({one_line(error)})") from None
        asked = request_of(body, where)
        unread = sorted(body.keys() - _FOLLOWED) if isinstance(body, dict) else []
        if unread:
            names = ", ".join(repr(name)[1:-1][:60] for name in unread)
            say(f"{where}: not followed: {names}; sampling and length are those of the options")
    # 2) The system prompt.
    if options.system is None:
        return asked
    if not options.system.strip() or asked.messages[0].role in ("system", "developer"):
        problem = "the messages begin with a system prompt" if options.system.strip() else "is empty; must hold text"
        raise InputError(f"--system {options.system[:40]!r}: {problem}")
    return replace(asked, messages=(Message(role="system", content=options.system), *asked.messages))


def answer_prompt(space: Workspace, prompt: str, options: GenerateOptions) -> GeneratedAnswer:
    """Answer one prompt, the user's first message; see `answer_messages`."""
    check_prompt(prompt)
    return answer_messages(space, [Message(role="user", content=prompt)], options)


def answer_messages(space: Workspace, messages: Sequence[Message], options: GenerateOptions) -> GeneratedAnswer:
    """Answer messages. At temperature 0 the rule is greedy, else the first of the recipe's that takes the draft."""
    return _answer_ids(space, render(space.target.tokenizer, messages), options)


def _answer(space: Workspace, asked: Record, options: GenerateOptions) -> GeneratedAnswer:
    """Answer a request as the target's engine reads it, with its tools and template arguments."""
    arguments = {name: value for name, value in (asked.template_args or {}).items() if name != OTHER_READINGS}
    ids = render(space.target.tokenizer, asked.messages, asked.tools, arguments, asked.prompt_end)
    return _answer_ids(space, ids, options)


def _answer_ids(space: Workspace, ids: list[int], options: GenerateOptions) -> GeneratedAnswer:
    proposer, plan = _proposer(space, space.target, options, len(ids) + options.max_new_tokens)
    return answer_ids(space, ids, proposer, plan, options)


def answer_ids(
    space: Workspace, ids: list[int], proposer: Proposer | None, plan: ServingPlan, options: GenerateOptions
) -> GeneratedAnswer:
    """Answer a prompt's ids by a proposer (None: plain decoding) at its plan; of the options, how to sample and for how
    long, and the draft's name."""
    sampling, rules = SamplingSettings(temperature=options.temperature), space.recipe.score.sampled_rules
    limit = options.max_new_tokens
    run = answer_run(
        space.target, proposer, plan, [ids], sampling, rules, max_new_tokens=limit, seed=options.seed, rule=options.rule
    )
    (answer,) = answers(space.target, run)
    # Name what drafted.
    name = options.draft or "champion"
    if isinstance(proposer, CascadeProposer):
        name += f" helped by {options.cascade} ({proposer.passes} of its passes instead of {proposer.passes_alone})"
    config = DraftConfig(0) if proposer is None else DraftConfig(plan.draft_tokens, plan.tree_name)
    return GeneratedAnswer(**vars(answer), draft=name, config=config)


def check_prompt(prompt: str) -> None:
    """Raise InputError for a prompt that is empty or that UTF-8 cannot hold (lone surrogates of a shell)."""
    if not prompt.strip():
        raise InputError("PROMPT: is empty; must hold text")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise InputError(f"PROMPT {prompt[:40]!a}: is not valid Unicode") from None


def check_tree(name: str, trees: Collection[str]) -> None:
    """Raise InputError for a tree that the recipe does not have."""
    if name not in trees:
        known = f"one of the recipe's score.trees ({', '.join(trees)})" if trees else "in score.trees, which is empty"
        raise InputError(f"--tree {name}: must be {known}")


def _proposer(
    space: Workspace, target: Target, options: GenerateOptions, longest: int
) -> tuple[Proposer | None, ServingPlan]:
    """Proposer of the options (None: plain decoding), and the plan that it drafts by: its own, or what is asked for.

    `longest`: tokens of the prompt and the longest answer. Raises InputError for options that do not fit each other.
    """
    # 1) Options that fit each other, and what needs no trained draft.
    draft, tree_name, cascade, K = options.draft, options.tree, options.cascade, options.draft_tokens
    trees = space.recipe.score.trees
    if tree_name is not None:
        check_tree(tree_name, trees)
        asked = trees[tree_name]
        if isinstance(asked, MergedTree) and not is_tree_of(asked, draft):
            raise InputError(f"--tree {tree_name}: merges {', '.join(asked.names)}: name one of them with --draft")
    if cascade is not None:
        if tree_name is not None:
            raise InputError(f"--cascade {cascade}: helps to draft chains, not --tree {tree_name}")
        small, proposer = _cascade(space, draft, cascade, longest)
        return proposer, small.plan_for(K).as_chain
    if draft == NO_DRAFT or draft in TRAINING_FREE:
        if tree_name is not None:
            raise InputError(f"--tree {tree_name}: --draft {draft} drafts no trees")
        if draft == NO_DRAFT:
            return None, ServingPlan.chain(1)
        return TRAINING_FREE[draft](target), StoredDraft.of_method(draft, target).plan_for(K)
    # 2) A stored draft, by its own plan unless K or a tree is asked for.
    path, device = find_draft(space, draft), space.recipe.score.draft_device
    loaded = StoredDraft.load(path, target, device, other_tokenizer=True)
    loaded.check_context(longest)
    if tree_name is None:
        plan = loaded.plan_for(K)
        return loaded.proposer(plan.tree), plan
    if not loaded.drafts_trees:
        raise InputError(f"--tree {tree_name}: a draft with another tokenizer than the target's drafts chains only")
    # 3) A tree of the recipe, of its own levels or of those that are asked for.
    tree, found = trees[tree_name], loaded.found_plan
    if is_fixed(tree):
        proposer = loaded.proposer(tree)
    else:
        scorer = Scorer(space, captured_stages(space).captured, SELECTION_SPLIT)
        proposer = scorer.tree_spec(loaded, tree_name, tree, draft or "").proposer
    if not found.assumed and found.plan.tree_name != tree_name:
        say(f"{path}: drafts by tree {tree_name}, as asked, not by the {found.plan} of its plan")
    return proposer, found.plan.model_copy(update={"draft_tokens": K or tree.levels, "tree_name": tree_name})


def _cascade(space: Workspace, draft: str | None, cascade: str, longest: int) -> tuple[StoredDraft, Proposer]:
    """A small draft, and the proposer of it with prompt lookup or a smaller draft that drafts for it."""
    if draft == NO_DRAFT or draft in TRAINING_FREE:
        raise InputError(f"--cascade {cascade}: helps a small draft, not --draft {draft}")
    small = StoredDraft.load(find_draft(space, draft), space.target, space.recipe.score.draft_device)
    if small.family != "small":
        raise InputError(f"--cascade {cascade}: helps a small draft, not one of family {small.family}")
    small.check_context(longest)
    helper = helper_of(space, cascade, longest)
    check_smaller(helper, small, cascade, draft or "the champion")
    return small, small.proposer(helper=helper.new_helper())


def helper_of(space: Workspace, cascade: str, longest: int) -> StoredDraft:
    """Helper of a cascade, which drafts for a small draft: prompt lookup, or a smaller draft by name or folder."""
    if cascade in HELPERS:
        return StoredDraft.of_method(cascade, space.target)
    path = find_draft(space, cascade, "--cascade")
    helper = StoredDraft.load(path, space.target, space.recipe.score.draft_device)
    if helper.family != "small":
        raise InputError(f"--cascade {cascade}: must be a small draft or {', '.join(HELPERS)}, not {helper.family}")
    helper.check_context(longest)
    return helper


def check_smaller(helper: StoredDraft, draft: StoredDraft, cascade: str, name: str) -> None:
    """Raise InputError for a helper that is not smaller than the draft (called `name`) that it drafts for."""
    if helper.parameters >= draft.parameters:
        raise InputError(
            f"--cascade {cascade}: has {helper.parameters:,} parameters; to draft for {name} it must have fewer "
            f"than its {draft.parameters:,}"
        )


def show(target: Target, answer: GeneratedAnswer) -> None:
    """Print the answer with accepted drafted tokens coloured, then one line of figures."""
    # 1) The answer.
    console, text = Console(highlight=False), Text()
    for piece, drafted in pieces(target, answer.generation):
        text.append(piece, DRAFTED if drafted else "")
    console.print(text, soft_wrap=True)
    # 2) The figures.
    speed = f"{len(answer.tokens)} tokens in {answer.seconds:.2f} s"
    if answer.tau is None or answer.rule is None:
        console.print(f"{speed}, no draft", style="dim", soft_wrap=True)
        return
    plan = f"{answer.config}, at most {answer.config.levels} levels" if answer.config.tree else str(answer.config)
    console.print(
        f"{speed}; {answer.draft}, rule {RULES[answer.rule].label}, {plan}: tau {answer.tau:.2f} "
        f"({answer.rounds} rounds, {answer.accepted} of {answer.drafted} drafted tokens accepted)",
        style="dim",
        soft_wrap=True,
    )


def pieces(target: Target, generation: Generation) -> Iterator[tuple[str, bool]]:
    """Pieces of the answer's text, each of one origin: True for accepted drafted tokens, False for the target's own."""
    # 1) The origin of each token: a round emits its accepted tokens, then the correction or bonus.
    origins: list[bool] = [False]
    for one in generation.rounds:
        origins += [True] * one.accepted + [False] * (one.emitted - one.accepted)
    origins += [False] * (len(generation.tokens) - len(origins))
    # 2) Cut where the origin changes.
    growing = GrowingText(target)
    for count, origin in enumerate(origins, start=1):
        at_end = count == len(origins)
        if not at_end and origins[count] == origin:
            continue
        if piece := growing.more(generation.tokens[:count], last=at_end):
            yield piece, origin
