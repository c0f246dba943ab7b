"""Python API: what `import draftforge` offers to notebooks and services.

Each function calls what the verb of its name calls: `generate` answers through `specdec/answers.py`, `score` counts
through `eval/score.py`, `distill` runs the verb's own function. Errors are those of `errors.py`, in one line.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack, get_type_hints

import numpy as np
import pyarrow as pa
from pydantic import TypeAdapter, ValidationError

from . import fingerprint
from .data.chat_template import render
from .data.records import messages_of
from .data.store import Sample
from .errors import InputError, refused_value
from .eval import acceptance, counts
from .eval.draft_configs import ProposerSpec
from .eval.score import Identity, score_draft
from .eval.settings import SELECTION_SPLIT, ScoreSettings
from .pipeline import distill as flow
from .pipeline.cli_options import StoreOptions
from .pipeline.distill import Outcome
from .pipeline.registry_listing import open_store
from .pipeline.report import find_scored, newest_score
from .pipeline.scoring import COUNTS_FILE
from .pipeline.workspace import Workspace, open_workspace
from .recipe import Recipe
from .registry.versions import CHAMPION, is_models_uri, require, resolve_models_uri
from .specdec import stored_draft, targets
from .specdec.answers import Answer, AnswerStream, answer_run, answers
from .specdec.proposers.training_free import TRAINING_FREE
from .specdec.requests import DecodeRun
from .specdec.sampling_settings import SamplingSettings
from .specdec.serving_plan import ServingPlan
from .specdec.target_settings import TargetSettings

Prompt = str | Sequence[Mapping[str, Any]]
"""A text, which is one user message, or messages with `role` and `content` as of OpenAI's chat completions."""


class SamplingOptions(TypedDict, total=False):
    """Options of answers that the target gives alone; the defaults are in brackets."""

    max_new_tokens: int
    """Longest answer in tokens (128)."""
    temperature: float
    """0 takes the most likely token (0)."""
    top_k: int
    """Keep the k most likely tokens; 0 keeps all (0)."""
    top_p: float
    """Keep the most likely tokens that together reach this probability (1)."""
    min_p: float
    """Drop tokens less likely than this share of the most likely one (0)."""
    repetition_penalty: float
    """Divide positive and multiply negative logits of tokens that were there before (1)."""
    seed: int
    """Seed of the sampling (0); the n-th prompt of a batch has seed + n."""
    tools: list[dict[str, Any]] | None
    """Tools that the chat template shows (None)."""
    template_args: dict[str, Any] | None
    """Further arguments of the chat template, such as {"enable_thinking": False} (None)."""


class AnswerOptions(SamplingOptions, total=False):
    """Options of answers that may have a draft's help."""

    draft_tokens: int | None
    """Tokens drafted a round, K (None: what the draft's own plan says)."""
    rule: str | None
    """Accept rule above temperature 0, such as token, block or match (None: the plan's)."""


