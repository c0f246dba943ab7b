"""Settings, their distributions, draws from them, and the counter-based uniforms."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy import stats
from stand_ins import llama
from transformers import GenerationConfig, LogitsProcessorList

from draftforge.data.settings import CaptureSettings, SamplingChoice
from draftforge.errors import InputError
from draftforge.specdec.sampling import (
    Purpose,
    _keep_top_k,
    _keep_top_k_then_p,
    _keep_top_p,
    categorical,
    probabilities,
    uniforms,
)
from draftforge.specdec.sampling_settings import SamplingSettings

LARGEST_U = 1.0 - 2.0**-53
RARE = 1e-3  # a sound generator fails a statistical test below with this chance (and then always: they are seeded)


def transformers_processors(settings: SamplingSettings) -> LogitsProcessorList:
    """What `generate` would apply, in its order."""
    config = GenerationConfig(
        do_sample=True,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
        repetition_penalty=settings.repetition_penalty,
    )
    found: LogitsProcessorList = llama(layers=1)._get_logits_processor(config, input_ids_seq_length=12, device="cpu")
    return found


def int64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


class TestSettings:
    def test_key_names_only_what_changes_the_distribution(self) -> None:
        assert SamplingSettings().key == "t0"
        assert SamplingSettings(temperature=1).key == "t1"
        assert SamplingSettings(temperature=0.8, top_p=0.95).key == "t0.8-p0.95"
        assert SamplingSettings(temperature=0.8, top_k=50, top_p=0.9, min_p=0.05).key == "t0.8-k50-p0.9-m0.05"
        assert SamplingSettings(repetition_penalty=1.1).key == "t0-r1.1"
        assert SamplingSettings(temperature=0.8, min_p=0.05, repetition_penalty=1.3).key == "t0.8-m0.05-r1.3"

    def test_settings_that_draw_alike_share_a_key(self) -> None:
        assert SamplingSettings(temperature=0, top_p=0.5).key == SamplingSettings(temperature=1e-6, top_k=3).key == "t0"

    @given(st.lists(st.floats(1e-5, 10), min_size=2, max_size=2, unique=True))
    def test_different_temperatures_have_different_keys(self, pair: list[float]) -> None:
        keys = {SamplingSettings(temperature=temperature).key for temperature in pair}
        assert len(keys) == 2
        assert all(set(key) <= set("0123456789abcdefghijklmnopqrstuvwxyz.-") for key in keys)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("temperature", -1),
            ("temperature", float("nan")),
            ("temperature", float("inf")),
            ("top_k", -1),
            ("top_p", 0),
            ("top_p", 1.01),
            ("min_p", -0.1),
            ("min_p", 1.1),
            ("repetition_penalty", 0),
            ("repetition_penalty", float("inf")),
            ("top_q", 1),
        ],
    )
    def test_refuses_values_out_of_range_and_unknown_fields(self, field: str, value: float) -> None:
        with pytest.raises(ValidationError, match=field):
            SamplingSettings.model_validate({field: value})

    def test_what_was_recorded_before_there_was_a_penalty_stays_the_same(self) -> None:
        """Fingerprints of captures and mixes hash these records, and old files hold them."""
        record = {"temperature": 0.8, "top_k": 0, "top_p": 0.9, "min_p": 0.0}
        settings = SamplingSettings.model_validate(record)
        assert settings.model_dump() == record
        assert json.loads(settings.model_dump_json()) == record
        assert SamplingChoice.model_validate({}).model_dump().keys() == {*record, "weight", "max_new_tokens"}
        assert CaptureSettings(sampling=settings).identity()["sampling"] == record

    def test_a_penalty_survives_being_recorded(self) -> None:
        settings = SamplingSettings(temperature=0.8, repetition_penalty=1.2)
        assert SamplingSettings.model_validate(settings.model_dump()) == settings
        assert SamplingSettings.model_validate_json(settings.model_dump_json()) == settings
        assert SamplingChoice.model_validate({"repetition_penalty": 1.2}).settings == SamplingSettings(
            repetition_penalty=1.2
        )

    def test_is_frozen_and_hashable(self) -> None:
        assert len({SamplingSettings(), SamplingSettings()}) == 1
        with pytest.raises(ValidationError, match="frozen"):
            SamplingSettings().temperature = 1.0


class TestProbabilities:
    @pytest.mark.parametrize(
        "settings",
        [
            SamplingSettings(temperature=1.0),
            SamplingSettings(temperature=0.7, top_k=5),
            SamplingSettings(temperature=1.3, top_p=0.8),
            SamplingSettings(temperature=0.9, min_p=0.1),
            SamplingSettings(temperature=1.5, top_k=12, top_p=0.7, min_p=0.05),
            SamplingSettings(temperature=1.0, top_k=1000),
            SamplingSettings(temperature=1.0, top_p=1e-6),
            SamplingSettings(temperature=1.0, min_p=1.0),
        ],
        ids=lambda settings: settings.key,
    )
    @pytest.mark.parametrize("penalty", [1.0, 1.3, 0.7])
    def test_equals_hugging_face(self, settings: SamplingSettings, penalty: float) -> None:
        settings = settings.model_copy(update={"repetition_penalty": penalty})
        generator = torch.Generator().manual_seed(1)
        logits = torch.randn(40, 33, generator=generator) * 3
        context = torch.randint(0, 33, (40, 12), generator=generator)
        scores = transformers_processors(settings)(context, logits)
        p = probabilities(logits, settings, torch.zeros_like(logits).bool().scatter(-1, context, True))
        assert torch.equal(p > 0, scores > -torch.inf)
        torch.testing.assert_close(p, scores.softmax(-1))

    def test_greedy_takes_the_best_token_after_the_penalty(self) -> None:
        settings = SamplingSettings(repetition_penalty=2.0)
        logits = torch.tensor([[3.0, 2.0, -1.0], [-1.0, -1.5, -3.0]], dtype=torch.bfloat16)
        seen = torch.tensor([True, False, False])  # broadcast to both rows
        assert probabilities(logits, settings, seen).tolist() == [[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]

    def test_a_penalty_without_the_tokens_seen_is_refused(self) -> None:
        with pytest.raises(InputError, match=r"repetition_penalty 1\.1: must be 1 here"):
            probabilities(torch.zeros(1, 3), SamplingSettings(repetition_penalty=1.1))

    def test_tokens_seen_are_not_read_without_a_penalty(self) -> None:
        logits, everything = torch.randn(2, 5), torch.ones(2, 5, dtype=torch.bool)
        settings = SamplingSettings(temperature=0.7)
        assert torch.equal(probabilities(logits, settings, everything), probabilities(logits, settings))

    @given(
        scores=st.lists(st.sampled_from([0.0, -0.25, -0.5, -1.0, -3.0, -90.0, -math.inf]), min_size=3, max_size=14),
        k=st.integers(1, 13),
        top_p=st.floats(0.01, 0.99),
    )
    @hypothesis_settings(max_examples=500)
    @example(scores=[-1.0, -1.0, -1.0, -2.0], k=2, top_p=0.6)  # ties with the weakest beyond the k
    @example(scores=[0.0, 0.0, -1.0], k=2, top_p=0.1)  # all that are kept tie
    @example(scores=[0.0, -1.0, -1.0], k=1, top_p=1e-9)  # and one of them must stay
    @example(scores=[-1.0, -1.0, -3.0], k=2, top_p=1e-9)  # the best one must stay
    @example(scores=[-math.inf, -math.inf, -1.0], k=3, top_p=0.5)  # fewer than k possible tokens
    def test_top_p_within_top_k_needs_no_sorted_vocabulary(self, scores: list[float], k: int, top_p: float) -> None:
        """The same tokens as sorting everything keeps, many ties included; sums at the limit itself may round apart."""
        assume(k < len(scores))
        best_first = torch.tensor([0.0, *scores])  # the best score is 0
        survivors = _keep_top_k(best_first, k)
        held = survivors.sort(stable=True).values.softmax(-1).double().cumsum(-1)
        assume(bool(((held[:-1] - (1.0 - top_p)).abs() > 1e-6).all()))
        assert torch.equal(_keep_top_k_then_p(best_first, k, top_p), _keep_top_p(survivors, top_p))

    def test_greedy_is_one_hot_at_the_first_best_token(self) -> None:
        p = probabilities(torch.tensor([1.0, 3.0, 3.0], dtype=torch.bfloat16), SamplingSettings())
        assert p.dtype == torch.float32
        assert p.tolist() == [0.0, 1.0, 0.0]

    @pytest.mark.parametrize("settings", [SamplingSettings(), SamplingSettings(temperature=0.8, top_k=3, top_p=0.9)])
    def test_takes_any_leading_dimensions(self, settings: SamplingSettings) -> None:
        logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(2), dtype=torch.bfloat16)
        p = probabilities(logits, settings)
        assert p.shape == logits.shape
        assert p.dtype == torch.float32
        torch.testing.assert_close(p[1, 2], probabilities(logits[1, 2], settings))

    @pytest.mark.parametrize("temperature", [1e-5, 1e30])
    def test_extreme_temperatures_and_masked_logits_stay_finite(self, temperature: float) -> None:
        logits = torch.tensor([5000.0, -5000.0, -torch.inf])
        p = probabilities(logits, SamplingSettings(temperature=temperature))
        assert p[2] == 0
        assert float(p.sum()) == pytest.approx(1)


class TestCategorical:
    @given(
        weights=st.lists(st.sampled_from([0.0, 1e-30, 1e-7, 0.1, 1.0, 3.0]), min_size=1, max_size=8).filter(any),
        u=st.floats(0, LARGEST_U),
    )
    def test_inverts_the_cumulative_distribution_and_skips_impossible_tokens(
        self, weights: list[float], u: float
    ) -> None:
        token = int(categorical(torch.tensor(weights), u))
        cumulative = np.cumsum(np.array(weights, dtype=np.float32), dtype=np.float64)
        assert weights[token] > 0
        assert u * cumulative[-1] < cumulative[token]
        assert token == 0 or cumulative[token - 1] <= u * cumulative[-1]

    def test_is_vectorised_over_leading_dimensions(self) -> None:
        p = torch.tensor([[[0.0, 1.0, 0.0], [0.5, 0.0, 0.5]]])
        assert categorical(p, torch.tensor([[0.0, 0.5]])).tolist() == [[1, 2]]
        assert categorical(p, torch.tensor([[LARGEST_U, LARGEST_U]], dtype=torch.float64)).tolist() == [[1, 2]]

    def test_draws_with_the_given_frequencies(self) -> None:
        p = torch.tensor([0.0, 0.1, 0.6, 0.0, 0.3])
        u = uniforms(int64(7), int64(0), Purpose.FINAL, 20_000)[0]
        counts = torch.bincount(categorical(p.expand(len(u), -1), u), minlength=5)
        assert counts[0] == counts[3] == 0
        expected = p[p > 0].double() / p.double().sum() * len(u)
        assert stats.chisquare(counts[p > 0], expected).pvalue > RARE


def reference_uniform(seed: int, emitted: int, purpose: int, index: int) -> float:
    """The same hash in plain Python integers."""
    mask = (1 << 64) - 1

    def mix(bits: int) -> int:
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & mask
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & mask
        return bits ^ bits >> 31

    which = emitted << 32 | purpose << 24 | index
    return (mix(mix(which + 0x9E3779B97F4A7C15 & mask) ^ mix(seed + 0x243F6A8885A308D3 & mask)) >> 11) * 2.0**-53


class TestUniforms:
    @given(
        seed=st.integers(-(2**63), 2**63 - 1),
        emitted=st.integers(0, 2**31 - 1),
        purpose=st.sampled_from(Purpose),
        count=st.integers(0, 5),
    )
    def test_equals_the_plain_hash(self, seed: int, emitted: int, purpose: Purpose, count: int) -> None:
        u = uniforms(int64(seed), int64(emitted), purpose, count)
        assert u.dtype == torch.float64
        assert u.tolist() == [[reference_uniform(seed, emitted, purpose, index) for index in range(count)]]

    def test_values_never_change_between_releases(self) -> None:
        u = uniforms(int64(0, 42), int64(0, 17), Purpose.ACCEPT, 2)
        assert u.tolist() == [
            [0.8315384715693882, 0.6753955039297009],
            [0.6904105943264018, 0.5907666333885411],
        ]

    def test_depends_on_neither_slot_nor_batch(self) -> None:
        seed, emitted = int64(5, 6, 7), int64(1, 1, 9)
        together = uniforms(seed, emitted, Purpose.DRAFT, 4)
        order = torch.tensor([2, 0, 1])
        assert torch.equal(uniforms(seed[order], emitted[order], Purpose.DRAFT, 4), together[order])
        assert torch.equal(uniforms(seed[2:], emitted[2:], Purpose.DRAFT, 2), together[2:, :2])

    def test_no_number_serves_two_rounds_purposes_or_requests(self) -> None:
        seed, emitted = torch.cartesian_prod(torch.arange(20), torch.arange(100)).T
        grid = torch.cat([uniforms(seed, emitted, purpose, 8) for purpose in Purpose])
        assert len(set(grid.flatten().tolist())) == grid.numel()

    def test_refuses_more_numbers_than_a_purpose_has(self) -> None:
        with pytest.raises(ValueError, match="count"):
            uniforms(int64(0), int64(0), Purpose.DRAFT, (1 << 24) + 1)

    def test_is_uniform_along_every_axis_and_uncorrelated(self) -> None:
        size = 24
        seed, emitted = torch.cartesian_prod(torch.arange(size), torch.arange(size)).T
        u = torch.stack([uniforms(seed, emitted, purpose, size) for purpose in Purpose]).reshape(-1, size, size, size)
        pvalues = [stats.kstest(u.flatten(), "uniform").pvalue]
        for axis in range(u.ndim):
            moved = u.movedim(axis, 0)
            pvalues += [stats.kstest(row.flatten(), "uniform").pvalue for row in moved]
            pvalues.append(stats.pearsonr(moved[1:].flatten(), moved[:-1].flatten()).pvalue)
        assert min(pvalues) > RARE / len(pvalues)

    def test_low_and_high_bits_are_fair(self) -> None:
        u = uniforms(torch.arange(200), torch.arange(200) * 3, Purpose.FINAL, 100)
        bits = (u * 2.0**53).long()
        share = torch.stack([(bits >> bit & 1).double().mean() for bit in range(53)])
        assert float((share - 0.5).abs().max()) < 5 * 0.5 / u.numel() ** 0.5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_draws_what_a_cpu_draws() -> None:
    seed, emitted = torch.arange(-50, 50), torch.arange(100)
    u = uniforms(seed, emitted, Purpose.FINAL, 50)
    assert torch.equal(uniforms(seed.cuda(), emitted.cuda(), Purpose.FINAL, 50).cpu(), u)
    p = torch.zeros(100, 50, 2000)
    p[..., ::400] = torch.rand(100, 50, 5, generator=torch.Generator().manual_seed(3))
    assert torch.equal(categorical(p.cuda(), u.cuda()).cpu(), categorical(p, u))
