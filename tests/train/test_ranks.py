"""Waiting for the first rank, and telling a lost rank from any other error."""

import itertools
from datetime import timedelta

import pytest
import torch.distributed as dist
from ports import free_port

from draftforge.distributed import process_group
from draftforge.distributed.process_group import join, wait_until
from draftforge.errors import LostRankError


def test_waiting_ends_when_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(process_group, "_POLL_SECONDS", 0.0)
    polls = itertools.count()
    wait_until(lambda: next(polls) == 60, "capture")
    assert next(polls) == 61


def test_waiting_ends_when_the_first_ranks_launcher_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    for name, value in (("TORCHELASTIC_USE_AGENT_STORE", "True"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(process_group, "_CONNECT_LIMIT", timedelta(milliseconds=300))
    with pytest.raises(LostRankError, match=rf"capture was waited for, but torchrun at 127.0.0.1:{port} is gone"):
        wait_until(lambda: False, "capture")


def test_who_does_not_start_is_named_while_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    for name, value in (("RANK", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(process_group, "COLLECTIVE_LIMIT", timedelta(seconds=2))
    monkeypatch.setattr(process_group, "PATIENCE_SECONDS", 0.1)
    with pytest.raises(LostRankError, match=f"the first rank at 127.0.0.1:{port} was not there within 2 s"):
        process_group.connect()
    said = capsys.readouterr().err
    assert said == f"rank 1: waiting for the first rank at 127.0.0.1:{port} to start, for 2 s at most\n"


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 600000ms for recv"), True),
        (dist.DistBackendError("NCCL communicator was aborted on rank 1"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("gloo"), False),
    ],
)
def test_a_failed_collective_says_that_a_rank_is_lost(
    error: Exception, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    expected = LostRankError if lost else type(error)
    with pytest.raises(expected, match="the same command goes on" if lost else None), join(need_group=False):
        raise error
