"""`Supervisor`: starts the ranks of this node, watches them, and stops them together or keeps survivors.

Ranks get the same environment variables as from torchrun. The supervisor of the first node runs the
TCPStore of the rendezvous, which outlives every rank. An event loop waits for signals, also for
SIGCHLD, so the end of a rank is known at once.

Without `min_ranks`, a failed rank ends the other ranks, which may start again. With it, once all ranks
have met, the supervisor announces the loss in the TCPStore (`LossLog`), and survivors continue without
the rank. It also ends ranks that survivors report as silent, so that none of them wakes up later.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, Self

from paceline.cli.failure import LAUNCHER_VARIABLE
from paceline.cli.nodes import Node, agree_on_job, open_store
from paceline.comm.generations import SUPERVISOR_VARIABLE
from paceline.comm.losses import LossLog
from paceline.core.host import SignalContext
from paceline.core.untrusted import ParseError, parse_table

_LEFT = "paceline/supervisors/left"
# Ranks that fail for the same reason may end this much later than the first one, without a signal.
_TOGETHER_S = 0.1
# Ranks of a host that are lost at once are one entry of the log.
_REPORT_S = 0.01
# The time to save after a signal.
_STOP_S = 30.0
# How long the first supervisor keeps the store for those of other nodes.
_LEAVE_S, _DAY_S = 30.0, 86_400.0
# The exit codes of ranks that saved and stopped because of a signal.
ASKED_TO_STOP = {
    128 + number
    for number in (
        signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2,
    )
}  # fmt: skip


@dataclass(frozen=True)
class RankEnd:
    """How a failed rank ended.

    A negative exit code is the signal that ended it.
    """

    exitcode: int
    message: Any = ""


class RankProcess(Protocol):
    """A child process, such as `subprocess.Popen`."""

    pid: int

    def poll(self) -> int | None: ...


@dataclass
class JobEnd:
    """How the ranks of this node ended: failures in the order of their ends, and any stop signal."""

    failures: dict[int, RankEnd] = field(default_factory=dict)
    # True if the job went on without the failed ranks and has finished.
    survived: bool = False
    stopped_by: signal.Signals | None = None


class Supervisor:
    """Starts and watches the ranks of one node. The context runs or connects to the TCPStore.

    Args:
        start: Starts a rank with these additional environment variables, in a separate session.
        node: Number of ranks and nodes, and which node this is.
        min_ranks: If above 0, survivors of a lost rank continue.
        max_restarts: The maximum number of restarts of all ranks after a failure.
        respawns: How many lost ranks start again, each at once, if survivors continue.

    Raises:
        LaunchError: If the TCPStore cannot be started or reached.
    """

    def __init__(
        self,
        start: Callable[[dict[str, str]], RankProcess],
        node: Node,
        *,
        min_ranks: int = 0,
        max_restarts: int = 0,
        respawns: int = 0,
    ) -> None:
        self._start, self._node = start, node
        self._keeps, self._max_restarts, self._respawns = min_ranks > 0, max_restarts, respawns
        self.store = open_store(node)
        self._run_id = agree_on_job(self.store, node)
        self._log = LossLog(self.store)
        self._running: dict[int, RankProcess] = {}
        self._evicted: dict[int, str] = {}
        self._end = JobEnd()
        self._attempt = 0
        self._left = False
        # When all ranks get the next signal of these, if they have not ended by then.
        self._ending: list[tuple[float, int]] = []
        self._events = Events()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        """Ends all ranks that are left, such as after an unexpected error."""
        self._signal(signal.SIGKILL)
        self._events.close()

    @property
    def pids(self) -> dict[int, int]:
        """The process id of each running rank."""
        return {rank: process.pid for rank, process in self._running.items()}

    def run(
        self,
        stops: Collection[signal.Signals] = (),
        saves: Collection[signal.Signals] = (),
        is_cause: Callable[[Mapping[int, RankEnd]], bool] = bool,
    ) -> JobEnd:
        """Runs all ranks until they have ended.

        Args:
            stops: The signals that stop the job, besides SIGTERM, SIGINT, SIGHUP and SIGQUIT.
            saves: The signals that request a checkpoint, which ranks receive, too.
            is_cause: Returns True if ranks with these failures may start again.
        """
        with (
            tempfile.TemporaryDirectory(prefix="paceline-") as folder,
            self._events.of(stops, saves),
            self._evicting(),
        ):
            while True:
                first = self._node.rank * self._node.processes
                for rank in range(first, first + self._node.processes):
                    self._start_rank(rank, folder)
                self._watch(folder, saves)
                if self._end.stopped_by or not self._end.failures or self._keeps:
                    break
                if self._attempt == self._max_restarts or not is_cause(self._end.failures):
                    break
                self._attempt += 1
                self._end = JobEnd()
        self._leave()
        return self._end

    def _start_rank(self, rank: int, folder: str) -> None:
        node = self._node
        world = str(node.count * node.processes)
        own = {
            "RANK": str(rank), "LOCAL_RANK": str(rank % node.processes), "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": str(node.processes), "GROUP_RANK": str(node.rank),
            "GROUP_WORLD_SIZE": str(node.count), "ROLE_RANK": str(rank), "ROLE_WORLD_SIZE": world,
            "ROLE_NAME": "default", "MASTER_ADDR": node.address, "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_RUN_ID": self._run_id, "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(self._attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(self._max_restarts),
            "TORCHELASTIC_ERROR_FILE": str(self._error_file(rank, folder)),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            LAUNCHER_VARIABLE: str(os.getpid()),
        }  # fmt: skip
        if self._keeps:
            own[SUPERVISOR_VARIABLE] = str(os.getpid())
        self._running[rank] = self._start(own)

    def _error_file(self, rank: int, folder: str) -> Path:
        return Path(folder) / f"{self._attempt}-{rank}.json"

    def _watch(self, folder: str, saves: Collection[signal.Signals]) -> None:
        """Waits until all ranks have ended that were started together."""
        self._ending = []
        while self._running:
            wait_s = self._ending[0][0] - time.monotonic() if self._ending else None
            for number in self._events.wait(wait_s):
                if number in saves:
                    self._request(number)
                elif number != signal.SIGCHLD:
                    self._stop(signal.Signals(number))
            ended = self._reap(folder)
            if ended and not self._survives(ended, folder) and not self._ending:
                self._end_ranks(_TOGETHER_S)
            while self._ending and time.monotonic() >= self._ending[0][0]:
                self._signal(self._ending.pop(0)[1])

    def _survives(self, ended: dict[int, RankEnd], folder: str) -> bool:
        """Announces lost ranks; returns False if the other ranks of this node cannot continue."""
        # If the first node is lost, so is the TCPStore. The ranks save and end.
        with contextlib.suppress(RuntimeError):
            if self._keeps and self._log.has_begun():
                time.sleep(_REPORT_S)
                self._report(ended | self._reap(folder), folder)
                return True
        return False

    def _reap(self, folder: str) -> dict[int, RankEnd]:
        """Returns the ranks that have ended with a failure since the last call."""
        failed = {}
        for rank, process in list(self._running.items()):
            code = process.poll()
            if code is not None:
                del self._running[rank]
                self._end.survived |= self._keeps and code == 0
                if code != 0:
                    failed[rank] = RankEnd(code, _message(self._error_file(rank, folder)))
        self._end.failures |= failed
        return failed

    def _report(self, failed: Mapping[int, RankEnd], folder: str) -> None:
        """Announces lost ranks to the survivors.

        Ranks that saved and stopped on request are not lost.
        """
        lost = [rank for rank, end in failed.items() if end.exitcode not in ASKED_TO_STOP]
        if not lost:
            return
        cause = self._evicted.get(lost[0]) or unreported_end(lost[0], failed[lost[0]].exitcode)
        self._log.report(lost, cause)
        for rank in lost[: self._respawns]:
            self._start_rank(rank, folder)
        self._respawns -= min(self._respawns, len(lost))

    @contextlib.contextmanager
    def _evicting(self) -> Iterator[None]:
        """Ends silent ranks on request of survivors while the context is active.

        The thread must not outlive this: a wait for the TCPStore that returns while the interpreter
        exits would end the process with `std::terminate`.
        """
        if not self._keeps:
            yield
            return
        thread = threading.Thread(target=self._evict, name="paceline-evict", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._left = True
            # A request for a rank that does not exist wakes the thread. Other supervisors ignore it.
            with contextlib.suppress(RuntimeError):
                why = f"node {self._node.rank} has ended"  # equal requests are one
                self._log.evict(self._node.world_size, why)
            thread.join(_STOP_S)

    def _evict(self) -> None:
        """Ends silent ranks on request of survivors; runs in a thread."""
        with contextlib.suppress(RuntimeError, ParseError):
            log = self._log.own_connection()
            while not self._left:
                for rank, why in log.evictions():
                    process = self._running.get(rank)
                    if process is not None:
                        self._evicted[rank] = why
                        _kill(process.pid, signal.SIGKILL)

    def _stop(self, number: signal.Signals) -> None:
        """Stops all ranks because of a signal to this process; further signals change nothing."""
        if self._end.stopped_by is not None:
            return
        self._end.stopped_by = number
        if number == signal.SIGQUIT:
            self._signal(number)
        elif number != signal.SIGTERM:
            # A rank reports the first signal that it gets.
            self._request(number, signal.SIGTERM)
        # All ranks get SIGTERM, which ends a starting interpreter without the traceback of SIGINT.
        # It comes later, so that a busy rank has handled the first signal by then.
        self._end_ranks(0.0 if number == signal.SIGTERM else _TOGETHER_S)

    def _end_ranks(self, after_s: float) -> None:
        now = time.monotonic()
        self._ending = [(now + after_s, signal.SIGTERM), (now + after_s + _STOP_S, signal.SIGKILL)]

    def _signal(self, number: int) -> None:
        for process in self._running.values():
            _kill(process.pid, number)

    def _request(self, *numbers: int) -> None:
        """Sends the first of these signals to the ranks that handle all of them.

        The signal would end a process that is still starting and has no handler yet.
        """
        for process in self._running.values():
            if _handles(process.pid, numbers):
                _kill(process.pid, numbers[0])

    def _leave(self) -> None:
        """Waits until no other supervisor needs the TCPStore, which ends with this process."""
        with contextlib.suppress(RuntimeError, ParseError):
            self._log.read()
            self._end.survived |= self._keeps and self._log.finished
            others = [f"{_LEFT}/{rank}" for rank in range(1, self._node.count)]
            if self._node.rank:
                self.store.set(f"{_LEFT}/{self._node.rank}", "")
            elif others:
                # The ranks of other nodes may go on without those of this node.
                waits = self._keeps and not self._end.survived and not self._end.stopped_by
                limit = timedelta(seconds=_DAY_S if waits else _LEAVE_S)
                self.store.wait(others, limit)
                self._log.read()
                self._end.survived |= self._keeps and self._log.finished


class Events:
    """Receives the signals to this process in a queue, for which one thread waits.

    The main thread blocks signals that ranks receive, too. Ranks inherit this signal mask, so that no
    such signal ends a rank whose interpreter is still starting. Another thread receives them.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)
        self._left = threading.Event()

    @contextlib.contextmanager
    def of(self, stops: Collection[signal.Signals], saves: Collection[signal.Signals]) -> Any:
        """Receives these signals, those that stop every job, and SIGCHLD while the context is active."""
        numbers = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, *stops, *saves}
        # SIGHUP stays ignored under nohup.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.add(signal.SIGHUP)
        before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        try:
            with SignalContext(sorted(numbers), lambda *_: None):
                threading.Thread(target=self._listen, args=[saves], daemon=True).start()
                signal.pthread_sigmask(signal.SIG_BLOCK, saves)
                try:
                    yield
                finally:
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, saves)
        finally:
            self._left.set()
            signal.set_wakeup_fd(before)

    def _listen(self, saves: Collection[signal.Signals]) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, saves)
        self._left.wait()

    def wait(self, limit_s: float | None) -> list[int]:
        """Waits for signals, up to `limit_s` seconds, and returns their numbers."""
        poller = select.poll()  # unlike `select`, for any number of open files
        poller.register(self._read, select.POLLIN)
        poller.poll(None if limit_s is None else max(limit_s, 0.0) * 1000)
        with contextlib.suppress(BlockingIOError):
            return list(os.read(self._read, 1 << 16))
        return []

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


