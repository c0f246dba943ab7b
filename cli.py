"""The command line: one thin function a verb. Nothing heavy is imported before a verb runs."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from . import __version__
from .errors import DraftforgeError, StoppedError
from .storage import is_disk_full

if TYPE_CHECKING:
    from .recipe import Recipe

# Threads of torch's CPU kernels spin while they wait. Two processes on the same cores then slow each other a
# hundredfold; spinning briefly costs nothing measurable alone. Read once, when torch is first imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

app = typer.Typer(
    name="draftforge",
    help="Train draft models for speculative decoding and pick them by expected serving speed.",
    epilog="Start with: draftforge doctor, then draftforge distill configs/demo.yaml",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
recipe_app = typer.Typer(no_args_is_help=True, help="Show a recipe as it will run, or the schema of all recipes.")
app.add_typer(recipe_app, name="recipe", rich_help_panel="Look")

STAGES, REGISTRY, USE, LOOK = "Stages", "Registry", "Use a draft", "Look"
RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML file; see `draftforge recipe schema`.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="section.key=value", help="Values that replace the recipe's, e.g. drafts.small.steps=20."),
]
DraftName = Annotated[str | None, typer.Option("--draft", help="Only this draft of the recipe; default: all.")]

ModelName = Annotated[str | None, typer.Option("--model", help="First part of registered names; default: draftforge.")]
TrackingUri = Annotated[
    str | None,
    typer.Option("--tracking-uri", help="MLflow store; default: MLFLOW_TRACKING_URI, else runs/mlflow.db."),
]
StoreFolder = Annotated[
    Path | None, typer.Option("--workdir", help="Work folder that holds the store, as in the recipe; default: runs.")
]
DraftDevice = Annotated[
    str | None,
    typer.Option(
        "--draft-device", help="Where the draft runs, such as cpu; default: score.draft_device, the target's."
    ),
]


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.", envvar="DRAFTFORGE_DEBUG")] = False,
) -> None:
    if version:
        print(f"draftforge {__version__}")
        raise typer.Exit
    if debug:
        os.environ["DRAFTFORGE_DEBUG"] = "1"


def _load(path: Path, overrides: list[str] | None) -> "Recipe":
    from .recipe import load_recipe

    return load_recipe(path, overrides or [])


def _on(draft_device: str | None) -> list[str]:
    """The override that an option stands for."""
    return [] if draft_device is None else [f"score.draft_device={draft_device}"]


@app.command(rich_help_panel=STAGES)
def distill(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Run mix, capture, train, score, register and promote; skip what is done already.

    Example: draftforge distill configs/demo.yaml drafts.small.steps=20

    By several GPUs: torchrun --nproc-per-node 2 -m draftforge.cli distill configs/smollm2-gpu.yaml
    """
    loaded = _load(recipe, overrides)
    from .pipeline import verbs

    verbs.distill(loaded)


