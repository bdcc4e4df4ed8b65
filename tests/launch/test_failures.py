"""A failure under `paceline train --nproc-per-node` is told once, by its cause, and nothing stays."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from cli_runs import IMAGES, small_on, started
from launch.jobs import assert_nothing_left, ranks_of, reached_step, training

ENDLESS = ["--epochs", "5000"]


def test_an_error_of_the_ranks_is_one_line(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    arguments = small_on(missing, "--nproc-per-node", "2", "--device", "cpu")
    with started([*arguments, "--output", str(tmp_path / "run")], tmp_path) as launcher:
        done = launcher.wait(60)
    assert f"{missing}: no such directory" in done.error_line()
    assert done.code == 1
    assert_nothing_left(tmp_path)


def test_a_killed_rank_is_named_with_its_signal(tmp_path: Path) -> None:
    arguments = training(tmp_path / "run", "--nproc-per-node", "2", *ENDLESS)
    with started(arguments, tmp_path) as launcher:
        launcher.wait_until(reached_step(tmp_path / "run"), 60)
        os.kill(ranks_of(tmp_path)[1], signal.SIGKILL)
        done = launcher.wait(60)
    assert done.error_line().startswith("rank 1 was ended by SIGKILL")
    assert done.code == 1
    assert_nothing_left(tmp_path)


def test_ranks_do_not_outlive_a_killed_launcher_and_save(tmp_path: Path) -> None:
    arguments = training(tmp_path / "run", "--nproc-per-node", "2", *ENDLESS)
    with started(arguments, tmp_path) as launcher:
        launcher.wait_until(reached_step(tmp_path / "run"), 60)
        assert sorted(ranks_of(tmp_path)) == [0, 1]
        launcher.send(signal.SIGKILL)
        done = launcher.wait(60)
    assert_nothing_left(tmp_path)
    assert "Traceback" not in done.err
    saved = sorted((tmp_path / "run/checkpoints").glob("step-*.pt"))
    assert int(saved[-1].stem.removeprefix("step-")) >= 15


def test_batch_sizes_are_checked_before_any_rank_starts(tmp_path: Path) -> None:
    arguments = ["train", *IMAGES, "--global-batch-size", "16", "-b", "5", "--nproc-per-node", "2"]
    with started([*arguments, "--output", str(tmp_path / "run")], tmp_path) as launcher:
        line = launcher.wait().error_line()
    assert "run.global_batch_size = 16" in line
    assert not (tmp_path / "run").exists()
