"""Environments in which ranks cannot meet: one line each, soon, and never a hang."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli_runs import run, small


@pytest.fixture
def taken() -> Iterator[str]:
    """A port on which somebody else listens, and never answers."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield str(other.getsockname()[1])


def test_a_master_port_in_use(tmp_path: Path, taken: str) -> None:
    done = run(small("--nproc-per-node", "2", "--master-port", taken), tmp_path)
    line = done.error_line()
    assert f"cannot listen on 127.0.0.1:{taken}" in line
    assert "choose a free --master-port" in line


def test_a_master_port_in_use_by_hand(tmp_path: Path, taken: str) -> None:
    world = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": taken}
    line = run(small("--output", "run"), tmp_path, **world).error_line()
    assert f"127.0.0.1:{taken} is in use" in line
    assert "set MASTER_PORT" in line


@pytest.mark.parametrize("flags", [(), ("--nproc-per-node", "2")])
def test_a_world_without_a_rank(tmp_path: Path, flags: tuple[str, ...]) -> None:
    line = run(small(*flags), tmp_path, WORLD_SIZE="2").error_line()
    assert line.startswith("WORLD_SIZE = 2 but RANK is not set")


@pytest.mark.parametrize(
    "mark",
    [
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
        {"OMPI_COMM_WORLD_RANK": "0"},
        {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "1",
         "SLURM_STEP_NODELIST": "a", "SLURM_STEP_TASKS_PER_NODE": "2"},
    ],
)  # fmt: skip
def test_a_rank_does_not_launch_ranks(tmp_path: Path, mark: dict[str, str]) -> None:
    done = run(small("--nproc-per-node", "2"), tmp_path, **mark)
    assert "--nproc-per-node = 2: this process is a rank of a launcher already" in done.error_line()
    assert done.code == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--nproc-per-node", "0"), "--nproc-per-node = 0: must be at least 1"),
        (
            ("--nproc-per-node", "2", "--max-restarts", "-1"),
            "--max-restarts = -1: must be at least 0",
        ),
        (("--nproc-per-node", "2", "--master-port", "65536"), "--master-port = 65536: must be 0"),
    ],
)
def test_flags_out_of_range(tmp_path: Path, flags: tuple[str, ...], words: str) -> None:
    done = run(small(*flags), tmp_path)
    assert done.error_line().startswith(words)
    assert done.code == 2
