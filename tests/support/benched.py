"""Runs of a benchmark that never happened: their clock is ours."""

from collections.abc import Sequence

from draftforge.eval.bench.latency import TimedAnswer
from draftforge.eval.bench.run import (
    EVERY,
    BenchRow,
    Environment,
    Failure,
    Interval,
    LengthRow,
    Memory,
    Report,
    RoundParts,
    RunRecord,
    Setting,
    Spread,
)
from draftforge.eval.summary import bench_summary

PARTS = RoundParts(draft_seconds=0.1, verify_seconds=0.3, rest_seconds=0.1)
PLAIN = Setting(method="plain", levels=0, batch_size=1)
SMALL = Setting(method="small", levels=2, batch_size=1)


def answer(
    prompt: int,
    begun: float,
    arrivals: Sequence[float],
    rounds: Sequence[tuple[int, int, int, int]] = (),
    digest: str = "same",
) -> TimedAnswer:
    """An answer whose token count follows from its arrivals or its rounds."""
    tokens = 1 + sum(emitted for _, _, emitted, _ in rounds) if rounds else len(arrivals)
    return TimedAnswer(
        prompt=prompt, tokens=tokens, digest=digest, begun=begun, arrivals=list(arrivals), rounds=list(rounds)
    )


def run(setting: Setting, answers: Sequence[TimedAnswer], seconds: float, repeat: int = 0) -> RunRecord:
    memory = Memory(weights=0 if setting.plain else 5_000_000, state=1_000_000, peak=None)
    return RunRecord(setting=setting, repeat=repeat, seconds=seconds, answers=list(answers), parts=PARTS, memory=memory)


NO_SPREAD = Spread(value=1.0, low=1.0, high=1.0)


def spread(low: float, value: float | None = None, high: float | None = None) -> Spread:
    value = low if value is None else value
    return Spread(value=value, low=low, high=value if high is None else high)


def row(
    batch_size: int = 1,
    speedup: Spread = NO_SPREAD,
    domain: str = EVERY,
    method: str = "small",
    tau: float = 2.0,
    break_even: float = 1.5,
    alpha: float = 0.5,
    equal: float = 1.0,
    slots: float | None = None,
    share: float = 0.25,
    lengths: tuple[LengthRow, ...] = (),
) -> BenchRow:
    drafted = method != "plain"
    setting = Setting(method=method, levels=4 if drafted else 0, batch_size=batch_size)
    return BenchRow(
        setting=setting, domain=domain, prompts=20, tokens=100, rounds=50,
        tau=Interval(value=tau, low=tau, high=tau),
        alphas=[Interval(value=alpha, low=alpha, high=alpha)] if drafted else [],
        tokens_per_second=NO_SPREAD, decoding_tokens_per_second=NO_SPREAD, speedup=speedup, decoding_speedup=speedup,
        first_token_p50=0.1, first_token_p95=0.2, inter_token_p50=0.01, inter_token_p95=0.02, first_token_share=share,
        round_seconds=0.03, break_even_tau=break_even, slots=batch_size if slots is None else slots, parts=PARTS,
        memory=Memory(weights=0, state=0, peak=None), equal_answers=equal, lengths=list(lengths),
    )  # fmt: skip


def sample_report() -> Report:
    """Three drafts beside plain decoding in three domains at four batch sizes, and one that could not run."""
    rows = [
        row(size, spread(low, low + 0.1, low + 0.2), domain, method)
        for method, low in (
            ("plain", 0.9),
            ("small", 1.2),
            ("a-name-that-somebody-gave-to-a-draft", 0.5),
            ("lookup", 0.8),
        )
        for size in (1, 4, 16, 64)
        for domain in (EVERY, "code", "math", "support")
    ]
    about = Environment(
        hardware="a CPU, 2 threads", dtype="bfloat16", torch="2.13.0", transformers="5.17.0", draftforge="0.1.0",
        commit=None, command=[], target="/models/smollm2-135m-instruct", target_fingerprint="0" * 64, drafts={},
        prompts={"code": 20, "math": 20, "support": 20}, prompts_left_out=2, max_new_tokens=256, sampling="t0",
        repeats=3, confidence=0.95,
    )  # fmt: skip
    failed = [Failure(method="eagle3", plan="-", batch_size=None, reason="has no checkpoint yet")]
    return Report(surroundings=about, rows=rows, failures=failed, words=bench_summary(rows, 3, True))
