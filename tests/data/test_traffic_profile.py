"""Distances between a mix and its log: closed forms, and what chance does to them."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from draftforge.data.conversation import Message
from draftforge.data.mix import build_mix
from draftforge.data.records import Record
from draftforge.data.settings import MixSettings
from draftforge.data.stratify import Column, LogTable, bucket, lengths_of, log_row
from draftforge.data.traffic_profile import JOINT, LOG, MIX, chi_square_p, profile, variation, variation_by_chance
from draftforge.specdec.sampling_settings import SamplingSettings


def counts(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def test_variation_is_the_part_that_must_change() -> None:
    assert variation(counts(1, 1), counts(10, 10)) == 0
    assert variation(counts(3, 1), counts(1, 3)) == 0.5
    assert variation(counts(5, 0), counts(0, 7)) == 1
    assert math.isnan(variation(counts(0, 0), counts(1, 1)))


def test_variation_by_chance_is_about_what_random_samples_have() -> None:
    draw, whole = np.random.default_rng(0), counts(500, 300, 150, 40, 10)
    for size in (20, 100, 2000):
        mean = np.mean([variation(draw.multinomial(size, whole / whole.sum()), whole) for _ in range(400)])
        assert variation_by_chance(size, whole) == pytest.approx(mean, rel=0.15)
    assert math.isnan(variation_by_chance(0, whole))


def test_chi_square_tells_samples_from_others() -> None:
    draw, whole = np.random.default_rng(1), counts(600, 300, 90, 8, 2)
    p = np.array([chi_square_p(draw.multinomial(200, whole / 1000), whole) for _ in range(500)])
    assert 0.02 < (p < 0.05).mean() < 0.09
    assert chi_square_p(counts(60, 60, 60, 10, 10), whole) < 1e-6
    assert chi_square_p(counts(3, 1), counts(3, 0)) == 0  # a label that the log does not have
    assert math.isnan(chi_square_p(counts(2, 1), counts(5, 5))) and math.isnan(chi_square_p(counts(9), counts(9)))


def test_labels_name_ranges_and_hold_no_text() -> None:
    assert [bucket(n, (1, 2, 3, 5, 9)) for n in (1, 2, 4, 5, 8, 9, 70)] == ["1", "2", "3-4", "5-8", "5-8", "9+", "9+"]
    said = [("system", "secret words"), ("user", "x" * 400), ("assistant", "y" * 20)]
    messages = tuple(Message.model_validate({"role": role, "content": text}) for role, text in said)
    record = Record(domain="d", messages=messages, started=86400.0 * 365)
    labels = log_row(record, SamplingSettings(temperature=0.5)).labels
    assert (labels.sampling, labels.turns, labels.prompt, labels.answer) == ("t0.5", "1", "64-255", "0-63")
    assert labels.day == "1971-01-01" and labels.tools == "without" and len(labels.system) == 8
    assert "secret" not in repr(labels)
    assert lengths_of(record) == (103, 5, False)
    counted = Record(domain="d", messages=messages, prompt_tokens=90, answer_tokens=7)
    assert lengths_of(counted) == (90, 7, True)
    open_ended = Record(domain="d", messages=messages[:2])
    assert lengths_of(open_ended) == (103, None, False) and log_row(open_ended, None).labels.answer == "unknown"


def test_labels_are_in_the_order_of_what_they_name() -> None:
    """Days in the order of their dates, ranges in that of their numbers, whatever the order of the log."""
    table = LogTable()
    for day, turns in ((3, 9), (1, 1), (None, 3), (2, 2)):
        asked = [Message(role="user", content="hi")] * turns
        started = None if day is None else 86_400.0 * (40 * day)
        table.add(log_row(Record(messages=tuple(asked), domain="a", started=started), None))
    assert table.column("day").names == ["1970-02-10", "1970-03-22", "1970-05-01", "unknown"]
    assert table.column("turns").names == ["1", "2", "3-4", "9+"]
    assert table.column("day").codes_N.tolist() == [2, 0, 3, 1]


def test_rare_labels_become_one() -> None:
    column = Column(["a", "b", "c", "d"], counts(0, 0, 0, 1, 1, 2, 3))
    lumped = column.lumped(3)
    assert lumped.counts() == {"a": 3, "b": 2, "other": 2} and column.lumped(4) == column


def test_a_profile_tells_what_the_mix_has_of_the_log(tmp_path: Path) -> None:
    words = [f"word{i}" for i in range(200)]
    draw = np.random.default_rng(0)
    lines = [
        {"turns": [" ".join(draw.choice(words, 20))], "domain": "ab"[i % 4 == 0], "temperature": float(i % 3 == 0)}
        for i in range(400)
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, *lines[:40]]))
    sources = [{"kind": "turns", "path": "log.jsonl"}]
    settings = {"sources": sources, "limit": 100, "weights": {"domain": {"a": 1, "b": 1}}}
    build_mix(MixSettings.model_validate(settings), tmp_path, tmp_path / "mix")
    found = profile(tmp_path / "mix")
    assert (found.sizes[LOG], found.sizes["distinct"], found.sizes[MIX]) == (440, 400, 100)
    by_key = {one.key: one for one in found.shares}
    assert by_key["domain"].counts[MIX].tolist() == [50, 50]
    mix_log, mix_distinct = by_key["domain"].distances[:2]
    assert mix_log.variation == pytest.approx(0.25, abs=0.01) and mix_log.p < 1e-6
    assert mix_distinct.variation == pytest.approx(0.25) and 0 < mix_distinct.by_chance < 0.05
    assert by_key["sampling"].distances[1].variation < 0.02  # what no weight names stays
    assert by_key[JOINT].counts[LOG].sum() == 440 and len(by_key[JOINT].labels) == 4
    assert found.counted == 0 and len(found.tokens["prompt"][LOG]) == 440 and len(found.tokens["answer"][LOG]) == 0
