"""The command line: one thin function a verb. Nothing heavy is imported before a verb runs."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import __version__
from .errors import InputError
from .pipeline import cli_exit, cli_options, completion
from .pipeline.cli_options import DraftDevice, DraftName, Overrides, RecipeFile

if TYPE_CHECKING:
    from .recipe import Recipe

app = typer.Typer(
    name="draftforge",
    help="Train draft models for speculative decoding and pick them by expected serving speed.",
    epilog="Start with: draftforge try, then draftforge distill configs/demo.yaml",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
recipe_app = typer.Typer(no_args_is_help=True, help="Show a recipe as it will run, or the schema of all recipes.")
app.add_typer(recipe_app, name="recipe", rich_help_panel="Look")

STAGES, REGISTRY, USE, LOOK = "Stages", "Registry", "Use a draft", "Look"


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; so does DRAFTFORGE_DEBUG=1.")] = False,
) -> None:
    if version:
        print(f"draftforge {__version__}")
        raise typer.Exit
    if debug:
        os.environ["DRAFTFORGE_DEBUG"] = "1"


def _load(path: Path, overrides: list[str] | None, draft_device: str | None = None) -> "Recipe":
    from .recipe import load_recipe

    device = [] if draft_device is None else [f"score.draft_device={draft_device}"]
    return load_recipe(path, [*(overrides or []), *device])


@app.command(rich_help_panel=STAGES)
def distill(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Run mix, capture, train, score, register and promote; skip what is done already.

    Example: draftforge distill configs/demo.yaml drafts.eagle3.steps=20

    By several GPUs: torchrun --nproc-per-node 2 -m draftforge.cli distill configs/smollm2-gpu.yaml

    Exit code 5: the gate refused the draft, which stays a candidate; 6: promoted, and promotion.command failed.
    """
    loaded = _load(recipe, overrides)
    from .pipeline import distill as stages

    raise typer.Exit(stages.exit_code(stages.distill(stages.open_workspace(loaded))))


