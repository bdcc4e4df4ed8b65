"""`paceline train --nproc-per-node`: signals reach the ranks, failures are one line, nothing stays.

Here the launcher and its ranks are forks of one server; `test_all_launchers.py` starts them for real.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import faults
from cli_runs import CliProcess, Done, events, run, small, small_on, started, summary
from launch.jobs import DISTURB_AT, assert_nothing_left, ranks_of, reached_step, training

TWO = ("--nproc-per-node", "2")
ENDLESS = ("--epochs", "5000")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The summary of the undisturbed run."""
    folder = tmp_path_factory.mktemp("reference")
    assert run(training(folder / "run", *TWO), folder).code == 0
    return summary(folder / "run")


def stop(folder: Path, *numbers: signal.Signals, more: tuple[str, ...] = ()) -> Done:
    """Sends signals to the launcher in the middle of its run, a moment apart; the run waits for them."""
    sent = folder / "sent"
    waits = partial(faults.at_micro_batch, DISTURB_AT, 0, partial(faults.await_file, sent))
    with started(training(folder / "run", *TWO, *more), folder, waits) as launcher:
        launcher.wait_until(reached_step(folder / "run"))
        for number in numbers:
            launcher.send(number)
            time.sleep(0.02)
        sent.touch()
        return launcher.wait()


def assert_saved_alike(folder: Path, number: signal.Signals) -> int:
    """The step at which all ranks stopped, and whose checkpoint is there."""
    stops = [events(folder / "run", "stop", rank)[-1] for rank in (0, 1)]
    assert {record["reason"] for record in stops} == {number.name}
    step = int(stops[0]["step"])
    assert stops[1]["step"] == step
    assert (folder / f"run/checkpoints/step-{step:08d}.pt").is_file()
    assert not list((folder / "run").rglob("*.tmp"))
    assert_nothing_left(folder)
    return step


def test_sigterm_again_and_again_and_resume(tmp_path: Path, reference: dict[str, Any]) -> None:
    done = stop(tmp_path, signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGTERM)
    assert (done.code, done.err) == (143, "")
    step = assert_saved_alike(tmp_path, signal.SIGTERM)
    assert f"stopped after step {step}: SIGTERM" in done.out

    done = run(training(tmp_path / "run", *TWO, "--resume", "auto"), tmp_path)
    assert (done.code, done.err) == (0, "")
    found = summary(tmp_path / "run")
    assert found["resumed_at_steps"] == [step]
    assert found["weights_sha256"] == reference["weights_sha256"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR2])
def test_signals_that_mean_stop_are_reported_by_name_and_are_no_failures(
    tmp_path: Path, number: signal.Signals
) -> None:
    done = stop(tmp_path, number, more=("--max-restarts", "3"))
    assert (done.code, done.err) == (128 + number, "")
    assert_saved_alike(tmp_path, number)
    assert f": {number.name}" in done.out


def test_a_request_to_save_reaches_the_ranks(tmp_path: Path, reference: dict[str, Any]) -> None:
    seldom = ("interval_steps=0", "interval_epochs=0", "keep_best=false")
    more = tuple(f"--set=checkpoint.{setting}" for setting in seldom)
    done = stop(tmp_path, signal.SIGUSR1, more=more)
    assert (done.code, done.err) == (0, "")
    saved = [record["step"] for record in events(tmp_path / "run", "checkpoint")]
    assert len(saved) == 2, "one on request, one at the end"
    assert summary(tmp_path / "run")["weights_sha256"] == reference["weights_sha256"]


def test_ctrl_c_while_the_ranks_start_ends_at_once(tmp_path: Path) -> None:
    waits = partial(faults.at_start, partial(faults.sleep, 600.0))
    with started(training(tmp_path / "run", *TWO), tmp_path, waits) as launcher:
        launcher.wait_until(lambda: len(ranks_of(tmp_path)) == 2)
        launcher.send(signal.SIGINT)
        done = launcher.wait()
    assert (done.code, done.out, done.err) == (130, "", "")
    assert_nothing_left(tmp_path)


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[CliProcess]:
    """A launcher in the middle of its run."""
    with started(training(tmp_path / "run", *TWO, *ENDLESS), tmp_path) as launcher:
        launcher.wait_until(reached_step(tmp_path / "run"))
        yield launcher