@app.command(rich_help_panel=STAGES)
def mix(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Gather, de-duplicate, balance and split the conversations that the target will answer.

    Example: draftforge mix configs/demo.yaml
    """
    loaded = _load(recipe, overrides)
    from .pipeline import verbs

    verbs.mix(loaded)


@app.command("inspect-mix", rich_help_panel=LOOK)
def inspect_mix(
    recipe: RecipeFile,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="PLACE", help="Also write a page (FILE.html), or pictures into a new folder."),
    ] = None,
) -> None:
    """Compare the mix with the log it comes from: shares, lengths, copies, redactions, contamination.

    Example: draftforge inspect-mix configs/demo.yaml --out mix.html
    """
    loaded = _load(recipe, overrides)
    from .pipeline import verbs

    verbs.inspect_mix(loaded, out)


@app.command(rich_help_panel=STAGES)
def capture(
    recipe: RecipeFile,
    overrides: Overrides = None,
    answers_to: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Also keep the answers alone there, for capture.answers.")
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(metavar="NUMBER/COUNT", help="Only this part of the answers, such as 2/5; see docs/capture.md."),
    ] = None,
    join: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="The folder of a part; given once for each, they are joined."),
    ] = None,
) -> None:
    """Let the target answer the mix, and keep its answers and log-probabilities. Resumes where it was stopped.

    Example: draftforge capture configs/demo.yaml capture.batch_size=8

    By two machines: --part 1/2 on one, --part 2/2 on the other, then --join FOLDER --join FOLDER on either.
    """
    loaded = _load(recipe, overrides)
    from .pipeline import verbs

    verbs.capture(loaded, answers_to, part, join or [])


@app.command(rich_help_panel=STAGES)
def train(recipe: RecipeFile, overrides: Overrides = None, draft: DraftName = None) -> None:
    """Train the recipe's drafts on the capture. Resumes where it was stopped.

    Example: draftforge train configs/demo.yaml --draft small
    """
    loaded = _load(recipe, overrides)
    from .pipeline import verbs

    verbs.train(loaded, draft)


@app.command(rich_help_panel=STAGES)
def score(
    recipe: RecipeFile,
    overrides: Overrides = None,
    draft_device: DraftDevice = None,
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft",
            help="Only this draft of the recipe, a draft folder or .gguf of anybody's, or a file of skip-layers; "
            "default: all.",
        ),
    ] = None,
) -> None:
    """Score every checkpoint by acceptance and show the table of expected speed-ups.

    Example: draftforge score configs/demo.yaml score.draft_tokens=[2,4,6]

    A draft that was made elsewhere, as it is: draftforge score configs/demo.yaml --draft ./their-eagle3
    """
    loaded = _load(recipe, [*(overrides or []), *_on(draft_device)])
    from .pipeline import verbs

    verbs.score(loaded, draft)


@app.command(rich_help_panel=REGISTRY)
def promote(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Compare the candidate with the champion for this target on the holdout; move the alias, or say why not.

    Example: draftforge promote configs/demo.yaml gate.min_speedup=1.2
    """
    loaded = _load(recipe, overrides)
    from .pipeline import verbs

    verbs.promote(loaded)


@app.command(rich_help_panel=REGISTRY)
def rollback(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Make the previous champion for the recipe's target the champion again.

    Example: draftforge rollback configs/demo.yaml
    """
    loaded = _load(recipe, overrides)
    from .pipeline import verbs

    verbs.rollback(loaded)


@app.command(rich_help_panel=REGISTRY)
def fetch(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make; must not exist.")],
    target: Annotated[
        str,
        typer.Option(
            "--target", help="Model folder, .gguf file, hub id, or the first hex digits of the target's fingerprint."
        ),
    ],
    layout: Annotated[
        str | None,
        typer.Option("--format", help="hf, vllm, sglang, speculators, medusa or gguf; default: as it is stored, vllm."),
    ] = None,
    target_id: Annotated[
        str | None, typer.Option("--target-id", help="The target's hub id, for formats that name it.")
    ] = None,
    model: ModelName = None,
    tracking_uri: TrackingUri = None,
    workdir: StoreFolder = None,
    alias: Annotated[str, typer.Option("--alias", help="champion, candidate or previous.")] = "champion",
) -> None:
    """Copy the champion of exactly this target out of the registry, in the layout of a serving engine. No recipe.

    Example: draftforge fetch served-draft --target .cache/smollm2-135m-instruct --workdir runs/demo --format vllm
    """
    from .pipeline import verbs

    verbs.fetch(
        out,
        target=target,
        model=model,
        tracking_uri=tracking_uri,
        workdir=workdir,
        alias=alias,
        layout=layout,
        target_id=target_id,
    )


@app.command(rich_help_panel=REGISTRY)
def registry(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="Whose registry; default: the store that options name.")
    ] = None,
    overrides: Overrides = None,
    target: Annotated[
        str | None, typer.Option("--target", help="Only targets whose fingerprint begins with these hex digits.")
    ] = None,
    decisions: Annotated[bool, typer.Option("--decisions", help="Also every decision of the gate, in full.")] = False,
    model: ModelName = None,
    tracking_uri: TrackingUri = None,
    workdir: StoreFolder = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List which draft serves which target, with aliases, figures, runs and decisions; and what each draft serves.

    Example: draftforge registry --workdir runs/demo --decisions
    """
    loaded = None if recipe is None else _load(recipe, overrides)
    from .pipeline import verbs

    verbs.registry(
        loaded,
        model=model,
        tracking_uri=tracking_uri,
        workdir=workdir,
        target=target,
        decisions=decisions,
        as_json=as_json,
    )


@app.command(rich_help_panel=REGISTRY)
def retrain(
    recipe: RecipeFile,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done and why; change nothing, in MLflow neither.")
    ] = False,
) -> None:
    """Train again, from the champion's weights, if it is stale: target, acceptance or traffic changed. For schedulers.

    Exit code 0: up to date, or promoted; 5: the gate refused the new draft; 6: promoted, and promotion.command failed;
    2, 3, 4: failed, the champion is untouched.

    Example: draftforge retrain configs/demo.yaml target.adapter=./new-adapter
    """
    loaded = _load(recipe, overrides)
    from .pipeline import verbs

    raise typer.Exit(verbs.retrain(loaded, dry_run=dry_run))


@app.command(rich_help_panel=REGISTRY)
def watch(
    recipe: RecipeFile,
    overrides: Overrides = None,
    every: Annotated[str, typer.Option("--every", help="Time from one start to the next: 90s, 30m, 6h, 1d.")] = "6h",
    jitter: Annotated[
        str | None, typer.Option("--jitter", help="Start later by a random time of at most this, such as 5m.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Retrain once, now, and exit with its code.")] = False,
    webhook: Annotated[
        int | None,
        typer.Option(
            "--webhook",
            metavar="PORT",
            min=0,
            max=65535,
            help="Also when MLflow's webhook says that the target's alias moved; DRAFTFORGE_WEBHOOK_SECRET signs it.",
        ),
    ] = None,
    bind: Annotated[
        str, typer.Option("--bind", help="Address that the webhook listens on; others than this machine need another.")
    ] = "127.0.0.1",
) -> None:
    """Retrain now and every so often, each time in a process of its own: a scheduler for where there is none.

    Example: draftforge watch configs/demo.yaml --every 6h --jitter 10m
    """
    loaded = _load(recipe, overrides)
    from .pipeline import verbs

    code = verbs.watch(
        loaded, str(recipe), overrides or [], every=every, jitter=jitter, once=once, port=webhook, address=bind
    )
    raise typer.Exit(code)


@app.command("skip-layers", rich_help_panel=USE)
def skip_layers(
    recipe: RecipeFile,
    overrides: Overrides = None,
    domain: Annotated[
        str | None, typer.Option("--domain", help="Only this domain; default: all together, then each.")
    ] = None,
    draft_tokens: Annotated[
        int | None,
        typer.Option("--draft-tokens", "-k", min=1, max=64, help="Tokens a round; default: the best of the recipe's."),
    ] = None,
    tries: Annotated[int, typer.Option("--tries", min=1, help="Sets of layers to try, in each domain.")] = 200,
    conversations: Annotated[
        int, typer.Option("--conversations", min=1, help="Conversations of each domain that a set is tried on.")
    ] = 16,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**63 - 1, help="Of the search.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="File to write, for --draft; default: skip-layers.json in the workdir."
        ),
    ] = None,
) -> None:
    """Find layers of the target that a draft can skip: the target itself, without them, then drafts. No training.

    Example: draftforge skip-layers configs/demo.yaml --domain support --tries 300 --out support.json

    Then: draftforge score configs/demo.yaml --draft support.json
    """
    loaded = _load(recipe, overrides)
    from .pipeline import verbs

    verbs.skip_layers(
        loaded,
        domain=domain,
        draft_tokens=draft_tokens,
        tries=tries,
        conversations=conversations,
        seed=seed,
        out=out,
    )


