"""`draftforge skip-layers`: self-speculative drafts, made of the target by skipping layers that matter least.

A search finds the set of attention and MLP sublayers to skip with the best expected speed-up, by domain; nothing is
trained. Self-speculative decoding: Zhang et al. 2023, arXiv 2309.08168.
"""

from collections.abc import Sequence
from pathlib import Path

from .. import fingerprint
from ..data.store import Sample
from ..errors import InputError
from ..eval.cost_table import CostTable
from ..eval.draft_configs import ProposerSpec
from ..eval.layer_skip_search import (
    RoundTimes,
    SkipCounts,
    SkipScore,
    SkipScorer,
    Sublayer,
    search,
    skipped_layers,
    sublayers,
)
from ..eval.score import stratified_conversations
from ..eval.settings import SELECTION_SPLIT
from ..eval.table import SkipRow, show_skips
from ..progress import bar, say
from ..recipe import Recipe
from ..specdec.drafts.layer_skip import SkippedDraft, SkippedLayers
from ..specdec.formats.layer_skip import SkipFile, check_writable, write_skipped
from ..specdec.stored_draft import StoredDraft
from .cli_options import SkipLayersOptions
from .draft_scorer import Scorer
from .stages import Stage, captured_stages
from .workspace import Workspace, open_workspace, require_whole

POOLED = "all domains"
TRIES_FILE = "tries.json"


def skip_layers(recipe: Recipe, options: SkipLayersOptions) -> None:
    """Search the layers to skip on recorded answers of the selection split, and write a file for each search.

    There is one search over all domains together and one in each, or only one, in the domain `options.domain`. `out`
    holds the result of the first; each of several domains has `<out>-<domain>.json` beside it. Counts of tried sets are
    kept in the work folder: the same search again only reads them, a search with more tries goes on from them.
    """
    require_whole(recipe, "a search of layers")
    space = open_workspace(recipe)
    with space.alone():
        _search_layers(space, options)


def _search_layers(space: Workspace, options: SkipLayersOptions) -> None:
    """Search and write, under the work folder's lock. All ranks capture; the first one searches."""
    tries, conversations, seed = options.tries, options.conversations, options.seed
    # 1) The answers to search on, and the files to write.
    out = space.root / "skip-layers.json" if options.out is None else options.out
    check_writable(out)
    captured = captured_stages(space).captured
    if not space.first_rank:
        return
    scorer = Scorer(space, captured, SELECTION_SPLIT)
    samples = _samples(scorer, options.domain, conversations)
    depths = scorer.settings.draft_tokens if options.draft_tokens is None else [options.draft_tokens]
    files = _files(list(samples), out)
    for path in files.values():
        check_writable(path)

    # 2) What a set of skipped layers is worth: its counts, kept from earlier searches, and the times of its rounds.
    times = _times(scorer, space, depths)
    tried = SkipCounts(_folder(space, captured, scorer, depths, conversations) / TRIES_FILE)
    skip_scorer = SkipScorer(space.target, samples, times, scorer.settings, tried)

    # 3) Search over all domains together, then from there in each.
    rows: list[SkipRow] = []
    best: list[frozenset[Sublayer]] = []  # of all domains together: where the search in each begins
    for name, path in files.items():
        asked = list(samples) if name == POOLED else [name]
        found, row = _search(space, skip_scorer, name, asked, tries, seed, best)
        best = best or [found]
        rows.append(row)
        how = {**row.record(), "seed": seed, "conversations": conversations, "capture": captured.fingerprint}
        file = SkipFile(target_fingerprint=space.target_fingerprint, skipped=row.skipped, found=how)
        write_skipped(path, file)
    # 4) Show what was found, and where skipping is slower than plain decoding.
    show_skips(rows)
    for row, path in zip(rows, files.values()):
        if row.speedup < 1:
            say(f"skipping layers loses here: {row.domain}: {row.speedup:.2f}x of plain decoding at best")
        say(f"{path}: {row.domain}; a draft: --draft {path}")


def _samples(scorer: Scorer, domain: str | None, conversations: int) -> dict[str, list[Sample]]:
    """Recorded answers by domain, of at most `conversations` conversations each; of `domain` alone if one is given.

    Raises InputError for an unknown domain, or where there are no answers.
    """
    domains = sorted({sample.domain for sample in scorer.samples})
    if domain is not None and domain not in domains:
        raise InputError(f"--domain {domain}: must be a domain of the selection split ({', '.join(domains)})")
    # The same conversations for every set that is tried: sets are compared on equal answers.
    found: dict[str, list[Sample]] = {}
    for name in domains if domain is None else [domain]:
        mine = [sample for sample in scorer.samples if sample.domain == name]
        kept = stratified_conversations(mine, conversations)
        found[name] = [sample for sample in mine if sample.conversation in kept]
    if not found:
        raise InputError("no answers to search on: the selection split is empty; give the mix more conversations")
    return found


def _files(domains: Sequence[str], out: Path) -> dict[str, Path]:
    """Path of the file for each search: by domain, and first for all of them together where there are several."""
    if len(domains) == 1:
        return {domains[0]: out}
    return {POOLED: out, **{name: out.with_name(f"{out.stem}-{name}{out.suffix}") for name in domains}}


def _times(scorer: Scorer, space: Workspace, depths: Sequence[int]) -> dict[int, RoundTimes]:
    """Times of rounds at every K, as a function of the skipped sublayers.

    Fitted from three measured drafts: with all sublayers, without any attention, without any MLP.
    """
    target = space.target
    every = tuple(range(target.num_layers))

    def timed(skipped: SkippedLayers) -> CostTable:
        draft = StoredDraft(target, SkippedDraft.family, SkippedDraft(target, skipped))
        return scorer.costs(draft, [ProposerSpec(draft.proposer, tuple(depths))])

    tables = [timed(SkippedLayers()), timed(SkippedLayers(attention=every)), timed(SkippedLayers(mlp=every))]
    return {K: RoundTimes.fit(K, target.num_layers, *tables) for K in depths}


def _folder(space: Workspace, captured: Stage, scorer: Scorer, depths: Sequence[int], conversations: int) -> Path:
    """Folder of the counts on these answers; counts depend neither on the seed nor on times."""
    inputs = [captured.fingerprint, scorer.settings.sampled_rules, list(depths), conversations]
    return space.folder("skip", fingerprint.of_json(["skip-layers", inputs]))


def _search(
    space: Workspace,
    skip_scorer: SkipScorer,
    name: str,
    domains: Sequence[str],
    tries: int,
    seed: int,
    start: Sequence[frozenset[Sublayer]],
) -> tuple[frozenset[Sublayer], SkipRow]:
    """Search the set of sublayers to skip with the best expected speed-up on `domains` together, with a progress bar.

    `start`: sets that the search begins from. Returns the best set and its row.
    """
    seen: dict[frozenset[Sublayer], SkipScore] = {}

    # Every score is kept: the search returns the best set, whose figures the row needs.
    with bar(f"skip layers, {name}", tries, "sets") as advance:

        def value(parts: frozenset[Sublayer]) -> float:
            seen[parts] = skip_scorer.score(skipped_layers(parts), domains)
            advance(note=f"best {max(one.speedup for one in seen.values()):.2f}x")
            return seen[parts].speedup

        found = search(sublayers(space.target.num_layers), value, tries, seed, start)
    best = seen[found.parts]
    row = SkipRow(
        name, skipped_layers(found.parts), space.target.num_layers, best.K, best.tau, best.speedup, found.tries
    )
    return found.parts, row
