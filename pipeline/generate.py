"""`draftforge generate`: one answer with the draft's help, and what the help was worth."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ..data.conversation import Message, render
from ..errors import InputError, RegistryError
from ..eval.draft_configs import DraftConfig, rules_for
from ..eval.settings import SELECTION_SPLIT
from ..recipe import Recipe
from ..registry.versions import champion, resolve_models_uri
from ..specdec.cross_tokenizer import ForeignDraft
from ..specdec.decoder import Generation, Request, generate
from ..specdec.drafts.small import SmallDraft
from ..specdec.formats import check_context
from ..specdec.proposers import Proposer, make_proposer
from ..specdec.proposers.cascade import CascadeProposer, Helper, SmallHelper
from ..specdec.proposers.training_free import HELPERS, TRAINING_FREE
from ..specdec.proposers.trees import MeasuredTree
from ..specdec.rules import RULES
from ..specdec.sampling import SamplingSettings
from ..specdec.targets import Target
from .scoring import Scorer, any_draft_for, draft_for
from .stages import captured_stages, checkpoints_of
from .workspace import Workspace, is_there

NO_DRAFT = "none"
DRAFTED = "bold green"
_NO_CHAMPION = "this target has no champion yet: run `draftforge distill`, or name a draft with --draft"


@dataclass(frozen=True)
class GeneratedAnswer:
    """What was said, and with which draft."""

    generation: Generation
    draft: str
    rule: str
    config: DraftConfig


def require_champion(recipe: Recipe, draft: str | None) -> None:
    """Raise RegistryError where no draft is named and there is no registry to ask. Makes nothing."""
    if draft is None and not is_there(recipe.registry, recipe.workdir.resolve()):
        raise RegistryError(_NO_CHAMPION)


def find_draft(space: Workspace, name: str | None, option: str = "--draft") -> Path:
    """The folder of a draft: a checkpoint folder, the last checkpoint of a draft of the recipe, or the champion."""
    if name is None:
        now = champion(space.tracking, space.target_fingerprint)
        if now is None:
            raise RegistryError(_NO_CHAMPION)
        return resolve_models_uri(space.tracking, now.uri, space.root / "models")
    if name not in space.recipe.drafts:
        if name and Path(name).exists():
            return Path(name)
        known = ", ".join(space.recipe.drafts)
        raise InputError(f"{option} {name}: must be a draft folder or one of the recipe's drafts ({known})")
    found = checkpoints_of(captured_stages(space).training(name))
    if not found:
        raise InputError(f"{option} {name}: has no checkpoint yet; run `draftforge train`")
    return found[max(found)]


def answer_prompt(
    space: Workspace,
    prompt: str,
    draft: str | None,
    rule: str | None,
    draft_tokens: int | None,
    tree: str | None,
    helped_by: str | None,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> GeneratedAnswer:
    """Answer one prompt. At temperature 0 the rule is greedy, else the first of the recipe's that takes the draft."""
    _check_prompt(prompt)
    target, sampling = space.target, SamplingSettings(temperature=temperature)
    ids = render(target.tokenizer, [Message(role="user", content=prompt)], None, {})
    proposer, levels = _proposer(space, target, draft, tree, helped_by, len(ids) + max_new_tokens)
    settings = space.recipe.score
    K = draft_tokens or levels
    rule = rule or ("greedy" if proposer is None else rules_for(sampling, proposer, settings)[0])
    request = Request(ids, sampling, seed, max_new_tokens, target.stop_ids)
    ((_, generation),) = generate(target, proposer, [request], rule=rule, draft_tokens=K)
    name = draft or "champion"
    if isinstance(proposer, CascadeProposer):
        name += f" helped by {helped_by} ({proposer.passes} of its passes instead of {proposer.passes_alone})"
    return GeneratedAnswer(generation, name, rule, DraftConfig(K if proposer is not None else 0, tree or ""))


def _check_prompt(prompt: str) -> None:
    if not prompt.strip():
        raise InputError("PROMPT: is empty; must hold text")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise InputError(f"PROMPT {prompt[:40]!a}: is not valid Unicode") from None


def check_tree(name: str, trees: Collection[str]) -> None:
    """Refuse a tree that the recipe does not have."""
    if name not in trees:
        known = f"one of the recipe's score.trees ({', '.join(trees)})" if trees else "in score.trees, which is empty"
        raise InputError(f"--tree {name}: must be {known}")


