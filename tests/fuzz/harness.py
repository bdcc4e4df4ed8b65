"""Runs a target's inputs in forked workers, and finds crashes, tracebacks, hangs and memory excess.

In: targets, a seed, a number of inputs each. Out: a `Tally` for each target. A worker is forked from this
process, which has imported everything, has a bounded address space, and publishes in shared memory which
input it is at. A worker that dies or uses too much CPU time loses that input alone: the next worker
continues behind it.
"""

from __future__ import annotations

import mmap
import os
import resource
import shutil
import signal
import struct
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fuzz.target import Target

# Number of the input, refused so far, accepted so far, kind of finding (0: none).
_STATE = struct.Struct("<qqqq")
_TEXT_AT, _TEXT_BYTES = 64, 16_000
_KINDS = {1: "traceback", 2: "memory"}
# Of one input. CPU time decides, so that a loaded host finds no hang that is none.
_CPU_LIMIT_S, _WALL_LIMIT_S = 20.0, 300.0
_POLL_S = 0.05
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Finding:
    target: str
    number: int
    kind: str
    text: str


@dataclass
class Tally:
    """What became of a target's inputs; `peak_bytes` is the most that any worker grew by."""

    target: str
    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0
    findings: list[Finding] = field(default_factory=list)


def fuzz(
    target: Target, seed: int, first: int, stop: int, on_finding: Callable[[Finding], None],
    cpu_limit_s: float = _CPU_LIMIT_S,
) -> Tally:  # fmt: skip
    """Inputs `first` to `stop` - 1, each of which may take `cpu_limit_s`."""
    tally, number, started = Tally(target.name), first, time.monotonic()
    shared = mmap.mmap(-1, _TEXT_AT + _TEXT_BYTES)
    # Files on a RAM disk where there is one: a tar is written for every input.
    ram = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=ram if os.access(ram, os.W_OK) else None, prefix="fuzz-"))
    try:
        while number < stop:
            shared.seek(0)
            shared.write(_STATE.pack(number, 0, 0, 0))
            status, usage = _one_worker(target, seed, number, stop, shared, folder, cpu_limit_s)
            reached, refused, accepted, kind = _STATE.unpack(shared[: _STATE.size])
            tally.refused, tally.accepted = tally.refused + refused, tally.accepted + accepted
            tally.peak_bytes = max(tally.peak_bytes, usage)
            number = reached
            if status == "ended":
                break
            text = shared[_TEXT_AT:].split(b"\0")[0].decode("utf-8", "replace")
            found = Finding(target.name, reached, _KINDS.get(kind, status), text)
            tally.findings.append(found)
            on_finding(found)
            number = reached + 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    tally.inputs = stop - first
    tally.seconds = time.monotonic() - started
    return tally


def _one_worker(
    target: Target, seed: int, first: int, stop: int, shared: mmap.mmap, folder: Path,
    cpu_limit_s: float,
) -> tuple[str, int]:  # fmt: skip
    """How it ended, and by how many bytes its memory grew."""
    pid = os.fork()
    if pid == 0:
        try:
            _work(target, seed, first, stop, shared, folder)
        finally:
            os._exit(0)
    before = _resident(pid)
    at, at_since, cpu_since = first, time.monotonic(), 0.0
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            break
        time.sleep(_POLL_S)
        now = _STATE.unpack(shared[: _STATE.size])[0]
        cpu = _cpu_s(pid)
        if now != at:
            at, at_since, cpu_since = now, time.monotonic(), cpu
        elif cpu - cpu_since > cpu_limit_s or time.monotonic() - at_since > _WALL_LIMIT_S:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "hang", 0
    grown = max(0, 1024 * usage.ru_maxrss - before) if before else 0
    if os.WIFSIGNALED(status):
        return f"crash by {signal.Signals(os.WTERMSIG(status)).name}", grown
    reached, _, _, kind = _STATE.unpack(shared[: _STATE.size])
    return ("finding" if kind else "ended" if reached >= stop else "crash by exit"), grown


def _work(
    target: Target, seed: int, first: int, stop: int, shared: mmap.mmap, folder: Path
) -> None:
    _quieten()
    held = 4096 * int(Path("/proc/self/statm").read_text().split()[0])
    limit = held + target.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    refused = accepted = 0
    for number in range(first, stop):
        shared[: _STATE.size] = _STATE.pack(number, refused, accepted, 0)
        try:
            name, content = target.make(seed, number)
            target.drive(content, name, folder)
            accepted += 1
        except target.refusals:
            refused += 1
        except BaseException as error:  # the harness reports whatever escapes
            kind = 2 if isinstance(error, MemoryError) else 1
            text = traceback.format_exc()[-_TEXT_BYTES + 100 :].encode("utf-8", "replace")
            shared[_TEXT_AT : _TEXT_AT + len(text) + 1] = text + b"\0"
            shared[: _STATE.size] = _STATE.pack(number, refused, accepted, kind)
            return
    shared[: _STATE.size] = _STATE.pack(stop, refused, accepted, 0)


def _quieten() -> None:
    """C libraries write warnings about damaged files; warnings of Python are findings."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    warnings.resetwarnings()
    warnings.simplefilter("error")


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICK


def _resident(pid: int) -> int:
    try:
        return 4096 * int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0
