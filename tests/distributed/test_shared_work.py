"""Work that ranks share through a key-value store: each piece is taken once, and whoever waits for a lost rank ends."""

import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from draftforge.distributed import shared_work
from draftforge.distributed import shared_work as crews
from draftforge.distributed.shared_work import ALONE
from draftforge.errors import DraftforgeError, InputError, LostRankError

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
    shared_work.PULSE_SECONDS, shared_work.LOST_SECONDS = 0.2, 1.0
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


def said(number: int, part: Callable[[crews.RankCrew], object]) -> str:
    """What ends this rank in a launch of its own; one that ends says why, as the command line does."""
    ranks = attempt(number)
    try:
        part(ranks)
    except DraftforgeError as error:
        ranks.end(error)
        return f"{type(error).__name__}: {error}"
    return "nothing"


def another_recipe(ranks: crews.RankCrew) -> None:
    ranks.agree({"seed": int(ranks.rank == 1), "draft": None})
    ranks.wait(lambda: False, "what comes next")


def another_work(ranks: crews.RankCrew) -> None:
    with ranks.share("score-a" if ranks.rank != 1 else "score-b", {} if ranks.first else None) as work:
        assert work is not None
        work.finish({})
    ranks.wait(lambda: False, "what comes next")


def elsewhere(ranks: crews.RankCrew) -> None:
    """The first rank has made it; the last one alone finds it."""
    if ranks.first:
        ranks.made("mix-a")
    ranks.wait(lambda: ranks.rank == 2, "mix-a" if not ranks.first else "what comes next")
    ranks.wait(lambda: False, "what comes next")


def failing(ranks: crews.RankCrew) -> None:
    """The first rank fails in work of its own, while the others wait for what it makes."""
    if ranks.first:
        raise InputError("made up")
    ranks.wait(lambda: False, "mix-a")


def failing_together(ranks: crews.RankCrew) -> None:
    """What a collective says of a rank that is gone is not why it went."""
    with ranks.together("train-a"):
        if ranks.rank == 1:
            raise InputError("made up")
        time.sleep(1.0)
        raise LostRankError("another rank is gone or hangs")


def run_all() -> list[Any]:
    shared = share_all()
    lost = [shared, lose_one("silent"), lose_one("fails")]
    shared_work.LOST_SECONDS, crews._SEEN_SECONDS = 45.0, 0.5
    parts = (another_recipe, another_work, elsewhere, failing, failing_together)
    return [*lost, *(said(number, part) for number, part in enumerate(parts, start=3))]


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

    words = "all ranks of a launch need the same recipe and options"
    assert other[3] == f"InputError: seed = 1: the first rank has 0; {words}"
    assert all(
        f"was waited for, but rank 1 ended: seed = 1: the first rank has 0; {words}" in x for x in (first[3], third[3])
    )
    assert other[4].startswith(
        "StaleInputError: score-b is what rank 1 comes to, but score-a is what the first rank does"
    )
    assert "rank 1 ended: score-b is what rank 1 comes to" in first[4]
    assert other[5].startswith("MissingFileError: mix-a: the first rank has made it, but rank 1 does not find it")
    assert "rank 1 ended: mix-a: the first rank has made it" in first[5] and "rank 1 ended" in third[5]
    assert first[6] == "InputError: made up"
    assert other[6] == third[6] == "LostRankError: mix-a was waited for, but rank 0 ended: made up"
    assert other[7] == "InputError: made up"
    assert first[7] == third[7] == "LostRankError: train-a was waited for, but rank 1 ended: made up"


def test_one_process_takes_everything() -> None:
    with ALONE.share("work", {"items": ITEMS}) as work:
        assert work is not None and all(map(work.claim, ITEMS))
        assert work.add({"a": 2, "b": 0}) == {"a": 2, "b": 0} and work.add({"a": 1}) == {"a": 3}
        assert work.finish({"x": 1}) == [{"x": 1}]
    assert ALONE.first
