"""Signals: the run saves and stops, or saves and goes on; either way it ends with the same bits."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import faults
from cli.conftest import Reference
from cli_runs import Done, events, run, run_two, small, started, started_ranks, steps, summary

TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
USR1, USR2 = signal.SIGUSR1, signal.SIGUSR2
# The tests themselves may run under nohup.
HEARS_HANGUP = partial(faults.dispose, HUP, signal.SIG_DFL)
# 16 = 4 micro-batches of 4, so that a step can be left in the middle.
ARGUMENTS = small("--output", "run", "-b", "4")


def at(step: int, micro_batch: int, *numbers: signal.Signals) -> Any:
    return partial(faults.at_micro_batch, step, micro_batch, partial(faults.signal_self, *numbers))


def in_evaluation(nth: int, number: signal.Signals) -> Any:
    return partial(faults.at_evaluation, nth, partial(faults.signal_self, number))


def assert_same_end(cwd: Path, reference: Reference, ranks: int = 1) -> None:
    ended, expected = summary(cwd / "run"), summary(reference("-b", "4", ranks=ranks))
    for name in ("weights_sha256", "top1", "val_loss", "best_top1", "steps", "images"):
        assert ended[name] == expected[name], name


def assert_resumes_to_the_same_end(cwd: Path, reference: Reference) -> None:
    assert run([*ARGUMENTS, "--resume", "auto"], cwd).code == 0
    assert_same_end(cwd, reference)


def assert_stopped(done: Done, cwd: Path, number: signal.Signals, step: int) -> None:
    assert done.code == 128 + number
    assert done.err == ""
    assert f"step {step}: {number.name}" in done.out
    assert "--resume auto --output run" in done.out
    saved = sorted((cwd / "run/checkpoints").glob("step-*.pt"))
    assert saved[-1].name == f"step-{step:08d}.pt"
    assert not (cwd / "run/summary.json").exists()
    assert not list((cwd / "run").rglob("*.tmp"))


STOPS = {
    "in the last micro-batch, so the step counts": (at(4, 3, TERM), TERM, 5),
    "in the first micro-batch": (at(4, 0, TERM), TERM, 4),
    "in the middle of a step": (at(9, 1, INT), INT, 9),
    "again and again": (at(9, 1, INT, TERM, TERM), INT, 9),
    "in the very last step": (at(12, 1, TERM), TERM, 13),
    "a lost terminal": (partial(faults.several, HEARS_HANGUP, at(4, 3, HUP)), HUP, 5),
    "by setting": (at(9, 1, USR2), USR2, 9),
    "in an evaluation": (in_evaluation(1, TERM), TERM, 7),
    "in the last evaluation": (in_evaluation(2, INT), INT, 13),
    "again in the save": (
        partial(
            faults.several,
            at(5, 2, TERM),
            partial(faults.at_rename, "step-", 1, partial(faults.signal_self, TERM, INT)),
        ),
        TERM,
        5,
    ),
}


@pytest.mark.parametrize(("fault", "number", "step"), STOPS.values(), ids=STOPS)
def test_a_signal_saves_and_nothing_of_a_half_step_remains(
    tmp_path: Path, reference: Reference, fault: Any, number: signal.Signals, step: int
) -> None:
    assert_stopped(run(ARGUMENTS, tmp_path, fault), tmp_path, number, step)
    assert events(tmp_path / "run", "stop")[-1]["reason"] == number.name
    assert_resumes_to_the_same_end(tmp_path, reference)


def test_a_signal_after_the_last_save_lets_the_run_end(
    tmp_path: Path, reference: Reference
) -> None:
    fault = partial(faults.at_rename, "weights", 1, partial(faults.signal_self, TERM, INT))
    assert run(ARGUMENTS, tmp_path, fault).code == 0
    assert_same_end(tmp_path, reference)


def test_a_signal_stops_within_one_micro_step(tmp_path: Path) -> None:
    """A global batch that takes far longer than a scheduler waits is not finished first."""
    arguments = small("--output", "run", "--global-batch-size", "65536", "-b", "4")
    arguments += ["--set", "data.synthetic_samples=70000", "--set", "run.smoothing=0.0"]
    with started(arguments, tmp_path) as process:
        process.wait_until(lambda: events(tmp_path / "run", "start"))
        time.sleep(0.3)
        process.send(TERM)
        done = process.wait()  # a hang is the helper's time limit; a finished step would show below
    assert_stopped(done, tmp_path, TERM, 0)
    assert steps(tmp_path / "run") == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_stops_both_at_the_same_step(
    tmp_path: Path, reference: Reference, rank: int
) -> None:
    # Micro-batches 0 and 2 are rank 0's, 1 and 3 are rank 1's.
    faults_of_ranks = [None, None]
    faults_of_ranks[rank] = at(6, rank, TERM)
    done = run_two(ARGUMENTS, tmp_path, faults_of_ranks)
    assert_stopped(done[0], tmp_path, TERM, 6)
    assert (done[1].code, done[1].err) == (128 + TERM, "")
    assert len(events(tmp_path / "run", "step", rank=1)) == 6
    assert [end.code for end in run_two([*ARGUMENTS, "--resume", "auto"], tmp_path)] == [0, 0]
    assert_same_end(tmp_path, reference, ranks=2)


def saved_steps(folder: Path, rank: int = 0) -> list[int]:
    return [record["step"] for record in events(folder, "checkpoint", rank)]


SAVES = {
    "thrice in a step": (at(3, 1, USR1, USR1, USR1), [4, 7, 13]),
    "where a save is due anyway": (at(6, 1, USR1), [7, 13]),
    "in the last step": (at(12, 1, USR1), [7, 13]),
    "twice": (partial(faults.several, at(3, 1, USR1), at(8, 0, USR1)), [4, 7, 9, 13]),
    # On a device the step after it has been launched already.
    "with a lag": (partial(faults.several, faults.lag, at(3, 1, USR1)), [5, 7, 13]),
    "in an evaluation that saves": (in_evaluation(1, USR1), [7, 13]),
}


@pytest.mark.parametrize(("fault", "saved"), SAVES.values(), ids=SAVES)
def test_a_run_that_is_asked_to_save_goes_on_to_the_same_end(
    tmp_path: Path, reference: Reference, fault: Any, saved: list[int]
) -> None:
    done = run([*ARGUMENTS, "--set", "checkpoint.keep=9"], tmp_path, fault)
    assert (done.code, done.err) == (0, "")
    assert saved_steps(tmp_path / "run") == saved
    assert_same_end(tmp_path, reference)


def test_one_rank_that_is_asked_to_save_is_enough(tmp_path: Path, reference: Reference) -> None:
    done = run_two(ARGUMENTS, tmp_path, [None, at(3, 1, USR1)])
    assert [end.code for end in done] == [0, 0], done[0].err
    assert saved_steps(tmp_path / "run")[0] == 4
    assert_same_end(tmp_path, reference, ranks=2)


def test_a_hang_up_under_nohup_changes_nothing(tmp_path: Path, reference: Reference) -> None:
    nohup = partial(faults.dispose, HUP, signal.SIG_IGN)
    assert run(ARGUMENTS, tmp_path, partial(faults.several, nohup, at(4, 1, HUP))).code == 0
    assert_same_end(tmp_path, reference)


def test_a_request_to_save_before_the_first_step_or_after_the_last_does_no_harm(
    tmp_path: Path,
) -> None:
    sent = partial(faults.signal_self, USR1)
    early = partial(faults.at_rename, "config.toml", 1, sent)
    fault = partial(
        faults.several, partial(faults.before_settings, sent), early, partial(faults.at_exit, sent)
    )
    assert run(ARGUMENTS, tmp_path, fault).code == 0
    assert saved_steps(tmp_path / "run") == [7, 13]


def test_a_request_to_stop_before_the_settings_are_known_is_not_lost(tmp_path: Path) -> None:
    fault = partial(faults.before_settings, partial(faults.signal_self, USR1))
    done = run([*ARGUMENTS, "--set", "checkpoint.on_sigusr1=stop"], tmp_path, fault)
    assert (done.code, done.out, done.err) == (-USR1, "", "")


# Sends a signal to itself when a module is first imported, and runs the command line.
_SIGNAL_AT_IMPORT = """
import os, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "paceline.cli":
            os.kill(os.getpid(), int(sys.argv.pop()))
