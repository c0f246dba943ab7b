"""The command line with a training that ends badly: a rank dies or hangs in the midst of a step.

    mortal.py RANK STEP HOW ARGUMENTS...

HOW: "kill" (SIGKILL); "hang", where the others' patience is shortened; "capture", SIGKILL before capturing; "answer",
SIGKILL after a shard more than STEP was answered by this rank; "fail", an error after as many counts.
"""

import itertools
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

from draftforge.cli import main
from draftforge.data.capture import capture as capturing
from draftforge.distributed import process_group
from draftforge.errors import InputError
from draftforge.pipeline import scoring, stages
from draftforge.train import loop

rank, step, how, *arguments = sys.argv[1:]
whole_reduce, whole_capture = loop.Trainer.reduce, stages.capture


def mortal_reduce(self: loop.Trainer, *args: Any) -> Any:
    """Between backward and the collective that sums the losses."""
    if self.state.step == int(step) and self.ranks.rank == int(rank):
        if how == "kill":
            die()
        time.sleep(3600)
    return whole_reduce(self, *args)


if how == "hang":
    process_group.COLLECTIVE_LIMIT = timedelta(seconds=8)


def mortal_capture(*args: Any) -> None:
    """Long enough for the others to be waiting."""
    if os.environ["RANK"] == rank:
        time.sleep(8)
        die()
    whole_capture(*args)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying_after(function: Any) -> Any:
    """The function, which so many calls of this rank survive."""
    calls = itertools.count(1)

    def call(*args: Any, **options: Any) -> Any:
        found = function(*args, **options)
        if os.environ["RANK"] == rank and next(calls) > int(step):
            if how == "fail":
                raise InputError("domain 'code': made up by a test")
            die()
        return found

    return call


if how == "capture":
    stages.capture = mortal_capture  # type: ignore[assignment]
if how == "answer":
    capturing.write_answers = dying_after(capturing.write_answers)
if how == "fail":
    scoring.Scorer.counts = dying_after(scoring.Scorer.counts)  # type: ignore[method-assign]
loop.Trainer.reduce = mortal_reduce  # type: ignore[assignment, method-assign]
main(arguments)
