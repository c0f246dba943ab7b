"""Work that ranks share through a key-value store: each piece is taken once, and whoever waits for a lost rank ends."""

import os
import time
from collections import Counter
from typing import Any

import pytest

from draftforge.data.crew import ALONE
from draftforge.errors import LostRankError
from draftforge.train import crew as crews
from draftforge.train import pulse

RunDistributed = Any
ITEMS = [str(number) for number in range(20)]


def attempt(number: int) -> crews.RankCrew:
    """The crew of another launch, as far as the store's keys are concerned."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
    crews.crew.cache_clear()
    found = crews.crew()
    assert isinstance(found, crews.RankCrew)
    return found


def share_all() -> dict[str, Any]:
    """Two pieces of work of one name; what this rank took, the reports, and the sum."""
    ranks, taken, reports = attempt(0), list[list[str]](), list[Any]()
    for number in range(2):
        with ranks.share("work", {"items": ITEMS, "number": number} if ranks.first else None) as work:
            assert work is not None and work.plan["number"] == number
            taken.append([])
            for item in work.plan["items"]:
                if work.claim(item):
                    taken[-1].append(item)
                    work.add({"items": 1})
                    time.sleep(0.01)
            reports.append(work.finish({"rank": ranks.rank}))
            total = work.add({"items": 0})["items"]
    return {"taken": taken, "reports": reports, "total": total}


def lose_one(how: str) -> str:
    """Rank 1 ends the work its way; what the first says then."""
    pulse.PULSE_SECONDS, pulse.LOST_SECONDS = 0.2, 1.0
    ranks = attempt(1 if how == "silent" else 2)
    try:
        with ranks.share(how, {} if ranks.first else None) as work:
            assert work is not None
            if ranks.rank == 1:
                if how == "fails":
                    raise ValueError("a made-up reason")
                ranks._pulse.stop()  # as if it had been killed
                return ""
            work.finish({})
    except (ValueError, LostRankError) as error:
        return str(error)
    return "nothing"


def run_all() -> list[Any]:
    shared = share_all()
    return [shared, lose_one("silent"), lose_one("fails")]


@pytest.mark.slow
def test_ranks_share_work_and_find_out_who_is_lost(run_distributed: RunDistributed) -> None:
    first, other, third = run_distributed(__file__, "run_all", 3)
    for number in range(2):
        taken = Counter(item for rank in (first, other, third) for item in rank[0]["taken"][number])
        assert taken == Counter(ITEMS)
        assert [report["rank"] for report in first[0]["reports"][number]] == [0, 1, 2]
    assert first[0]["total"] == len(ITEMS)
    assert first[1].startswith("silent was waited for, but nothing was heard of rank 1 for ")
    assert first[2] == "fails was waited for, but rank 1 ended: a made-up reason"


def test_one_process_takes_everything() -> None:
    with ALONE.share("work", {"items": ITEMS}) as work:
        assert work is not None and all(map(work.claim, ITEMS))
        assert work.add({"a": 2, "b": 0}) == {"a": 2, "b": 0} and work.add({"a": 1}) == {"a": 3}
        assert work.finish({"x": 1}) == [{"x": 1}]
    assert ALONE.first