sys.meta_path.insert(0, Finder())
from paceline.__main__ import main
main()
"""


def test_the_command_line_is_safe_from_requests_to_save_before_its_imports() -> None:
    command = [sys.executable, "-c", _SIGNAL_AT_IMPORT, "train", "--no-such-flag", f"{USR1:d}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr


def test_a_signal_that_comes_before_there_is_anything_to_save_ends_the_ranks(
    tmp_path: Path,
) -> None:
    """Rank 1 never comes; rank 0, which waits for it, is not deaf. The second signal ends it at once."""
    with started_ranks([ARGUMENTS, ["--version"]], tmp_path) as ranks:
        assert ranks[1].wait().code == 0
        while ranks[0].process.is_alive():
            ranks[0].send(TERM)
            time.sleep(0.2)
        done = ranks[0].wait()
        assert (done.code, done.err) == (-TERM, "")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", [TERM, INT, USR2])
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_learn_that_one_was_ended_before_it_had_joined(
    tmp_path: Path, rank: int, number: signal.Signals
) -> None:
    """Far sooner than the rendezvous times out, after which the line would be another."""
    sent = partial(faults.before_settings, partial(faults.signal_self, number))
    done = run_two(ARGUMENTS, tmp_path, [sent if rank == n else None for n in (0, 1)])
    assert (done[rank].code, done[rank].err) == (-number, "")
    assert f"was ended by {number.name} before all ranks had met" in done[1 - rank].error_line()


def test_ranks_learn_that_one_was_ended_while_it_waited_for_a_third(tmp_path: Path) -> None:
    never = partial(faults.at_start, partial(faults.sleep, 600.0))
    soon = partial(faults.constant, "paceline.comm.coordinator", "_EARLY_S", 1.0)
    with started_ranks([ARGUMENTS] * 3, tmp_path, [soon, None, never]) as ranks:
        time.sleep(1.0)
        ranks[1].send(TERM)
        done = [rank.wait() for rank in ranks[:2]]
    assert (done[1].code, done[1].err) == (-TERM, "")
    assert "rank 1 was ended by SIGTERM before all ranks had met" in done[0].error_line()
