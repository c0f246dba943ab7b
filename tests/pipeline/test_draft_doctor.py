"""The doctor on drafts: faults that are planted into healthy ones are named and mended, and nothing else is."""

import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from trained import Trained, sentences

from draftforge import cli
from draftforge.data.conversation import Message
from draftforge.errors import InputError, MissingFileError, OwnershipError
from draftforge.pipeline import draft_doctor
from draftforge.pipeline.cli_options import DraftDoctorOptions
from draftforge.pipeline.doctor_answers import Asked, rendered_otherwise
from draftforge.pipeline.doctor_report import Diagnosis, print_diagnosis
from draftforge.pipeline.draft_doctor import Examination
from draftforge.specdec.decoder import decode_rounds
from draftforge.specdec.diagnosis.reading import Reading, Scene
from draftforge.specdec.diagnosis.repairs import refusal_of, repaired
from draftforge.specdec.diagnosis.vocabulary_changes import nearest_ids, vocabulary
from draftforge.specdec.diagnosis.weight_changes import halves
from draftforge.specdec.drafts.layers import vocabulary_maps
from draftforge.specdec.formats import read_draft
from draftforge.specdec.requests import DecodeRun, Request
from draftforge.specdec.sampling_settings import SamplingSettings
from draftforge.specdec.targets import Target

SCRIPT = Path(__file__).parents[2] / "scripts" / "plant_faults.py"
ANSWERS, TOKENS = 16, 30
NOISE = 1.3


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plant_faults", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["plant_faults"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def answering(trained_drafts: Trained) -> Target:
    return trained_drafts.target()


