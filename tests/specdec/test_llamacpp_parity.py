"""Our counts against llama.cpp's, on the very files that we write: greedy, float32, every K, every way to end."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_counts import EngineCounts, EngineRound, engine_rounds, matched_runs
from llamacpp import LlamaServer
from trained import PROMPTS, Trained
from transformers import AutoConfig, LlamaForCausalLM

from draftforge.eval.engine_metrics import parse
from draftforge.eval.request_metrics import counters_of
from draftforge.specdec.decoder import Generation, Request, generate
from draftforge.specdec.drafts.eagle3 import Eagle3Config, Eagle3Draft
from draftforge.specdec.formats import write_draft
from draftforge.specdec.formats.gguf.llama import read_llama, write_llama
from draftforge.specdec.models import CausalModel
from draftforge.specdec.proposers.factory import make_proposer
from draftforge.specdec.proposers.tree_settings import ConfidentChain, OwnTree
from draftforge.specdec.requests import Round
from draftforge.specdec.sampling_settings import SamplingSettings
from draftforge.specdec.targets import Target

pytestmark = pytest.mark.slow
NAMES = ("small", "eagle3", "eagle3-reduced", "dflash", "dflash-reduced", "dspark", "dspark-reduced")
KINDS = {"small": "DRAFT_SIMPLE"} | {name: f"DRAFT_{name.upper()}" for name in ("eagle3", "dflash", "dspark")}
LENGTHS = (2, 3, 40)
PAIRS = [("small", 1), ("small", 5), ("eagle3", 4), ("eagle3-reduced", 2), ("dflash", 3), ("dflash-reduced", 5)]
PAIRS += [("dspark", 5), ("dspark", 1), ("dspark-reduced", 3)]
"""Every draft and every K, if not each with each."""
Texts = list[tuple[list[int], list[int]]]


@pytest.fixture(scope="module")
def target(trained_drafts: Trained) -> Target:
    return trained_drafts.target()


@pytest.fixture(scope="module")
def drafts(trained_drafts: Trained) -> dict[str, Any]:
    return {name: trained_drafts.draft(name) for name in NAMES}


@pytest.fixture(scope="module")
def files(target: Target, drafts: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    write_files(folder, target, drafts)
    return folder


@pytest.fixture(scope="module")
def texts(target: Target) -> Texts:
    """Each prompt, and its greedy answer of 64 tokens."""
    prompts = [target.tokenizer(text).input_ids for text in PROMPTS]
    answers = dict(generate(target, None, [Request(ids, SamplingSettings(), 0, 64) for ids in prompts]))
    return [(ids, answers[n].tokens) for n, ids in enumerate(prompts)]


def write_files(folder: Path, target: Target, drafts: dict[str, Any]) -> None:
    write_llama(target.model, target.tokenizer, folder / "target.gguf")
    for name, draft in drafts.items():
        (folder / name).mkdir(exist_ok=True)
        write_draft(draft, folder / name, "gguf", tokenizer=target.tokenizer)


def serve(folder: Path, name: str, K: int, p_min: float = 0.0) -> LlamaServer:
    kind = KINDS[name.partition("-")[0]]
    return LlamaServer(folder / "target.gguf", folder / name / "draft.gguf", kind, K, p_min)


def decode(
    target: CausalModel,
    draft: Any,
    ids: list[int],
    length: int,
    K: int,
    stops: frozenset[int],
    tree: OwnTree | None = None,
) -> Generation:
    proposer = make_proposer(draft, target, tree) if draft is not None else None
    request = Request(ids, SamplingSettings(), 0, length, stops)
    ((_, answer),) = generate(target, proposer, [request], draft_tokens=K)
    return answer


@pytest.mark.parametrize(("name", "K"), PAIRS)
def test_counts_and_tokens_equal_the_decoders(
    target: Target, drafts: dict[str, Any], files: Path, name: str, K: int
) -> None:
    server = serve(files, name, K)
    count = accepted = drafted = 0
    for text, length in itertools.product(PROMPTS, LENGTHS):
        ids = target.tokenizer(text).input_ids
        answer = decode(target, drafts[name], ids, length, K, frozenset())
        rounds = [EngineRound(*round_[:2]) for round_ in answer.rounds if round_.drafted]
        found = server.complete(ids, length)
        assert found.tokens == answer.tokens and len(answer.tokens) == length
        assert found.counts == EngineCounts.from_rounds(rounds, K)
        accepted, drafted = accepted + found.counts.accepted, drafted + found.counts.drafted
        count += found.counts.rounds
    assert 0.6 * count < accepted < drafted  # both verdicts were compared


@pytest.mark.parametrize("name", ["dspark", "dspark-reduced"])
def test_confidence_ends_a_draft_where_the_server_ends_it(
    target: Target, drafts: dict[str, Any], files: Path, name: str
) -> None:
    """Its p_min is our threshold; a round that drafts nothing is none of its rounds."""
    K, drafted, rounds = 5, 0, 0
    tree = ConfidentChain(kind="confident", levels=K, confidence_threshold=0.6)
    server = serve(files, name, K, tree.confidence_threshold)
    for text, length in itertools.product(PROMPTS, LENGTHS):
        ids = target.tokenizer(text).input_ids
        answer = decode(target, drafts[name], ids, length, K, frozenset(), tree)
        found = server.complete(ids, length)
        assert found.tokens == answer.tokens and len(answer.tokens) == length
        assert found.counts == EngineCounts.from_rounds([EngineRound(*r[:2]) for r in answer.rounds if r.drafted], K)
        drafted, rounds = drafted + found.counts.drafted, rounds + found.counts.rounds
    assert rounds < drafted < 0.9 * K * rounds  # some rounds were cut


def test_what_the_server_says_of_itself_is_read_as_it_counts(
    target: Target, drafts: dict[str, Any], files: Path
) -> None:
    """Its metrics are the sum of its answers' counts; its responses give the decoder's own rounds."""
    server, K = serve(files, "eagle3", 4), 4
    before, answers, rounds, tokens = parse(server.metrics(), "before"), [], 0, 0
    for text, length in itertools.product(PROMPTS, LENGTHS):
        ids = target.tokenizer(text).input_ids
        own = decode(target, drafts["eagle3"], ids, length, K, frozenset())
        rounds, tokens = rounds + len(own.rounds), tokens + length - 1
        body = {"prompt": ids, "n_predict": length, "temperature": 0.0, "cache_prompt": False, "ignore_eos": True}
        answers.append(server.post("/completion", body))
    counted = parse(server.metrics(), "after").since(before)
    timed = counters_of("\n".join(map(json.dumps, answers)), "responses")
    assert (counted.accepted, counted.drafted) == (timed.accepted, timed.drafted)
    assert sum(counted.accepted_at) == counted.accepted and not counted.restarted
    assert timed.rounds == rounds and timed.tau == pytest.approx(tokens / rounds)
    assert counted.rounds < timed.rounds  # the last one drafts nothing and is no round of its metrics


@pytest.mark.parametrize(("name", "K"), [("small", 1), ("eagle3", 4), ("dflash-reduced", 3)])
def test_an_answer_that_ends_inside_a_draft_is_booked_as_counting_says(
    trained_drafts: Trained,
    drafts: dict[str, Any],
    texts: Texts,
    tmp_path: Path,
    name: str,
    K: int,
) -> None:
    target, differing = trained_drafts.target(), 0
    for stop in (".", ","):
        target.tokenizer.eos_token = stop
        write_files(tmp_path, target, {name: drafts[name]})
        server, stop_id = serve(tmp_path, name, K), target.tokenizer.eos_token_id
        for ids, beyond in texts:
            answer = decode(target, drafts[name], ids, 60, K, frozenset({stop_id}))
            runs = matched_runs(target, make_proposer(drafts[name], target), ids, beyond[: 60 + K], K)
            found = server.complete(ids, 60, ignore_eos=False)
            assert found.tokens == answer.tokens and answer.finish == "stop"
            expected = EngineCounts.from_rounds(engine_rounds("llamacpp", runs, K, 60, len(answer.tokens)), K)
            assert found.counts == expected
            differing += expected.accepted != sum(round_.accepted for round_ in answer.rounds)
    assert bool(differing) == (K > 1)  # the two laws differ where a stop is inside a draft, and only there


SCALINGS = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
}


NORMS = ("norm_before_residual", "norm_before_fc", "norm_before_fc norm_before_residual")


@pytest.mark.parametrize("kind", [*NORMS, *SCALINGS])
def test_a_head_of_another_kind_counts_the_same(
    kind: str,
    target: Target,
    drafts: dict[str, Any],
    plain_rounds: list[list[Round]],
    texts: Texts,
    tmp_path: Path,
) -> None:
    plain = drafts["eagle3"]
    change: dict[str, Any] = dict.fromkeys(kind.split(), True)
    if kind in SCALINGS:
        change = {"rope_scaling": {"rope_type": kind, **SCALINGS[kind]}}
    draft = Eagle3Draft(Eagle3Config.model_validate({**plain.config.model_dump(), **change}))
    draft.load_state_dict(draft.state_dict() | plain.state_dict())
    if draft.fc.input_norm is not None:
        with torch.no_grad():  # other weights than ones, of about the length that the features had without a norm
            draft.fc.input_norm.weight.uniform_(1.0, 5.0, generator=torch.Generator().manual_seed(0))
    write_files(tmp_path, target, {"eagle3": draft.eval()})
    server, found = serve(tmp_path, "eagle3", 4), []
    for ids, _ in texts:
        found.append(decode(target, draft, ids, 60, 4, frozenset()).rounds)
        counts = EngineCounts.from_rounds([EngineRound(*r[:2]) for r in found[-1] if r.drafted], 4)
        assert server.complete(ids, 60).counts == counts
    assert found != plain_rounds  # the change does something


@pytest.fixture(scope="module")
def plain_rounds(target: Target, drafts: dict[str, Any], texts: Texts) -> list[list[Round]]:
    return [decode(target, drafts["eagle3"], ids, 60, 4, frozenset()).rounds for ids, _ in texts]


def test_scaled_rotary_frequencies_are_llamacpps(trained_drafts: Trained, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(trained_drafts.target_folder)
    factors = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    config.rope_parameters = {"rope_type": "llama3", "rope_theta": 10000.0, **factors}
    target, scaled = trained_drafts.target(), LlamaForCausalLM(config).eval()
    scaled.load_state_dict(target.model.state_dict())
    ids = target.tokenizer(PROMPTS[0]).input_ids
    write_llama(scaled, target.tokenizer, tmp_path / "target.gguf")
    found = LlamaServer(tmp_path / "target.gguf").complete(ids, 60).tokens
    assert found == decode(CausalModel(scaled), None, ids, 60, 0, frozenset()).tokens
    assert found != decode(target, None, ids, 60, 0, frozenset()).tokens
    again = read_llama(tmp_path / "target.gguf")
    assert found == decode(CausalModel(again), None, ids, 60, 0, frozenset()).tokens


def test_plain_greedy_decoding_equals_ours(texts: Texts, files: Path) -> None:
    server = LlamaServer(files / "target.gguf")
    for ids, expected in texts:
        found = server.complete(ids, 60)
        assert found.tokens == expected[:60]
        assert found.counts == (0, 0, 0, ())


def test_a_draft_whose_rows_are_not_permuted_is_noticed(
    target: Target, drafts: dict[str, Any], files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison above has teeth: this file loads without a word and drafts worse."""
    monkeypatch.setattr("draftforge.specdec.formats.gguf.llama._permute", lambda name, tensor, config, split: tensor)
    (tmp_path / "eagle3").mkdir()
    write_draft(drafts["eagle3"], tmp_path / "eagle3", "gguf", tokenizer=target.tokenizer)
    (tmp_path / "target.gguf").symlink_to(files / "target.gguf")
    ids = target.tokenizer(PROMPTS[0]).input_ids
    wrong, right = (serve(folder, "eagle3", 4).complete(ids, 40) for folder in (tmp_path, files))
    assert wrong.tokens == right.tokens and wrong.counts.accepted < right.counts.accepted
