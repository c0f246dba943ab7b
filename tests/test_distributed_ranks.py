"""How ranks meet and divide work, and that one that dies, fails, hangs, starts late or differs ends all of them, each
in one line that says why."""

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Ended, as_command, run_ranks

from draftforge import distributed as module
from draftforge.distributed import ALONE, Ranks, ranks, training_ranks
from draftforge.errors import DraftforgeError, InputError, LostRankError

pytestmark = pytest.mark.slow
SECONDS = 60.0


def said(part: Any) -> str:
    """The error of one part."""
    try:
        part()
    except DraftforgeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def meet() -> dict[str, Any]:
    """What ranks do that go on together."""
    mine = ranks()
    module.FILE_LIMIT = timedelta(seconds=0.2)
    plan = {"seed": 1, "draft": None}
    with training_ranks(needs_group=True) as training:
        total = training.sum(torch.tensor([mine.rank + 1.0])).item()
    return {
        "all": mine.gather("all", {"rank": mine.rank, "long": "x" * mine.rank * 100}),
        "first": mine.broadcast("first", [mine.rank, float("inf")]),
        "bytes": [part.tolist() for part in mine.gather_bytes(torch.tensor([mine.rank], dtype=torch.uint8))],
        "total": total,
        "same": said(lambda: mine.check_same_config(plan)),
        "other": said(lambda: mine.check_same_config(plan | ({"seed": 2} if mine.rank == 1 else {}))),
        "elsewhere": said(lambda: mine.barrier("score-b" if mine.rank == 2 else "score-a")),
        "unseen": said(lambda: mine.wait_for_file(lambda: mine.first, "mix-a")),
    }


def test_ranks_meet(run_distributed: Any) -> None:
    found = run_distributed(__file__, "meet", 3)
    for rank, one in enumerate(found):
        assert one["all"] == [{"rank": other, "long": "x" * other * 100} for other in range(3)]
        assert one["first"] == [0, float("inf")] and one["bytes"] == [[0], [1], [2]] and one["total"] == 6
        assert one["same"] == "nothing"
        assert one["other"] == (
            "InputError: seed = 2 on rank 1: the first rank has 1; all ranks of a launch need the same recipe and "
            "options"
        )
        assert one["elsewhere"] == (
            "StaleInputError: score-b is what rank 2 comes to, but score-a is what the first rank does: they have "
            "another recipe, target or mix"
        )
        unseen = f"MissingFileError: mix-a: another rank has made it, but rank {rank} does not find it; workdir must"
        assert one["unseen"].startswith(unseen if rank else "nothing")


def end(how: str) -> None:
    """One rank ends its way while the others wait for it."""
    if how.endswith(("stops", "unnoticed")):
        module.SILENCE_LIMIT, module._BEAT_SECONDS = timedelta(seconds=3), 0.2
    if how == "hangs":
        module.WAIT_LIMIT = timedelta(seconds=3)
    if how.startswith("late"):
        module.START_LIMIT, module._PATIENCE = timedelta(seconds=4), timedelta(seconds=1)
    module._HEARD_LIMIT = timedelta(seconds=1 if how in ("dies", "hangs") or how.endswith("unnoticed") else 60)
    mine = ranks()
    mine.barrier("begun")  # no rank ends while another one still connects
    which = 0 if how.startswith("first") else 1
    if how == "collective":
        with training_ranks(needs_group=True) as training:
            if mine.rank == which:
                raise InputError("made up")
            training.sum(torch.zeros(1))
    if mine.rank != which and how.endswith("unnoticed"):  # as in a collective of NCCL, which waits for the dead
        time.sleep(SECONDS)
    if mine.rank != which:
        mine.barrier("mix-a")
    elif how.endswith(("dies", "stops", "dies unnoticed")):  # one that stops closes no connection, as without power
        os.kill(os.getpid(), signal.SIGSTOP if how.endswith("stops") else signal.SIGKILL)
    elif how == "hangs":
        time.sleep(SECONDS)
    raise InputError("made up")


def ends(folder: Path, how: str, **options: Any) -> list[Ended]:
    folder.mkdir(exist_ok=True)
    return run_ranks(as_command, [__file__, "end", how], folder, 3, SECONDS, **options)


MIX, GONE = "mix-a was waited for, but", "is gone or hangs; the same command goes on from what is finished"
STEP = "a step of the training was waited for, but"
HEARD = f"{MIX} rank 0 ended: {MIX} rank 1 {GONE}"  # by a rank that wakes up while the first one still waits for it


@pytest.mark.parametrize(
    ("how", "codes", "lines"),
    [
        ("fails", [3, 2, 3], [f"{MIX} rank 1 ended: made up", "made up", f"{MIX} rank 1 ended: made up"]),
        ("first fails", [2, 3, 3], ["made up", *[f"{MIX} rank 0 ended: made up"] * 2]),
        ("dies", [3, -9, 3], [f"{MIX} rank 1 {GONE}", "", f"({HEARD}|{MIX} rank 0 {GONE})"]),
        ("first dies", [-9, 3, 3], ["", *[f"{MIX} rank 0 {GONE}"] * 2]),
        ("collective", [3, 2, 3], [f"{STEP} rank 1 ended: made up", "made up", f"{STEP} rank 1 ended: made up"]),
    ],
)
def test_a_rank_that_ends_ends_the_others(tmp_path: Path, how: str, codes: list[int], lines: list[str]) -> None:
    found = ends(tmp_path, how)
    whose = ["error", "error (rank 1)", "error (rank 2)"]
    for one, who, line in zip(found, whose, lines):
        assert re.fullmatch(line and rf"{re.escape(who)}: {line}\n", one.said), found
    assert [one.code for one in found] == codes