@pytest.fixture(scope="module")
def answers(answering: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts of the kind that target and drafts were trained on, and the target's own answers."""
    lines = sentences(ANSWERS, 999).splitlines()
    prompts = [answering.tokenizer(line).input_ids[: 20 + number % 9] for number, line in enumerate(lines)]
    asked = [Request(ids, SamplingSettings(), 0, TOKENS, frozenset()) for ids in prompts]
    done = dict(one for step in decode_rounds(DecodeRun(answering, None, asked, batch_size=ANSWERS)) for one in step)
    path = tmp_path_factory.mktemp("doctor") / "answers.jsonl"
    rows = [{"prompt_ids": prompts[number], "answer_ids": done[number].tokens} for number in sorted(done)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def copied(drafts: Trained, name: str, tmp_path: Path) -> Path:
    """A copy of a draft's folder, which a test may change."""
    place = tmp_path / "head"
    shutil.copytree(drafts.draft_folders[name], place)
    return place


@contextmanager
def changed(place: Path) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of a draft's folder, which are written back."""
    tensors = load_file(place / "model.safetensors")
    yield tensors
    save_file(tensors, place / "model.safetensors")


def examined(draft: Path, target: Target, answers: Path, **options: Any) -> Diagnosis:
    given = DraftDoctorOptions(draft=draft, target=target.settings.model, answers=answers, **options)
    return Examination(given, target).run()


FAULTS = [
    ("eagle3-reduced", "rope_theta lost", "vllm"),
    ("eagle3-reduced", "d2t holds ids", "speculators"),
    ("eagle3-reduced", "d2t is zeros", "vllm"),
    ("eagle3-reduced", "embeddings of another target", "vllm"),
    ("eagle3-reduced", "both lists of captured layers alike", "vllm"),
    ("eagle3-reduced", "partial_rotary_factor", "vllm"),
    ("eagle3-reduced", "int8 with scales", "vllm"),
    ("eagle3-reduced", "state before embedding", "vllm"),
    ("eagle3-reduced", "norm_before_residual not said", "speculators"),
    ("eagle", "rows of query and key interleaved", "vllm"),
    ("dflash", "rows of the key alone interleaved", "vllm"),
    ("eagle", "key and value exchanged", "vllm"),
    ("dflash-reduced", "d2t of another draft", "vllm"),
    ("medusa", "heads in reverse", "vllm"),
    ("dspark", "anchor that does not draft", "speculators"),
    ("small", "rope_theta of another model", "hf"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("draft", "name", "layout"), FAULTS, ids=[f"{d}: {n}, {form}" for d, n, form in FAULTS])
def test_a_planted_fault_is_named_and_mended(
    draft: str,
    name: str,
    layout: str,
    script: ModuleType,
    trained_drafts: Trained,
    answering: Target,
    answers: Path,
    tmp_path: Path,
) -> None:
    healthy = trained_drafts.draft_folders[draft]
    fault = next(one for one in script.FAULTS if one.name == name)
    place = script.planted(healthy, tmp_path, fault, layout, answering)
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    found = examined(place, answering, answers)
    assert found.verdict == "fault" and found.causes[0]["hypothesis"] in fault.names, found.causes
    assert len(found.causes) == 1, found.causes
    sound = Examination(DraftDoctorOptions(draft=healthy, target=answering.settings.model, answers=answers), answering)
    (patient,), _ = sound._patients()
    tau = sound._bench([patient]).measure(patient.reading).tau.value
    assert found.after is not None and found.after["tau"]["value"] >= 0.99 * tau
    # The draft itself is as it was; beside it lies one that needs no doctor.
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before
    assert found.corrected == f"{place}-corrected"
    mended = Examination(DraftDoctorOptions(draft=Path(found.corrected), target="t", answers=answers), answering)
    (patient,), refusal = mended._patients()
    assert not refusal and mended._bench([patient]).measure(patient.reading).tau.value >= 0.99 * tau


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["eagle3-reduced", "medusa", "small"])
def test_a_healthy_draft_is_healthy(draft: str, trained_drafts: Trained, answering: Target, answers: Path) -> None:
    found = examined(trained_drafts.draft_folders[draft], answering, answers)
    assert (found.verdict, found.causes, found.corrected) == ("healthy", [], None)
    assert found.before is not None and found.after is None


@pytest.mark.slow
def test_a_matrix_of_zeros_is_named_however_much_is_accepted(
    trained_drafts: Trained, answering: Target, answers: Path, tmp_path: Path
) -> None:
    place = copied(trained_drafts, "dspark", tmp_path)
    with changed(place) as tensors:
        tensors["markov_head.markov_w2.weight"].zero_()
        tensors["norm.weight"].fill_(1)  # may have been left so
    found = examined(place, answering, answers)
    assert found.verdict == "fault" and found.corrected is None
    (cause,) = found.causes
    assert cause["what"] == "tensor markov_head.markov_w2.weight holds 0 everywhere" and cause["tau_after"] is None
    assert "tensor norm.weight holds 1 everywhere" in found.evidence


@pytest.mark.slow
def test_a_likely_fault_is_named_beside_another_one(
    script: ModuleType, trained_drafts: Trained, answering: Target, answers: Path, tmp_path: Path
) -> None:
    """One that costs 5 %, behind one that costs most."""
    two = script.both(script.exchanged("k_proj", "v_proj"), script.flipped("norm_before_residual"))
    fault = script.Fault("two", (), (), (), two)
    place = script.planted(trained_drafts.draft_folders["eagle3"], tmp_path, fault, "vllm", answering)
    found = examined(place, answering, answers)
    assert [one["hypothesis"] for one in found.causes] == ["weights in another order", "norm flags"]


@pytest.mark.slow
def test_a_healthy_draft_of_another_target_is_said_to_be_one(
    trained_drafts: Trained, answering: Target, answers: Path, tmp_path: Path
) -> None:
    place = copied(trained_drafts, "small", tmp_path)
    meta = json.loads((place / "draftforge.json").read_text())
    (place / "draftforge.json").write_text(json.dumps(meta | {"target_fingerprint": "ab" * 32}))
    found = examined(place, answering, answers)
    assert found.verdict == "healthy" and any("its lineage names target ababab" in one for one in found.evidence)


@pytest.mark.slow
def test_a_trifle_more_of_nothing_restores_nothing(
    trained_drafts: Trained, answering: Target, answers: Path, tmp_path: Path
) -> None:
    """Rows of a head that never were the target's, in an order that no file tells."""
    place = copied(trained_drafts, "eagle3-reduced", tmp_path)
    with changed(place) as tensors:
        rows = tensors["lm_head.weight"]
        tensors["lm_head.weight"] = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(11))].clone()
    found = examined(place, answering, answers)
    assert found.verdict in ("low", "undertrained") and not found.causes and found.corrected is None


