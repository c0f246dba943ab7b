"""`draftforge doctor --draft FOLDER`: why a draft is accepted less than it should be, and the corrected draft.

The draft is replayed along answers of the target. Where that falls short of its own record, or of its family, changed
readings are tried (`eval/diagnosis.py`); where it is healthy and the served counters are low, the engine is at fault.
"""

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import fingerprint, storage
from ..errors import DraftforgeError, InputError, MissingFileError, OwnershipError
from ..eval.counts import CountRow, context_bucket, to_table
from ..eval.diagnosis import (
    CLEAR_GAIN,
    CONFIDENCE,
    Acceptance,
    ReplayBench,
    Search,
    Tried,
    on_device,
)
from ..eval.engine_metrics import AcceptanceMismatch, compare, expected_acceptance
from ..eval.request_metrics import counters_of
from ..eval.served_causes import known_causes, shape_of
from ..masking import masked
from ..progress import bar
from ..specdec.diagnosis.reading import Reading, Scene
from ..specdec.diagnosis.repairs import layout_name, read_files, refusal_of, repaired
from ..specdec.formats import META_FILE, Verifier, meta_file, read_meta, write_draft
from ..specdec.formats.checkpoint import DraftMeta
from ..specdec.formats.layouts import NATIVE, layout_of
from ..specdec.loading import load_tokenizer
from ..specdec.serving_plan import PLAN_FILE, find_plan
from ..specdec.stored_draft import TOKENIZER_FILE
from ..specdec.target_settings import named_target
from ..specdec.targets import Target, copy_tokenizer, tokenizer_digest, tokenizer_files
from .cli_options import DraftDoctorOptions
from .doctor_answers import Asked, answered, asked_of, rendered_otherwise
from .doctor_report import EXIT_CODES, Diagnosis, Verdict, print_diagnosis

REPORT_FILE = "doctor.json"
_UNFILLED, _OTHER_TARGET = "tensors that nothing filled", "a quantised or fine-tuned target"
FLOORS = {
    "small": 0.45,
    "eagle": 0.35,
    "eagle3": 0.4,
    "peagle": 0.35,
    "dflash": 0.3,
    "dspark": 0.3,
    "medusa": 0.3,
    "skipped": 0.45,
}
_FLOOR = 0.35
"""Acceptance of the first token below which a grown draft of the family is not expected on its own traffic."""
GROWN_STEPS = 150
"""Training steps from which a draft counts as grown, at the batches of our recipes."""
_RECORD_MARGIN = 0.1
"""Share of the recorded tau beyond 1 that other prompts may cost."""
_SEARCH_SECONDS = 900.0
_MOST_TAU = 1e6
_OWN_ANSWERS = 0.9
"""Share of recorded tokens that must be the target's first choices, for answers to count as its own at T=0."""


class Patient(NamedTuple):
    """A draft as it may be read, and why it was read so."""

    reading: Reading
    repairs: tuple[str, ...]


def examine_draft(options: DraftDoctorOptions, as_json: bool = False) -> int:
    """Examine a draft, print what was found, and write the corrected draft beside it. Returns the exit code."""
    found = Examination(options).run()
    if as_json:
        print(json.dumps(asdict(found), indent=2, ensure_ascii=False))
    else:
        print_diagnosis(found)
    return EXIT_CODES[found.verdict]


