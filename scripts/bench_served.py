"""Acceptance and speed that vLLM serves, beside the counts and the speed-up that draftforge promises.

    python3 scripts/bench_served.py OUT --target FOLDER --vllm-python VLLM/bin/python --prompts mt_bench.jsonl \
        --prompts humaneval.jsonl --limit 60 --draft runs/train-eagle3-0123456789ab/checkpoints/step-000400

vLLM (0.23 to 0.33) lives in an environment of its own and serves the target on this machine: plain, with prompt lookup,
and with each draft at each K, one server after another. With `--together N`, N of them start side by side, which takes
hardly longer than one, and are measured one by one while the others have nothing to do, the plain one once more at the
end; each must then be content with a part of the memory. Each server answers the first turn of every prompt at each
concurrency, at temperature 0, after a warm-up. The answer to a prompt has the same number of tokens everywhere, half to
one and a half times `--new-tokens`: answers of one length that begin together would end together, which an operator's
do not. A server's counters before and after give tau and accepted tokens by position; tokens a second while all
requests are in flight, beside the plain server's on the same prompts, give the speed-up.

After that each server's rounds and answers are timed as `score.load.costs` times them, over the concurrencies as
batch sizes. When the last server has stopped, draftforge replays each draft on the very answers that each server gave
("tau ours", in vLLM's convention), and measures its own times over the same batch sizes. The counts on the plain
server's answers make a promised speed-up with the engine's times, and another with draftforge's own. `equal` is the
share of answers that are the plain server's at the least concurrency, token by token: near ties fall otherwise in
passes of another shape.

`--accept` lets every server accept draft tokens with one probability, whatever the target says, and replays nothing: it
compares times alone, for targets and drafts of any size whose weights say nothing (vLLM's `--load-format dummy`).

`--counts` compares counts alone, such as those of many checkpoints: the servers that start together answer at the same
time, none is plain, and nothing is timed.

OUT/results.json and OUT/table.txt are written as results come, OUT/promised-and-served.svg at the end; OUT/logs has the
log of each server, OUT/answers what it answered, OUT/costs the times of both. A later run goes on: what is measured is
not measured again, what failed is tried again.
Exit code 3: something failed; its row says why.
"""

import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from draftforge import fingerprint, storage
from draftforge.data.chat_template import render
from draftforge.data.conversation import Message
from draftforge.errors import DraftforgeError, EngineError, InputError
from draftforge.eval.vllm_server import MODEL, StartedServer, VllmClient, VllmLauncher
from draftforge.pipeline import cli_exit
from draftforge.pipeline.stages import captured_stages, checkpoints_of
from draftforge.pipeline.workspace import Workspace
from draftforge.progress import bar, say
from draftforge.recipe import load_recipe
from draftforge.registry.lineage import git_commit
from draftforge.scripts.served_judge import judge_all
from draftforge.scripts.served_results import Bench, compare, draw, measured_key, show
from draftforge.scripts.vllm_servers import (
    PLAIN,
    Draft,
    EngineTimes,
    Measured,
    Prompt,
    Setup,
    hardware,
    measure,
)
from draftforge.specdec.formats import meta_file, read_meta
from draftforge.specdec.formats.layouts import NATIVE, family_at, layout_of
from draftforge.specdec.proposers.training_free import LOOKUP
from draftforge.specdec.target_settings import TargetSettings
from draftforge.specdec.targets import load_target_tokenizer

Json = dict[str, Any]
GRAPH_TOKENS = 512
app = typer.Typer(add_completion=False)


def read_prompts(paths: Sequence[Path], limit: int, settings: TargetSettings) -> list[Prompt]:
    """First turns of JSON-lines files, `limit` of each (0: all), as ids. Raises InputError."""
    tokenizer, found = load_target_tokenizer(settings), list[Prompt]()
    for path in paths:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        for number, line in enumerate(lines[: limit or None], 1):
            try:
                raw = json.loads(line)
                text, domain = str(raw["turns"][0]), str(raw.get("domain", path.stem))
            except (ValueError, KeyError, IndexError, TypeError, AttributeError):
                raise InputError(f"{path}: line {number}: must be an object with turns, a list of texts") from None
            # A target without a chat template reads the bare text.
            chat = getattr(tokenizer, "chat_template", None)
            ids = render(tokenizer, [Message(role="user", content=text)]) if chat else tokenizer(text).input_ids
            found.append(Prompt(list(ids), domain))
    if not found:
        raise InputError(f"--prompts {paths[0]}: holds no prompt")
    return found