def test_captured_layers_two_too_low_are_repaired(trained_drafts: Trained, answering: Target, tmp_path: Path) -> None:
    """One less than files of DFlash count, which begin at the embeddings' layer."""
    place = copied(trained_drafts, "dflash", tmp_path)
    config = json.loads((place / "config.json").read_text())
    config["dflash_config"]["target_layer_ids"] = [-1, 0, 1]
    (place / "config.json").write_text(json.dumps(config))
    draft, refusal = refusal_of(place, answering)
    assert draft is None
    layers = [one.draft.target_layers for one in repaired(place, refusal, answering)]
    assert layers == [(1, 2, 3)]


def test_ids_of_a_head_are_those_of_the_nearest_rows_of_the_vocabulary(
    trained_drafts: Trained, answering: Target
) -> None:
    """Where the target's table has rows beyond its vocabulary, too."""
    draft: Any = read_draft(trained_drafts.draft_folders["dflash-reduced"], answering.num_layers)
    ids = draft.draft_ids.clone()
    draft.d2t, draft.t2d = vocabulary_maps(torch.arange(len(ids)), len(ids), answering.vocab_size)
    rows = torch.cat([answering.model.get_output_embeddings().weight, draft.lm_head.weight]).detach()
    padded = SimpleNamespace(get_output_embeddings=lambda: SimpleNamespace(weight=rows))
    changes = vocabulary(Reading(draft), Scene(SimpleNamespace(model=padded)))  # type: ignore[arg-type]
    (found,) = [one for one in changes if "began as rows" in one.what]
    assert torch.equal(found.reading.draft.draft_ids, ids)
    # No id twice, and none for rows of another width.
    twice = nearest_ids(SimpleNamespace(weight=draft.lm_head.weight[[0, 0, 1]]), rows[: answering.vocab_size])
    assert twice is not None and len(set(twice.tolist())) == 3 and ids[0] in twice and ids[1] in twice
    assert nearest_ids(SimpleNamespace(weight=torch.ones(3, 5)), rows) is None


@pytest.mark.slow
def test_a_draft_that_has_learned_little_is_undertrained(
    trained_drafts: Trained, answering: Target, answers: Path, tmp_path: Path
) -> None:
    """Half of the way from random weights to trained ones: right now and then, and no change makes it better."""
    place = copied(trained_drafts, "eagle3-reduced", tmp_path)
    with changed(place) as tensors:
        draw = torch.Generator().manual_seed(3)
        for name, tensor in tensors.items():
            if name.endswith("proj.weight") or name in ("fc.weight", "lm_head.weight"):
                tensors[name] = tensor + NOISE * tensor.std() * torch.randn(tensor.shape, generator=draw)
    found = examined(place, answering, answers)
    assert found.verdict == "undertrained" and not found.causes
    assert any("the first token is right in" in line for line in found.evidence)


