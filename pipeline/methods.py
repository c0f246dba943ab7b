"""The ways of drafting that a benchmark compares: drafts of a recipe and of anybody, trees, training-free ones.

One that cannot draft for this target, or not under this rule, is a failure with its reason, and the others go on.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from .. import fingerprint
from ..errors import DraftforgeError, InputError, one_line
from ..eval.bench_records import PLAIN, Failure, Setting
from ..eval.bench_runs import Way
from ..eval.plans import Drafting, Plan, rules_for
from ..eval.settings import SELECTION_SPLIT, ScoreSettings
from ..specdec.drafts import AnyDraft
from ..specdec.drafts.small import SmallDraft
from ..specdec.foreign import ForeignDraft
from ..specdec.formats import check_context
from ..specdec.proposers import Proposer, make_proposer
from ..specdec.proposers.cascade import CascadeProposer
from ..specdec.proposers.free import LOOKUP, TRAINING_FREE
from ..specdec.proposers.trees import TreeSettings
from ..specdec.requests import check_proposer
from ..specdec.rules import RULES
from ..specdec.targets import Target
from .bench_settings import BenchSettings
from .scoring import Scorer, any_draft_for
from .stages import capture_stage, mix_stage
from .talk import NO_DRAFT, Helping, check_tree, find_draft, helper_of
from .workspace import Workspace

CHAMPION = "champion"
T = TypeVar("T")
TreeOf = Callable[[AnyDraft, str, TreeSettings], Drafting]
"""A tree as a draft drafts it."""


@dataclass(frozen=True)
class Method:
    """A draft, or what drafts without one, and the ways in which it drafts."""

    name: str
    place: str
    """Where the draft lies; "" where there is none."""
    digest: str
    """Of its files, and of where it runs."""
    ways: list[Way]


class MethodFinder:
    """Finds methods for one target, and notes those that cannot be run."""

    def __init__(self, target: Target, settings: BenchSettings, score: ScoreSettings, longest: int) -> None:
        self._target, self._settings, self._score, self._longest = target, settings, score, longest
        self.methods = [Method(PLAIN, "", "", [Way(Setting(method=PLAIN, levels=0, batch_size=1), None)])]
        self.failures: list[Failure] = []
        self.helped = 0
        """Small drafts that their helper is smaller than."""

    def add_free(self, name: str) -> None:
        """A training-free method."""
        self._add(name, "", lambda: (name, self._chains(name, partial(TRAINING_FREE[name], self._target))))

    def add_draft(
        self,
        name: str,
        find: Callable[[], Path],
        trees: dict[str, TreeSettings],
        tree_of: TreeOf | None = None,
        helping: Helping | None = None,
    ) -> None:
        """A trained draft: its chains and its trees; a small one also helped. `find` gives its folder or file."""
        name = f"{name} (given)" if name in (PLAIN, *TRAINING_FREE) else name
        place = self._tried(name, None, find)
        if place is None:
            return
        loaded: list[AnyDraft | ForeignDraft] = []

        def ways() -> tuple[str, list[Way]]:
            draft = any_draft_for(self._target, place, self._score.draft_device)
            loaded.append(draft)
            found = self._chains(name, partial(make_proposer, draft, self._target))
            digest = _digest(place, self._score.draft_device)
            if isinstance(draft, ForeignDraft):  # it drafts no trees, and reads the ends of texts that are too long
                return digest, found
            check_context(draft, self._longest, place)
            for tree, asked in trees.items():
                drafting = self._tried(name, tree, partial(tree_of, draft, tree, asked)) if tree_of else None
                if drafting is not None:
                    found += self._way(name, Plan(drafting.depths[0], tree), drafting.make)
            return digest, found

        self._add(name, str(place), ways)
        if helping is not None and loaded and isinstance(loaded[0], SmallDraft):
            self._add_cascade(name, place, loaded[0], helping)

    def _add_cascade(self, alone: str, place: Path, draft: SmallDraft, helping: Helping) -> None:
        device, shown = self._score.draft_device, helping.name
        helper = shown
        if helping.place is not None:
            shown, helper = Path(shown).resolve().name, _digest(helping.place, device)
        name = f"{alone} helped by {shown}"

        def ways() -> tuple[str, list[Way]]:
            helping.check_smaller(draft, alone)
            self.helped += 1
            digest = fingerprint.of_json([_digest(place, device), helper])
            return digest, self._chains(name, lambda: CascadeProposer(draft, helping.make()))

        self._add(name, str(place), ways)

    def _add(self, name: str, place: str, ways: Callable[[], tuple[str, list[Way]]]) -> None:
        known = any(method.name == name for method in self.methods)
        found = None if known else self._tried(name, None, ways)
        if found is not None and found[1]:
            self.methods.append(Method(name, place, found[0], found[1]))

    def _chains(self, name: str, make: Callable[[], Proposer]) -> list[Way]:
        """Of every K; one that is more than it can draft is as much as it can."""
        proposer, wanted = make(), sorted(set(self._settings.draft_tokens))
        depths = [min(K, proposer.most_nodes(K)) if proposer.chain else K for K in wanted]
        return [way for K in dict.fromkeys(depths) for way in self._way(name, Plan(K), make)]

    def _way(self, name: str, plan: Plan, make: Callable[[], Proposer]) -> list[Way]:
        """One, or none where no rule takes it."""
        sampling, proposer = self._settings.sampling, make()
        rule = self._settings.rule or rules_for(sampling, proposer, self._score)[0]
        try:
            check_proposer(RULES[rule], proposer, sampling)
        except InputError as error:
            self.failures.append(Failure(method=name, plan=plan.label, batch_size=None, reason=str(error)))
            return []
        judged = "greedy" if sampling.greedy else rule
        setting = Setting(method=name, levels=plan.levels, tree=plan.tree, rule=judged, batch_size=1)
        return [Way(setting, make)]

    def _tried(self, name: str, tree: str | None, find: Callable[[], T]) -> T | None:
        try:
            return find()
        except DraftforgeError as error:
            self.failures.append(Failure(method=name, plan=tree or "-", batch_size=None, reason=one_line(error)))
            return None


def find_methods(space: Workspace, settings: BenchSettings, longest: int) -> MethodFinder:
    """Plain decoding and what a recipe's user asks for. Raises InputError for a name that means nothing.

    `longest`: tokens of the longest prompt and answer.
    """
    recipe, finder = space.recipe, MethodFinder(space.target, settings, space.recipe.score, longest)
    names = list(settings.drafts) or [*recipe.drafts, LOOKUP]
    for name in names:
        _check_name(name, recipe.drafts)
    names = _once(names, recipe.drafts)
    trees = _trees(recipe.score.trees, settings.trees)
    shorts = [Path(name).resolve().name for name in names if _is_place(name, recipe.drafts)]

    def tree_of(draft: AnyDraft, name: str, tree: TreeSettings) -> Drafting:
        if tree.kind == "measured":
            return Scorer(space, capture_stage(space, mix_stage(space)), SELECTION_SPLIT).tree_of(draft, name, tree)
        return Drafting(partial(make_proposer, draft, space.target, tree), (tree.levels,), name, tree)

    helping = None
    if settings.helped_by is not None:
        helping = helper_of(space, space.target, settings.helped_by, longest)
    for name in names:
        if name in TRAINING_FREE and name not in recipe.drafts:
            finder.add_free(name)
            continue
        short = Path(name).resolve().name if _is_place(name, recipe.drafts) else name
        shown = short if shorts.count(short) <= 1 and (short == name or short not in recipe.drafts) else name
        asked = None if name == CHAMPION and name not in recipe.drafts else name
        finder.add_draft(shown, partial(find_draft, space, asked), trees, tree_of, helping)
    if helping is not None and not finder.helped:
        raise _helps_none(helping, finder.failures)
    return finder


def _helps_none(helping: Helping, failures: Sequence[Failure]) -> InputError:
    why = "; ".join(f"{one.method}: {one.reason}" for one in failures)
    return InputError(f"--helped-by {helping.name}: no small draft here that it could help{why and f' ({why})'}")


def _once(names: Sequence[str], drafts: Collection[str]) -> list[str]:
    """Each once, as it is named first; a folder by any of its paths."""
    found: dict[str | Path, str] = {}
    for name in names:
        found.setdefault(Path(name).resolve() if _is_place(name, drafts) else name, name)
    return list(found.values())


def _is_place(name: str, drafts: Collection[str]) -> bool:
    return name not in drafts and name not in TRAINING_FREE and name != CHAMPION


def _check_name(name: str, drafts: Collection[str]) -> None:
    if name in (NO_DRAFT, PLAIN):
        raise InputError(f"--draft {name}: plain decoding is always measured; name what is compared with it")
    if _is_place(name, drafts) and not (name and Path(name).exists()):
        known = ", ".join([*drafts, *TRAINING_FREE, CHAMPION])
        raise InputError(f"--draft {name}: must be a draft folder or one of {known}")


def _trees(known: dict[str, TreeSettings], wanted: Sequence[str]) -> dict[str, TreeSettings]:
    for name in wanted:
        check_tree(name, known)
    return {name: tree for name, tree in known.items() if name in wanted or not wanted}


def _digest(place: Path, device: str | None) -> str:
    """Of a draft's files, and of where it runs if that is not with the target."""
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    digests = {path.name: fingerprint.of_file(path) for path in files if path.is_file()}
    return fingerprint.of_json(digests if device is None else [digests, device])