def find_drafts(given: Sequence[str], recipe: Path | None, overrides: Sequence[str], last: int) -> list[Draft]:
    """Drafts by folder, or by their name in the recipe: the last checkpoints of each. Raises InputError."""
    loaded = load_recipe(recipe, overrides) if recipe is not None else None
    found = list[Draft]()
    for one in given:
        if loaded is not None and one in loaded.drafts:
            known = checkpoints_of(captured_stages(Workspace(loaded)).training(one))
            folders = [known[step] for step in sorted(known)[-last:]]
            if not folders:
                raise InputError(f"--draft {one}: has no checkpoint yet; run `draftforge train`")
        elif Path(one).is_dir():
            folders = [Path(one)]
        else:
            raise InputError(f"--draft {one}: must be a draft's folder, or with --recipe one of its drafts")
        for folder in folders:
            if (layout := layout_of(folder)) != NATIVE:
                raise InputError(
                    f"--draft {folder}: has format {layout}; must be as vLLM reads it with any K: "
                    f"`draftforge export --format {NATIVE}` writes it"
                )
            family, digest = family_at(folder), fingerprint.of_json(fingerprint.file_digests(folder))
            step = read_meta(folder).step if meta_file(folder).is_file() else 0
            name = one if loaded is not None and one in loaded.drafts else family
            if any((name, step) == (other.name, other.step) for other in found):
                name = f"{name}-{digest[:6]}"
            found.append(Draft(name, step, family, folder.resolve(), digest))
    return found


def serve_all(
    bench: Bench,
    vllm: VllmLauncher,
    target: TargetSettings,
    setups: Sequence[Setup],
    prompts: Sequence[Prompt],
    times: EngineTimes,
    asked: Json,
) -> None:
    """Measure what is not measured yet: so many servers start together, and are measured one by one.

    With counts alone they are measured at the same time.
    """
    begun, sizes, served = time.monotonic(), asked["concurrency"], bench.found["served"]
    left = {one: [size for size in sizes if measured_key(one, size) not in served] for one in setups}
    waiting = [one for one, missing in left.items() if missing or not (asked["counts"] or times.known(one))]
    with bar("serving", sum(map(len, left.values())), "measurements") as advance:

        def figures_of(setup: Setup, client: VllmClient) -> Iterator[tuple[str, Measured]]:
            asking = prompts, asked["new_tokens"], asked["seconds"], asked["counts"]
            for size in left[setup]:
                yield measured_key(setup, size), measure(client, setup, size, *asking)

        def late() -> bool:
            return bool(asked["most_seconds"]) and time.monotonic() - begun > asked["most_seconds"]

        for first in range(0, len(waiting), asked["together"]):
            group = waiting[first : first + asked["together"]]
            # Servers are stopped before their requests are waited for.
            with ThreadPoolExecutor(len(group)) as pool, together(bench, vllm, target, group) as clients:
                some = clients if asked["counts"] else {}
                at_once = {one: pool.submit(list, figures_of(one, client)) for one, (client, _) in some.items()}
                for setup, (client, server) in clients.items():
                    if late():
                        bench.failed(setup.key, f"was not begun within {asked['most_seconds']:g} s")
                        continue
                    try:
                        with server.watched():
                            found = at_once[setup].result() if asked["counts"] else figures_of(setup, client)
                            for key, (figures, answers) in found:
                                bench.keep_answers(key, answers)
                                bench.keep("served", key, figures)
                                advance(note=f"{key}: {speed_or_tau(figures)}")
                            if not asked["counts"]:
                                times.measure(client, setup)
                        bench.found["failed"].pop(setup.key, None)
                    except DraftforgeError as error:
                        bench.failed(setup.key, str(error))
                # What has changed meanwhile, on the machine or in the plain server, shows in its speeds at the end.
                if (plain := Setup(None, 0)) in clients and len(clients) > 1 and not late():
                    try:
                        with clients[plain][1].watched():
                            for size in sizes:
                                asking = prompts, asked["new_tokens"], asked["seconds"]
                                again = measure(clients[plain][0], plain, size, *asking)
                                bench.keep("again", measured_key(plain, size), again.figures)
                    except DraftforgeError as error:
                        bench.failed(f"{PLAIN} again", str(error))


