"""The Python API: answers are those of the decoder, counts those of decoding, and a recipe's way through `distill`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from distilled import Distilled
from hypothesis import given, settings
from hypothesis import strategies as st

import draftforge as df
from draftforge.api import Prompt
from draftforge.cli import main
from draftforge.errors import ContextLengthError, InputError, MissingFileError, RecipeError, RegistryError
from draftforge.eval.counts import where
from draftforge.specdec.answers import GrowingText, text_of
from draftforge.specdec.decoder import generate
from draftforge.specdec.requests import Request
from draftforge.specdec.sampling_settings import SamplingSettings
from draftforge.specdec.serving_plan import ServingPlan, write_plan

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs/python.ipynb"
PROMPT: Prompt = "support password order number 3?"
CHAT: Prompt = [{"role": "system", "content": "Short."}, {"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def target(tiny_target_folder: Path) -> df.Target:
    return df.Target.from_pretrained(tiny_target_folder, device="cpu")


@pytest.fixture(scope="module")
def draft(distilled_once: Distilled, target: df.Target) -> df.Draft:
    return df.Draft.from_pretrained(distilled_once.outcome.scored.chosen_folder, target)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [PROMPT, CHAT])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_answer_is_the_decoders(target: df.Target, draft: df.Draft, prompt: Any, temperature: float) -> None:
    options: Any = {"max_new_tokens": 20, "temperature": temperature, "seed": 5}
    answer = target.generate(prompt, draft, draft_tokens=3, **options)
    chat = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    ids = target.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    request = Request(ids, SamplingSettings(temperature=temperature), 5, 20, target.stop_ids)
    ((_, wanted),) = generate(target, draft.proposer(), [request], "token" if temperature else "greedy", 3)
    assert answer.tokens == wanted.tokens and answer.generation.rounds == wanted.rounds
    assert answer.tau == (len(answer.tokens) - 1) / len(wanted.rounds)
    assert (answer.drafted, answer.accepted) == tuple(map(sum, list(zip(*wanted.rounds))[:2]))
    assert answer.text == text_of(target, wanted.tokens)
    assert answer.rule == ("token" if temperature else "greedy")
    plain = target.generate(prompt, **options)
    assert plain.rule is None and target.stream(prompt, **options).answer.rule is None
    if not temperature:
        assert plain.tokens == answer.tokens and plain.tau is None and plain.rounds == 0
    # The same, piece by piece; nothing is decoded before it is asked for.
    stream = target.stream(prompt, draft, draft_tokens=3, **options)
    assert stream.answer.tokens == []
    seen = ""
    for piece in stream:
        seen += piece
        assert piece and stream.answer.text.startswith(seen)
    assert seen == answer.text and stream.answer.tokens == answer.tokens and stream.answer.tau == answer.tau


def test_a_batch_is_its_prompts_one_by_one(target: df.Target, draft: df.Draft) -> None:
    prompts: list[Prompt] = [PROMPT, "code sum function", CHAT]
    single = [target.generate(prompt, draft, max_new_tokens=9).tokens for prompt in prompts]
    assert [one.tokens for one in target.generate_batch(prompts, draft, 2, max_new_tokens=9)] == single
    assert target.generate_batch([], draft) == []


@settings(max_examples=60)
@given(tokens=st.lists(st.integers(3, 299), max_size=24), cuts=st.sets(st.integers(0, 24)))
def test_pieces_of_a_growing_text_are_the_text(target: df.Target, tokens: list[int], cuts: set[int]) -> None:
    """Wherever it is cut: most of these tokens are bytes, of which characters have several."""
    growing = GrowingText(target)
    pieces = [growing.more(tokens[:cut]) for cut in sorted(cuts) if cut <= len(tokens)]
    assert "".join(pieces) + growing.more(tokens, last=True) == text_of(target, tokens)


def test_scores_on_prompts_are_what_decoding_counts(target: df.Target, draft: df.Draft) -> None:
    lookup = df.Draft.from_pretrained("lookup", target)
    prompts: dict[str, list[Prompt]] = {"support": [PROMPT, CHAT], "code": ["code sum function"]}
    table = target.score(prompts, {"ours": draft, "lookup": lookup}, [1, 3], max_new_tokens=16)
    flat = [(domain, prompt) for domain, some in prompts.items() for prompt in some]
    for name, one in (("ours", draft), ("lookup", lookup)):
        for K in (1, 3):
            rows = where(table, draft=name, draft_tokens=K).to_pylist()
            assert [row["domain"] for row in rows] == [domain for domain, _ in flat]
            for row, (_, prompt) in zip(rows, flat):
                answer = target.generate(prompt, one, max_new_tokens=16, draft_tokens=K)
                assert (row["rounds"], row["drafted"], row["accepted"]) == (
                    answer.rounds,
                    answer.drafted,
                    answer.accepted,
                )
    # Figures: pooled over rounds.
    (found,) = df.tau(where(table, draft="ours", draft_tokens=3), by=["draft"]).to_pylist()
    rows = where(table, draft="ours", draft_tokens=3).to_pylist()
    assert found["tau"] == sum(row["tokens"] for row in rows) / sum(row["rounds"] for row in rows)
    assert len(table.to_pandas()) == 12
    with pytest.raises(InputError, match="by size: must be among draft, step"):
        df.tau(table, by=["size"])


def test_a_tree_of_the_plan_is_drafted_and_scored(
    target: df.Target, distilled_once: Distilled, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = distilled_once.outcome.scored.folders["eagle3", 4]
    shutil.copytree(folder, tmp_path / "draft")
    tree = {"kind": "static", "widths": [2, 1]}
    plan = {"draft_tokens": 2, "tree_name": "wide", "tree": tree, "chain_tokens": 3}
    write_plan(tmp_path / "draft", ServingPlan.model_validate(plan))
    draft = df.Draft.from_pretrained(tmp_path / "draft", target)
    answer = target.generate(PROMPT, draft, max_new_tokens=16)
    assert 2 * answer.rounds < answer.drafted <= 4 * answer.rounds  # four nodes on two levels
    assert answer.tokens == target.generate(PROMPT, max_new_tokens=16).tokens
    assert set(target.score([PROMPT], draft, [1])["tree"].to_pylist()) == {"", "wide"}
    capsys.readouterr()
    target.generate(PROMPT, draft, max_new_tokens=4, draft_tokens=1)
    assert "drafts K=1, as asked, not the tree wide of its plan" in capsys.readouterr().err


def test_counts_and_drafts_of_a_finished_run(distilled_once: Distilled, target: df.Target, tmp_path: Path) -> None:
    recipe, outcome = df.load_recipe(distilled_once.recipe), distilled_once.outcome
    work = recipe.workdir
    for place in (recipe, work, str(outcome.scored.stage.folder), outcome.scored.counts_file):
        assert df.read_counts(place).equals(outcome.scored.counts)
    row = outcome.scored.chosen
    found = where(df.tau(outcome.scored.counts), draft=row.draft, step=row.step, draft_tokens=row.config.levels)
    assert found["tau"].to_pylist() == [row.tau.value] and found["low"].to_pylist() == [row.tau.low]
    with pytest.raises(MissingFileError, match="holds no score to report on"):
        df.read_counts(tmp_path)
    # The champion, by its address and by its target.
    uri = f"models:/{outcome.version.name}@champion"
    for stored in (
        df.Draft.from_pretrained(uri, target, workdir=work),
        df.Draft.from_registry(target, workdir=work),
    ):
        assert stored.meta is not None and stored.meta.step == outcome.version.lineage.step
        assert stored.plan == outcome.version.lineage.plan
    with pytest.raises(RegistryError, match="has no previous in the registry"):
        df.Draft.from_registry(target, "previous", workdir=work)
    with pytest.raises(RegistryError, match="no such alias"):
        df.Draft.from_pretrained(f"models:/{outcome.version.name}@best", target, workdir=work)
    with pytest.raises(MissingFileError, match=r"holds no mlflow\.db"):
        df.Draft.from_registry(target, workdir=tmp_path)


def test_a_recipe_is_changed_written_and_read_again(recipe_in: Callable[..., Path], tmp_path: Path) -> None:
    path = recipe_in(tmp_path)
    recipe = df.load_recipe(path)
    changed = recipe.changed("drafts.small.steps=20", "capture.max_new_tokens=8")
    assert changed == df.load_recipe(path, ["drafts.small.steps=20", "capture.max_new_tokens=8"])
    assert recipe == df.load_recipe(path) and changed.base_dir == recipe.base_dir
    (tmp_path / "elsewhere").mkdir()
    changed.save(tmp_path / "elsewhere/other.yaml")
    assert df.load_recipe(tmp_path / "elsewhere/other.yaml").resolved() == changed.resolved()
    assert "learning_rate" not in (tmp_path / "elsewhere/other.yaml").read_text()  # a default
    # A work folder by default follows the name.
    plain = df.load_recipe(path, ["workdir=null"])
    assert str(plain.workdir) == "runs/tiny" and str(plain.changed("name=other").workdir) == "runs/other"
    assert recipe.changed("name=other").workdir == recipe.workdir
    with pytest.raises(RecipeError, match=r"^tiny: drafts\.small\.stepz: unknown key; the nearest known one is"):
        recipe.changed("drafts.small.stepz=20")
    with pytest.raises(df.DraftforgeError, match=r"tiny: seed = -1: must be >= 0"):
        recipe.changed("seed=-1")


@pytest.mark.slow
def test_distill_skips_what_the_verb_has_done(crowned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["distill", str(crowned)])
    assert ended.value.code == 0
    outcome, recipe = df.distill(df.load_recipe(crowned)), df.load_recipe(crowned)
    champion = df.Draft.from_registry(df.Target.load(recipe.target), workdir=recipe.workdir)
    assert outcome is not None and champion.meta is not None
    assert champion.meta.step == outcome.version.lineage.step
    assert df.read_counts(recipe).equals(outcome.scored.counts)


def test_what_is_wrong_is_said_in_one_line(target: df.Target, draft: df.Draft, tiny_target_folder: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"temperatur": 1}, "^temperatur: no such option; must be among max_new_tokens"),
        ({"temperature": -1}, "^temperature = -1: "),
        ({"draft_tokens": 65}, "^draft_tokens 65: must be 1 to 64"),
        ({"max_new_tokens": 0}, "max_new_tokens 0: must be >= 1"),
        ({"rule": "best"}, "rule: 'best': must be one of"),
        ({"max_new_tokens": "5"}, "^max_new_tokens = '5': input should be a valid integer"),
        ({"max_new_tokens": None}, "^max_new_tokens = None: "),
        ({"seed": 1.5}, r"^seed = 1\.5: "),
        ({"temperature": "hot"}, "^temperature = 'hot': "),
        ({"draft_tokens": True}, "^draft_tokens = True: "),
        ({"tools": "search"}, "^tools = 'search': "),
    ]
    for options, words in wrong:
        with pytest.raises(InputError, match=words):
            target.generate(PROMPT, draft, **options)
    no_batch: Any = None
    with pytest.raises(InputError, match=r"^batch_size = None: "):
        target.generate_batch([PROMPT], draft, no_batch)
    # What nothing reads.
    unread: list[tuple[dict[str, Any], str]] = [
        ({"draft_tokens": 3}, "^draft_tokens 3: is for a draft, and none is given"),
        ({"rule": "token", "temperature": 1}, "^rule: 'token': judges drafted tokens"),
    ]
    for options, words in unread:
        with pytest.raises(InputError, match=words):
            target.generate(PROMPT, **options)
    ruled: dict[str, Any] = {"rule": "token"}
    with pytest.raises(InputError, match=r"^rule: no such option; must be among max_new_tokens"):
        target.score([PROMPT], draft, **ruled)
    with pytest.raises(ContextLengthError, match="must fit the context"):
        target.stream(PROMPT, max_new_tokens=600)
    nothing: list[Any] = ["", [], [{"role": "user"}], 5]
    for prompt in nothing:
        with pytest.raises(InputError, match=r"^prompt 0: "):
            target.generate(prompt)
    with pytest.raises(InputError, match=r"^prompts: are none"):
        target.score([], draft)
    with pytest.raises(InputError, match=r"^draft_tokens = \[0\]: .*at least 1"):
        target.score([PROMPT], draft, [0])
    no_list: Any = 3
    with pytest.raises(InputError, match=r"^draft_tokens = 3: "):
        target.score([PROMPT], draft, no_list)
    with pytest.raises(InputError, match=r"^target\.dtyp = 'float32': "):
        df.Target.from_pretrained(tiny_target_folder, dtyp="float32")
    with pytest.raises(InputError, match="was loaded for another target"):
        df.Target.from_pretrained(tiny_target_folder, device="cpu").generate(PROMPT, draft)
    with pytest.raises(AttributeError, match="has no attribute 'Targets'"):
        df.Targets  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.slow
def test_the_notebook_runs(tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells in order, with the tests' tiny target in place of the real one."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    named = '"../.cache/smollm2-135m-instruct"'
    assert sum(source.count(named) for source in sources) == 1
    monkeypatch.chdir(NOTEBOOK.parent)
    space: dict[str, Any] = {}
    for number, source in enumerate(sources):
        exec(compile(source.replace(named, repr(str(tiny_target_folder))), f"cell {number}", "exec"), space)
    assert space["outcome"].decision.promote and space["answer"].tokens == space["plain"].tokens
