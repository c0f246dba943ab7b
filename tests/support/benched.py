"""Runs of a benchmark that never happened: their clock is ours."""

from collections.abc import Sequence

from draftforge.eval.bench.latency import TimedAnswer
from draftforge.eval.bench.run import Memory, RoundParts, RunRecord, Setting

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
