"""The host: how long threads wait for a core (`HostLoad`), usable cores, what `/proc` tells about other
processes, connections to the GPU, and signals to this process (`SignalContext`, `SignalWakeup`).

`HostLoad` reads Linux's accounts (`/proc`, and the container's CPU quota) and explains a slow run in one
sentence with the remedy. A thread that could run but has no core adds to the run delay in `schedstat`;
slow compute does not. Where the system keeps no such account, nothing is reported.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Self

from paceline.core.errors import RunError
from paceline.core.units import plural

# Threads of one process that decode and compute on the same cores wait for each other a little. Above
# this share of the time in which they could run, waiting decides how long a step takes.
NOTABLE_WAIT = 0.3
# Other processes that use less of the cores than this are not what the threads wait for.
_NOTABLE_OTHERS = 0.15
_NOTABLE_THROTTLING = 0.05
# Shorter spans say little: clocks of /proc/stat tick 100 times a second.
_LEAST_S = 2.0
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class LoadReading:
    """Over a span of time. `waited`: of the time in which the process's threads could run, the share that
    they had no core. `others`: how much of the cores other processes used. `throttled`: the share of the
    time in which the container's quota stopped the process."""

    waited: float
    others: float
    throttled: float
    cores: int

    @property
    def overloaded(self) -> bool:
        return self.waited >= NOTABLE_WAIT

    def describe(self, threads: int) -> str:
        """One sentence with the remedy; `threads` compute at once. Empty where no core was missing."""
        if not self.overloaded:
            return ""
        waited = f"{self.waited:.0%} of the time"
        head = f"the host is overloaded: this rank's threads waited for cores {waited}"
        if self.throttled >= _NOTABLE_THROTTLING:
            fewer = "" if threads == 1 else ", or set run.threads to the cores that it grants"
            return f"{head}, stopped by the container's CPU quota; raise the quota{fewer}"
        if self.others >= _NOTABLE_OTHERS:
            return f"{head}, other processes use {self.others:.0%} of its {self.cores} cores; " + (
                "stop other work" if threads == 1 else "stop other work, or set run.threads=1"
            )
        if threads > self.cores:
            remedy = f"set run.threads={self.cores} or fewer"
        elif threads > 1:
            remedy = f"set run.threads={max(1, min(self.cores // 2, threads - 1))}"
        else:
            remedy = "use fewer data.workers, or fewer ranks on this host"
        shared = (
            f"{plural(threads, 'compute thread')} and the loader share {plural(self.cores, 'core')}"
        )
        return f"{head}, {shared}; {remedy}"


@dataclass(frozen=True)
class _Account:
    """Seconds. `own_s` counts ended threads too, `ran_s` and `waited_s` those that are there."""

    at_s: float
    ran_s: float
    waited_s: float
    own_s: float
    busy_s: float
    throttled_s: float


