"""`pl.init` on real ranks, alone, and beside a process group that exists."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import paceline as pl
from paceline.core.errors import CommError, ConfigError, PacelineError
from ranks import run_ranks

LAUNCHERS: dict[str, dict[str, str]] = {
    "slurm": {"SLURM_PROCID": "{r}", "SLURM_LOCALID": "{r}", "SLURM_NTASKS": "{n}",
              "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_STEP_TASKS_PER_NODE": "{n}",
              "SLURM_STEP_NODELIST": "localhost"},
    "openmpi": {"OMPI_COMM_WORLD_RANK": "{r}", "OMPI_COMM_WORLD_LOCAL_RANK": "{r}",
                "OMPI_COMM_WORLD_SIZE": "{n}", "OMPI_COMM_WORLD_LOCAL_SIZE": "{n}"},
    "environment": {},
}  # fmt: skip


def _under(rank: int, launcher: str) -> list[Any]:
    variables, size = LAUNCHERS[launcher], int(os.environ["WORLD_SIZE"])
    before = dict(os.environ)
    for name, value in variables.items():
        os.environ[name] = value.format(r=rank, n=size)
    if variables:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
    try:
        with pl.init(device="cpu", timeout_s=120) as context:
            value = torch.ones(3) * (rank + 1)
            dist.all_reduce(value)
            context.barrier()
            same = pl.init() is context
            found = [context.rank, context.world_size, context.local_rank, context.backend]
            found += [context.topology.launcher, same, value.tolist()]
        context.close()
        return [*found, dist.is_initialized()]
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_of_any_launcher_meet(launcher: str) -> None:
    for rank, found in enumerate(run_ranks(2, _under, launcher)):
        assert found == [rank, 2, rank, "gloo", launcher, True, [3.0] * 3, False]


def _one_fails(rank: int) -> str:
    device = "cuda" if rank == 1 else "cpu"
    with pytest.raises(PacelineError) as caught:
        pl.init(device=device, timeout_s=120)
    assert not dist.is_initialized()
    return str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_all_ranks_raise_the_error_of_one() -> None:
    first, second = run_ranks(2, _one_fails)
    assert first == second
    assert "rank 1: device = 'cuda'" in first


def _existing(rank: int) -> list[Any]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    try:
        with pl.init(device="cpu") as context:
            found = [context.rank, context.world_size, context.backend]
        return [*found, dist.is_initialized()]
    finally:
        dist.destroy_process_group()


def test_an_existing_process_group_is_used_and_left_open() -> None:
    assert run_ranks(2, _existing) == [[0, 2, "gloo", True], [1, 2, "gloo", True]]


def _contradicted(rank: int, variables: dict[str, str]) -> list[Any]:
    """The program has started the ranks itself; the variables describe its parent."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    try:
        with mock.patch.dict(os.environ, variables, clear=True):
            model = pl.DataParallel(torch.nn.Linear(2, 2), algorithm="hierarchical")
            model(torch.full((1, 2), 1.0 + rank)).sum().backward()
            hook = pl.HybridAllReduce.from_env(pl.SizeTable.single("ring"))
            hook.close()
            with pl.init(device="cpu") as context:
                found = [context.rank, context.world_size, context.local_rank]
        return [*found, float(model.module.weight.grad[0, 0])]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "2"},
        {"RANK": "3"},
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0",
         "SLURM_STEP_NODELIST": "localhost"},
    ],
)  # fmt: skip
def test_an_existing_process_group_wins_over_variables(variables: dict[str, str]) -> None:
    assert run_ranks(2, _contradicted, variables) == [[0, 2, 0, 1.5], [1, 2, 1, 1.5]]


def test_a_process_alone_creates_no_group() -> None:
    with pl.init(device="cpu") as context:
        context.barrier()
        assert pl.init() is context
        assert not dist.is_initialized()
        assert (context.world_size, context.is_main, context.local_world_size) == (1, True, 1)
        with pytest.raises(ConfigError, match="backend"):
            pl.init(backend="gloo")
    with pl.init(device="cpu") as again:
        assert again is not context


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"backend": "ncl"}, "backend"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"device": "gpu"}, "device"),
    ],
)
def test_mistakes_are_one_line(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        pl.init(**arguments)
    assert "\n" not in str(caught.value)


def test_a_rank_without_a_launchers_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(CommError, match="WORLD_SIZE"):
        pl.init()