def speed_or_tau(figures: Json) -> str:
    """A measurement in a word."""
    speed = figures.get("tokens_per_second")
    return f"tau {figures['tau']:.3f}" if speed is None else f"{speed:,.0f} tokens/s"


@contextmanager
def together(
    bench: Bench, vllm: VllmLauncher, target: TargetSettings, group: Sequence[Setup]
) -> Iterator[dict[Setup, tuple[VllmClient, StartedServer]]]:
    """Servers that answer, of a group that starts side by side; what does not start is noted."""
    begun, servers, found = (
        time.monotonic(),
        dict[Setup, StartedServer](),
        dict[Setup, tuple[VllmClient, StartedServer]](),
    )
    with ExitStack() as stack:
        for setup in group:
            say(f"{setup.key}: starting (log: {bench.out / log_of(setup)})")
            command = setup.command(target)
            servers[setup] = stack.enter_context(vllm.starting(command, target.dtype, bench.out / log_of(setup)))
        # All of them answer before one is measured: one that starts would disturb it.
        for setup, server in servers.items():
            command = setup.command(target)
            record: Json = {"command": shlex.join(vllm.words(command, target.dtype, "PORT")), "engine": "vLLM"}
            record |= {"notes": list(command.notes), "log": log_of(setup), "together": len(group)}
            try:
                client = VllmClient(setup.key, server.wait(), model=MODEL)
                with server.watched():
                    record |= {"engine": client.version(), "start_seconds": time.monotonic() - begun}
                found[setup] = client, server
            except DraftforgeError as error:
                bench.failed(setup.key, str(error))
            bench.keep("servers", setup.key, record)
        yield found
        # They end side by side, too.
        for server in servers.values():
            server.end()


def log_of(setup: Setup) -> str:
    """Where the log of a server lies."""
    return f"logs/{setup.key}.log"