class HostLoad:
    """Reads the accounts at most every two seconds; a reading takes well under a millisecond."""

    def __init__(
        self, proc: Path = Path("/proc"), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._proc, self._clock = proc, clock
        self._cores = available_cores()
        self._last = self._account()
        self.latest: LoadReading | None = None

    def read(self) -> LoadReading | None:
        """A new reading once enough time has passed since the last one; else None."""
        if self._last is None or self._clock() - self._last.at_s < _LEAST_S:
            return None
        before, now = self._last, self._account()
        if now is None:
            return None
        span_s = now.at_s - before.at_s
        # Threads that ended took their accounts with them.
        ran, waited = max(0.0, now.ran_s - before.ran_s), max(0.0, now.waited_s - before.waited_s)
        foreign_s = now.busy_s - before.busy_s - (now.own_s - before.own_s)
        others = max(0.0, foreign_s) / (span_s * self._cores)
        self._last = now
        self.latest = LoadReading(
            waited=waited / (ran + waited) if ran + waited > 0 else 0.0,
            others=min(1.0, others),
            throttled=min(1.0, max(0.0, now.throttled_s - before.throttled_s) / span_s),
            cores=self._cores,
        )
        return self.latest

    def _account(self) -> _Account | None:
        ran_ns = waited_ns = 0
        try:
            at_s = self._clock()
            for task in (self._proc / "self" / "task").iterdir():
                try:
                    ran, waited, *_ = (task / "schedstat").read_text().split()
                except FileNotFoundError:
                    continue  # a thread that has just ended
                ran_ns, waited_ns = ran_ns + int(ran), waited_ns + int(waited)
            busy_s = self._busy_s()
        except (OSError, ValueError):
            return None
        throttled_s = self._throttled_s()
        own_s = time.process_time()
        return _Account(at_s, ran_ns / 1e9, waited_ns / 1e9, own_s, busy_s, throttled_s)

    def _busy_s(self) -> float:
        """Of the cores that this process may use, by whoever ran on them."""
        ours = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        ticks = 0
        for line in (self._proc / "stat").read_text().splitlines():
            name, *fields = line.split()
            if not name.startswith("cpu") or not name[3:].isdigit() or int(name[3:]) not in ours:
                continue
            user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
            ticks += user + nice + system + irq + softirq + steal
        return ticks / _TICKS

    def _throttled_s(self) -> float:
        """0 outside of a container with a quota."""
        try:
            own = (self._proc / "self" / "cgroup").read_text().splitlines()
            place = next(line[3:] for line in own if line.startswith("0::"))
            for folder in (Path("/sys/fs/cgroup") / place.lstrip("/"), Path("/sys/fs/cgroup")):
                if (folder / "cpu.stat").is_file():
                    for line in (folder / "cpu.stat").read_text().splitlines():
                        if line.startswith("throttled_usec "):
                            return int(line.split()[1]) / 1e6
        except (OSError, ValueError, StopIteration):
            pass
        return 0.0


def available_cores() -> int:
    """Those that the scheduler, a container or taskset left to us; all where that cannot be asked."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_PROC = Path("/proc")


class ProcessStat(NamedTuple):
    """`start`, in clock ticks since the host's, tells apart processes that had the same id."""

    state: str
    parent: int
    session: int
    start: str

    @property
    def has_ended(self) -> bool:
        """A zombie has ended too."""
        return self.state in "ZX"


def process_stat(pid: int) -> ProcessStat | None:
    """None where there is no such process, or `/proc` hides it."""
    try:
        # A name is cut at 15 bytes, which can split a letter.
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The name in parentheses may itself hold spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    return ProcessStat(fields[0], int(fields[1]), int(fields[3]), fields[19])


def process_age_s() -> float:
    """Seconds since this process was started, the interpreter's own start included; 0 where the system
    does not say."""
    own = process_stat(os.getpid())
    try:
        since_boot_s = float((_PROC / "uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0.0, since_boot_s - int(own.start) / _TICKS) if own is not None else 0.0


class StartUp:
    """The seconds from a command to its first step, by part. Parts follow one another: each begins where
    the one before it ended. `before_s`: what the process took until here."""

    def __init__(
        self, before_s: float = 0.0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.seconds: dict[str, float] = {"imports": round(before_s, 3)} if before_s else {}
        self._clock = clock
        self._last = clock()

    def end(self, part: str) -> None:
        """Of a part that comes again, the seconds add up."""
        now = self._clock()
        self.seconds[part] = round(self.seconds.get(part, 0.0) + now - self._last, 3)
        self._last = now


def process_ids() -> list[int]:
    """Empty where there is no `/proc`."""
    return [int(entry.name) for entry in _PROC.glob("[0-9]*")]


def started_with(pid: int, name: str, value: str) -> bool:
    """Whether a process was started with this variable. False for one of another user, which cannot be
    read."""
    try:
        entries = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"{name}={value}".encode() in entries


# Connections of a process to its GPU are the hardware queues of its streams. CUDA opens eight, unless the
# environment asks for more before CUDA starts. Further streams share a queue, whose work runs in order:
# the two dozen streams of a decoder then wait for whole training steps.
_NAME = "CUDA_DEVICE_MAX_CONNECTIONS"
_FEWEST, _USUAL, _MOST = 2, 8, 32
_DRIVER = "libcuda.so.1"
_NOT_STARTED = 3


def ask_for_connections(sharing: int = 1) -> None:
    """Before anything else asks CUDA. What a user set stays. `sharing`: processes on one GPU, which MPS
    gives about a hundred connections in all; one process too many gets "out of memory"."""
    if _NAME not in os.environ and not _has_started():
        os.environ[_NAME] = str(max(_FEWEST, _MOST // sharing))


def connections() -> str:
    """How many there are, unless somebody set the variable after CUDA had started."""
    return os.environ.get(_NAME, str(_USUAL))


def few_connections() -> str:
    """A remark where there are fewer than there could be; empty otherwise."""
    found = connections()
    if found == str(_MOST):
        return ""
    return f"slower than it could be: set {_NAME}={_MOST}, it is {found}"


def _has_started() -> bool:
    """Even a question for the number of GPUs starts CUDA, and then the environment is not read again."""
    try:
        count = ctypes.CDLL(_DRIVER).cuDeviceGetCount
    except (OSError, AttributeError):  # no NVIDIA GPU
        return False
    return bool(count(ctypes.byref(ctypes.c_int())) != _NOT_STARTED)


def no_thread(error: BaseException) -> RunError | None:
    """The error to show if `error` says that the system starts no further thread; else None."""
    # Python's own words, and those of C++.
    if str(error) not in ("can't start new thread", "Resource temporarily unavailable"):
        return None
    return RunError(
        "this process cannot start another thread",
        "raise the limit (ulimit -u, the container's pids limit), or lower data.workers and run.threads",
    )


def in_thread(action: Callable[[], object]) -> Callable[[float], None]:
    """Runs `action` in a thread, or here if the system starts none; returns what waits for its end."""
    thread = threading.Thread(target=action, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        action()
        return lambda limit_s: None
    return thread.join


class SignalContext:
    """To be entered in the main thread, as Python asks of whoever sets handlers."""

    def __init__(
        self,
        numbers: Iterable[signal.Signals],
        handler: Callable[[int, FrameType | None], None],
    ) -> None:
        self._numbers = tuple(numbers)
        self._handler = handler
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in self._numbers:
            self._before[number] = signal.signal(number, self._handler)
        return self

    def __exit__(self, *details: object) -> None:
        for number in reversed(self._numbers):
            signal.signal(number, self._before[number])


# Signals that the command line holds back while it starts.
_held: set[signal.Signals] = set()


def hold_back(numbers: Iterable[signal.Signals]) -> None:
    """Signals wait until `release`. Threads and processes that are started meanwhile do not get them."""
    _held.update(numbers)
    signal.pthread_sigmask(signal.SIG_BLOCK, _held)


def release(numbers: Iterable[signal.Signals]) -> set[signal.Signals]:
    """Returns those of the signals that were held back."""
    found = _held & set(numbers)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, found)
    _held.difference_update(found)
    return found


def is_held_back(number: signal.Signals) -> bool:
    return number in _held


# The signals that ask a rank to end.
END_SIGNALS = (
    signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip
# How long a process lives after one, at most.
_DEFERRED_S = 8.0


class DeferredEnd(SignalContext):
    """A context in which a signal that ends the process by default is noted first; it ends the process
    when the context is left, after some seconds, or if another one follows.

    `active`: whether it does anything but release signals that were held back."""

    def __init__(self, active: bool) -> None:
        usable = active and threading.current_thread() is threading.main_thread()
        ending = [n for n in END_SIGNALS if usable and signal.getsignal(n) is signal.SIG_DFL]
        super().__init__(ending, self._note)
        self.active = bool(ending)
        self.received: signal.Signals | None = None
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Self:
        super().__enter__()
        release(END_SIGNALS)
        return self

    def __exit__(self, *details: object) -> None:
        super().__exit__(*details)
        if self.received is not None:
            signal.raise_signal(self.received)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            signal.signal(self.received, signal.SIG_DFL)
            signal.raise_signal(self.received)
        self.received = signal.Signals(number)
        self._timer = threading.Timer(_DEFERRED_S, os.kill, (os.getpid(), number))
        self._timer.daemon = True
        self._timer.start()


class SignalWakeup:
    """Tells other threads which signals have reached the process, also while the main thread is inside a
    wait in C and its Python handlers cannot run (`signal.set_wakeup_fd`)."""

    def __init__(self, numbers: Iterable[signal.Signals]) -> None:
        self._numbers = frozenset(int(number) for number in numbers)
        self._read, self._write, self._before = -1, -1, -1
        self._arrived = False

    def __enter__(self) -> Self:
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        return self

    def __exit__(self, *details: object) -> None:
        signal.set_wakeup_fd(self._before)
        read, self._read = self._read, -1
        os.close(read)
        os.close(self._write)

    def arrived(self) -> bool:
        """Whether one of the signals has come."""
        try:
            while not self._arrived and self._read >= 0 and (data := os.read(self._read, 64)):
                if any(byte in self._numbers for byte in data):
                    self._arrived = True
        except OSError:
            pass  # nothing new, or closed meanwhile
        return self._arrived