@app.command(rich_help_panel=STAGES)
def mix(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Gather, de-duplicate, balance and split the conversations that the target will answer.

    Example: draftforge mix configs/demo.yaml
    """
    loaded = _load(recipe, overrides)
    from .pipeline import distill as stages

    stages.mix(loaded)


@app.command("inspect-mix", rich_help_panel=LOOK)
def inspect_mix(
    recipe: RecipeFile,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE.html", help="Also write one page, with charts."),
    ] = None,
    prompts: Annotated[
        int | None, typer.Option("--prompts", min=1, help="Show so many turns as the target reads them, instead.")
    ] = None,
    domain: Annotated[
        str | None,
        typer.Option("--domain", help="With --prompts: only of this domain.", autocompletion=completion.domains),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object; with --prompts one a line.")] = False,
) -> None:
    """Say what needs attention in the mix; compare it with its log: shares, lengths, copies, contamination.

    Example: draftforge inspect-mix configs/demo.yaml --out mix.html
    """
    if prompts is None and domain is not None:
        raise InputError(f"--domain {domain}: is of --prompts, which is not given")
    if prompts is not None and out is not None:
        raise InputError(f"--out {out}: is of the tables; give it without --prompts")
    loaded = _load(recipe, overrides)
    from .pipeline import mix_report, shown_prompts

    if prompts is None:
        mix_report.inspect_mix(loaded, out, as_json)
    else:
        shown_prompts.show_prompts(loaded, prompts, domain, as_json)


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
    from .pipeline import distill as stages

    stages.capture(loaded, answers_to, part, join or [])


@app.command(rich_help_panel=STAGES)
def train(recipe: RecipeFile, overrides: Overrides = None, draft: DraftName = None) -> None:
    """Train the recipe's drafts on the capture. Resumes where it was stopped.

    Example: draftforge train configs/demo.yaml --draft eagle3
    """
    loaded = _load(recipe, overrides)
    from .pipeline import distill as stages

    stages.train(loaded, draft)


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
            autocompletion=completion.drafts,
        ),
    ] = None,
) -> None:
    """Score every checkpoint by acceptance and show the table of expected speed-ups.

    Example: draftforge score configs/demo.yaml score.draft_tokens=[2,4,6]

    A draft that was made elsewhere, as it is: draftforge score configs/demo.yaml --draft ./their-eagle3
    """
    loaded = _load(recipe, overrides, draft_device)
    from .pipeline import distill as stages

    stages.score(loaded, draft)


@app.command(rich_help_panel=REGISTRY)
def promote(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Ask on the holdout whether the candidate is worth serving and beats the champion; move the alias, or say why not.

    Exit code 0: promoted, or the champion already; 5: the gate refused it; 6: promoted, and promotion.command failed.

    Example: draftforge promote configs/demo.yaml gate.min_speedup=1.2
    """
    loaded = _load(recipe, overrides)
    from .pipeline import distill as stages

    raise typer.Exit(stages.exit_code(stages.promote(loaded)))


@app.command(rich_help_panel=REGISTRY)
def rollback(
    recipe: RecipeFile,
    overrides: Overrides = None,
    undo: Annotated[bool, typer.Option("--undo", help="Take back the last rollback instead.")] = False,
    why: Annotated[str, typer.Option("--why", metavar="TEXT", help="Reason, kept in the registry.")] = "",
) -> None:
    """Make the previous champion for the recipe's target the champion again; --undo: the one that a rollback left.

    Example: draftforge rollback configs/demo.yaml --why "slower for long prompts"
    """
    loaded = _load(recipe, overrides)
    from .pipeline import promotion

    promotion.rollback(loaded, undo, why)


@app.command(rich_help_panel=REGISTRY)
@cli_options.spread
def fetch(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make; must not exist.")],
    target: Annotated[
        str,
        typer.Option(
            "--target", help="Model folder, .gguf file, hub id, or the first hex digits of the target's fingerprint."
        ),
    ],
    store: cli_options.StoreOptions,
    layout: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="hf, vllm, sglang, speculators, medusa or gguf; default: as it is stored, vllm.",
            autocompletion=completion.one_of(*completion.FORMATS),
        ),
    ] = None,
    target_id: Annotated[
        str | None, typer.Option("--target-id", help="The target's hub id, for formats that name it.")
    ] = None,
    alias: cli_options.Alias = "champion",
) -> None:
    """Copy the champion of exactly this target out of the registry, for an engine; print the command that serves it.

    Example: draftforge fetch served-draft --target .cache/smollm2-135m-instruct --workdir runs/demo --format vllm
    """
    from .pipeline import registry_listing

    registry_listing.require_store(store)  # before what takes seconds to import
    from .pipeline import fetch as fetching

    fetching.fetch(out, target, store, alias, layout, target_id)