class Target(targets.Target):
    """The model that is served: it answers, alone or with the help of a draft, and it judges drafts.

    `tokenizer` and `model` are those of transformers, on `device` in `dtype`; `fingerprint` (64 hex digits) is what the
    registry knows it by.
    """

    @classmethod
    def from_pretrained(cls, model: str | Path, **settings: Any) -> Self:
        """Load a target.

        `model`: a folder, a .gguf file or a hub id. `settings`: `device` and `dtype` (default: the GPU in bfloat16
        where there is one, else the CPU in float32), `revision`, `adapter` (a LoRA folder, merged), `context` in
        tokens, `trust_remote_code`, and what else a recipe's `target` has; a recipe's own is loaded by
        `Target.load(recipe.target)`.

        Raises MissingFileError, InputError or FormatError where there is no such model or it cannot be served.
        """
        try:
            return cls.load(TargetSettings.model_validate({"model": str(model), **settings}))
        except ValidationError as error:
            raise refused_value(error, "target.") from None

    def generate(self, prompt: Prompt, draft: "Draft | None" = None, **options: Unpack[AnswerOptions]) -> Answer:
        """Answer one prompt. At temperature 0 the answer is the same with a draft as without (in float32).

        Raises InputError, or ContextLengthError where prompt and answer do not fit the context of target or draft.
        """
        return answers(self, self._run([prompt], draft, 1, options))[0]

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        draft: "Draft | None" = None,
        batch_size: int = 8,
        **options: Unpack[AnswerOptions],
    ) -> list[Answer]:
        """Answer prompts, `batch_size` of them side by side; answers in the order of the prompts. Raises as above."""
        return answers(self, self._run(prompts, draft, batch_size, options)) if prompts else []

    def stream(self, prompt: Prompt, draft: "Draft | None" = None, **options: Unpack[AnswerOptions]) -> AnswerStream:
        """Answer one prompt piece by piece: an iterator of text, whose `answer` is the answer so far.

        Nothing is decoded before the first piece is asked for, nor after the last one that is. Raises as above.
        """
        return AnswerStream(self, self._run([prompt], draft, 1, options))

    def score(
        self,
        prompts: Sequence[Prompt] | Mapping[str, Sequence[Prompt]],
        drafts: "Draft | Mapping[str, Draft]",
        draft_tokens: Sequence[int] = (1, 2, 3, 4),
        batch_size: int = 8,
        **options: Unpack[SamplingOptions],
    ) -> pa.Table:
        """Acceptance counts of drafts on prompts, which this target first answers without them.

        `prompts`: a list, or lists by domain. `drafts`: a draft, or several by the name that the table shall show.
        `draft_tokens`: every K that is counted; a tree of the draft's plan is counted beside them. Every accept rule is
        counted that a recipe without `score.rules` counts.

        A row is one prompt under one rule at one K or tree; `rounds`, `tokens`, `drafted` and `accepted` are counts (at
        temperature above 0 expected ones), `reached` and `accepted_at` lists of K counts by position. `to_pandas()`
        makes a data frame of the table, `draftforge.tau` figures. Raises InputError or ContextLengthError.
        """
        # 1) The target's own answers; prompts that are equal are one cluster.
        domains = prompts if isinstance(prompts, Mapping) else {"prompts": prompts}
        asked = [(domain, prompt) for domain, some in domains.items() for prompt in some]
        if not asked:
            raise InputError("prompts: are none; there must be at least one")
        _check_options({**options, "batch_size": batch_size}, SamplingOptions)
        run = self._run([prompt for _, prompt in asked], None, batch_size, options)
        samples = [
            _recorded(request, answer, domain, number)
            for number, ((domain, _), request, answer) in enumerate(zip(asked, run.requests, answers(self, run)))
        ]
        # 2) Replay of each draft along them.
        settings = _score_settings(draft_tokens, run.requests[0].sampling)
        tables = []
        for name, draft in (drafts if isinstance(drafts, Mapping) else {_name(drafts): drafts}).items():
            self._check_own(draft)
            draft.check_context(max((len(one.prompt_ids) + len(one.answer_ids) for one in samples), default=0))
            identity = Identity(name, draft.meta.step if draft.meta is not None else 0)
            tables.append(score_draft(self, _specs(draft, settings), samples, settings, identity).counts)
        return counts.concat(tables)

    def _run(
        self, prompts: Sequence[Prompt], draft: "Draft | None", batch_size: int, options: Mapping[str, Any]
    ) -> DecodeRun:
        """Decoding run of prompts. Raises InputError for options that there are not, or that nothing reads."""
        # 1) Options: those of sampling are checked together.
        _check_options({**options, "batch_size": batch_size}, AnswerOptions)
        if draft is None and options.get("draft_tokens") is not None:
            raise InputError(f"draft_tokens {options['draft_tokens']}: is for a draft, and none is given")
        try:
            given = {name: value for name, value in options.items() if name in SamplingSettings.model_fields}
            sampling = SamplingSettings.model_validate(given)
        except ValidationError as error:
            raise refused_value(error) from None
        # 2) Prompts as the target reads them.
        shown = options.get("tools"), options.get("template_args")
        rows = [messages_of(prompt, f"prompt {number}") for number, prompt in enumerate(prompts)]
        ids = [render(self.tokenizer, messages, *shown) for messages in rows]
        # 3) What drafts, and how much of it.
        limit = options.get("max_new_tokens", 128)
        if draft is not None:
            self._check_own(draft)
            draft.check_context(max(map(len, ids), default=0) + limit)
        plan = ServingPlan.chain(1) if draft is None else draft.plan_for(options.get("draft_tokens"))
        return answer_run(
            self,
            None if draft is None else draft.proposer(plan.tree),
            plan,
            ids,
            sampling,
            ScoreSettings().sampled_rules,
            max_new_tokens=limit,
            seed=options.get("seed", 0),
            rule=options.get("rule"),
            batch_size=batch_size,
        )

    def _check_own(self, draft: "Draft") -> None:
        if draft.target is not self:
            raise InputError(f"draft {_name(draft)}: was loaded for another target; load it for this one")


