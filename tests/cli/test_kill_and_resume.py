"""A run that was killed and resumed ends bit-identical to an undisturbed one (contract 3)."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import faults
from cli.conftest import Reference
from cli_runs import (
    Done,
    run,
    run_two,
    small,
    started_ranks,
    steps,
    summary,
)

KILL = partial(faults.signal_self, signal.SIGKILL)
# Not in the background, so that the step from which a killed run continues is known.
BACKGROUND = ("--set", "checkpoint.interval_steps=3")
SAVES = (*BACKGROUND, "--set", "checkpoint.background=false")
CHECKPOINTS = Path("run/checkpoints")


def resume(cwd: Path, *more: str) -> Done:
    done = run(small("--output", "run", "--resume", "auto", *SAVES, *more), cwd)
    assert done.code == 0, done.err
    return done


def assert_same_end(folder: Path, undisturbed: Path) -> None:
    """Bit-identical weights, and all figures but times."""
    ended, expected = summary(folder), summary(undisturbed)
    for name in ("weights_sha256", "top1", "top5", "val_loss", "best_top1", "best_step", "steps",
                 "images", "epochs", "skipped_steps", "corrupt_samples", "stopped_by"):  # fmt: skip
        assert ended[name] == expected[name], name
    assert not list(folder.rglob("*.tmp"))
    assert (folder / "report.html").is_file()
    assert (folder / "weights.safetensors").is_file()


def in_step(step: int, number: int = 0) -> Any:
    return partial(faults.at_micro_batch, step, number, KILL)


def at_rename(part: str, nth: int = 1, **more: Any) -> Any:
    return partial(faults.at_rename, part, nth, KILL, **more)


KILLS = {
    "in the first step": (in_step(0), []),
    "between two saves": (in_step(4), [3]),
    "right after a save": (in_step(6), [6]),
    "in the short last step": (in_step(12), [12]),
    "in an evaluation": (partial(faults.at_evaluation, 1, KILL), [6]),
    "in the middle of a write": (
        partial(faults.at_rename, "step-", 2, partial(faults.halve_and_die, CHECKPOINTS)),
        [3],
    ),
    "before the rename": (at_rename("step-", 2), [3]),
    "between the best and the last": (at_rename("best.pt", after=True), [6]),
    "before the weights": (at_rename("weights.safetensors"), [13]),
    "before the report": (at_rename("report.html"), [13]),
    "before the summary": (at_rename("summary.json"), [13]),
}


@pytest.mark.parametrize(("fault", "resumed_at"), KILLS.values(), ids=KILLS)
def test_killed_anywhere(
    tmp_path: Path, reference: Reference, fault: Any, resumed_at: list[int]
) -> None:
    arguments = small("--output", "run", *SAVES)
    assert run(arguments, tmp_path, fault).code == -signal.SIGKILL
    assert not (tmp_path / "run/summary.json").exists()
    resume(tmp_path)
    assert_same_end(tmp_path / "run", reference())
    assert summary(tmp_path / "run")["resumed_at_steps"] == resumed_at
    best = f"step-{summary(reference())['best_step']:08d}.pt"
    assert (tmp_path / CHECKPOINTS / "best.pt").samefile(tmp_path / CHECKPOINTS / best)


@pytest.mark.parametrize(
    "where", ["in the middle of a write", "before the rename", "between the best and the last"]
)
def test_killed_while_the_background_thread_writes(
    tmp_path: Path, reference: Reference, where: str
) -> None:
    fault, resumed_at = KILLS[where]
    arguments = small("--output", "run", *BACKGROUND)
    assert run(arguments, tmp_path, fault).code == -signal.SIGKILL
    resume(tmp_path)
    assert_same_end(tmp_path / "run", reference())
    assert summary(tmp_path / "run")["resumed_at_steps"] == resumed_at


def test_two_ranks_killed_together(tmp_path: Path, reference: Reference) -> None:
    arguments = small("--output", "run", "-b", "8", *SAVES)
    # Rank 1 holds back, so that rank 0 is killed while it waits in the exchange.
    wait = partial(faults.at_micro_batch, 7, 1, partial(faults.sleep, 600.0))
    with started_ranks([arguments, arguments], tmp_path, [None, wait]) as ranks:
        ranks[0].wait_until(lambda: steps(tmp_path / "run")[-1:] == [7])
        for process in ranks:
            process.send(signal.SIGKILL)
        assert [process.wait().code for process in ranks] == [-signal.SIGKILL] * 2
    done = run_two([*arguments, "--resume", "auto"], tmp_path)
    assert [rank.code for rank in done] == [0, 0], done[0].err
    expected = reference("-b", "8", ranks=2)
    assert_same_end(tmp_path / "run", expected)
    assert load_file(tmp_path / "run/weights.safetensors")["bn1.running_mean"].equal(
        load_file(expected / "weights.safetensors")["bn1.running_mean"]
    ), "each rank's own statistics are saved and restored"


def _fail_the_device(killed: Path) -> None:
    faults.await_file(killed)
    faults.sleep(2.0)
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def _mark_and_die(killed: Path) -> None:
    killed.touch()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("shared", [True, False])
def test_a_killed_rank_that_broke_a_shared_gpu_is_named(tmp_path: Path, shared: bool) -> None:
    """Under MPS the others may only see that their device failed."""
    arguments = small(
        "--output", "run", "-b", "8", "--set", f"comm.share_gpus={str(shared).lower()}"
    )
    actions = [
        partial(faults.at_micro_batch, 5, 0, partial(_fail_the_device, tmp_path / "killed")),
        partial(faults.at_micro_batch, 5, 1, partial(_mark_and_die, tmp_path / "killed")),
    ]
    survivor, _ = run_two(arguments, tmp_path, actions)
    assert "rank 0: cpu failed" in survivor.error_line()
    assert ("rank 1" in survivor.error_line()) == shared


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_goes_on_with_the_same_batches(
    tmp_path: Path, reference: Reference, before: int, after: int
) -> None:
    arguments = small("--output", "run", "-b", "8", "--set", "checkpoint.background=false")
    fault = in_step(9)
    start(before, arguments, tmp_path, fault)
    assert steps(tmp_path / "run")[-1] == 9
    assert all(code == 0 for code in start(after, [*arguments, "--resume", "auto"], tmp_path))
    ended = summary(tmp_path / "run")
    # Of two ranks the one that is left saves the last step.
    assert (ended["world_size"], ended["resumed_at_steps"]) == (after, [9 if before == 2 else 7])
    expected = load_file(reference("-b", "8", ranks=2) / "weights.safetensors")
    for name, value in load_file(tmp_path / "run/weights.safetensors").items():
        if "running" not in name and "tracked" not in name:
            # The same samples in the same micro-batches; only the order of a sum may differ.
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def start(ranks: int, arguments: list[str], cwd: Path, fault: Any = None) -> list[int | None]:
    if ranks == 1:
        return [run(arguments, cwd, fault).code]
    return [done.code for done in run_two(arguments, cwd, [fault, None])]


def test_a_run_killed_at_its_target_ends_there(tmp_path: Path) -> None:
    arguments = small("--output", "run", "--target-top1", "1")
    killed = at_rename("weights.safetensors")
    assert run(arguments, tmp_path, killed).code == -signal.SIGKILL
    assert run([*arguments, "--resume", "auto"], tmp_path).code == 0
    ended = summary(tmp_path / "run")
    assert (ended["stopped_by"], ended["steps"]) == ("target", 7)
    assert ended["time_to_target_s"] is not None