@app.command(rich_help_panel=USE)
def export(
    recipe: RecipeFile,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make; must not exist.")],
    overrides: Overrides = None,
    draft: Annotated[
        str | None, typer.Option("--draft", help="Name in the recipe, or a checkpoint folder; default: the chosen one.")
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="hf, vllm, sglang, speculators, gguf (llama.cpp) or medusa (the original project's); default: vllm, "
            "as it is stored.",
        ),
    ] = None,
    target_id: Annotated[
        str | None,
        typer.Option("--target-id", help="The target's hub id, for formats that name it; default: the recipe's model."),
    ] = None,
) -> None:
    """Write a draft in the layout that serving engines read; read it back and score it again.

    Example: draftforge export configs/demo.yaml served-draft --draft small --format sglang
    """
    loaded = _load(recipe, overrides)
    from .pipeline import verbs

    verbs.export(loaded, out, draft, layout, target_id)


@app.command(rich_help_panel=USE)
def generate(
    recipe: RecipeFile,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The user's message; - reads standard input.")],
    overrides: Overrides = None,
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft",
            help="Name in the recipe, draft folder, skip-layers' file, lookup, suffix, lookahead, jacobi, none; "
            "default: the chosen.",
        ),
    ] = None,
    rule: Annotated[
        str | None,
        typer.Option("--rule", help="Accept rule, such as token, block, onehot, match; default: the recipe's."),
    ] = None,
    draft_tokens: Annotated[
        int | None,
        typer.Option("--draft-tokens", "-k", min=1, max=64, help="Tokens a round, or levels of the tree."),
    ] = None,
    tree: Annotated[
        str | None, typer.Option("--tree", help="Name in the recipe's score.trees; default: chains.")
    ] = None,
    helped_by: Annotated[
        str | None,
        typer.Option("--helped-by", help="Drafts for a small draft: lookup, or a smaller draft's name or folder."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Longest answer.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", "-t", min=0.0, max=1e6, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**63 - 1, help="Of the sampling.")] = 0,
    draft_device: DraftDevice = None,
) -> None:
    """Answer a prompt with the draft's help: accepted drafted tokens in colour, then tau and speed.

    Example: draftforge generate configs/demo.yaml "Where is my order?" -n 64
    """
    loaded = _load(recipe, [*(overrides or []), *_on(draft_device)])
    from .pipeline import verbs

    verbs.generate(
        loaded,
        sys.stdin.read() if prompt == "-" else prompt,
        draft=draft,
        rule=rule,
        draft_tokens=draft_tokens,
        tree=tree,
        helped_by=helped_by,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
    )


@app.command(rich_help_panel=USE)
def bench(
    recipe: RecipeFile,
    overrides: Overrides = None,
    draft_device: DraftDevice = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            "--prompts", metavar="FILE", help="Prompts, JSON lines with domain and turns, or any shape that mixes read."
        ),
    ] = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            "--draft",
            help="Name in the recipe, draft folder, champion, or a method without training such as lookup; may be "
            "given again. Default: the recipe's drafts (their last checkpoints) and lookup.",
        ),
    ] = None,
    tree: Annotated[
        list[str] | None,
        typer.Option("--tree", help="Of the recipe's score.trees; may be given again. Default: all."),
    ] = None,
    helped_by: Annotated[
        str | None,
        typer.Option("--helped-by", help="Drafts for small drafts, beside these alone: lookup, or a smaller draft."),
    ] = None,
    draft_tokens: Annotated[str, typer.Option("--draft-tokens", "-k", help="K of the chains.")] = "2,4,8",
    batch_size: Annotated[str, typer.Option("--batch-size", "-b", help="Requests answered at once.")] = "1,4,16",
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="Longest answer.")] = 256,
    max_prompts: Annotated[
        int | None, typer.Option("--max-prompts", help="Only so many, spread over the domains; default: all.")
    ] = None,
    temperature: Annotated[float, typer.Option("--temperature", "-t", min=0.0, max=1e6, help="0 is greedy.")] = 0.0,
    rule: Annotated[
        str | None, typer.Option("--rule", help="Accept rule above temperature 0; default: the recipe's.")
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", help="Turns of all methods; medians of them count.")] = 3,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**63 - 1, help="Of the sampling.")] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="For the report; default: one in the work folder.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Run again what a benchmark before this one left.")] = False,
) -> None:
    """Measure every way of drafting on your own prompts: speed, waiting, memory, and where speculation loses.

    Plain decoding runs first in every repeat, and what a repeat took is compared with it. Time to first token: from
    when a request has a slot. Inter-token latency: the time between two arrivals of an answer, divided evenly among
    the tokens of the second one (tokens of one round come together). A killed benchmark goes on with the same command.

    Example: draftforge bench configs/demo.yaml --prompts prompts.jsonl --draft small --draft lookup -k 2,4 -b 1,8
    """
    loaded = _load(recipe, [*(overrides or []), *_on(draft_device)])
    from .pipeline import verbs

    verbs.bench(
        loaded,
        prompts=list(prompts or []),
        drafts=list(draft or []),
        trees=list(tree or []),
        helped_by=helped_by,
        draft_tokens=draft_tokens,
        batch_sizes=batch_size,
        max_new_tokens=max_new_tokens,
        max_prompts=max_prompts,
        temperature=temperature,
        rule=rule,
        repeats=repeats,
        seed=seed,
        out=out,
        fresh=fresh,
    )