class Examination:
    """Examination of one draft, from its files to the verdict."""

    def __init__(
        self, options: DraftDoctorOptions, target: Target | None = None, bench: ReplayBench | None = None
    ) -> None:
        """`target` and `bench`: the options' own, where they are there already.

        Raises InputError or MissingFileError for options that name nothing.
        """
        if options.draft is None or options.target is None:
            raise InputError("--draft and --target: both must be given")
        self._place, self._options = Path(options.draft), options
        if self._place.name in ("", ".."):  # such as the current folder, whose own name the corrected one goes by
            self._place = self._place.resolve()
        if not self._place.exists():
            raise MissingFileError(f"--draft {self._place}: no such file or folder")
        # Before the search, which takes minutes.
        name = self._place.stem if self._place.is_file() else self._place.name
        self._corrected = self._place.parent / f"{name}-corrected"
        if os.path.lexists(self._corrected) and not (self._corrected / REPORT_FILE).is_file():
            raise OwnershipError(f"{self._corrected}: exists, and was not written by the doctor; move it away")
        self._served = None
        if options.served is not None:
            if options.served.startswith(("http://", "https://")):
                raise InputError(
                    f"--served {masked(options.served)}: must be a file: save a scrape there (curl -s HOST/metrics > "
                    "FILE)"
                )
            text = storage.read_text(Path(options.served), "--served")
            self._served = counters_of(text, f"--served {options.served}")
        self._target = target or Target.load(named_target(options.target))
        self._known_bench = bench
        self._evidence: list[str] = []
        self._suspects: list[tuple[str, str]] = []
        """Hypotheses that files speak for and no replay can show, and what was seen."""
        self._hollow: list[tuple[str, str]] = []
        """Those that no trained draft has, however much of it is accepted."""
        self._asked: list[Asked] = []
        self._plan = find_plan(self._place).plan.as_chain
        self._meta = self._lineage()
        self._dtype = torch.float32

    def run(self) -> Diagnosis:
        """Replay the draft, search what restores it, and judge."""
        # 1) Readings that its files allow; 2) answers; 3) how it does on them as it is.
        patients, refusal = self._patients()
        scene = self._scene()
        self.bench = bench = self._known_bench or self._bench(patients)
        if not patients:
            return self._unreadable(bench, refusal)
        patient, now = self._best(bench, patients)
        before = None if refusal else now
        record, wanted = self._expected()

        # 4) What restores it, on top of what had to be repaired.
        search = Search(bench, scene, wanted, time.monotonic() + _SEARCH_SECONDS)
        search.floor = FLOORS.get(patient.reading.draft.family, _FLOOR)
        search.careful = wanted is None or now.tau.value >= wanted
        with bar("trying hypotheses", None, "readings") as advance:
            found = search.run(patient.reading, now, advance)
        if search.cut_short:
            self._evidence.append(f"the search ended after {_SEARCH_SECONDS:.0f} s, before all was tried")
        after = found[-1].acceptance if found else now

        # 5) The verdict, and the corrected draft.
        causes = _causes(patient, now, found)
        reading = found[-1].reading if found else patient.reading
        verdict = self._judge(bench, reading, after, wanted, bool(causes))
        if verdict in ("undertrained", "low"):
            causes += self._other_prompts(search, reading, after)
            verdict = "fault" if causes else verdict
        suspects = self._hollow if verdict in ("healthy", "fault") else self._suspects
        if suspects:
            figures = {"tau_before": now.tau.value, "tau_after": None}
            causes += [{"hypothesis": name, "what": what, **figures} for name, what in suspects]
            verdict = "fault"
        self._evidence += [what for name, what in self._suspects if (name, what) not in suspects]
        diagnosis = Diagnosis(
            verdict=verdict,
            draft=str(self._place),
            family=reading.draft.family,
            layout=layout_name(self._place),
            target=str(self._options.target),
            draft_tokens=bench.K,
            answers=len(bench.answers),
            before=None if before is None else _figures(before),
            after=_figures(after) if found or patient.repairs else None,
            expected=record,
            causes=causes,
            evidence=self._evidence,
            tried=_by_hypothesis(search),
        )
        if found or patient.repairs:
            diagnosis.corrected = self._write(reading, diagnosis)
        if self._served is not None:
            self._compare_served(search, patient.reading, now, diagnosis)
        return diagnosis

    def _lineage(self) -> DraftMeta | None:
        """Lineage of the draft, where it has one, compared with the target."""
        if not meta_file(self._place).is_file():
            return None
        meta = read_meta(self._place)
        if meta.tokenizer_digest != self._target.tokenizer_digest:
            self._suspects.append(("another tokenizer", "its lineage names another tokenizer than the target's"))
        if meta.target_fingerprint != self._target.fingerprint and set(meta.target_fingerprint) != {"0"}:
            shorts = [fingerprint.short(one) for one in (meta.target_fingerprint, self._target.fingerprint)]
            self._suspects.append((_OTHER_TARGET, f"its lineage names target {shorts[0]}, this one is {shorts[1]}"))
        return meta

    def _patients(self) -> tuple[list[Patient], str]:
        """Readings of the files: one, or those that repairs allow, and why the readers refuse them."""
        draft, refusal = refusal_of(self._place, self._target)
        if draft is not None:
            self._dtype = draft.dtype
            return [Patient(on_device(Reading(draft), self._target), ())], ""
        self._evidence.append(f"the files cannot be read as they are: {refusal}")
        found = []
        for one in repaired(self._place, refusal, self._target, self._evidence.append):
            self._dtype = one.draft.dtype
            found.append(Patient(on_device(Reading(one.draft), self._target), one.done))
        return found, refusal

    def _scene(self) -> Scene:
        """Facts of target and files that hypotheses read."""
        files, own_ids, target = None, None, self._target
        with suppress(DraftforgeError):
            files = read_files(self._place)
        # A tokenizer of its own: where each of its ids stands in the target's.
        folder = self._place if self._place.is_dir() else self._place.parent
        if (folder / TOKENIZER_FILE).is_file():
            theirs = load_tokenizer(folder, str(folder), trust_remote_code=False)
            if tokenizer_digest(theirs) != target.tokenizer_digest:
                self._suspects.append(("another tokenizer", f"its {TOKENIZER_FILE} is not the target's"))
                known = target.tokenizer.get_vocab()
                own_ids = torch.full((target.vocab_size,), -1)
                for token, at in theirs.get_vocab().items():
                    if at < len(own_ids) and known.get(token, len(own_ids)) < len(own_ids):
                        own_ids[at] = known[token]
        if files is not None:
            self._look_at(files.tensors)
        marks = None if files is None else files.tensors.get("t2d")
        special = {*target.tokenizer.all_special_ids, *target.tokenizer.get_added_vocab().values()}
        if marks is not None and (marks.dim() != 1 or len(marks) > target.embedding_rows):
            marks = None
        return Scene(target, None if marks is None else marks.bool(), own_ids, tuple(sorted(special)))

    def _look_at(self, tensors: dict[str, torch.Tensor]) -> None:
        """Note tensors that look as if nothing had filled them."""
        for name, tensor in tensors.items():
            if name == "d2t" and tensor.numel() < self._target.vocab_size and not bool(tensor.any()):
                self._suspects.append(
                    (_UNFILLED, "d2t is all zeros: the first ids of the target's vocabulary are drafted")
                )
            elif not tensor.is_floating_point() or tensor.numel() < 2 or name.endswith("bias"):
                continue
            # torch cannot ask whether 8-bit floats are finite.
            tensor = tensor.float() if tensor.element_size() == 1 else tensor
            if not bool(torch.isfinite(tensor).all()):
                self._suspects.append((_UNFILLED, f"tensor {name} has values that are not finite"))
            elif bool((tensor == tensor.flatten()[0]).all()):
                suspect = (_UNFILLED, f"tensor {name} holds {float(tensor.flatten()[0]):g} everywhere")
                self._suspects.append(suspect)
                # Norms may have stayed at the ones that they began as; a matrix that was trained has not.
                if min(tensor.shape) > 1 and tensor.dim() > 1:
                    self._hollow.append(suspect)

    def _bench(self, patients: Sequence[Patient]) -> ReplayBench:
        """Answers of the target, with its states along them."""
        asked = asked_of(self._options.answers, self._target)
        self._asked = asked
        last = self._target.num_layers
        near = {layer + by for one in patients for layer in one.reading.draft.target_layers for by in (-2, -1, 0, 1, 2)}
        layers = sorted(near | {last // 2 + by for by in (-1, 0, 1)} | {2, 3, last - 4, last - 3, last - 2, last})
        bench = self._captured(answered(self._target, asked), layers)
        # Recorded answers must be this target's own.
        share = bench.agreement()
        if share < _OWN_ANSWERS:
            self._evidence.append(
                f"only {share:.0%} of the recorded tokens are this target's first choices: they were sampled, or come "
                "of another target (fine-tuned, quantised, another template); the target has answered the prompts anew"
            )
            again = [one._replace(answer_ids=[]) for one in asked]
            bench = self._captured(answered(self._target, again), layers)
        return bench

    def _captured(self, answers: Sequence[Any], layers: Sequence[int]) -> ReplayBench:
        bench = ReplayBench(self._target, answers, self._plan.draft_tokens, layers)
        with bar("reading answers", len(answers), "answers") as advance:
            bench.capture(advance)
        return bench

    def _best(self, bench: ReplayBench, patients: Sequence[Patient]) -> tuple[Patient, Acceptance]:
        """The reading that is accepted most, of several that repairs allow."""
        found = [(one, bench.measure(one.reading)) for one in patients if bench.readable(one.reading)]
        if not found:
            raise InputError(f"--draft {self._place}: reads layers that the target does not have")
        return max(found, key=lambda pair: pair[1].tau.value)

    def _expected(self) -> tuple[dict[str, Any], float | None]:
        """What the draft's record leads one to expect, and the least tau in accordance with it; None: no record."""
        step = None if self._meta is None else self._meta.step
        known: dict[str, Any] = {} if step is None else {"step": step}
        folder = self._place if self._place.is_dir() else self._place.parent
        try:
            record = storage.read_object(folder / PLAN_FILE)
        except DraftforgeError:
            return known, None
        tau, plan = record.get("tau"), find_plan(self._place).plan
        if not isinstance(tau, float | int) or not 0 < tau < _MOST_TAU or plan.tree is not None:
            return known, None
        return known | {"tau": float(tau)}, 1 + (float(tau) - 1) * (1 - _RECORD_MARGIN)

    def _judge(
        self, bench: ReplayBench, reading: Reading, now: Acceptance, wanted: float | None, restored: bool
    ) -> Verdict:
        """Verdict from what is left after all that restores."""
        family = reading.draft.family
        floor = FLOORS.get(family, _FLOOR)
        low = now.first.high < floor if now.first.high == now.first.high else now.first.value < floor
        if restored:
            if wanted is not None and now.tau.high < wanted:
                self._evidence.append("not all is restored: tau stays below the draft's record")
            elif wanted is None and low:
                self._evidence.append(
                    f"not all may be restored: the first token is right in {now.first.value:.0%} of rounds, a grown "
                    f"{family} draft is in {floor:.0%} at least; another cause, or little training, is left"
                )
            return "fault"
        if wanted is not None:
            if now.tau.high >= wanted:
                return "healthy"
            self._evidence.append("tau is below the draft's record, and no hypothesis restores it")
        elif not low:
            return "healthy"
        # Low, and nothing restores it: young, or something that is not among the hypotheses.
        ranks = bench.ranks(reading)
        near = sum(ranks)
        self._evidence.append(
            f"the first token is right in {now.first.value:.0%} of rounds, a grown {family} draft is in {floor:.0%} at "
            f"least; the right one is among its first {len(ranks)} in {near:.0%}"
        )
        age = None if self._meta is None else self._meta.step
        grown = self._growth(bench, now)
        young = age is not None and age < GROWN_STEPS
        learning = near >= max(2 * ranks[0], 0.3) if ranks else False
        if grown is not None:
            self._evidence.append(grown)
        return "undertrained" if young or grown is not None or learning else "low"

    def _other_prompts(self, search: Search, reading: Reading, now: Acceptance) -> list[dict[str, Any]]:
        """The other form of prompts on which the draft is accepted as it should be; none where there is none."""
        for name, what, asked in rendered_otherwise(self._target, self._place, self._asked, self._evidence.append):
            other = ReplayBench(self._target, answered(self._target, asked), search.bench.K, search.bench.layers)
            other.capture(lambda *_: None)
            after = other.measure(reading)
            # These are other answers, so that the gain is not paired.
            if after.tau.low > now.tau.high and search.restores(after, now, CLEAR_GAIN):
                return [{"hypothesis": name, "what": what, "tau_before": now.tau.value, "tau_after": after.tau.value}]
        return []

    def _growth(self, bench: ReplayBench, now: Acceptance) -> str | None:
        """A sentence where an earlier checkpoint beside this one is accepted less; None: none is."""
        earlier = sorted(self._place.resolve().parent.glob("step-*"))
        mine = self._place.resolve()
        if mine not in earlier or not earlier.index(mine):
            return None
        draft, _ = refusal_of(earlier[0], self._target)
        if draft is None:
            return None
        then = bench.measure(on_device(Reading(draft), self._target))
        if then.first.value >= now.first.value:
            return None
        shares = f"{then.first.value:.0%} of first tokens right, {mine.name} {now.first.value:.0%}"
        return f"it still grows: {earlier[0].name} has {shares}"

    def _unreadable(self, bench: ReplayBench, refusal: str) -> Diagnosis:
        """Files that no repair makes readable: the refusal is the cause."""
        return Diagnosis(
            verdict="fault",
            draft=str(self._place),
            family="unknown",
            layout=layout_name(self._place),
            target=str(self._options.target),
            draft_tokens=bench.K,
            answers=len(bench.answers),
            before=None,
            causes=[{"hypothesis": "unreadable files", "what": refusal, "tau_before": None, "tau_after": None}],
            evidence=self._evidence,
        )

    def _write(self, reading: Reading, diagnosis: Diagnosis) -> str | None:
        """Write the corrected draft beside the draft, read back; None where no config can say what is changed."""
        place = self._corrected
        if reading.tampered or reading.before_norm or reading.shift:
            self._evidence.append(
                "no config says what restores it: train it as it is served, or serve it as it was trained"
            )
            return None
        layout = NATIVE
        with suppress(DraftforgeError):
            layout = layout_of(self._place)
        draft = replace(reading).draft.to(self._dtype)
        source = self._place if self._place.is_dir() else self._place.parent
        try:
            with storage.new_folder(place) as beside:
                write_draft(draft, beside, layout, self._plan.draft_tokens, self._verifier(), self._target.tokenizer)
                for name in (META_FILE, PLAN_FILE):
                    if storage.lies_inside(source, source / name):
                        storage.write_bytes(beside / name, (source / name).read_bytes())
                if draft.family == "small" and tokenizer_files(source):
                    copy_tokenizer(source, beside)
                again, why = refusal_of(beside, self._target)
                if again is None:
                    raise InputError(f"{place}: reads back wrong: {why}")
                storage.write_json(beside / REPORT_FILE, asdict(diagnosis))
        except DraftforgeError as error:
            self._evidence.append(f"the corrected draft is not written: {error}")
            return None
        finally:
            on_device(reading, self._target)
        return str(place)

    def _verifier(self) -> Verifier:
        """The target as a file names it: as the draft's own does, where it does."""
        try:
            files = read_files(self._place)
        except DraftforgeError:
            files = None
        said = None if files is None else files.config.get("speculators_config")
        known = said.get("verifier") if isinstance(said, dict) else None
        known = known if isinstance(known, dict) else {}
        name = known.get("name_or_path") or (files.config.get("base_model_name_or_path") if files else None)
        architectures = known.get("architectures")
        if not isinstance(architectures, list) or not all(isinstance(one, str) for one in architectures):
            architectures = list(self._target.model.config.architectures or [])
        return Verifier(str(name or self._options.target), architectures)

    def _compare_served(self, search: Search, reading: Reading, now: Acceptance, diagnosis: Diagnosis) -> None:
        """Compare the engine's counters with the replay, and say what may cost the difference."""
        assert self._served is not None
        bench = search.bench
        table = to_table(
            CountRow(
                "draft",
                0,
                str(n),
                0,
                str(n),
                "answers",
                "holdout",
                context_bucket(len(one.prompt_ids)),
                "t0",
                "greedy",
                bench.K,
                "",
                "replay",
                counts,
            )
            for n, (one, counts) in enumerate(zip(bench.answers, now.counts))
        )
        found: AcceptanceMismatch = compare(self._served, expected_acceptance(table, CONFIDENCE), 0.05)
        served_at = [count / self._served.rounds for count in self._served.accepted_at if self._served.rounds]
        alphas = [at / before if before else 0.0 for at, before in zip(served_at, [1.0, *served_at])]
        shape = shape_of(alphas, now.alphas)
        low = found.difference.high < 0 and found.mismatch is not False
        diagnosis.served = {
            "engine": found.engine,
            "rounds": found.rounds,
            "tau": found.served.record(),
            "replayed": found.expected.record(),
            "difference": found.difference.record(),
            "by_position": alphas,
            "unknown": found.unknown,
            "causes": [],
            "alike": [],
        }
        if not low or found.unknown:
            return
        # The engine serves less than the files are worth: readings that give what it serves, then what is known of it.
        if diagnosis.verdict == "healthy":
            diagnosis.verdict = "engine"
        causes = [
            {"cause": one.cause, "cure": one.cure}
            for one in known_causes(
                found.engine, diagnosis.family, diagnosis.layout, getattr(reading.draft, "config", None), shape
            )
        ]
        alike = [
            {"cause": f"the engine serves as if: {one.what} (tau {tau:.2f})", "cure": "", "hypothesis": one.hypothesis}
            for one, tau in search.serving(found.served, reading, now)
        ]
        diagnosis.served |= {"shape": shape, "causes": causes, "alike": alike}


def _causes(patient: Patient, now: Acceptance, found: Sequence[Tried]) -> list[dict[str, Any]]:
    """What was repaired and what restores, each with tau before and after."""
    causes: list[dict[str, Any]] = [
        {"hypothesis": "unreadable files", "what": what, "tau_before": None, "tau_after": now.tau.value}
        for what in patient.repairs
    ]
    taus = [now.tau.value, *(one.acceptance.tau.value for one in found)]
    for one, before, after in zip(found, taus, taus[1:]):
        figures = {"tau_before": before, "tau_after": after, "gain": one.gain.record()}
        causes.append({"hypothesis": one.hypothesis, "what": one.what, **figures})
    return causes


def _by_hypothesis(search: Search) -> dict[str, dict[str, float]]:
    """tau on some answers of every change that was tried on the draft as it is."""
    found = dict[str, dict[str, float]]()
    for one in search.tried:
        found.setdefault(one.hypothesis, {})[one.what] = one.tau
    return found


def _figures(one: Acceptance) -> dict[str, Any]:
    return {"tau": one.tau.record(), "first": one.first.record(), "by_position": one.alphas}