def test_a_rank_that_is_waited_for_in_vain_is_named(tmp_path: Path) -> None:
    """It hangs, has stopped, or does not start; or ends while the others hear only its signs of life."""
    launches: dict[str, dict[str, Any]] = {
        "hangs": {"leaving": 1},
        "stops": {"leaving": 1},
        "first stops": {"leaving": 1},
        "late-0": {"absent": [0]},
        "late-2": {"absent": [2]},
        **{f"{who} unnoticed": {} for who in ("dies", "first dies", "fails", "first fails")},
    }
    with ThreadPoolExecutor() as pool:  # waiting takes no time of the machine's
        begun = {how: pool.submit(ends, tmp_path / how, how, **options) for how, options in launches.items()}
    found = {how: launch.result() for how, launch in begun.items()}
    first, _, third = found["hangs"]
    assert first.said == f"error: {MIX} rank 1 {GONE}\n"
    # Both give up after the same time: the third has heard the first one's reason, or gave up on the first by itself.
    assert re.fullmatch(rf"error \(rank 2\): ({HEARD}|{MIX} rank 0 {GONE})\n", third.said)

    for how, which, who in (("stops", 1, "rank 1"), ("first stops", 0, "the host of the ranks' store")):
        silent = f"{who} has given no sign of life for 3 s: it has stopped, or its machine is gone; the same command go"
        for rank, one in enumerate(found[how]):
            assert rank == which or (one.code == 3 and (silent in one.said or "is gone or hangs" in one.said)), found[
                how
            ]

    for how, which, why in (
        ("dies unnoticed", 1, "rank 1 has given no sign of life for 3 s"),
        ("first dies unnoticed", 0, "the host of the ranks' store has given no sign of life for 3 s"),
        ("fails unnoticed", 1, "its next sign of life was waited for, but rank 1 ended: made up\n"),
        ("first fails unnoticed", 0, "its next sign of life was waited for, but rank 0 ended: made up\n"),
    ):
        for rank, one in enumerate(found[how]):
            assert rank == which or (one.code == 3 and one.said.count("error") == 1 and why in one.said), found[how]

    assert [one.code for how in ("late-0", "late-2") for one in found[how]] == [3] * 4
    assert any("waiting for the first rank at 127.0.0.1:" in one.said for one in found["late-0"])
    assert all(one.said.endswith(" was not there within 4 s\n") for one in found["late-0"])
    first, second = found["late-2"]
    assert first.said == "waiting for rank 2 to start, for 4 s at most\nerror: rank 2 did not start within 4 s\n"
    assert "rank 2 did not start" in second.said or "the first rank is gone" in second.said


def test_shares_are_of_about_one_size() -> None:
    three = [Ranks(rank, 3, torch.device("cpu")) for rank in range(3)]
    assert [one.share("abcdefgh") for one in three] == [list("ab"), list("cde"), list("fgh")]
    assert [one.share("ab", [1, 1]) for one in three] == [["a"], ["b"], []]
    sizes = [1, 9, 2, 8, 3, 7, 4, 6]
    shares = [one.share(range(8), sizes) for one in three]
    assert sorted(item for share in shares for item in share) == list(range(8))
    assert all(share == sorted(share) for share in shares)
    assert max(sum(sizes[item] for item in share) for share in shares) <= 15


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT") for value in ("abc", "", "-1")),
        *(("RANK", "2"), ("WORLD_SIZE", "0"), ("MASTER_PORT", "99999999"), ("MASTER_PORT", "9" * 50)),
    ],
)
def test_numbers_of_a_launch_that_are_none_are_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for variable, text in (launch | {name: value}).items():
        monkeypatch.setenv(variable, text)
    with pytest.raises(InputError, match=rf"^{name} '{value}': must be a whole number from \d+ to \d+; launch with"):
        module.ranks.__wrapped__()


def test_one_process_waits_for_nobody() -> None:
    assert ALONE.first and ALONE.gather("all", {"a": 1}) == [{"a": 1}] and ALONE.broadcast("first", 2) == 2
    assert ALONE.share("abc") == ALONE.share("abc", [1, 2, 3]) == list("abc")
    ALONE.barrier("all")
    ALONE.check_same_config({"seed": 1})


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:1"), True),
        (torch.distributed.DistBackendError("NCCL communicator was aborted on rank 1"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("gloo"), False),
    ],
)
def test_a_failed_collective_says_that_a_rank_is_lost(
    error: Exception, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ranks", lambda: Ranks(0, 2, torch.device("cpu")))
    expected = LostRankError if lost else type(error)
    with pytest.raises(expected, match="the same command goes on" if lost else None), training_ranks(False):
        raise error