class Draft(stored_draft.StoredDraft):
    """A draft of one target: its `family`, `path`, number of `parameters`, and `plan` (K or tree, and accept rule)."""

    @classmethod
    def from_pretrained(
        cls,
        draft: str | Path,
        target: Target,
        *,
        device: str | None = None,
        workdir: str | Path = "runs",
        tracking_uri: str | None = None,
    ) -> Self:
        """Load a draft for a target.

        `draft`: a folder in any layout that `draftforge export` writes, a .gguf file, a file of `skip-layers`, an
        address `models:/NAME@champion` or `models:/NAME/VERSION` in the registry, or a way of drafting that needs no
        training (lookup, suffix, lookahead, jacobi). `device`: None for the target's. `workdir`: the work folder that
        holds the registry, unless `tracking_uri` or MLFLOW_TRACKING_URI names one; drafts are downloaded into its
        folder `models`.

        Raises InputError, FormatError or StaleInputError where it does not fit the target, RegistryError where the
        registry has no such version.
        """
        name = str(draft)
        if name in TRAINING_FREE:
            return cls.of_method(name, target)
        if is_models_uri(name):
            store = StoreOptions(workdir=Path(workdir), tracking_uri=tracking_uri)
            draft = resolve_models_uri(open_store(store), name, Path(workdir).resolve() / "models")
        return cls.load(Path(draft), target, device, other_tokenizer=True)

    @classmethod
    def from_registry(
        cls,
        target: Target,
        alias: str = CHAMPION,
        *,
        device: str | None = None,
        workdir: str | Path = "runs",
        tracking_uri: str | None = None,
    ) -> Self:
        """Load the champion of exactly this target, or what another alias names: candidate, previous.

        Raises RegistryError, which lists the targets that have a champion, where this one has none.
        """
        tracking = open_store(StoreOptions(workdir=Path(workdir), tracking_uri=tracking_uri))
        uri = require(tracking, target.fingerprint, alias).uri
        return cls.from_pretrained(uri, target, device=device, workdir=workdir, tracking_uri=tracking_uri)


def read_counts(place: str | Path | Recipe) -> pa.Table:
    """Acceptance counts of a finished score, in the columns of `Target.score`.

    `place`: a counts.parquet, a score's folder, a work folder (its newest score), or a recipe (its own score, else the
    newest in its work folder, which is said). Raises MissingFileError or CorruptDataError.
    """
    if isinstance(place, Recipe):
        folder = find_scored(Workspace(place, read_only=True))
    else:
        folder = Path(place)
        if folder.is_file():
            return counts.read(folder)
        if not (folder / COUNTS_FILE).is_file():
            folder = newest_score(folder)
    return counts.read(folder / COUNTS_FILE)