@app.command()
def main(
    out: Annotated[Path, typer.Argument(help="Results are written there.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value of the recipe.")] = None,
    *,
    target: Annotated[Path, typer.Option(exists=True, help="The target's folder.")],
    vllm_python: Annotated[Path, typer.Option(exists=True, help="Python of vLLM's environment.")],
    vllm_site: Annotated[Path | None, typer.Option(exists=True, help="PYTHONPATH of that Python.")] = None,
    vllm_flags: Annotated[str, typer.Option(help="Further flags of every server, as one text.")] = "",
    prompts: Annotated[list[Path], typer.Option(exists=True, help="JSON lines with turns, domain; again for more.")],
    limit: Annotated[int, typer.Option(min=0, help="Prompts of each file; 0: all.")] = 60,
    draft: Annotated[list[str] | None, typer.Option(help="Folder, or draft of --recipe; again for more.")] = None,
    recipe: Annotated[Path | None, typer.Option(exists=True, help="Recipe whose drafts --draft names.")] = None,
    checkpoints: Annotated[int, typer.Option(min=1, help="Last checkpoints of each draft of the recipe.")] = 1,
    lookup: Annotated[bool, typer.Option(help="Serve prompt lookup, too.")] = True,
    concurrency: Annotated[list[int] | None, typer.Option(min=1, help="Again for more; 1, 8, 32, 64.")] = None,
    draft_tokens: Annotated[list[int] | None, typer.Option(min=1, help="K; again for more; 1, 2, 4.")] = None,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer, on average.")] = 128,
    seconds: Annotated[float, typer.Option(min=0, help="Of a measurement, about, at least.")] = 6,
    dtype: Annotated[str, typer.Option(help="Of target and drafts, here and there.")] = "bfloat16",
    start_seconds: Annotated[float, typer.Option(min=1, help="A server must answer within these.")] = 600,
    cost_prompts: Annotated[int, typer.Option(min=1, help="Prompts of our own times.")] = 4,
    cost_rounds: Annotated[int, typer.Option(min=4, help="Rounds timed of each.")] = 16,
    own_times: Annotated[bool, typer.Option(help="Promise from draftforge's own rounds, too.")] = True,
    together: Annotated[int, typer.Option(min=1, help="Servers that start side by side.")] = 1,
    accept: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Draft tokens are accepted so often, synthetically."),
    ] = None,
    counts_only: Annotated[bool, typer.Option("--counts", help="Counts alone, of all these at the same time.")] = False,
    most_seconds: Annotated[float, typer.Option(min=0, help="Begin with no server after so many; 0: all.")] = 0,
    dry_run: Annotated[bool, typer.Option(help="Print the commands of all servers, and start none.")] = False,
) -> None:
    """Serve, replay, compare, and show it."""
    # 1) What is asked.
    sizes, depths = sorted(set(concurrency or [1, 8, 32, 64])), sorted(set(draft_tokens or [1, 2, 4]))
    settings = TargetSettings.model_validate({"model": str(target.resolve()), "dtype": dtype})
    if dtype not in ("bfloat16", "float16", "float32"):
        raise InputError(f"--dtype {dtype}: must be bfloat16, float16 or float32, which both sides know")
    # Prompt lookup drafts where the text repeats, which a text of accepted nonsense does not.
    drafts = [Draft(LOOKUP, 0, LOOKUP, None, LOOKUP)] if lookup and accept is None else []
    drafts += find_drafts(draft or [], recipe, overrides or [], checkpoints)
    if accept is not None and counts_only:
        raise InputError("--accept: has no counts to compare; leave out --counts")
    setups = [Setup(one, K, accept=accept) for one in drafts for K in depths]
    setups = setups if counts_only else [Setup(None, 0), *setups]
    # Answers that repeat a prompt must read it again, as new ones would. vLLM's graphs hold twice as many full drafts
    # as may run at once, and 512 tokens at most: with fewer at once, drafts would have larger graphs than plain rounds.
    most = max(sizes[-1], GRAPH_TOKENS // 2)
    flags = ["--max-num-seqs", str(most), "--no-enable-prefix-caching", *shlex.split(vllm_flags)]
    vllm = VllmLauncher(vllm_python.absolute(), flags, start_seconds, vllm_site)
    if dry_run:
        for setup in setups:
            print(shlex.join(vllm.words(setup.command(settings), settings.dtype, "PORT")))
        return
    rows = read_prompts(prompts, limit, settings)
    asked: Json = {
        "target": settings.model,
        "dtype": dtype,
        "new_tokens": new_tokens,
        "lengths": "half to one and a half",
        "seconds": seconds,
        "flags": flags,
        "counts": counts_only,
    } | ({} if accept is None else {"accept": accept})
    asked["prompts"] = fingerprint.of_json([list(one) for one in rows])
    bench = Bench(out.resolve(), asked)
    for one in drafts:
        if bench.found["drafts"].setdefault(one.key, one.digest) != one.digest:
            raise InputError(f"{bench.file}: {one.key} was another draft; name another folder")
    # 2) The servers, then, with the device free again, our own part.
    asked = asked | {"concurrency": sizes, "draft_tokens": depths}
    asked |= {"cost_prompts": cost_prompts, "cost_rounds": cost_rounds, "own_times": own_times and not counts_only}
    asked |= {"together": together, "most_seconds": most_seconds, "accept": accept}
    times = EngineTimes(bench.out / "costs", settings, rows, asked)
    serve_all(bench, vllm, settings, setups, rows, times, asked)
    judge_all(bench, settings, setups, rows, times, asked)
    # 3) Both.
    bench.found |= {"hardware": hardware(), "torch": torch.__version__, "commit": git_commit(), "command": sys.argv}
    compare(bench, setups, sizes)
    show(bench.found, Console(width=200))
    with (bench.out / "table.txt").open("w") as stream:
        show(bench.found, Console(width=200, file=stream))
    if (figure := draw(bench.found)) is not None:
        storage.write_bytes(bench.out / "promised-and-served.svg", figure.encode())
    if bench.found["failed"]:
        raise typer.Exit(EngineError.exit_code)


if __name__ == "__main__":
    cli_exit.run(app, None, Path(__file__).name)
