"""A rank is lost: the lowest one that is left saves its last completed step, marked as salvaged."""

from __future__ import annotations

import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import faults
from cli.conftest import Reference
from cli_runs import Done, run, run_two, small, started_ranks, summary
from paceline.train.checkpoint import Checkpoint

KILL = partial(faults.signal_self, signal.SIGKILL)
# A short time-out has frequent heartbeats, by which a lost rank is found.
# Not in the background: the rank that writes may be killed a step later.
ARGUMENTS = small(
    "--output", "run", "-b", "4", "--set", "checkpoint.interval_steps=3", "--set",
    "comm.timeout_s=12", "--set", "checkpoint.background=false",
)  # fmt: skip


def in_step(step: int, number: int = 3) -> Any:
    return partial(faults.at_micro_batch, step, number, KILL)


def lose(cwd: Path, rank: int, fault: Any, *more: str, both: Any = None) -> Done:
    """Two ranks, of which `fault` kills one; returns how the other ended. `both` happens to both."""
    of_ranks = [both, both]
    of_ranks[rank] = fault if both is None else partial(faults.several, both, fault)
    done = run_two([*ARGUMENTS, *more], cwd, of_ranks)
    assert done[rank].code == -signal.SIGKILL
    return done[1 - rank]


def undisturbed(reference: Reference) -> dict[str, Any]:
    return summary(reference("-b", "4", ranks=2))


def salvaged(cwd: Path) -> list[str]:
    return sorted(path.name for path in (cwd / "run/checkpoints").glob("*.salvaged.pt"))


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """A run that has lost rank 1 in step 4, and the end of rank 0."""
    folder = tmp_path_factory.mktemp("lost")
    return folder / "run", lose(folder, 1, in_step(4))


@pytest.mark.parametrize("rank", [1, 0])
def test_the_rank_that_is_left_saves_and_the_weights_stay_exact(
    tmp_path: Path, reference: Reference, lost: tuple[Path, Done], rank: int
) -> None:
    if rank == 1:
        left = lost[1]
        shutil.copytree(lost[0], tmp_path / "run")
    else:
        # Of four micro-batches, 0 and 2 are rank 0's: the survivor is in the middle of its step.
        left = lose(tmp_path, 0, in_step(4, 2))
    assert f"rank {rank}" in left.error_line()
    assert "--resume auto" in left.error_line()
    assert salvaged(tmp_path) == ["step-00000004.salvaged.pt"]
    file = tmp_path / "run/checkpoints/step-00000004.salvaged.pt"
    assert Checkpoint.read(file).salvaged_by == 1 - rank
    assert (tmp_path / "run/checkpoints/step-00000003.pt").is_file()
    done = run_two([*ARGUMENTS, "--resume", "auto"], tmp_path)
    assert [end.code for end in done] == [0, 0], done[0].err
    assert f"salvaged by rank {1 - rank}" in done[0].out
    ended = summary(tmp_path / "run")
    assert ended["resumed_at_steps"] == [4]
    assert ended["weights_sha256"] == undisturbed(reference)["weights_sha256"]
    assert salvaged(tmp_path) == [], "a regular checkpoint has taken its place"


def test_its_statistics_are_those_of_the_last_completed_step(
    tmp_path: Path, lost: tuple[Path, Done]
) -> None:
    """What the broken step has added to them is gone."""
    alone = Checkpoint.read(lost[0] / "checkpoints/step-00000004.salvaged.pt")
    every = ["--set", "checkpoint.interval_steps=1", "--set", "checkpoint.keep=20"]
    run_two([*ARGUMENTS, "--output", "all", *every], tmp_path)
    regular = Checkpoint.read(tmp_path / "all/checkpoints/step-00000004.pt")
    assert alone.batch_norm["rows"][0].equal(regular.batch_norm["rows"][0])
    assert alone.batch_norm["tracked"][0].equal(regular.batch_norm["tracked"][0])
    for name, value in regular.model.items():
        assert alone.model[name].equal(value), name


@pytest.mark.parametrize("step", [0, 3], ids=["no step is done", "that step is saved"])
def test_nothing_is_salvaged(tmp_path: Path, step: int) -> None:
    lose(tmp_path, 1, in_step(step)).error_line()
    assert salvaged(tmp_path) == []


def test_a_step_that_is_under_way_counts(tmp_path: Path, reference: Reference) -> None:
    lose(tmp_path, 1, in_step(5), both=faults.lag)
    assert salvaged(tmp_path) == ["step-00000005.salvaged.pt"]
    run_two([*ARGUMENTS, "--resume", "auto"], tmp_path)
    assert summary(tmp_path / "run")["weights_sha256"] == undisturbed(reference)["weights_sha256"]


def test_a_rank_lost_in_an_evaluation(tmp_path: Path, reference: Reference) -> None:
    average = ("--set", "run.average_epochs=1.0")
    lose(tmp_path, 1, partial(faults.at_evaluation, 1, KILL), *average)
    assert salvaged(tmp_path) == ["step-00000007.salvaged.pt"]
    done = run_two([*ARGUMENTS, *average, "--resume", "auto"], tmp_path)
    assert [end.code for end in done] == [0, 0], done[0].err
    assert summary(tmp_path / "run")["weights_sha256"] == undisturbed(reference)["weights_sha256"]


def test_the_lowest_of_several_saves_and_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    # Batches of 12: three ranks with a micro-batch of 4 each.
    arguments = [*ARGUMENTS, "--global-batch-size", "12"]
    with started_ranks([arguments] * 3, tmp_path, [in_step(4, 0), None, None]) as ranks:
        codes = [process.wait().code for process in ranks]
    assert codes[0] == -signal.SIGKILL
    assert 0 not in codes
    assert salvaged(tmp_path) == ["step-00000004.salvaged.pt"]
    file = tmp_path / "run/checkpoints/step-00000004.salvaged.pt"
    assert Checkpoint.read(file).salvaged_by == 1
    assert run([*arguments, "--resume", "auto"], tmp_path).code == 0
    assert summary(tmp_path / "run")["resumed_at_steps"] == [4]
