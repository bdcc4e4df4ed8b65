"""Output that nobody can write: a run goes on to its end, and no command shows a traceback."""

from __future__ import annotations

import io
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import faults
from cli_runs import run, run_two, small, started, steps, summary
from paceline.cli.app import LossyOutput
from report.made_up_ablations import write_run

KINDS = ["reader is gone", "terminal is gone", "disk is full"]


@pytest.mark.parametrize(
    "fault",
    [
        *(pytest.param(partial(faults.unwritable_output, kind, 1, 2), id=kind) for kind in KINDS),
        pytest.param(faults.closed_output, id="closed"),
    ],
)
def test_training_ends_as_it_would_have(tmp_path: Path, fault: Any) -> None:
    done = run(small("--output", "run", "--log-interval", "1"), tmp_path, fault)
    assert (done.code, done.out, done.err) == (0, "", "")
    assert summary(tmp_path / "run")["steps"] == 13
    assert {"report.html", "weights.safetensors"} <= {p.name for p in (tmp_path / "run").iterdir()}
    assert not list((tmp_path / "run").rglob("*.tmp"))


def test_an_interrupt_that_takes_the_reader_along_still_saves(tmp_path: Path) -> None:
    """Ctrl-C in `paceline train | tee log` ends both."""
    fault = partial(
        faults.several,
        partial(faults.unwritable_output, "reader is gone"),
        partial(faults.at_micro_batch, 5, 0, partial(faults.signal_self, signal.SIGINT)),
    )
    done = run(small("--output", "run"), tmp_path, fault)
    assert (done.code, done.err) == (130, "")
    assert (tmp_path / "run/checkpoints/step-00000006.pt").is_file()


def test_a_reader_that_leaves_in_the_middle(tmp_path: Path) -> None:
    arguments = small("--output", "run", "--log-interval", "1", "--epochs", "10")
    fault = partial(faults.output_into, str(tmp_path / "pipe"))
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with started(arguments, tmp_path, fault) as process:
        process.wait_until(lambda: len(steps(tmp_path / "run")) > 3)
        os.close(reader)
        assert process.wait().code == 0
    assert summary(tmp_path / "run")["steps"] == len(steps(tmp_path / "run"))


def test_only_rank_0_shows_and_both_end_well(tmp_path: Path) -> None:
    fault = partial(faults.unwritable_output, "reader is gone", 1, 2)
    done = run_two(small("--output", "run", "-b", "8"), tmp_path, [fault, fault])
    assert [rank.code for rank in done] == [0, 0]


def test_a_full_disk_below_the_display_is_a_note(tmp_path: Path) -> None:
    fault = partial(faults.unwritable_output, "disk is full")
    done = run(small("--output", "run"), tmp_path, fault)
    assert done.code == 0
    assert done.err == "paceline: note: standard output is incomplete: No space left on device\n"


@pytest.mark.parametrize("arguments", [["report", "run"], ["--help"], ["train", "--help"]])
def test_a_reader_that_has_seen_enough_changes_no_exit_code(
    tmp_path: Path, arguments: list[str]
) -> None:
    write_run(tmp_path / "run", 90.0)
    done = run(arguments, tmp_path, partial(faults.unwritable_output, "reader is gone"))
    assert (done.code, done.err) == (0, "")


def test_output_that_is_wanted_and_lost_is_an_error(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 90.0)
    done = run(["report", "run"], tmp_path, partial(faults.unwritable_output, "disk is full"))
    assert "standard output cannot be written: No space left" in done.error_line()
    assert done.code == 1


def test_an_error_that_nobody_reads_keeps_its_exit_code(tmp_path: Path) -> None:
    fault = partial(faults.unwritable_output, "reader is gone", 1, 2)
    assert run(["train", "no-such-recipe"], tmp_path, fault).code == 2


def test_a_non_blocking_pipe_is_written_until_its_reader_is_gone() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    raw = LossyOutput(write)
    stream = io.BufferedWriter(raw)
    stream.write(b"x" * 10)
    stream.flush()
    assert (os.read(read, 100), raw.problem) == (b"x" * 10, None)
    os.close(read)
    stream.write(b"y")
    stream.flush()
    assert isinstance(raw.problem, BrokenPipeError)
    os.close(write)