@app.command(rich_help_panel=LOOK)
def metrics(
    recipe: RecipeFile,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.prom", help="File to write at once; default: standard output.")
    ] = None,
    listen: Annotated[
        str | None, typer.Option("--listen", metavar="HOST:PORT", help="Serve /metrics there until stopped.")
    ] = None,
    served: Annotated[
        list[str] | None,
        typer.Option("--served", metavar="URL-OR-FILE", help="A serving engine's metrics; again for each replica."),
    ] = None,
    since: Annotated[
        list[str] | None,
        typer.Option("--since", metavar="URL-OR-FILE", help="An earlier look at each --served; default: its start."),
    ] = None,
    interval_seconds: Annotated[
        float, typer.Option("--interval", min=0.0, help="Compare what is counted in so many seconds.")
    ] = 0.0,
    margin: Annotated[
        float, typer.Option("--margin", min=0.0, max=1.0, help="Share of the promised tau that may be missing.")
    ] = 0.05,
    fail: Annotated[
        bool, typer.Option("--fail-on-parting", help="Exit code 3 where served and promised acceptance part.")
    ] = False,
) -> None:
    """Prometheus metrics of the champion; warn where an engine accepts other than was promised.

    Example: draftforge metrics configs/demo.yaml --out draftforge.prom --served http://127.0.0.1:8000

    Example: draftforge metrics configs/demo.yaml --listen 127.0.0.1:9109 --served http://127.0.0.1:8000 --interval 3600
    """
    loaded = _load(recipe, overrides)
    from .pipeline import verbs

    verbs.metrics(loaded, out, listen, list(served or []), list(since or []), interval_seconds, margin, fail)


