"""The helper that all multi-process tests stand on must itself be able to fail."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import pytest
import torch

import faults
from cli_runs import started
from paceline.comm.group import Group
from paceline.comm.settings import CommSettings
from paceline.core.topology import Topology
from ranks import RankFailed, run_ranks


def _sum_of_ranks(rank: int, extra: int) -> tuple[int, int]:
    group = Group(Topology.from_env(os.environ), CommSettings(), torch.device("cpu"))
    try:
        value = torch.tensor([float(rank + extra)])
        group.all_reduce_sum(value)
        return int(value), os.getpid()
    finally:
        group.close()


def _fail_on_one(rank: int) -> None:
    if rank == 1:
        raise RuntimeError("rank one is unwell")
    time.sleep(30)


def _sleep(rank: int) -> None:
    time.sleep(60)


def test_runs_a_real_collective_and_keeps_the_processes() -> None:
    first = run_ranks(2, _sum_of_ranks, 10)
    second = run_ranks(2, _sum_of_ranks, 20)
    assert [value for value, _ in first] == [21, 21]
    assert [value for value, _ in second] == [41, 41]
    assert [pid for _, pid in first] == [pid for _, pid in second]


def test_shows_the_traceback_of_the_rank_that_failed() -> None:
    with pytest.raises(RankFailed, match=r"(?s)rank 1 of 2 failed first.*rank one is unwell"):
        run_ranks(2, _fail_on_one)


def test_a_hanging_rank_is_named() -> None:
    with pytest.raises(RankFailed, match=r"ranks \[0, 1\] of 2 did not return"):
        run_ranks(2, _sleep, timeout_s=3)


def test_a_fork_shows_its_environment_at_once(tmp_path: Path) -> None:
    """By which launchers know their ranks."""
    waits = partial(faults.await_file, tmp_path / "never")
    with started(["--version"], tmp_path, waits, PACELINE_LAUNCHER="77") as fork:
        shown = Path(f"/proc/{fork.process.pid}/environ").read_bytes().split(b"\0")
        assert b"PACELINE_LAUNCHER=77" in shown