def test_a_killed_rank_is_named_with_its_signal(tmp_path: Path, endless: CliProcess) -> None:
    os.kill(ranks_of(tmp_path)[1], signal.SIGKILL)
    done = endless.wait()
    assert done.error_line().startswith("rank 1 was ended by SIGKILL")
    assert done.code == 1
    assert_nothing_left(tmp_path)


def test_ranks_do_not_outlive_a_killed_launcher_and_save(
    tmp_path: Path, endless: CliProcess
) -> None:
    assert sorted(ranks_of(tmp_path)) == [0, 1]
    endless.send(signal.SIGKILL)
    done = endless.wait()
    assert_nothing_left(tmp_path)
    assert "Traceback" not in done.err
    saved = sorted((tmp_path / "run/checkpoints").glob("step-*.pt"))
    assert int(saved[-1].stem.removeprefix("step-")) >= 15


def test_an_error_of_the_ranks_is_one_line(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    done = run(small_on(missing, *TWO, "--output", "run"), tmp_path)
    assert f"{missing}: no such directory" in done.error_line()
    assert done.code == 1
    assert_nothing_left(tmp_path)


@pytest.fixture
def taken() -> Iterator[str]:
    """A port on which somebody else listens, and never answers."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield str(other.getsockname()[1])


def test_a_master_port_in_use(tmp_path: Path, taken: str) -> None:
    line = run(small(*TWO, "--master-port", taken), tmp_path).error_line()
    assert f"cannot listen on 127.0.0.1:{taken}" in line
    assert "choose a free --master-port" in line
    world = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": taken}
    line = run(small("--output", "run"), tmp_path, **world).error_line()
    assert f"127.0.0.1:{taken} is in use" in line
    assert "set MASTER_PORT" in line


HAND = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
SLURM = {
    "SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "1",
    "SLURM_STEP_NODELIST": "a", "SLURM_STEP_TASKS_PER_NODE": "2",
}  # fmt: skip
NO_RANK = "WORLD_SIZE = 2 but RANK is not set"
RANK_ALREADY = "--nproc-per-node = 2: this process is already a rank of a launcher"


@pytest.mark.parametrize(
    ("flags", "place", "words"),
    [
        ((), {"WORLD_SIZE": "2"}, NO_RANK),
        (TWO, {"WORLD_SIZE": "2"}, NO_RANK),
        (TWO, HAND, RANK_ALREADY),
        (TWO, {"OMPI_COMM_WORLD_RANK": "0"}, RANK_ALREADY),
        (TWO, SLURM, RANK_ALREADY),
        (("--nproc-per-node", "0"), {}, "--nproc-per-node = 0: must be at least 1"),
        ((*TWO, "--max-restarts", "-1"), {}, "--max-restarts = -1: must be at least 0"),
        ((*TWO, "--master-port", "65536"), {}, "--master-port = 65536: must be 0"),
    ],
)
def test_places_and_flags_that_cannot_be(
    tmp_path: Path, flags: tuple[str, ...], place: dict[str, str], words: str
) -> None:
    done = run(small(*flags), tmp_path, **place)
    assert done.error_line().startswith(words)
    assert done.code == (1 if words == NO_RANK else 2)


def _lose_rank_1(step: int) -> None:
    if os.environ["RANK"] == "1":
        faults.at_micro_batch(step, 1, partial(faults.signal_self, signal.SIGKILL))


def test_survivors_of_a_lost_rank_finish_the_run(tmp_path: Path, reference: dict[str, Any]) -> None:
    lose, own = partial(_lose_rank_1, DISTURB_AT), ("--min-ranks", "1")
    done = run(training(tmp_path / "run", *TWO, *own), tmp_path, lose)
    assert (done.code, done.err) == (0, "")
    assert "rank 1 was ended by SIGKILL: continuing after step" in done.out
    found = summary(tmp_path / "run")
    assert (found["world_size"], found["steps"]) == (1, reference["steps"])
    assert_nothing_left(tmp_path)


def test_min_ranks_and_restarts_exclude_each_other(tmp_path: Path) -> None:
    done = run(
        training(tmp_path / "run", *TWO, "--min-ranks", "1", "--max-restarts", "1"), tmp_path
    )
    assert done.code == 2
    assert done.error_line().startswith("--max-restarts = 1")
    more = run(training(tmp_path / "run", *TWO, "--min-ranks", "3"), tmp_path)
    assert more.error_line().startswith("comm.min_ranks = 3")
