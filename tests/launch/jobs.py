"""Jobs of several ranks, started by real launchers.

In: a command line. Out: exit code and output. Nothing that a job started outlives its test: launchers
put ranks into sessions of their own, so they are found by the folder in which they run.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cli_runs import Done, is_launchers, small, steps

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples" / "launch"
# Takes the place of a launcher and writes down how it was called.
_RECORDER = """#!/usr/bin/env python3
import json, os, sys
json.dump({"argv": sys.argv[1:], "env": dict(os.environ)}, open(os.environ["RECORD"], "w"))
"""
# A machine that is busy with other things takes its time to import torch.
PATIENCE_S = 200.0
# 6 epochs of 100 samples in batches of 16: long enough to be disturbed, and saved every 10 steps.
TOTAL_STEPS = 38
DISTURB_AT = 15


def training(output: Path, *more: str) -> list[str]:
    """`train …` of the job that all launchers do alike."""
    every = ["--set", "checkpoint.interval_steps=10", "--set", "run.eval_interval_epochs=2"]
    return [*small(), "--device", "cpu", "--epochs", "6", *every, "--output", str(output), *more]


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Ours without any launcher's traces, with this Python first on the path."""
    env = {name: value for name, value in os.environ.items() if not is_launchers(name)}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), env.get("PYTHONPATH")]))
    # Two launchers, four ranks and few cores: none of them shall take more than one.
    env["OMP_NUM_THREADS"] = "1"
    return env | extra


def stand_in(folder: Path, name: str, text: str) -> str:
    """Puts a program first on the path; returns that path."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    return os.pathsep.join([str(folder), environment({})["PATH"]])


def called(
    folder: Path, script: str, launcher: str, users: Sequence[str], **extra: str
) -> tuple[list[str], Any]:
    """Runs a script of the examples with the arguments of its user and a recorder for its launcher;
    returns the launcher's arguments and variables."""
    stand_in(folder / "bin", "nvidia-smi", "#!/bin/sh\nexit 9\n")
    path = stand_in(folder / "bin", launcher, _RECORDER)
    env = environment(extra | {"RECORD": str(folder / "record"), "PATH": path})
    command = ["bash", str(EXAMPLES / script), *users]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    record = json.loads((folder / "record").read_text())
    return record["argv"], record["env"]


class Job:
    """A launcher under way."""

    def __init__(self, command: Sequence[str], cwd: Path, extra: Mapping[str, str]) -> None:
        self._log = cwd / f"job-{time.monotonic_ns()}"
        with self._file("out").open("wb") as out, self._file("err").open("wb") as err:
            self.process = subprocess.Popen(
                command,
                cwd=cwd,
                env=environment(extra),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def _file(self, name: str) -> Path:
        return self._log.with_suffix(f".{name}")

    def wait(self) -> Done:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE_S)
        out, err = (self._file(name).read_text() for name in ("out", "err"))
        assert self.process.returncode is not None, f"did not end\n{out}\n{err}"
        return Done(self.process.returncode, out, err)

    def wait_until(self, reached: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not reached():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                done = self.wait()
                raise AssertionError(f"was not reached; code {done.code}\n{done.out}\n{done.err}")
            time.sleep(0.02)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def started(command: Sequence[str], cwd: Path, **extra: str) -> Iterator[Job]:
    job = Job(command, cwd, extra)
    try:
        yield job
    finally:
        job.kill()
        _end(cwd)


def run(command: Sequence[str], cwd: Path, **extra: str) -> Done:
    with started(command, cwd, **extra) as job:
        return job.wait()


def reached_step(output: Path, step: int = DISTURB_AT) -> Callable[[], bool]:
    return lambda: max(steps(output), default=0) >= step


def ranks_of(folder: Path) -> dict[int, int]:
    """Process ids by rank, of the ranks that run in the folder; forked ones bear it in their name."""
    found = {}
    for pid in _processes(folder):
        with contextlib.suppress(OSError):
            place = Path(f"/proc/{pid}")
            name = re.fullmatch(rb"rank(\d+)\n", (place / "comm").read_bytes())
            mark = re.search(rb"(?:^|\0)RANK=(\d+)", (place / "environ").read_bytes())
            python = b"-m\0paceline" in (place / "cmdline").read_bytes()
            if name or (mark and python):
                found[int((name or mark)[1])] = pid
    return found


def assert_nothing_left(folder: Path) -> None:
    """Ranks may be on their way out when their launcher has ended; they must not stay."""
    deadline = time.monotonic() + 100
    while _processes(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _processes(folder), f"still there: {_processes(folder)}"


def _processes(folder: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            # A zombie has no folder: it has ended, and waits for its parent only.
            with contextlib.suppress(OSError):
                if (entry / "cwd").readlink() == folder:
                    found.append(int(entry.name))
    return found


def _end(folder: Path) -> None:
    for pid in _processes(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