@app.command(rich_help_panel=LOOK)
def report(
    recipe: RecipeFile,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="HTML file to write; default: report.html in the score's folder."),
    ] = None,
) -> None:
    """Draw the report of a run again, from what is on disk: one HTML page that needs no network.

    Example: draftforge report configs/demo.yaml --out report.html
    """
    loaded = _load(recipe, overrides)
    from .pipeline import verbs

    verbs.report(loaded, out)


@app.command(rich_help_panel=LOOK)
def doctor(
    workdir: Annotated[Path, typer.Option("--workdir", help="Where runs will be written.")] = Path("runs"),
    tracking_uri: Annotated[
        str | None, typer.Option("--tracking-uri", help="MLflow store; default: MLFLOW_TRACKING_URI, else a file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what this machine can do, what is missing, and how to mend it. Exit code 1 if something must be mended.

    Example: draftforge doctor --workdir runs
    """
    from .pipeline.doctor import doctor as examine

    raise typer.Exit(examine(workdir, tracking_uri, as_json))


@recipe_app.command("show")
def recipe_show(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Print the recipe with every default and override in place; passwords in addresses are left out.

    Example: draftforge recipe show configs/demo.yaml seed=1
    """
    import yaml

    print(yaml.safe_dump(_load(recipe, overrides).public(), sort_keys=False, allow_unicode=True), end="")


@recipe_app.command("schema")
def recipe_schema() -> None:
    """Print the JSON schema of recipes, for editors and checks.

    Example: draftforge recipe schema > recipe.schema.json
    """
    import json

    from .recipe import schema

    print(json.dumps(schema(), indent=2))


def main(args: list[str] | None = None) -> None:
    """Entry point: errors become one line on standard error and an exit code."""
    _quiet_libraries()
    try:
        with _sigterm_unwinds():
            code = app(args=args, prog_name="draftforge", standalone_mode=False)
    except DraftforgeError as error:
        _fail(error, str(error), error.exit_code)
    except StoppedError as error:
        _fail(error, str(error), 143)
    except KeyboardInterrupt as error:
        _fail(error, "interrupted", 130)
    except Exception as error:
        _fail(error, *_outside_the_tree(error))
    if code == 130:  # the parser's own way of passing on Ctrl-C
        print("error: interrupted", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


@contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """SIGTERM ends the work like an error does: what is half-written goes, locks open, the run is closed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> NoReturn:
        raise StoppedError("stopped by SIGTERM; the same command goes on from what is finished")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _quiet_libraries() -> None:
    """Standard output is for results, and a log without a terminal is no place for other libraries' bars."""
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno > logging.WARNING)  # it prints to stdout
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of a lost connection our error says it, without its stack
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # what it warns of in tables, loading.py checks
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")


def _outside_the_tree(error: Exception) -> tuple[str, int]:
    """One line and an exit code for what no code of ours raised: wrong usage, the operating system, the unexpected."""
    usage = getattr(error, "format_message", None)  # the parser's errors
    if usage is not None:
        said = " ".join(str(usage()).split())  # nothing after a help page, which a verb too few shows
        help_of = getattr(getattr(error, "ctx", None), "command_path", "draftforge")
        return said and f"{said.rstrip('.')}; see `{help_of} --help`", 2
    if is_disk_full(error):
        where = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
        return f"{where}no space left on the device ({' '.join(str(error).split())[:200]})", 3
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror.lower()}", 2
    return _unexpected(error), 1


def _unexpected(error: Exception) -> str:
    message = " ".join(str(error).split())
    what = f"{type(error).__name__}: {message[:300]}" if message else type(error).__name__
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError):
        return f"{what} (out of memory: lower batch sizes, sequence length or batch tokens in the recipe)"
    return f"{what} (unexpected; DRAFTFORGE_DEBUG=1 or `draftforge --debug …` shows where)"


def _fail(error: BaseException, message: str, code: int) -> NoReturn:
    debugging = os.environ.get("DRAFTFORGE_DEBUG") not in (None, "", "0")
    rank = os.environ.get("RANK", "0")
    if message and not debugging:
        print(f"error: {message}" if rank == "0" else f"error (rank {rank}): {message}", file=sys.stderr, flush=True)
    if (crew := sys.modules.get(f"{__package__}.train.crew")) is not None:
        crew.tell_others(error)
    if debugging:
        raise error
    sys.exit(code)


if __name__ == "__main__":
    main()
