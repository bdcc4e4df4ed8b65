"""A signal to the launcher: all ranks stop at the same step and save, and the run can go on."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

from cli_runs import Done, events, run, started, summary
from launch.jobs import assert_nothing_left, ranks_of, reached_step, training


def stop(folder: Path, *numbers: signal.Signals, more: tuple[str, ...] = ()) -> Done:
    """Sends signals to the launcher in the middle of its run, a moment apart."""
    arguments = training(folder / "run", "--nproc-per-node", "2", *more)
    with started(arguments, folder) as launcher:
        launcher.wait_until(reached_step(folder / "run"), 60)
        for number in numbers:
            launcher.send(number)
            time.sleep(0.02)
        return launcher.wait(60)


def assert_saved_alike(folder: Path) -> int:
    """The step at which all ranks stopped, and whose checkpoint is there."""
    stops = [events(folder / "run", "stop", rank)[-1] for rank in (0, 1)]
    assert {record["reason"] for record in stops} == {"SIGTERM"}
    step = int(stops[0]["step"])
    assert stops[1]["step"] == step
    assert (folder / f"run/checkpoints/step-{step:08d}.pt").is_file()
    assert not list((folder / "run").rglob("*.tmp"))
    assert_nothing_left(folder)
    return step


def test_sigterm_again_and_again_and_resume(tmp_path: Path, reference: dict[str, Any]) -> None:
    done = stop(tmp_path, signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGTERM)
    assert (done.code, done.err) == (143, "")
    step = assert_saved_alike(tmp_path)
    assert f"stopped after step {step}: SIGTERM" in done.out

    resumed = training(tmp_path / "run", "--nproc-per-node", "2", "--resume", "auto")
    done = run(resumed, tmp_path)
    assert (done.code, done.err) == (0, "")
    found = summary(tmp_path / "run")
    assert found["resumed_at_steps"] == [step]
    assert found["weights_sha256"] == reference["weights_sha256"]


def test_sigint(tmp_path: Path) -> None:
    done = stop(tmp_path, signal.SIGINT)
    assert (done.code, done.err) == (130, "")
    assert_saved_alike(tmp_path)


def test_a_request_to_save_reaches_the_ranks(tmp_path: Path, reference: dict[str, Any]) -> None:
    seldom = (
        "checkpoint.interval_steps=0",
        "checkpoint.interval_epochs=0",
        "checkpoint.keep_best=false",
    )
    done = stop(tmp_path, signal.SIGUSR1, more=tuple(f"--set={setting}" for setting in seldom))
    assert (done.code, done.err) == (0, "")
    saved = [record["step"] for record in events(tmp_path / "run", "checkpoint")]
    assert len(saved) == 2, "one on request, one at the end"
    assert summary(tmp_path / "run")["weights_sha256"] == reference["weights_sha256"]


def test_a_user_signal_that_means_stop_is_not_taken_for_a_failure(tmp_path: Path) -> None:
    done = stop(tmp_path, signal.SIGUSR2, more=("--max-restarts", "3"))
    assert (done.code, done.err) == (128 + signal.SIGUSR2, "")
    assert_saved_alike(tmp_path)


def test_ctrl_c_while_the_ranks_start_ends_at_once(tmp_path: Path) -> None:
    arguments = training(tmp_path / "run", "--nproc-per-node", "2")
    with started(arguments, tmp_path) as launcher:
        launcher.wait_until(lambda: len(ranks_of(tmp_path)) == 2, 60)
        launcher.send(signal.SIGINT)
        done = launcher.wait(60)
    assert (done.code, done.out, done.err) == (130, "", "")
    assert_nothing_left(tmp_path)
