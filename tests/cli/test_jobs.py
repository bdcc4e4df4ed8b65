"""Two jobs: a run folder has one writer, a port one job; a killed job blocks nobody."""

from __future__ import annotations

import shutil
import signal
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import faults
from cli_runs import (
    CliProcess,
    run,
    small,
    started,
    started_ranks,
    steps,
    summary,
)
from ranks import free_port

# Not in the background: such a save could still be at work when the folder is looked at or removed.
SAVES = ("--set", "checkpoint.interval_steps=3", "--set", "checkpoint.background=false")


@pytest.fixture
def training(tmp_path: Path) -> Iterator[CliProcess]:
    """A run in `run` that has saved step 3 and stands still in step 5."""
    stands = tmp_path / "stands"
    actions = partial(faults.several, stands.touch, partial(faults.sleep, 600.0))
    fault = partial(faults.at_micro_batch, 4, 0, actions)
    with started(small("--output", "run", *SAVES), tmp_path, fault) as process:
        process.wait_until(stands.exists)
        yield process


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("more", [(), ("--resume", "auto"), ("--resume", "run")])
def test_a_second_job_is_refused_and_changes_nothing(
    tmp_path: Path, training: CliProcess, more: tuple[str, ...]
) -> None:
    before = contents(tmp_path / "run")
    line = run(small("--output", "run", *SAVES, *more), tmp_path).error_line()
    assert f"process {training.process.pid} on {socket.gethostname()}" in line
    assert contents(tmp_path / "run") == before
    assert training.process.is_alive()


def test_a_job_that_has_only_just_begun_is_seen(tmp_path: Path) -> None:
    """It holds the folder before it has written anything else."""
    waits = partial(faults.at_rename, "config.toml", 1, partial(faults.sleep, 600.0))
    with started(small("--output", "run"), tmp_path, waits) as process:
        process.wait_until((tmp_path / "run/run.lock").exists)
        process.wait_until(lambda: (tmp_path / "run/run.lock").read_text().endswith("}"))
        line = run(small("--output", "run"), tmp_path).error_line()
        assert f"process {process.process.pid} on " in line
        assert process.process.is_alive()


def test_reading_is_possible_meanwhile_and_a_kill_frees_the_folder(
    tmp_path: Path, training: CliProcess
) -> None:
    assert run(["report", "run", "--out", "page.html"], tmp_path).code == 0
    assert run(["export", "run", "weights.safetensors"], tmp_path).code == 0
    assert run(["eval", "run", "--device", "cpu"], tmp_path).code == 0
    training.send(signal.SIGKILL)
    training.wait()
    assert (tmp_path / "run/run.lock").exists()
    assert run(small("--output", "run", "--resume", "auto", *SAVES), tmp_path).code == 0
    assert summary(tmp_path / "run")["resumed_at_steps"] == [3]
    assert not (tmp_path / "run/run.lock").exists()


@pytest.mark.parametrize("step", [4, 12])
def test_a_folder_that_is_deleted_during_the_run(tmp_path: Path, step: int) -> None:
    """Before a save of the run, and before the last one."""
    remove = partial(faults.at_micro_batch, step, 0, partial(shutil.rmtree, tmp_path / "run"))
    done = run(small("--output", "run", *SAVES), tmp_path, remove)
    assert "run folder run" in done.error_line()
    assert done.code == 1
    assert not (tmp_path / "run").exists()


# Without an id it is the very same command twice.
@pytest.mark.parametrize("ids", [("first", "second"), ("", "")])
def test_the_second_job_ends_at_once(tmp_path: Path, ids: tuple[str, str]) -> None:
    """While the first one stands in its third step, until the second has ended."""
    port, over = free_port(), tmp_path / "over"
    arguments = small("--output", "first", "--epochs", "1")
    waits = partial(faults.at_micro_batch, 2, 0, partial(faults.await_file, over))
    with started_ranks([arguments] * 2, tmp_path, [waits, None], port, ids[0]) as first:
        first[0].wait_until(lambda: steps(tmp_path / "first"))
        others = [[*arguments, "--output", "second"]] * 2
        with started_ranks(others, tmp_path, None, port, ids[1]) as second:
            lines = [rank.wait().error_line() for rank in second]
        assert all(f"127.0.0.1:{port}" in line for line in lines)
        assert not (tmp_path / "second").exists()
        over.touch()
        assert [rank.wait().code for rank in first] == [0, 0]
    assert summary(tmp_path / "first")["world_size"] == 2