@app.command(rich_help_panel=REGISTRY)
@cli_options.spread
def registry(
    store: cli_options.StoreOptions,
    recipe: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RECIPE]",
            help="Whose registry; default: the store that options name.",
            autocompletion=completion.recipes,
        ),
    ] = None,
    overrides: Overrides = None,
    target: Annotated[
        str | None, typer.Option("--target", help="Only targets whose fingerprint begins with these hex digits.")
    ] = None,
    decisions: Annotated[bool, typer.Option("--decisions", help="Also every decision of the gate, in full.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List which draft serves which target, with aliases, figures, runs and decisions; and what each draft serves.

    Example: draftforge registry --workdir runs/demo --decisions
    """
    loaded = None if recipe is None else _load(recipe, overrides)
    from .pipeline import registry_listing

    with cli_exit.uncollected():
        registry_listing.registry(loaded, store, target, decisions, as_json)


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
    from .pipeline import retrain as retraining

    if dry_run:
        retraining.dry_run(loaded)
        return
    raise typer.Exit(retraining.retrain(loaded))


@app.command(rich_help_panel=REGISTRY)
@cli_options.spread
def watch(recipe: RecipeFile, options: cli_options.WatchOptions, overrides: Overrides = None) -> None:
    """Retrain now and every so often, each time in a process of its own: a scheduler for where there is none.

    Example: draftforge watch configs/demo.yaml --every 6h --jitter 10m
    """
    loaded = _load(recipe, overrides)
    from .pipeline import watch as watching

    raise typer.Exit(watching.watch(loaded, [str(recipe), *(overrides or [])], options))


@app.command("skip-layers", rich_help_panel=USE)
@cli_options.spread
def skip_layers(recipe: RecipeFile, options: cli_options.SkipLayersOptions, overrides: Overrides = None) -> None:
    """Find layers of the target that a draft can skip: the target itself, without them, then drafts. No training.

    Example: draftforge skip-layers configs/demo.yaml --domain support --tries 300 --out support.json

    Then: draftforge score configs/demo.yaml --draft support.json
    """
    loaded = _load(recipe, overrides)
    from .pipeline import layer_skip

    layer_skip.skip_layers(loaded, options)


@app.command(rich_help_panel=USE)
def export(
    recipe: RecipeFile,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make; must not exist.")],
    overrides: Overrides = None,
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft",
            help="Name in the recipe, or a checkpoint folder; default: the champion.",
            autocompletion=completion.drafts,
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="hf, vllm, sglang, speculators, gguf (llama.cpp) or medusa (the original project's); default: vllm, "
            "as it is stored.",
            autocompletion=completion.one_of(*completion.FORMATS),
        ),
    ] = None,
    target_id: Annotated[
        str | None,
        typer.Option("--target-id", help="The target's hub id, for formats that name it; default: the recipe's model."),
    ] = None,
    policy: Annotated[
        str | None, typer.Option("--policy", help="vllm, sglang, tensorrt-llm: also its K by batch size (score.load).")
    ] = None,
) -> None:
    """Write a draft as an engine reads it, score it again, and print the command that serves it.

    Example: draftforge export configs/demo.yaml served-draft --draft eagle3 --format sglang
    """
    loaded = _load(recipe, overrides)
    from .pipeline import export as exporting

    exporting.export(loaded, out, draft, layout, target_id, policy)


@app.command(rich_help_panel=USE)
@cli_options.spread
def push(
    source: Annotated[
        str,
        typer.Argument(
            metavar="DRAFT",
            help="Recipe (its champion), a draft's folder, or models:/NAME/NUMBER.",
            autocompletion=completion.pushed,
        ),
    ],
    repository: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository of the Hugging Face hub.")],
    options: cli_options.PushOptions,
) -> None:
    """Upload a draft with a model card to the Hugging Face hub, in one commit; HF_TOKEN or `hf auth login` is used.

    Example: draftforge push served-draft me/qwen3-8b-eagle3 --base-model Qwen/Qwen3-8B --dry-run
    """
    from .pipeline import push as pushing

    pushing.push(source, repository, options)


@app.command("try", rich_help_panel=USE)
def try_out(
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT]...", help="Your own prompts; default: three shipped ones.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--prompts", metavar="FILE", help="Prompts, one a line.")] = None,
    target: Annotated[str, typer.Option("--target", help="Model folder, .gguf file or hub id.")] = cli_options.TARGET,
) -> None:
    """Train a tiny draft in two minutes; show an answer in colour, its tau, and prompt lookup's on your prompts.

    Example: draftforge try "Write a haiku about rain." "List three uses of vinegar."
    """
    from .pipeline import tryout

    tryout.try_out(prompts or [], file, target)


@app.command(rich_help_panel=USE)
@cli_options.spread
def generate(
    recipe: RecipeFile,
    options: cli_options.GenerateOptions,
    prompt: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="The user's message; - reads standard input.")
    ] = None,
    overrides: Overrides = None,
    draft_device: DraftDevice = None,
) -> None:
    """Answer a prompt with the draft's help: accepted drafted tokens in colour, then tau and speed.

    Example: draftforge generate configs/demo.yaml "Where is my order?" -n 64 --system "Be short."
    """
    if options.messages is not None:  # there is no PROMPT then: the word is an override
        prompt, overrides = None, [*filter(None, [prompt]), *(overrides or [])]
    loaded = _load(recipe, overrides, draft_device)
    from .pipeline import generate as generation

    generation.generate(loaded, prompt, options)


@app.command(rich_help_panel=USE)
@cli_options.spread
def bench(
    recipe: RecipeFile, options: cli_options.BenchOptions, overrides: Overrides = None, draft_device: DraftDevice = None
) -> None:
    """Measure every way of drafting on your own prompts: speed, waiting, memory, and where speculation loses.

    Plain decoding runs first in every repeat, and what a repeat took is compared with it. Time to first token: from
    when a request has a slot. Inter-token latency: the time between two arrivals of an answer, divided evenly among
    the tokens of the second one (tokens of one round come together). A killed benchmark goes on with the same command.

    Example: draftforge bench configs/demo.yaml --prompts prompts.jsonl --draft eagle3 --draft lookup -k 2,4 -b 1,8
    """
    loaded = _load(recipe, overrides, draft_device)
    from .pipeline import bench as benchmark

    benchmark.bench(loaded, options)


@app.command(rich_help_panel=LOOK)
@cli_options.spread
def metrics(recipe: RecipeFile, options: cli_options.MetricsOptions, overrides: Overrides = None) -> None:
    """Prometheus metrics of the champion; warn where an engine accepts other than was expected.

    Example: draftforge metrics configs/demo.yaml --out draftforge.prom --served http://127.0.0.1:8000

    Example: draftforge metrics configs/demo.yaml --listen 127.0.0.1:9109 --served http://127.0.0.1:8000 --interval 3600
    """
    loaded = _load(recipe, overrides)
    from .pipeline import monitoring

    monitoring.metrics(loaded, options)


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
    from .pipeline import report as reporting

    reporting.report(loaded, out)


@app.command(rich_help_panel=LOOK)
@cli_options.spread
def doctor(
    options: cli_options.DraftDoctorOptions,
    workdir: Annotated[Path, typer.Option("--workdir", help="Where runs will be written.")] = Path("runs"),
    tracking_uri: Annotated[
        str | None, typer.Option("--tracking-uri", help="MLflow store; default: MLFLOW_TRACKING_URI, else a file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what this machine can do, what is missing, and how to mend it. Exit code 1 if something must be mended.

    With --draft: say why a draft is accepted less than it should be, and write the corrected one beside it. Exit code
    0: healthy; 5: the draft is at fault or undertrained; 3: the engine is at fault (--served).

    Example: draftforge doctor --draft my-head --target ./my-model --served metrics.txt
    """
    if options.draft is None:
        cli_options.refuse_without("--draft", target=options.target, served=options.served, answers=options.answers)
        from .pipeline import doctor as examination

        raise typer.Exit(examination.doctor(workdir, tracking_uri, as_json))
    from .pipeline.draft_doctor import examine_draft

    raise typer.Exit(examine_draft(options, as_json))


@app.command(rich_help_panel=STAGES)
def init(
    log: Annotated[Path, typer.Option("--log", metavar="PATH", help="A log: a file, a folder or a pattern.")],
    target: Annotated[str, typer.Option("--target", help="Model folder, .gguf file or hub id of what is served.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Recipe to write; must not exist.")] = Path(
        "recipe.yaml"
    ),
) -> None:
    """Write a commented recipe from a log and a target: kind, domains, sampling, lengths, a family that fits.

    Example: draftforge init --log logs/vllm.log --target ./my-model --out recipe.yaml
    """
    from .pipeline import init_recipe

    init_recipe.init(log, target, out)


@app.command(rich_help_panel=LOOK)
def plan(
    recipe: RecipeFile,
    overrides: Overrides = None,
    gpu: Annotated[cli_options.GpuName, typer.Option("--gpu", help="Kind of GPU.")] = "h100",
    gpus: Annotated[
        list[int] | None, typer.Option("--gpus", min=1, max=65536, help="How many; again to compare: 1 and 8.")
    ] = None,
) -> None:
    """Estimate memory, disk and hours of each stage on GPUs that are not here, with the basis of each figure.

    Example: draftforge plan configs/qwen3-8b.yaml --gpu h100 --gpus 1 --gpus 8
    """
    loaded = _load(recipe, overrides)
    from .pipeline import plan as planning

    planning.plan(loaded, gpu, gpus or [1, 8])


@recipe_app.command("show")
def recipe_show(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Print the recipe with every default and override in place; secrets in it are masked.

    Example: draftforge recipe show configs/demo.yaml seed=1
    """
    from .recipe import yaml_text

    print(yaml_text(_load(recipe, overrides).public()), end="")


@recipe_app.command("schema")
def recipe_schema() -> None:
    """Print the JSON schema of recipes, for editors and checks.

    Example: draftforge recipe schema > recipe.schema.json
    """
    import json

    from .recipe import schema

    print(json.dumps(schema(), indent=2))


def main(args: list[str] | None = None) -> None:
    """Entry point: run the verb that the arguments name, by default those of the process."""
    cli_exit.run(app, args)


if __name__ == "__main__":
    main()
