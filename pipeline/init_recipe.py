"""`draftforge init`: a commented recipe from a log and a target, with what was found in them and what is assumed."""

import itertools
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from .. import storage
from ..data import file_search, files
from ..data.record_outcomes import SourceCounts
from ..data.settings import LABEL, FileSource
from ..data.sources import detect_kind, read_records
from ..data.stratify import lengths_of
from ..errors import InputError, OwnershipError, spelt_out
from ..progress import say
from ..recipe import load_recipe, yaml_text
from ..registry.settings import GateSettings
from ..specdec.sampling_settings import API_DEFAULTS, SamplingSettings
from ..specdec.target_settings import TargetSettings, named_target

_USUAL_DOMAIN = "chat"
_TOKENS_PER_STEP, _EPOCHS, _FEWEST_STEPS, _MOST_STEPS = 16384, 3, 100, 4000
_HOLDOUT = 30  # conversations that a holdout should have, as some are near-duplicates of others
_CLUSTERS = GateSettings().min_clusters
_MOST_SCORED, _LEAST_SHARE = 3, 0.1  # sampling settings to score, and the share of the log that each must have
_EAGLE3_LAYERS = 6  # from which on its usual three layers are three
_LARGE_VOCABULARY, _DRAFT_VOCABULARY = 64_000, 32_000
_MOST_NAME = 64  # characters of a recipe's name
_LOOKED_AT, _MOST_DOMAINS, _LEAST_LINES = 500, 12, 3
"""Lines in which a field is looked for that may name domains; most of its values, and least lines of one on average."""
_NO_DOMAIN = re.compile(r"(?i).*(model|role|type|status|level|object|kind|version|event|reason|replica|host|server|id)")
"""Fields of a few values that tell something else."""


@dataclass
class LogFacts:
    """Facts of a log, counted in one pass."""

    kind: str
    counts: SourceCounts
    ids: set[str] = field(default_factory=set)
    domains: Counter[str] = field(default_factory=Counter)
    sampling: Counter[SamplingSettings] = field(default_factory=Counter)
    unnamed: SamplingSettings | None = None
    """Setting of requests that leave it to `capture.sampling`; None: there are none."""
    prompts: list[int] = field(default_factory=list)
    """Tokens of each prompt, as logged or a fourth of its characters; so `answers`."""
    answers: list[int] = field(default_factory=list)
    limits: Counter[int] = field(default_factory=Counter)
    """Token limits of answers that requests name."""


@dataclass(frozen=True)
class TargetFacts:
    """Facts of a target's configs."""

    layers: int
    vocabulary: int
    context: int | None
    sampling: dict[str, float]
    """Settings of its generation_config.json."""


def init(log: Path, target: str, out: Path) -> None:
    """Write a recipe for a log (file, folder or pattern) and a target, and say what was found and assumed.

    Raises OwnershipError where `out` exists, MissingFileError where log or target does not, and InputError for a log
    that no reader makes conversations of.
    """
    if out.exists():
        raise OwnershipError(f"--out {out}: exists; name a new file")
    storage.require_file_place(out, "--out")
    # 1) What there is.
    source, settings = _source(log), named_target(target).absolute()
    of_target = _look_at(settings)
    facts = _read(log, source, of_target.sampling)
    source = source.model_copy(update={"skip_invalid": facts.counts.skipped > 0})
    # 2) The recipe. It is loaded before it is written: what does not load is a defect here.
    lines = _lines(out, log, settings.model, source, facts, of_target)
    # Comments name what a log holds: behind a line's end there would stand keys of the recipe.
    text = "".join(f"{spelt_out(line) if line.startswith('#') else line}\n" for line in lines)
    with tempfile.TemporaryDirectory() as beside:
        storage.write_bytes(Path(beside) / out.name, text.encode())
        load_recipe(Path(beside) / out.name)
    storage.write_bytes(out, text.encode())
    # 3) The same in words: comments begin with "#".
    for line in text.splitlines():
        if (note := line.strip()).startswith("# "):
            say(note[2:])
    say(f"{out}: written; look at its mix: draftforge inspect-mix {out}")


def _look_at(settings: TargetSettings) -> TargetFacts:
    """Facts of a target; of a hub id the configs alone are downloaded."""
    # They load torch, which takes seconds: a log that no reader understands is refused before that.
    from transformers import AutoConfig

    from ..specdec.loading import refused
    from ..specdec.targets import CONFIG_FILES, context_length, locate, sampling_defaults, snapshot

    if not Path(settings.model).exists() and not settings.model.endswith(".gguf"):
        folder = snapshot(settings.model, settings.revision, "target.model", CONFIG_FILES)
        settings = settings.model_copy(update={"model": str(folder)})
    source = locate(settings)
    with refused(f"--target {settings.model}"):
        config = AutoConfig.from_pretrained(source.folder, gguf_file=source.gguf_file).get_text_config()
        layers, vocabulary = int(config.num_hidden_layers), int(config.vocab_size)
    return TargetFacts(layers, vocabulary, context_length(settings), sampling_defaults(settings))