def unreported_end(rank: int, exit_code: int) -> str:
    """Describes the end of a rank that was killed or crashed in native code."""
    if exit_code >= 0:
        return (
            f"rank {rank} ended with exit code {exit_code} without a message; see its output above"
        )
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:  # a real-time signal
        name = f"signal {-exit_code}"
    hint = "was it out of memory? lower --batch-size or --workers; " if name == "SIGKILL" else ""
    return f"rank {rank} was ended by {name}; {hint}continue with --resume auto"


def _message(error_file: Path) -> Any:
    """Returns what a rank has written into its error file (`Failure.record`)."""
    with contextlib.suppress(OSError, ParseError):
        return parse_table(error_file.read_bytes()).get("message", "")
    return ""


def _kill(pid: int, number: int) -> None:
    """Sends a signal to a rank and to the processes that it has started."""
    with contextlib.suppress(ProcessLookupError):
        try:
            os.killpg(pid, number)
        except ProcessLookupError:  # its session has not begun
            os.kill(pid, number)


def _handles(pid: int, numbers: Collection[int]) -> bool:
    """Returns True if a process has handlers for these signals, as /proc shows it."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        handled = int(dict(line.split(":", 1) for line in lines)["SigCgt"], 16)
        return all(handled >> (number - 1) & 1 for number in numbers)
    return False
