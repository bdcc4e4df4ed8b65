"""Measures the load of the host, and handles processes, threads, GPU connections and signals.

`HostLoad` reads Linux's statistics in `/proc` and describes an overloaded host in one sentence with the
remedy. A thread that could run but has no core adds to the run delay in `schedstat`; slow compute does
not. On a system without these statistics, nothing is reported.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Self

from paceline.core.errors import RunError

# Threads of one process that decode and compute on the same cores wait for each other a little. Above
# this share of the time in which they could run, waiting decides how long a step takes.
NOTABLE_WAIT = 0.3
# In shorter time spans a few waits have too much weight.
_MIN_SPAN_S = 2.0
_TICKS = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


def describe_overload(wait_share: float) -> str:
    """Returns one sentence with the remedy; empty if the threads hardly waited for cores."""
    if wait_share < NOTABLE_WAIT:
        return ""
    return (
        "the host is overloaded: this rank's threads waited for cores "
        f"{wait_share:.0%} of the time; stop other work, raise the container's CPU quota, or "
        "lower run.threads or data.workers"
    )


class HostLoad:
    """Measures the load of the host from `/proc`, at most every two seconds.

    The load is the share of the time in which the threads of this process could run but had no core.
    `latest` is the last reading.
    """

    def __init__(self, proc: Path = _PROC, clock: Callable[[], float] = time.monotonic) -> None:
        self._proc, self._clock = proc, clock
        self._last = self._account()
        self.latest: float | None = None

    def read(self) -> float | None:
        """Returns a new reading if enough time has passed since the last one, else None."""
        if self._last is None or self._clock() - self._last[0] < _MIN_SPAN_S:
            return None
        before, now = self._last, self._account()
        if now is None:
            return None
        # The statistics of threads that have ended are gone, so differences can be negative.
        ran, waited = (max(0.0, now[i] - before[i]) for i in (1, 2))
        self._last = now
        self.latest = waited / (ran + waited) if ran + waited > 0 else 0.0
        return self.latest

    def _account(self) -> tuple[float, float, float] | None:
        """Returns the time, and the seconds that living threads ran and waited; None if unknown."""
        ran_ns = waited_ns = 0
        try:
            at_s = self._clock()
            for task in (self._proc / "self" / "task").iterdir():
                try:
                    ran, waited, *_ = (task / "schedstat").read_text().split()
                except FileNotFoundError:
                    continue  # a thread that has just ended
                ran_ns, waited_ns = ran_ns + int(ran), waited_ns + int(waited)
        except (OSError, ValueError):
            return None
        return at_s, ran_ns / 1e9, waited_ns / 1e9


def available_cores() -> int:
    """Returns the number of cores that the scheduler, a container or taskset allows this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class ProcessStat(NamedTuple):
    """State, parent, session and start of a process.

    The start, in clock ticks since boot, distinguishes processes that have had the same id.
    """

    state: str
    parent: int
    session: int
    start: str

    @property
    def has_ended(self) -> bool:
        """True if the process has ended, even if it is still a zombie."""
        return self.state in "ZX"


def process_stat(pid: int) -> ProcessStat | None:
    """Reads the `ProcessStat` of a process; None if there is no such process or `/proc` hides it."""
    try:
        # The kernel cuts a name at 15 bytes, which can split a letter.
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The name in parentheses may itself contain spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    return ProcessStat(fields[0], int(fields[1]), int(fields[3]), fields[19])