def _source(log: Path) -> FileSource:
    """The source that reads a log. Raises InputError where no kind does."""
    kind, named = detect_kind(Path(), str(log))
    path = next(iter(file_search.find(Path(), str(log))))
    return FileSource.model_validate(
        {
            "kind": kind,
            "path": str(log),
            "domain": None if named else _USUAL_DOMAIN,
            "year": datetime.fromtimestamp(path.stat().st_mtime).year if kind == "vllm" else None,
            "skip_invalid": True,
        }
    )


def _read(log: Path, source: FileSource, defaults: dict[str, float]) -> LogFacts:
    """What is in a log. Raises InputError where most lines break a rule."""
    facts = LogFacts(source.kind, SourceCounts())
    unnamed = SamplingSettings.model_validate({**API_DEFAULTS, **defaults})
    for record in read_records(source, Path(), 0, facts.counts):
        facts.ids.add(record.id)
        facts.domains[record.domain] += 1
        own = record.sampling.model_dump() if record.sampling is not None else {}
        served = {name: defaults[name] for name in record.server_sampling if name in defaults}
        if own or served:
            facts.sampling[SamplingSettings.model_validate({**API_DEFAULTS, **own, **served})] += 1
        else:
            facts.unnamed = unnamed
            facts.sampling[unnamed] += 1
        lengths = lengths_of(record)
        facts.prompts.append(lengths.prompt)
        facts.answers += [] if lengths.answer is None else [lengths.answer]
        facts.limits.update([] if record.max_new_tokens is None else [record.max_new_tokens])
    if facts.counts.skipped > facts.counts.taken:
        raise InputError(
            f"--log {log}: read as kind {source.kind}, {facts.counts.skipped:,} lines break a rule and "
            f"{facts.counts.taken:,} give a conversation; must be a log that one reader understands (docs/logs.md)"
        )
    return facts