def served(tmp_path: Path, rounds: int, accepted: tuple[int, ...]) -> Path:
    path, at = tmp_path / "metrics.txt", enumerate(accepted)
    lines = [f"vllm:spec_decode_num_drafts_total {rounds}", f"vllm:spec_decode_num_draft_tokens_total {3 * rounds}"]
    lines += [f"vllm:spec_decode_num_accepted_tokens_total {sum(accepted)}"]
    lines += [f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{k}"}} {count}' for k, count in at]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.slow
def test_low_served_counters_of_a_healthy_draft_are_the_engines_fault(
    trained_drafts: Trained, answering: Target, answers: Path, tmp_path: Path
) -> None:
    draft = trained_drafts.draft_folders["eagle3-reduced"]
    low = examined(draft, answering, answers, served=str(served(tmp_path, 4000, (400, 40, 4))))
    assert low.verdict == "engine" and low.served is not None and low.served["shape"] == "all"
    assert any("captures other layers" in one["cause"] for one in low.served["causes"])
    # An engine that exchanges embedding and state serves what that reading gives.
    options = DraftDoctorOptions(draft=draft, target="t", answers=answers)
    work = Examination(options, answering)
    (patient,), _ = work._patients()
    bench = work._bench([patient])
    wrong = next(halves(patient.reading, work._scene()))
    counts = bench.measure(wrong.reading).counts
    accepted = tuple(40 * round(sum(at)) for at in zip(*(one.accepted_K for one in counts), strict=True))
    path = served(tmp_path, 40 * round(sum(one.rounds for one in counts)), accepted)
    alike = examined(draft, answering, answers, served=str(path))
    assert alike.verdict == "engine" and alike.served is not None
    assert any(wrong.what in one["cause"] for one in alike.served["alike"]), alike.served["alike"]


def test_what_cannot_be_examined_is_one_line(trained_drafts: Trained, answering: Target, tmp_path: Path) -> None:
    draft = trained_drafts.draft_folders["eagle3"]
    with pytest.raises(MissingFileError, match="--draft nowhere: no such"):
        examined(Path("nowhere"), answering, tmp_path)
    with pytest.raises(InputError, match="--draft and --target: both"):
        Examination(DraftDoctorOptions(draft=draft))
    with pytest.raises(MissingFileError, match=r"--served .*: no such file"):
        examined(draft, answering, tmp_path, served=str(tmp_path / "none"))
    with pytest.raises(
        InputError, match=r"^--served http://gpu-7:8000/metrics: must be a file: save a scrape there \(cur"
    ):
        examined(draft, answering, tmp_path, served="http://gpu-7:8000/metrics")
    for own in (Path("/"), Path()):
        assert Examination(DraftDoctorOptions(draft=own, target="x"), answering)._corrected.name.endswith("-corrected")
    (tmp_path / "ids.jsonl").write_text('{"prompt_ids": [1, 999999]}\n')
    with pytest.raises(InputError, match=r"ids\.jsonl:1: prompt_ids and answer_ids must be ids"):
        examined(draft, answering, tmp_path / "ids.jsonl")


def test_a_folder_that_the_doctor_did_not_write_is_kept(
    trained_drafts: Trained, answering: Target, tmp_path: Path
) -> None:
    place = copied(trained_drafts, "eagle3", tmp_path)
    (tmp_path / "head-corrected").mkdir()
    with pytest.raises(OwnershipError, match="was not written by the doctor"):
        Examination(DraftDoctorOptions(draft=place, target=answering.settings.model), answering)


def test_files_of_strangers_are_looked_at_without_a_defect(
    trained_drafts: Trained, answering: Target, tmp_path: Path
) -> None:
    place = copied(trained_drafts, "eagle3", tmp_path)
    with changed(place) as tensors:
        tensors |= {
            "d2t": torch.tensor(5),
            "t2d": torch.zeros(3, 2),
            "fc.weight": tensors["fc.weight"].to(torch.float8_e4m3fn),
        }
    config = json.loads((place / "config.json").read_text())
    options = DraftDoctorOptions(draft=place, target=answering.settings.model)
    for said in ([1], "x", {"verifier": "x"}, {"verifier": {"name_or_path": {}, "architectures": 5}}):
        (place / "config.json").write_text(json.dumps(config | {"speculators_config": said}))
        work = Examination(options, answering)
        assert work._scene().vocabulary_marks is None
        assert work._verifier().architectures == list(answering.model.config.architectures)
    for tau in ("NaN", "Infinity", "-1", "9" * 400):
        (place / "serve.json").write_text(f'{{"tau": {tau}, "plan": {{"draft_tokens": 3, "chain_tokens": 3}}}}')
        assert "tau" not in work._expected()[0]


PLAIN, STRANGE = "{{ messages[0].content }}", "QQQQQQ" * 10 + "{{ messages[0].content[6] }}"
"""Templates of prompts as in training, and of prompts after which the target says what the draft has not learned."""
THINKING = f"{{% if enable_thinking | default(true) %}}{STRANGE}{{% else %}}{PLAIN}{{% endif %}}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("served", "own", "cause"),
    [
        (THINKING, None, ("thinking on or off", "enable_thinking false in the prompts' template")),
        (STRANGE, PLAIN, ("another template", "the template that lies beside the draft")),
        (STRANGE, None, ("another template", "prompts without a chat template")),
        (PLAIN, STRANGE, None),
    ],
)
def test_the_form_of_prompts_that_a_draft_was_trained_on_is_found(
    served: str,
    own: str | None,
    cause: tuple[str, str] | None,
    trained_drafts: Trained,
    answering: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, log = copied(trained_drafts, "eagle3-reduced", tmp_path), tmp_path / "log.jsonl"
    if own is not None:
        (place / "chat_template.jinja").write_text(own)
    asked = [[{"role": "user", "content": line[:28]}] for line in sentences(ANSWERS, 999).splitlines()]
    log.write_text("\n".join(json.dumps({"messages": messages}) for messages in asked) + "\n")
    monkeypatch.setattr(answering.tokenizer, "chat_template", served, raising=False)
    # The tiny target soon says what the draft knows, so that it accepts 0.4 where others accept nothing.
    monkeypatch.setitem(draft_doctor.FLOORS, "eagle3", 0.7)
    found = examined(place, answering, log)
    assert found.verdict == ("healthy" if cause is None else "fault")
    assert [(one["hypothesis"], one["what"]) for one in found.causes] == ([] if cause is None else [cause])
    assert cause is None or found.causes[0]["tau_after"] > 1.5 * found.causes[0]["tau_before"]
    assert found.corrected is None and answering.tokenizer.chat_template == served


@pytest.mark.parametrize("template", [b"\xff\xfe", b"{% for", b"{{ raise_exception('no') }}"])
def test_a_bad_template_beside_a_draft_is_told(answering: Target, tmp_path: Path, template: bytes) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(template)
    own, told = getattr(answering.tokenizer, "chat_template", None), list[str]()
    answering.tokenizer.chat_template = "{{ messages[0].content }}"
    try:
        asked = [Asked([1], [], (Message(role="user", content="what is this"),))]
        forms = [what for _, what, _ in rendered_otherwise(answering, tmp_path, asked, told.append)]
        assert answering.tokenizer.chat_template == "{{ messages[0].content }}"
    finally:
        answering.tokenizer.chat_template = own
    assert forms == ["prompts without a chat template"]
    assert len(told) == 1 and told[0].startswith("the template that lies beside the draft is not tried: ")


def test_a_report_shows_names_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    found = Diagnosis("fault", "[/bold] x\nerror: fake", "eagle3", "vllm", "[/red]", 3, 0, None)
    found.evidence.append("tensor a\x1b]0;pwned\nerror: fake")
    print_diagnosis(found)
    shown = capsys.readouterr().out
    assert r"[/bold] x\nerror: fake: at fault" in shown and r"seen: tensor a\x1b]0;pwned\nerror: fake" in shown


def test_options_of_a_draft_need_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--target", "t"])
    assert ended.value.code == 2 and "--target t: is of --draft, which is not given" in capsys.readouterr().err