def _proposer(
    space: Workspace, target: Target, draft: str | None, tree_name: str | None, helped_by: str | None, longest: int
) -> tuple[Proposer | None, int]:
    """What drafts, and how many levels it drafts unless told otherwise. `longest`: tokens that the text may have."""
    trees, K = space.recipe.score.trees, max(space.recipe.score.draft_tokens)
    if tree_name is not None:
        check_tree(tree_name, trees)
    if helped_by is not None:
        if tree_name is not None:
            raise InputError(f"--helped-by {helped_by}: helps to draft chains, not --tree {tree_name}")
        return _cascade(space, target, draft, helped_by, longest), K
    if draft == NO_DRAFT or draft in TRAINING_FREE:
        if tree_name is not None:
            raise InputError(f"--tree {tree_name}: --draft {draft} drafts no trees")
        return (None if draft == NO_DRAFT else TRAINING_FREE[draft](target)), K
    place = find_draft(space, draft)
    loaded = any_draft_for(target, place, space.recipe.score.draft_device)
    if not isinstance(loaded, ForeignDraft):
        check_context(loaded, longest, place)
    if tree_name is None:
        return make_proposer(loaded, target), K
    if isinstance(loaded, ForeignDraft):
        raise InputError(f"--tree {tree_name}: a draft with another tokenizer than the target's drafts chains only")
    tree = trees[tree_name]
    if isinstance(tree, MeasuredTree):
        scorer = Scorer(space, captured_stages(space).captured, SELECTION_SPLIT)
        return scorer.tree_of(loaded, tree_name, tree).proposer, tree.levels
    return make_proposer(loaded, target, tree), tree.levels


def _cascade(space: Workspace, target: Target, draft: str | None, helped_by: str, longest: int) -> CascadeProposer:
    """A small draft with something smaller that drafts for it."""
    if draft == NO_DRAFT or draft in TRAINING_FREE:
        raise InputError(f"--helped-by {helped_by}: helps a small draft, not --draft {draft}")
    device, place = space.recipe.score.draft_device, find_draft(space, draft)
    small = draft_for(target, place, device)
    if not isinstance(small, SmallDraft):
        raise InputError(f"--helped-by {helped_by}: helps a small draft, not one of family {small.family}")
    check_context(small, longest, place)
    helping = helper_of(space, target, helped_by, longest)
    helping.check_smaller(small, draft or "the champion")
    return CascadeProposer(small, helping.make())


@dataclass(frozen=True)
class CascadeDrafter:
    """What drafts for small drafts."""

    name: str
    """As it was asked for."""
    make: Callable[[], Helper]
    place: Path | None = None
    """Where its files lie; None: it has none."""
    parameters: int = 0

    def check_smaller(self, draft: SmallDraft, name: str) -> None:
        """Raise InputError for a draft that this one is not smaller than."""
        theirs = _parameters(draft)
        if self.parameters >= theirs:
            raise InputError(
                f"--helped-by {self.name}: has {self.parameters:,} parameters; to draft for {name} it must have fewer "
                f"than its {theirs:,}"
            )


def _parameters(draft: SmallDraft) -> int:
    return sum(parameter.numel() for parameter in draft.parameters())


def helper_of(space: Workspace, target: Target, helped_by: str, longest: int) -> CascadeDrafter:
    """What drafts for a small draft: prompt lookup, or a smaller draft by name or folder."""
    if helped_by in HELPERS:
        return CascadeDrafter(helped_by, HELPERS[helped_by])
    place = find_draft(space, helped_by, "--helped-by")
    helper = draft_for(target, place, space.recipe.score.draft_device)
    if not isinstance(helper, SmallDraft):
        raise InputError(f"--helped-by {helped_by}: must be a small draft or {', '.join(HELPERS)}, not {helper.family}")
    check_context(helper, longest, place)
    return CascadeDrafter(helped_by, partial(SmallHelper, helper), place, _parameters(helper))


def show(target: Target, spoken: GeneratedAnswer) -> None:
    """Print the answer with accepted drafted tokens coloured, then one line of figures."""
    console, text = Console(highlight=False), Text()
    for piece, drafted in pieces(target, spoken.generation):
        text.append(piece, DRAFTED if drafted else "")
    console.print(text, soft_wrap=True)
    generation = spoken.generation
    speed = f"{len(generation.tokens)} tokens in {generation.seconds:.2f} s"
    if not spoken.config.levels or not generation.rounds:
        console.print(f"{speed}, no draft", style="dim", soft_wrap=True)
        return
    rounds = len(generation.rounds)
    tau = (len(generation.tokens) - 1) / rounds
    accepted = sum(one.accepted for one in generation.rounds)
    proposed = sum(one.drafted for one in generation.rounds)
    plan = f"{spoken.config}, at most {spoken.config.levels} levels" if spoken.config.tree else str(spoken.config)
    console.print(
        f"{speed}; {spoken.draft}, rule {RULES[spoken.rule].label}, {plan}: tau {tau:.2f} "
        f"({rounds} rounds, {accepted} of {proposed} drafted tokens accepted)",
        style="dim",
        soft_wrap=True,
    )


def pieces(target: Target, generation: Generation) -> Iterator[tuple[str, bool]]:
    """The answer's text in pieces of one origin each: accepted drafted tokens, or the target's own."""
    origins: list[bool] = [False]
    for one in generation.rounds:
        origins += [True] * one.accepted + [False] * (one.emitted - one.accepted)
    origins += [False] * (len(generation.tokens) - len(origins))
    tokens = [token for token in generation.tokens if token not in target.stop_ids]
    said = ""
    for count, origin in enumerate(origins[: len(tokens)], start=1):
        at_end = count == len(tokens)
        if not at_end and origins[count] == origin:
            continue
        text = target.tokenizer.decode(tokens[:count], skip_special_tokens=True)
        if text.endswith("\ufffd") and not at_end:  # half a character: it goes with the next piece
            continue
        yield text[len(said) :], origin
        said = text
