"""`inspect-mix` through the command line: tables, a page, pictures, and no target."""

import html
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from draftforge.cli import app
from draftforge.data.mix import CONTAMINATED, COPY, NEAR_COPY
from draftforge.data.traffic_profile import MIX, profile
from draftforge.errors import InputError
from draftforge.pipeline.mix_headline import NOTHING, headline
from draftforge.pipeline.mix_report import check_out
from draftforge.pipeline.stages import Stages, mix_stage
from draftforge.pipeline.workspace import Workspace
from draftforge.recipe import load_recipe

LINES = [
    {
        "messages": [
            {"role": "system", "content": f"you are bot number {i % 2}"},
            {"role": "user", "content": f"topic{i} asks about thing{i * 7} and part{i * 3}, mail joe{i}@acme.org"},
            {"role": "assistant", "content": "an answer " * (1 + i % 30)},
        ],
        "domain": "support" if i % 3 else "code",
        "temperature": 0.7 if i % 2 else 0,
        "started": 1_790_000_000 + 40_000 * (i // 3) + i % 3,
        "ended": 1_790_000_000 + 40_000 * (i // 3) + 10,
        "replica": f"10.0.0.{1 + i % 2}:8000",
        "prompt_tokens": 20 + i,
        "answer_tokens": 2 + i % 30,
    }
    for i in range(90)
]


@pytest.fixture
def recipe(tmp_path: Path, write_recipe: Callable[..., Path]) -> Path:
    """A made log with copies; its target has no weights, so nothing may load it."""
    (tmp_path / "weightless").mkdir()
    (tmp_path / "weightless" / "config.json").write_text('{"max_position_embeddings": 20}')
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*LINES, *LINES[:7]]))
    (tmp_path / "eval.jsonl").write_text(json.dumps({"prompt": "nothing like this in the log"}) + "\n")
    mix = {
        "sources": [{"kind": "messages", "path": "log.jsonl"}],
        "limit": 60,
        "domains": {"rules": [{"match": "topic1", "domain": "ones"}]},
        "contamination": [str(tmp_path / "eval.jsonl")],
    }
    return write_recipe(mix=mix, target={"model": str(tmp_path / "weightless")})


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["inspect-mix", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def test_tables_tell_of_the_log_and_the_mix(recipe: Path) -> None:
    told = run(recipe)
    for row in (
        r"read\s+97",
        r"left out: exact copy\s+7",
        r"left out: over the mix's shares or limit\s+30",
        r"the log, as compared below: 97 records",
        r"97 records read: 60 conversations with 60 turns; left out: 30 over the mix's shares or limit, 7 exact copy",
        r"ones\s+\d+",
        r"t0\.7\s+\d+",
        r"kind email, replaced 97",
        r"of them near this mix's train\s+0",
        r"of them near \S*eval\.jsonl\s+0",
        r"all together\s+0\.\d+ \(0\.\d+",
        r"prompt, holdout\s+\d+",
        r"answer, log\s+\d+",
        r"counted by the log for 100% of its records",
        r"of the mix, prompts of 20 tokens or more\s+60",
        r"2026-09-2\d\s+\d+",
        r"<ip>:8000 2\s+\d+\s+\d+",
        r"all\s+\d+\s+\d+",
        r"  load:\n    # engine: the log does not tell; .*\n    batch_sizes: {",
    ):
        assert re.search(row, told), row
    assert not any(secret in told for secret in ("joe", "bot number", "10.0.0"))
    again = run(recipe)
    assert "mix: done" in again or again.count("Lengths") == 1


SMALL = ("gate.min_clusters=1", "gate.min_domain_clusters=1", "capture.max_new_tokens=64")
"""Overrides by which ten conversations are no small holdout, and the log's answers are not too long."""


def test_the_headline_is_the_same_in_text_page_and_json(recipe: Path, tmp_path: Path) -> None:
    """7 copies of 97 records are few; the holdout is small, no prompt fits a context of 20 tokens, answers are long."""
    told, page = run(recipe), tmp_path / "mix.html"
    shown = json.loads(run(recipe, "--json", "--out", page).splitlines()[-1])
    assert [notice["about"] for notice in shown["needs_attention"]] == ["few turns", "cut", "cut"]
    assert shown["needs_attention"][1]["text"] == "60 of 60 prompts do not fit the target's context of 20 tokens"
    text = html.unescape(re.sub("<[^>]+>", "", page.read_text()))
    for notice in shown["needs_attention"]:
        assert f"- {notice['about']}: {notice['text']}\n" in told
        assert f"{notice['about']}: {notice['text']}" in text
    assert "Needs attention\n" in told and f"({shown['note']})" in told and shown["note"] in text
    titles = [table["title"] for table in shown["tables"]]
    assert titles[0] == "What became of the log" and all(title in told for title in titles)


def test_a_sound_mix_needs_none_and_one_row_is_a_line(asked: Path, tmp_path: Path) -> None:
    told = run(asked, *SMALL, "--out", tmp_path / "mix.html")
    assert f"{NOTHING}\n(90 turns were looked at for prompts that are not the logged ones)" in told
    assert NOTHING in (tmp_path / "mix.html").read_text()
    assert re.search(r"Personal data and secrets: kind email, replaced \d+\n", told)
    assert re.search("Of every record: .*tools without", told) and "By tools" not in told


def test_a_prompt_that_the_log_does_not_show_is_in_doubt(asked: Path) -> None:
    """One line of ten counts seven tokens more than its prompt has; as most are right, that one is another prompt."""
    log = asked.parent / "log.jsonl"
    # What was redacted is not compared.
    lines = re.sub(", mail joe[0-9]+@acme.org", "", log.read_text()).splitlines()[: len(LINES)]
    log.write_text("\n".join(lines))
    done = CliRunner().invoke(app, ["inspect-mix", str(asked), "--prompts", "200", "--json"])
    ids = {one["where"]: one["ids"] for one in map(json.loads, done.stdout.splitlines()) if "ids" in one}
    counts = [len(ids[f"log.jsonl:{number + 1}"]) + (0 if number % 10 else 7) for number in range(len(lines))]
    logged = [{**json.loads(line), "response": {"usage": {"prompt_tokens": n}}} for line, n in zip(lines, counts)]
    log.write_text("\n".join(map(json.dumps, logged)))
    shown = json.loads(run(asked, *SMALL, "--json").splitlines()[-1])
    (notice,) = shown["needs_attention"]
    assert notice["about"] == "prompts in doubt"
    assert notice["text"].startswith(
        "9 of 90 turns looked at are not asked, 9 of them as its prompt has another number"
    )


@pytest.mark.parametrize(
    ("changed", "about", "text"),
    [
        ({"contamination": {"near_train": 2}}, "contamination", "2 clusters of the holdout are near this mix's train"),
        ({"contamination": {"near_evaluation_sets": {"e.jsonl": 3}}}, "contamination", "3 clusters .* near e.jsonl"),
        ({"left_out": {CONTAMINATED: 4}}, "contamination", "4 conversations were left out"),
        ({"unanswered": {"smalltalk": "copies"}}, "no turns", "nothing is asked of smalltalk"),
        ({"clusters": {"holdout": 0}}, "few turns", "the holdout has 0 clusters .* gate.min_clusters = 1"),
        (
            {"conversations": {"holdout": {"code": 5}}},
            "few turns",
            r"support \(0\); below gate.min_domain_clusters = 1",
        ),
        (
            {"left_out": {"failed request": 8, "broken rule": 1, "health check": 40}},
            "left out",
            r"17% of the requests \(9 of 54\) are left out: 8 failed request, else broken rule",
        ),
        ({"left_out": {COPY: 30, NEAR_COPY: 10}}, "duplicates", r"43% of the log \(40 of 93 records\)"),
        ({"odd_clocks": {"count": 2, "some": ["1970-01-01 at a:1"]}}, "clocks", r"2 records .* \(1970-01-01 at a:1\)"),
        ({"in_flight": {"skewed": 5}}, "clocks", "5 requests have times of two clocks"),
        ({"without_time": 93}, "clocks", "93 of 93 records have no time, which mix.half_life_days needs"),
        ({"sources": [{"unfollowed": {"guided_json": 9}}]}, "not followed", "guided_json shaped 9 logged answers"),
    ],
)
def test_each_thing_that_needs_attention_is_said_once(
    asked: Path, changed: dict[str, Any], about: str, text: str
) -> None:
    loaded = load_recipe(asked, SMALL)
    if "without_time" in changed:
        loaded = load_recipe(asked, [*SMALL, "mix.half_life_days=9"])
    run(asked, *SMALL)
    found = profile(mix_stage(Stages(Workspace(loaded))).folder)
    assert headline(found, load_recipe(asked, SMALL)).notices == []
    manifest = {**found.manifest}
    for name, value in changed.items():
        inner = name in ("contamination", "clusters", "conversations")
        manifest[name] = {**manifest[name], **value} if inner else value
    (notice,) = headline(found._replace(manifest=manifest), loaded).notices
    assert notice.about == about and re.search(text, notice.text), notice


def test_one_domain_beside_others_that_hardly_count_and_answers_beyond_the_limit(asked: Path) -> None:
    run(asked, *SMALL)
    recipe = load_recipe(asked, SMALL)
    found = profile(mix_stage(Stages(Workspace(recipe))).folder)
    shares = [
        one._replace(counts={**one.counts, MIX: np.array([9, 91])}) if one.key == "domain" else one
        for one in found.shares
    ]
    (notice,) = headline(found._replace(shares=shares), recipe).notices
    assert notice.text == "support is 91% of the mix; mix.weights gives the others a larger share"
    limit = recipe.capture.max_new_tokens
    tokens = {**found.tokens, "answer": {MIX: np.array([limit] * 90 + [limit + 1] * 10)}}
    (notice,) = headline(found._replace(tokens=tokens), recipe).notices
    assert notice.text.startswith(f"10% of the logged answers are longer than capture.max_new_tokens = {limit}")


def test_what_a_retraining_would_add_is_said(recipe: Path) -> None:
    told = " ".join(run(recipe).split())
    assert "retrain.old_share 0.25: a retraining adds conversations of the champion's mix until they are this" in told
    assert "old_share" not in run(recipe, "retrain.old_share=0")


def test_a_page_needs_nothing_else_and_is_the_same_again(recipe: Path, tmp_path: Path) -> None:
    run(recipe, "--out", tmp_path / "a.html")
    run(recipe, "--out", tmp_path / "b.html")
    page = (tmp_path / "a.html").read_text()
    assert page == (tmp_path / "b.html").read_text()
    # Nothing in it runs or loads anything, as in the report.
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
    assert "default-src 'none'" in policy and "script-src" not in policy and "<script" not in page
    assert page.count("<svg") >= 6 and page.count("<table>") >= 10 and "By system" in page
    assert not re.search(r'(src|href)="http', page) and "joe" not in page


def test_a_page_ends_in_html_and_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "c.html").mkdir()
    for place, rule in (("pictures", r"pictures: must end in \.html"), ("c.html", r"c\.html: is a folder")):
        with pytest.raises(InputError, match=rule):
            check_out(tmp_path / place)