def _lines(out: Path, log: Path, model: str, source: FileSource, facts: LogFacts, target: TargetFacts) -> Iterator[str]:
    """Lines of the recipe. A comment tells what was found or assumed for the lines below it."""
    counts, conversations = facts.counts, len(facts.ids)
    yield f"# Made by draftforge init of {log.name} for {Path(model).name}. All keys: draftforge recipe schema"
    name = re.sub(r"[^a-z0-9._-]+", "-", log.stem.lower()).strip("-._")[:_MOST_NAME] or "log"
    yield from _yaml({"name": name})
    yield from _yaml({"target": {"model": _place(Path(model), out) if Path(model).exists() else model}})

    # 1) The mix.
    left = ", ".join(f"{count:,} {reason}" for reason, count in counts.left_out.items())
    yield f"# {counts.read:,} lines or requests read as kind {facts.kind}: {conversations:,} different conversations"
    if left or counts.skipped:
        broken = f"{counts.skipped:,} broken" if counts.skipped else ""
        yield f"# not taken: {', '.join(part for part in (left, broken) if part)}"
    if source.domain is not None:
        yield f"# assumed: one domain, {source.domain}; mix.domains has rules and clusters that tell several apart"
        for name, of_lines in _domain_fields(log, source).items():
            seen = ", ".join(f"{value} {count:,}" for value, count in of_lines.most_common(6))
            yield f"# or domain_field: {name}, in place of domain: {source.domain}; its first lines have {seen}"
    else:
        named = ", ".join(f"{name} {count:,}" for name, count in facts.domains.most_common(6))
        yield f"# domains, as its lines name them: {named}"
    if source.year is not None:
        yield f"# assumed: the year {source.year}, that of the file; the log's lines name none"
    asked = source.model_dump(exclude_defaults=True, exclude_none=True) | {"path": _place(log, out)}
    mix: dict[str, Any] = {"sources": [{"kind": facts.kind, **asked}]}
    share = max(0.15, min(0.3, _HOLDOUT / conversations))
    if share > 0.15:
        judge = int(share * conversations)
        yield (
            f"# few conversations: {share:.0%} of them select, {share:.0%} judge: at most {judge} clusters of "
            f"near-duplicates, and the gate asks for {_CLUSTERS}"
        )
        if judge < _CLUSTERS:
            yield f"# so distill will promote no draft: log {-int(-_CLUSTERS // share) - conversations} more, or more"
        mix |= {"selection_share": round(share, 2), "holdout_share": round(share, 2)}
    yield from _yaml({"mix": mix})

    # 2) Lengths: of prompts and answers, and what the target's context holds.
    tokens = _tokens(facts, target)
    yield f"# tokens of prompts, p50 and p95: {_percentiles(facts.prompts)}; the target's context: {target.context}"
    over = sum(prompt + tokens > (target.context or prompt + tokens) for prompt in facts.prompts)
    if over:
        yield f"# {over:,} prompts do not fit the context with an answer of that length: they are left out, and counted"
    if facts.answers:
        yield f"# tokens of answers, p50 and p95: {_percentiles(facts.answers)}; estimated where they are not logged"
    else:
        yield f"# assumed: answers of at most {tokens} tokens, as the log holds none"
    capture: dict[str, Any] = {"max_new_tokens": tokens}
    if facts.unnamed is not None:
        yield "# capture.sampling: for requests of which the log names no setting; the target's own, else the API's"
        capture["sampling"] = _short(facts.unnamed)
    yield from _yaml({"capture": capture})

    # 3) The draft.
    steps, epochs = _steps(facts, tokens, conversations * (1 - 2 * share))
    family = "eagle3" if target.layers >= _EAGLE3_LAYERS else "eagle"
    why = f"the target has {target.layers} layers, and eagle3 needs {_EAGLE3_LAYERS} or more"
    yield f"# assumed: family {family}, as {why}; about {epochs:,.0f} epochs"
    draft: dict[str, Any] = {"family": family, "steps": steps, "tokens_per_step": _TOKENS_PER_STEP}
    draft |= {"learning_rate": 1e-3, "warmup_steps": steps // 10, "score_every": steps // 2}
    if family == "eagle3":
        draft["optimizer"] = "muon"
        if target.vocabulary > _LARGE_VOCABULARY:
            draft["draft_vocabulary"] = _DRAFT_VOCABULARY
        if facts.kind in ("vllm", "sglang"):
            draft["serving_engines"] = [facts.kind]
    yield from _yaml({"drafts": {family: draft}})

    # 4) The score.
    scored = _scored(facts)
    shares = ", ".join(f"{one.key} {count / facts.sampling.total():.0%}" for one, count in scored)
    yield f"# sampling settings of the log, with the target's and the API's own where it names none: {shares}"
    yield "# drafts are chosen by draftforge's own rounds at batch 1. For your server state score.load, as inspect-mix"
    yield "# proposes it of a log with times, and score.load.costs, which times your vLLM (docs/load.md)"
    yield from _yaml({"score": {"sampling": [_short(one) for one, _ in scored]}})


def _tokens(facts: LogFacts, target: TargetFacts) -> int:
    """Longest answer to capture: the 95th percentile of those logged in steps of 64, or what most requests allow."""
    longest = (
        int(np.percentile(facts.answers, 95)) if facts.answers else next(iter(dict(facts.limits.most_common(1))), 256)
    )
    rounded = min(max(64, -(-longest // 64) * 64), 2048)
    return min(rounded, max(1, (target.context or 2 * rounded) // 2))


def _steps(facts: LogFacts, tokens: int, trained: float) -> tuple[int, float]:
    """Steps for three epochs of `trained` conversations, within bounds, and the epochs that they make."""
    supervised = np.mean(np.minimum(facts.answers, tokens)) if facts.answers else tokens
    epoch = trained * (float(np.mean(facts.prompts)) + float(supervised)) / _TOKENS_PER_STEP
    steps = max(_FEWEST_STEPS, min(_MOST_STEPS, -(-int(_EPOCHS * epoch) // 10) * 10))
    return steps, steps / max(epoch, 1.0)  # a step is an epoch at most


def _domain_fields(log: Path, source: FileSource) -> dict[str, Counter[str]]:
    """Fields that every one of the first lines has, with a few values that could be domains, and their counts."""
    if source.kind in ("vllm", "sglang", "prompts"):
        return {}
    paths = [one for one in file_search.find(Path(), str(log)) if one.stat().st_size]
    lines: list[dict[str, Any]] = []
    for item in itertools.islice(files.objects(paths[:1], ""), _LOOKED_AT):
        with suppress(InputError):  # counted as broken where the log is read
            if isinstance(line := item.decode(), dict):
                lines.append(line)
    found = {
        name: Counter(value for line in lines if isinstance(value := line.get(name), str))
        for name in (lines[0] if lines else ())
        if not _NO_DOMAIN.fullmatch(name)
    }
    return {
        name: values
        for name, values in found.items()
        if values.total() == len(lines)
        and 2 <= len(values) <= min(_MOST_DOMAINS, len(lines) // _LEAST_LINES)
        and all(re.fullmatch(LABEL, value) for value in values)
    }


def _scored(facts: LogFacts) -> list[tuple[SamplingSettings, int]]:
    """Commonest sampling settings of the log, those of a tenth of it or more; at least one."""
    common = [
        (one, count) for one, count in facts.sampling.most_common() if count >= _LEAST_SHARE * facts.sampling.total()
    ]
    # Settings that draw alike share a key.
    by_key = {one.key: (one, count) for one, count in reversed(common or facts.sampling.most_common(1))}
    return list(reversed(by_key.values()))[:_MOST_SCORED]


def _short(sampling: SamplingSettings) -> dict[str, Any]:
    return {"temperature": sampling.temperature, **sampling.model_dump(exclude_defaults=True)}


def _percentiles(values: Sequence[int]) -> str:
    return " and ".join(f"{value:,.0f}" for value in np.percentile(values, [50, 95]))


def _place(path: Path, out: Path) -> str:
    """Path as the recipe writes it: from its own folder where it lies there or below, else absolute."""
    whole, folder = path.absolute(), out.absolute().parent
    return f"./{whole.relative_to(folder)}" if whole.is_relative_to(folder) else str(whole)


def _yaml(section: dict[str, Any]) -> Iterator[str]:
    yield from yaml_text(section).splitlines()
