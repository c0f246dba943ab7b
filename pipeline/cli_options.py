"""Options of verbs that have many: name, flag, help and default of each, in one place.

`draftforge.cli` fills these classes from its arguments; callers from Python make them by keyword. Nothing heavy is
imported here, because the command line's help must come at once.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from typer import Argument, BadParameter, Option

from ..errors import InputError
from . import completion


def spread(verb: Callable[..., None]) -> Callable[..., None]:
    """Give Typer a verb whose last parameter is a dataclass of options as one with a parameter a field."""
    signature, hints = inspect.signature(verb, eval_str=True), get_type_hints(verb)
    name, options = next((name, kind) for name, kind in hints.items() if is_dataclass(kind) and isinstance(kind, type))
    flags = get_type_hints(options, include_extras=True)
    parameters = [one for one in signature.parameters.values() if one.name != name]
    for one in fields(options):
        default = one.default if one.default_factory is MISSING else one.default_factory()
        parameters.append(
            inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=flags[one.name])
        )

    @wraps(verb)
    def filled(**given: Any) -> None:
        values = {one.name: given.pop(one.name) for one in fields(options)}
        verb(**given, **{name: options(**values)})

    filled.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    filled.__annotations__ = {one.name: one.annotation for one in parameters}
    return filled


TARGET = ".cache/smollm2-135m-instruct"
"""Target of `draftforge try`, which scripts/fetch_target.py makes."""

GpuName = Literal["a100", "h100", "h200"]
"""Kinds of GPU that `draftforge plan` has the data sheet of."""

# Arguments and options that several verbs share.
RecipeFile = Annotated[
    Path,
    Argument(metavar="RECIPE", help="YAML file; see `draftforge recipe schema`.", autocompletion=completion.recipes),
]
Overrides = Annotated[
    list[str] | None,
    Argument(
        metavar="section.key=value",
        help="Values that replace the recipe's, e.g. drafts.eagle3.steps=20.",
        autocompletion=completion.overrides,
    ),
]
DraftName = Annotated[
    str | None,
    Option("--draft", help="Only this draft of the recipe; default: all.", autocompletion=completion.drafts),
]
DraftDevice = Annotated[
    str | None,
    Option("--draft-device", help="Where the draft runs, such as cpu; default: score.draft_device."),
]
Alias = Annotated[
    str,
    Option("--alias", help="champion, candidate or previous.", autocompletion=completion.one_of(*completion.ALIASES)),
]
Temperature = Annotated[float, Option("--temperature", "-t", min=0.0, max=1e6, help="0 is greedy.")]
SamplingSeed = Annotated[int, Option("--seed", min=0, max=2**63 - 1, help="Of the sampling.")]


def _numbers(given: str | Sequence[int] | None) -> Sequence[int] | None:
    """Whole numbers of a text such as `2,4,8`; a default, which is numbers already, is returned as it is.

    Raises BadParameter, which the command line shows as a usage error.
    """
    if not isinstance(given, str):
        return given
    try:
        return tuple(int(part) for part in given.split(","))
    except ValueError:
        raise BadParameter(f"{given}: must be whole numbers with commas between, such as 2,4,8") from None


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """MLflow store to open without a recipe, for `draftforge fetch` and `draftforge registry`."""

    model: Annotated[str | None, Option("--model", help="First part of registered names; default: draftforge.")] = None
    tracking_uri: Annotated[
        str | None,
        Option("--tracking-uri", help="MLflow store; default: MLFLOW_TRACKING_URI, else runs/mlflow.db."),
    ] = None
    workdir: Annotated[
        Path | None, Option("--workdir", help="Work folder that holds the store, as in the recipe; default: runs.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class PushOptions(StoreOptions):
    """What `draftforge push` says of a draft, and how; with the store of a `models:/` address."""

    base_model: Annotated[
        str | None, Option("--base-model", metavar="OWNER/NAME", help="The target's hub id; default: the recipe's.")
    ] = None
    license: Annotated[
        str | None, Option("--license", metavar="ID", help="The draft's license; default: that of the base model.")
    ] = None
    private: Annotated[
        bool,
        Option(
            "--private",
            help="Make a new repository private; default, as in transformers: public, unless its organization's "
            "default is private.",
        ),
    ] = False
    dry_run: Annotated[bool, Option("--dry-run", help="List files and sizes and print the card; send nothing.")] = False


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """Schedule and webhook of `draftforge watch`."""

    every: Annotated[str, Option("--every", help="Time from one start to the next: 90s, 30m, 6h, 1d.")] = "6h"
    jitter: Annotated[
        str | None, Option("--jitter", help="Start later by a random time of at most this, such as 5m.")
    ] = None
    once: Annotated[bool, Option("--once", help="Retrain once, now, and exit with its code.")] = False
    webhook: Annotated[
        int | None,
        Option(
            "--webhook",
            metavar="PORT",
            min=0,
            max=65535,
            help="Also when MLflow's webhook says that the target's alias moved; DRAFTFORGE_WEBHOOK_SECRET signs it.",
        ),
    ] = None
    bind: Annotated[
        str, Option("--bind", help="Address that the webhook listens on; others than this machine need another.")
    ] = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class SkipLayersOptions:
    """Search of `draftforge skip-layers`: answers, number of tries, and output."""

    domain: Annotated[
        str | None,
        Option(
            "--domain",
            help="Only this domain; default: all together, then each.",
            autocompletion=completion.domains,
        ),
    ] = None
    draft_tokens: Annotated[
        int | None,
        Option("--draft-tokens", "-k", min=1, max=64, help="Tokens a round; default: the best of the recipe's."),
    ] = None
    tries: Annotated[int, Option("--tries", min=1, help="Sets of layers to try, in each domain.")] = 200
    conversations: Annotated[
        int, Option("--conversations", min=1, help="Conversations of each domain that a set is tried on.")
    ] = 16
    seed: Annotated[int, Option("--seed", min=0, max=2**63 - 1, help="Of the search.")] = 0
    out: Annotated[
        Path | None,
        Option("--out", metavar="FILE", help="File to write, for --draft; default: skip-layers.json in the workdir."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Prompt, draft, accept rule and sampling of `draftforge generate`."""

    system: Annotated[str | None, Option("--system", metavar="TEXT", help="System prompt.")] = None
    messages: Annotated[
        Path | None,
        Option(
            "--messages",
            metavar="FILE",
            help="Instead of PROMPT: JSON, a list of messages with role and content, or the body of a chat "
            "completion with its tools; - reads standard input.",
        ),
    ] = None
    draft: Annotated[
        str | None,
        Option(
            "--draft",
            help="Name in the recipe, draft folder, skip-layers' file, lookup, suffix, lookahead, jacobi, none; "
            "default: the chosen.",
            autocompletion=completion.methods,
        ),
    ] = None
    rule: Annotated[
        str | None, Option("--rule", help="Accept rule, such as token, block, onehot, match; default: the plan's.")
    ] = None
    draft_tokens: Annotated[
        int | None,
        Option(
            "--draft-tokens",
            "-k",
            min=1,
            max=64,
            help="Tokens a round, or levels of the tree; default: those of the draft's plan.",
        ),
    ] = None
    tree: Annotated[
        str | None,
        Option(
            "--tree",
            help="Name in the recipe's score.trees; default: as the draft's plan says.",
            autocompletion=completion.trees,
        ),
    ] = None
    cascade: Annotated[
        str | None, Option("--cascade", help="Drafts for a small draft: lookup, or a smaller draft's name or folder.")
    ] = None
    max_new_tokens: Annotated[int, Option("--max-new-tokens", "-n", min=1, help="Longest answer.")] = 128
    temperature: Temperature = 0.0
    seed: SamplingSeed = 0


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Prompts, methods and sizes of `draftforge bench`."""

    prompts: Annotated[
        list[Path],
        Option(
            "--prompts", metavar="FILE", help="Prompts, JSON lines with domain and turns, or any shape that mixes read."
        ),
    ] = field(default_factory=list)
    drafts: Annotated[
        list[str],
        Option(
            "--draft",
            help="Name in the recipe, draft folder, champion, or a method without training such as lookup; may be "
            "given again. Default: the recipe's drafts (their last checkpoints) and lookup.",
            autocompletion=completion.methods,
        ),
    ] = field(default_factory=list)
    trees: Annotated[
        list[str],
        Option(
            "--tree",
            help="Of the recipe's score.trees; may be given again. Default: all, and of a plan its own alone.",
            autocompletion=completion.trees,
        ),
    ] = field(default_factory=list)
    cascade: Annotated[
        str | None,
        Option("--cascade", help="Drafts for small drafts, beside these alone: lookup, or a smaller draft."),
    ] = None
    draft_tokens: Annotated[
        Sequence[int] | None,
        Option(
            "--draft-tokens",
            "-k",
            parser=_numbers,
            metavar="K,K",
            help="K of the chains; default: the K or tree of a draft's plan, of other drafts 2,4,8.",
        ),
    ] = None
    batch_sizes: Annotated[
        Sequence[int], Option("--batch-size", "-b", parser=_numbers, metavar="N,N", help="Requests answered at once.")
    ] = (1, 4, 16)
    max_new_tokens: Annotated[int, Option("--max-new-tokens", "-n", help="Longest answer.")] = 256
    max_prompts: Annotated[
        int | None, Option("--max-prompts", help="Only so many, spread over the domains; default: all.")
    ] = None
    temperature: Temperature = 0.0
    rule: Annotated[str | None, Option("--rule", help="Accept rule above temperature 0; default: the recipe's.")] = None
    repeats: Annotated[int, Option("--repeats", help="Turns of all methods; medians of them count.")] = 3
    seed: SamplingSeed = 0
    out: Annotated[
        Path | None, Option("--out", metavar="FOLDER", help="For the report; default: one in the work folder.")
    ] = None
    fresh: Annotated[bool, Option("--fresh", help="Run again what a benchmark before this one left.")] = False


@dataclass(frozen=True, kw_only=True)
class MetricsOptions:
    """Output of `draftforge metrics`, and the engines' counters that it compares."""

    out: Annotated[
        Path | None, Option("--out", metavar="FILE.prom", help="File to write at once; default: standard output.")
    ] = None
    listen: Annotated[
        str | None, Option("--listen", metavar="HOST:PORT", help="Serve /metrics there until stopped.")
    ] = None
    served: Annotated[
        list[str],
        Option("--served", metavar="URL-OR-FILE", help="An engine's metrics, or responses; again for each replica."),
    ] = field(default_factory=list)
    since: Annotated[
        list[str],
        Option("--since", metavar="URL-OR-FILE", help="An earlier look at each --served; default: its start."),
    ] = field(default_factory=list)
    interval_seconds: Annotated[
        float, Option("--interval", min=0.0, help="Compare what is counted in so many seconds.")
    ] = 0.0
    margin: Annotated[
        float, Option("--margin", min=0.0, max=1.0, help="Share of the expected tau that may be missing.")
    ] = 0.05
    fail_on_mismatch: Annotated[
        bool, Option("--fail-on-mismatch", help="Exit code 3 where served and expected acceptance differ.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class DraftDoctorOptions:
    """What `draftforge doctor` examines beside the machine: a draft, its target, and where its acceptance was seen."""

    draft: Annotated[
        Path | None, Option("--draft", metavar="FOLDER", help="Examine this draft, in any layout, not the machine.")
    ] = None
    target: Annotated[str | None, Option("--target", help="With --draft: its target, a folder or hub id.")] = None
    served: Annotated[
        str | None, Option("--served", metavar="FILE", help="With --draft: the engine's metrics, as it shows them.")
    ] = None
    answers: Annotated[
        Path | None,
        Option(
            "--answers", metavar="FILE", help="With --draft: prompts or answers, a log or capture; default: shipped."
        ),
    ] = None


def refuse_without(needed: str, **given: object) -> None:
    """Raise InputError for an option that is given without the one that it needs."""
    for name, value in given.items():
        if value is not None:
            raise InputError(f"--{name} {value}: is of {needed}, which is not given")