def tau(
    table: pa.Table,
    by: Sequence[str] = ("draft", "step", "setting", "rule", "tree", "draft_tokens"),
    confidence: float = 0.95,
) -> pa.Table:
    """Mean accepted length tau, tokens a round of the target, with its interval, for each group of rows.

    `by`: the columns that tell groups apart, such as `domain` or `context_bucket` beside the default ones; groups must
    not mix K, rules or settings that you would not add up. The table has these columns, then `tau`, `low`, `high`
    (intervals by clusters of near-duplicates; NaN with a `reason` where there are too few), `rounds` and `tokens`.
    """
    unknown = [name for name in by if name not in counts.COUNTS_SCHEMA.names]
    if unknown:
        raise InputError(f"by {unknown[0]}: must be among {', '.join(counts.COUNTS_SCHEMA.names)}")
    rows = []
    for key, some in counts.groups(table, *by):
        found = acceptance.tau(some, confidence)
        figures = {"tau": found.value, "low": found.low, "high": found.high, "reason": found.reason}
        sums = {name: sum(some[name].to_pylist()) for name in ("rounds", "tokens")}
        rows.append({**dict(zip(by, key)), **figures, **sums})
    return pa.Table.from_pylist(rows)


def distill(recipe: Recipe) -> Outcome | None:
    """Run every stage of a recipe, as `draftforge distill` does; what is on disk already is skipped.

    The outcome holds the score (`scored.rows`, `scored.counts`), the registered `version`, and the gate's `decision`
    (`promote`, `reasons`); None on ranks other than the first.
    """
    return flow.distill(open_workspace(recipe))


def _recorded(request: Any, answer: Answer, domain: str, number: int) -> Sample:
    """Recorded answer of the target, in the form that drafts are replayed on."""
    content = fingerprint.short(fingerprint.of_json(request.prompt_ids))
    return Sample(
        prompt_ids=request.prompt_ids,
        answer_ids=answer.tokens,
        max_new_tokens=request.max_new_tokens,
        id=f"{number}/0/{request.sampling.key}",
        conversation=str(number),
        turn=0,
        cluster=content,
        domain=domain,
        split=SELECTION_SPLIT,
        sampling=request.sampling,
        finish=answer.finish,
    )


def _check_options(options: Mapping[str, Any], kind: type) -> None:
    """Raise InputError for an option that `kind` lacks, or whose value has another type than there."""
    known = get_type_hints(kind)
    unknown = sorted(set(options) - {*known, "batch_size"})
    if unknown:
        raise InputError(f"{unknown[0]}: no such option; must be among {', '.join(known)}")
    for name, value in options.items():
        try:
            plain = value.item() if isinstance(value, np.generic) else value  # of a table
            TypeAdapter(known.get(name, int)).validate_python(plain, strict=True)
        except ValidationError as error:
            raise refused_value(error, f"{name} = {value!r:.80}: ") from None


def _score_settings(draft_tokens: Sequence[int], sampling: SamplingSettings) -> ScoreSettings:
    asked = {"draft_tokens": draft_tokens, "sampling": [sampling], "decode_conversations": 0}
    try:
        return ScoreSettings.model_validate(asked)
    except ValidationError as error:
        raise refused_value(error) from None


def _specs(draft: Draft, settings: ScoreSettings) -> list[ProposerSpec]:
    """Chains of every K, and the tree of the draft's plan where it has one."""
    plan, chains = draft.plan, ProposerSpec(draft.proposer, tuple(settings.draft_tokens))
    if plan.tree is None or not draft.drafts_trees:
        return [chains]
    return [chains, ProposerSpec(partial(draft.proposer, plan.tree), (plan.tree.levels,), plan.tree_name, plan.tree)]


def _name(draft: Draft) -> str:
    return draft.family if draft.path is None else draft.path.name