def messages_of(number: int) -> list[dict[str, str]]:
    """The request without its answer."""
    messages: Any = LINES[number]["messages"]
    return list(messages[:2])


@pytest.fixture
def asked(tmp_path: Path, write_recipe: Callable[..., Path], tiny_target_folder: Path) -> Path:
    """A log with copies and a failed request, for a target whose template can be read."""
    pairs: list[dict[str, Any]] = [
        {"request": {"messages": messages_of(i)}, "domain": line["domain"]} for i, line in enumerate(LINES)
    ]
    pairs += [*pairs[:3], {**pairs[5], "response": {"error": "no"}}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in pairs))
    sources = [{"kind": "openai", "path": "log.jsonl"}]
    return write_recipe(mix={"sources": sources}, target={"model": str(tiny_target_folder)})


def test_prompts_are_shown_as_the_target_reads_them(asked: Path, tiny_target_folder: Path) -> None:
    done = CliRunner().invoke(app, ["inspect-mix", str(asked), "--prompts", "200", "--json"])
    assert done.exit_code == 0, done.output
    shown = [json.loads(line) for line in done.stdout.splitlines()]
    prompts = [one for one in shown if one["kind"] == "prompt"]
    tokenizer = AutoTokenizer.from_pretrained(tiny_target_folder)
    assert len(prompts) == len(LINES)
    for one in prompts:
        number = int(one["where"].removeprefix("log.jsonl:"))
        system, user = messages_of(number - 1)
        said = {**user, "content": re.sub(r"joe\d+@acme.org", "<email>", user["content"])}
        text = tokenizer.apply_chat_template([system, said], add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert (one["text"], one["ids"], one["supervised_from"]) == (text, ids, len(ids))
        changed: dict[str, Any] = {"redacted": {"email": 1}}
        assert one["changed"] == changed | ({"stands_for": {"exact copy": 1}} if number <= 3 else {})
        assert one["domain"] == LINES[number - 1]["domain"]
    left_out = {one["reason"]: one for one in shown if one["kind"] == "left_out"}
    assert left_out["failed request"]["count"] == 1 and left_out["failed request"]["where"] == ["log.jsonl:94"]
    assert left_out["exact copy"]["count"] == 3
    assert sorted(left_out["exact copy"]["where"]) == ["log.jsonl:91", "log.jsonl:92", "log.jsonl:93"]


def test_what_a_request_left_to_its_server_is_the_models_own(
    tmp_path: Path, write_recipe: Callable[..., Path], tiny_target_folder: Path
) -> None:
    """As vLLM's `--generation-config auto` and SGLang's `--sampling-defaults model`, both of which are the default."""
    shutil.copytree(tiny_target_folder, tmp_path / "model")
    own = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": None, "presence_penalty": 1.5}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(own))
    named: list[dict[str, Any]] = [{}, {"top_p": 1.0}, {"temperature": 0, "top_k": -1, "top_p": 0.5}]
    pairs = [
        {"request": {"messages": messages_of(i), **named[i % 3]}, "domain": line["domain"]}
        for i, line in enumerate(LINES)
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in pairs))
    (tmp_path / "plain.jsonl").write_text("".join(json.dumps({"prompt": f"{i} " * 9}) + "\n" for i in range(9)))
    sources = [
        {"kind": "openai", "path": "log.jsonl"},
        {"kind": "prompts", "path": "plain.jsonl", "domain": "code"},
    ]
    recipe = write_recipe(mix={"sources": sources}, target={"model": str(tmp_path / "model")})
    done = CliRunner().invoke(app, ["inspect-mix", str(recipe), "--prompts", "200", "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, set[str]] = {}
    for one in map(json.loads, done.stdout.splitlines()):
        if one["kind"] == "prompt" and one["split"] == "train":
            path, number = one["where"].split(":")
            kind = str((int(number) - 1) % 3) if path == "log.jsonl" else "plain"
            found.setdefault(kind, set()).add(json.dumps([one["sampling"][0], one.get("from_generation_config")]))
    sampled = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.0}
    three = {"temperature": 0.7, "top_k": 20, "top_p": 0.8}
    assert found == {
        "0": {json.dumps([sampled, three])},
        "1": {json.dumps([{**sampled, "top_p": 1.0}, {"temperature": 0.7, "top_k": 20}])},
        "2": {json.dumps([{**sampled, "temperature": 0.0, "top_k": 0, "top_p": 0.5}, None])},
        "plain": {json.dumps([{**sampled, "temperature": 0.0, "top_k": 0, "top_p": 1.0}, None])},  # no request
    }
    assert "generation_config.json: presence_penalty 1.5: vLLM draws so" in " ".join(done.stderr.split())
    assert "from generation_config.json: temperature 0.7 top_k 20" in run(recipe, "--prompts", "200")


def test_prompts_as_long_as_the_context_are_not_shown_as_asked(
    asked: Path, write_recipe: Callable[..., Path], tiny_target_folder: Path
) -> None:
    sources = [{"kind": "openai", "path": "log.jsonl"}]
    recipe = write_recipe(mix={"sources": sources}, target={"model": str(tiny_target_folder), "context": 87})
    done = CliRunner().invoke(app, ["inspect-mix", str(recipe), "--prompts", "200", "--json"])
    prompts = [one for one in map(json.loads, done.stdout.splitlines()) if one["kind"] == "prompt"]
    assert 0 < sum("refused" in one for one in prompts) < len(prompts)
    assert all("context 87" in one["refused"] if "refused" in one else len(one["ids"]) < 87 for one in prompts)


def test_a_few_prompts_of_a_domain_in_words(asked: Path) -> None:
    run(asked, "--prompts", "1")
    told = run(asked, "--prompts", "3", "--domain", "code")
    assert len(re.findall(r"log\.jsonl:\d+, turn 0 \(code, (?:train|selection|holdout)\)", told)) == 3
    assert told.count("supervised: the answer, from token") == 3 and told.count("redacted: 1 email") == 3
    assert "joe" not in told and "(support" not in told
    assert told == run(asked, "--prompts", "3", "--domain", "code")
    for options, rule in (
        (["--prompts", "3", "--domain", "none"], "--domain none: the mix has no such domain; it has code, support"),
        (["--domain", "code"], "--domain code: is of --prompts, which is not given"),
        (["--prompts", "3", "--out", "x"], "--out x: is of the tables; give it without --prompts"),
    ):
        result = CliRunner().invoke(app, ["inspect-mix", str(asked), *options])
        assert isinstance(result.exception, InputError) and str(result.exception) == rule