def process_age_s() -> float:
    """Returns the seconds since this process started; 0 if the system does not tell."""
    own = process_stat(os.getpid())
    try:
        since_boot_s = float((_PROC / "uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0.0, since_boot_s - int(own.start) / _TICKS) if own is not None else 0.0


class StartUp:
    """Measures how many seconds each part of the start-up takes, from the command to the first step.

    Each part begins at the end of the part before it.

    Args:
        before_s: Seconds from the start of the command until this object was created.
        clock: Returns the current time.
    """

    def __init__(
        self, before_s: float = 0.0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.seconds: dict[str, float] = {"imports": round(before_s, 3)} if before_s else {}
        self._clock = clock
        self._last = clock()

    def end(self, part: str) -> None:
        """Ends the current part of the start-up and names it; seconds of equal names are added up."""
        now = self._clock()
        self.seconds[part] = round(self.seconds.get(part, 0.0) + now - self._last, 3)
        self._last = now


def process_ids() -> list[int]:
    """Returns the ids of all processes of the host; empty without `/proc`."""
    return [int(entry.name) for entry in _PROC.glob("[0-9]*")]


def started_with(pid: int, name: str, value: str) -> bool:
    """Returns True if a process was started with this environment variable.

    Returns False if the environment cannot be read, as for a process of another user.
    """
    try:
        entries = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"{name}={value}".encode() in entries


# Connections of a process to its GPU are the hardware queues of its streams. CUDA opens eight, unless the
# environment asks for more before CUDA starts. Further streams share a queue, whose work runs in order:
# the two dozen streams of a decoder then wait for whole training steps.
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_MIN_CONNECTIONS, _DEFAULT_CONNECTIONS, _MAX_CONNECTIONS = 2, 8, 32
_DRIVER = "libcuda.so.1"
_NOT_STARTED = 3


def ask_for_connections(sharing: int = 1) -> None:
    """Asks CUDA for more connections to the GPU, so that more streams can run concurrently.

    Does nothing if CUDA has started, or if the user has set CUDA_DEVICE_MAX_CONNECTIONS.

    Args:
        sharing: Number of processes that share the GPU. MPS has about a hundred connections in
            total. A process that exceeds this limit fails with "out of memory".
    """
    if _CONNECTIONS not in os.environ and not _has_started():
        os.environ[_CONNECTIONS] = str(max(_MIN_CONNECTIONS, _MAX_CONNECTIONS // sharing))


def connections() -> str:
    """Returns CUDA's number of connections to the GPU, which an environment variable sets.

    The result is wrong if the variable was set after CUDA had started.
    """
    return os.environ.get(_CONNECTIONS, str(_DEFAULT_CONNECTIONS))


def few_connections() -> str:
    """Returns a remark if CUDA has fewer connections to the GPU than possible, else ""."""
    number = connections()
    if number == str(_MAX_CONNECTIONS):
        return ""
    return f"slower than it could be: set {_CONNECTIONS}={_MAX_CONNECTIONS}, it is {number}"


def _has_started() -> bool:
    """Returns True if CUDA has read its environment variables; even counting the GPUs starts CUDA."""
    try:
        count = ctypes.CDLL(_DRIVER).cuDeviceGetCount
    except (OSError, AttributeError):  # no NVIDIA GPU
        return False
    return bool(count(ctypes.byref(ctypes.c_int())) != _NOT_STARTED)


def no_thread(error: BaseException) -> RunError | None:
    """Returns the error to show if `error` means that no thread could be started, else None."""
    # The message of Python, and that of C++.
    if str(error) not in ("can't start new thread", "Resource temporarily unavailable"):
        return None
    return RunError(
        "this process cannot start another thread",
        "raise the limit (ulimit -u, the container's pids limit), or lower data.workers and run.threads",
    )


def in_thread(action: Callable[[], object]) -> Callable[[float], None]:
    """Runs `action` in a thread, or directly if no thread can be started.

    Returns a function that waits for it, up to a number of seconds.
    """
    thread = threading.Thread(target=action, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        action()
        return lambda limit_s: None
    return thread.join


class SignalContext:
    """A context that handles signals with a method of the subclass. Only the main thread may enter it."""

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


# Signals that the command line blocks while it starts.
_held: set[signal.Signals] = set()


def hold_back(numbers: Iterable[signal.Signals]) -> None:
    """Blocks signals until `release`, also in threads and processes that start before that."""
    _held.update(numbers)
    signal.pthread_sigmask(signal.SIG_BLOCK, _held)


def release(numbers: Iterable[signal.Signals]) -> set[signal.Signals]:
    """Unblocks those of `numbers` that `hold_back` has blocked, and returns them."""
    blocked = _held & set(numbers)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
    _held.difference_update(blocked)
    return blocked


def is_held_back(number: signal.Signals) -> bool:
    return number in _held


# The signals that ask a rank to end.
END_SIGNALS = (
    signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip
# The longest time in seconds for which a process continues after one of these signals.
_DEFERRED_S = 8.0


class DeferredEnd(SignalContext):
    """Defers signals that end the process by default.

    The process ends when the context is left, after some seconds, or at the next such signal.

    Args:
        active: If False, the context only releases signals that were held back.
    """

    def __init__(self, active: bool) -> None:
        usable = active and threading.current_thread() is threading.main_thread()
        ending = [n for n in END_SIGNALS if usable and signal.getsignal(n) is signal.SIG_DFL]
        super().__init__(ending, self._note)
        self.active = bool(ending)
        self.received: signal.Signals | None = None

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
        timer = threading.Timer(_DEFERRED_S, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()


class SignalWakeup:
    """Records signals that have reached the process (`signal.set_wakeup_fd`).

    Other threads can query these signals while the main thread waits in C code, where Python's
    handlers cannot run.
    """

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
        """Returns True if one of the signals has arrived."""
        try:
            while not self._arrived and self._read >= 0 and (data := os.read(self._read, 64)):
                if any(byte in self._numbers for byte in data):
                    self._arrived = True
        except OSError:
            pass  # nothing new, or closed by another thread
        return self._arrived
