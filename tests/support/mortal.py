"""The command line with a training that ends badly: a rank dies or hangs in the midst of a step.

    mortal.py RANK STEP HOW ARGUMENTS...

HOW: "kill" (SIGKILL); "hang", where the others' patience is shortened; "capture", SIGKILL while capturing.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

from draftforge.cli import main
from draftforge.pipeline import stages
from draftforge.train import distributed, loop

rank, step, how, *arguments = sys.argv[1:]
whole_reduce = loop.Run.reduce


def mortal_reduce(self: loop.Run, *args: Any) -> Any:
    """Between backward and the collective that sums the losses."""
    if self.state.step == int(step) and self.ranks.rank == int(rank):
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600)
    return whole_reduce(self, *args)


if how == "hang":
    distributed.COLLECTIVE_LIMIT = timedelta(seconds=8)


def mortal_capture(*args: Any) -> None:
    """Long enough for the others to be waiting."""
    time.sleep(8)
    os.kill(os.getpid(), signal.SIGKILL)


if how == "capture":
    stages.capture = mortal_capture  # type: ignore[assignment]
loop.Run.reduce = mortal_reduce  # type: ignore[assignment, method-assign]
main(arguments)
