"""Starts several ranks on this node, with torch's elastic agent, which torchrun uses too.

When a rank fails, only the root cause is shown. A signal to the launcher stops all ranks and waits until
they have saved. Ranks do not outlive their launcher.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Protocol, Self

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from paceline.cli.failure import LAUNCHER_VARIABLE, Failure
from paceline.cli.options import without_options
from paceline.config import Job, RunConfig
from paceline.core.errors import ConfigError, LaunchError
from paceline.core.host import (
    SignalContext,
    available_cores,
    process_ids,
    process_stat,
    started_with,
)
from paceline.core.topology import Topology
from paceline.train.batch_sizes import batch_stages, requested_batch, resolve_batch_sizes
from paceline.train.machine import COMMAND_VARIABLE, command_line
from paceline.train.stop_signals import user_signals

ADDRESS = "127.0.0.1"
BACKEND = "paceline-local"
_LAUNCHER_OPTIONS = ("--nproc-per-node", "--master-port", "--max-restarts")
_STORE_TIMEOUT = timedelta(seconds=60)
# The agent gives ranks 30 s to stop. A signal after that counts again, in case the first was lost.
_REPEAT_S = 35.0
# Exit codes of ranks that saved and stopped on request.
_ASKED_TO_STOP = {
    128 + number
    for number in (
        signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2,
    )
}  # fmt: skip
# The agent sends SIGTERM to the other ranks when one has ended, which may interrupt their exit.
_TERMINATED = {-signal.SIGTERM}


def launch_ranks(config: RunConfig, processes: int, port: int, max_restarts: int) -> int:
    """Checks what can be checked once, before the ranks start."""
    _refuse_to_nest(processes)
    if not 0 <= port < 65536:
        raise ConfigError("--master-port", port, "must be 0 to 65535")
    config.check_job(Job(processes=processes))
    asked = requested_batch(config, processes)
    sizes = resolve_batch_sizes(*asked)
    if asked[:2] != (None, None):
        batch_stages(config.optim, sizes, processes)
    return launch(
        processes, without_options(sys.argv[1:], _LAUNCHER_OPTIONS), port=port,
        max_restarts=max_restarts,
        stops=user_signals(config.checkpoint, "stop"),
        saves=user_signals(config.checkpoint, "save"),
    )  # fmt: skip


def _refuse_to_nest(processes: int) -> None:
    """A rank that starts ranks would multiply them, or conflict with its neighbours."""
    variables = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    found = next((name for name in variables if name in os.environ), None)
    # One srun task may start the ranks of a node; several tasks are ranks themselves.
    if found is None and Topology.from_env(os.environ).world_size > 1:
        found = "SLURM_PROCID"
    if found is not None:
        raise ConfigError(
            "--nproc-per-node", processes,
            f"this process is a rank of a launcher already ({found} is set)",
            "leave the flag out under torchrun, srun and mpirun",
        )  # fmt: skip


def launch(
    processes: int,
    arguments: Sequence[str],
    *,
    port: int,
    max_restarts: int,
    stops: Sequence[signal.Signals] = (),
    saves: Sequence[signal.Signals] = (),
) -> int:
    """Runs `python -m paceline ARGUMENTS` on `processes` ranks and returns their exit code.

    `saves` are signals that request a checkpoint, `stops` those that request a stop besides SIGTERM,
    SIGINT and SIGHUP."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _silence_agent()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend=register(),
        rdzv_endpoint=f"{ADDRESS}:{port}",
        local_addr=ADDRESS,
        max_restarts=max_restarts,
        monitor_interval=0.1,
        # `LaunchSignals` handles the others; Ctrl-\ still stops at once, without saving.
        signals_to_handle="SIGQUIT",
    )
    signals = LaunchSignals(SignalException, stops=stops, forwarded=saves)
    # Ranks choose their own thread counts; the agent's default is 1, with a warning.
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, available_cores() // processes))
    own = {
        LAUNCHER_VARIABLE: str(os.getpid()),
        COMMAND_VARIABLE: command_line(),
        "OMP_NUM_THREADS": threads,
    }
    if sys.platform == "linux":
        # Gloo would listen on the address that the host's name resolves to.
        own["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    try:
        with signals, _environment(own):
            # -P: as with the command `paceline`, no module comes from the current directory, which may
            # be a foreign run folder. `import_object` adds it for modules that the user names.
            elastic_launch(config, sys.executable)("-P", "-m", "paceline", *arguments)
    except ChildFailedError as error:
        cause = root_cause(error.failures)
        if isinstance(cause, int):
            return cause
        cause.show()
        return cause.exit_code
    except SignalException as error:
        end_ranks()
        return 128 + int(signals.received or error.sigval)
    except (RendezvousError, OSError) as error:
        raise LaunchError(
            f"cannot listen on 127.0.0.1:{port} for the ranks to meet ({_reason(error)})",
            "choose a free --master-port, or 0 to have one chosen",
        ) from None
    return 0


class ChildFailure(Protocol):
    """The part of torch's record of a failed process that is read; `exitcode` is -n for signal n."""

    @property
    def message(self) -> object: ...

    @property
    def exitcode(self) -> int: ...


def root_cause(failures: Mapping[int, ChildFailure]) -> Failure | int:
    """The failure to show, of all that the agent has collected, in the order in which it saw them; an
    exit code where the ranks stopped on request.

    A rank that reported a cause comes first, then one that ended without a report, then consequences.
    """
    reported = {
        rank: Failure.from_record(failure.message, failure.exitcode)
        for rank, failure in failures.items()
    }
    for failure in reported.values():
        if failure and not failure.consequence:
            return failure
    silent = [rank for rank, failure in reported.items() if failure is None]
    codes = {failures[rank].exitcode for rank in silent}
    expected = _ASKED_TO_STOP | _TERMINATED
    if codes & _ASKED_TO_STOP and codes <= expected:
        return max(codes)
    # The agent kills ranks that do not stop, but it saw the end of the first one before.
    ended = [rank for rank in silent if failures[rank].exitcode not in expected] or silent
    if ended:
        return Failure(_unreported_end(ended[0], failures[ended[0]].exitcode), 1)
    return next(failure for failure in reported.values() if failure)


def _unreported_end(rank: int, exit_code: int) -> str:
    """For a rank that was killed, or crashed in native code."""
    if exit_code >= 0:
        return (
            f"rank {rank} ended with exit code {exit_code} without a message; see its output above"
        )
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:  # a real-time signal has a number only
        name = f"signal {-exit_code}"
    hint = "was it out of memory? lower --batch-size or --workers; " if name == "SIGKILL" else ""
    return f"rank {rank} was ended by {name}; {hint}continue with --resume auto"


def end_ranks(limit_s: float = 30.0) -> None:
    """Ends ranks that the agent did not know yet because the signal came while it started them: they
    would report that the rendezvous, which ends with the agent, is gone. Kills one that takes longer."""
    deadline = time.monotonic() + limit_s
    for child in _children():
        if not started_with(child, LAUNCHER_VARIABLE, str(os.getpid())):
            continue
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGTERM)
            while os.waitpid(child, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:
                    os.kill(child, signal.SIGKILL)
                time.sleep(0.02)


def _silence_agent() -> None:
    """The agent logs the end of every child in several paragraphs; we show the root cause instead."""
    for name in list(logging.root.manager.loggerDict):
        # Each of its modules has its own logger with its own level.
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """For the children that are started within the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _reason(error: BaseException) -> str:
    """The first line of torch's message, or a plain sentence where the cause is known."""
    text = str(error.__cause__ or error).strip()
    if "EADDRINUSE" in text or "in use" in text.lower():
        return "the port is in use"
    lines = text.splitlines()
    return (lines[0] if lines else type(error).__name__)[:120]


class LaunchSignals(SignalContext):
    """A context for the launcher. The first signal that requests a stop (SIGTERM, SIGINT, SIGHUP,
    `stops`) goes to the ranks that handle it, which report it, and raises `raised(text, SIGTERM)` in the
    agent's loop, which sends SIGTERM to the ranks and waits for them; further ones are ignored while
    ranks save. The `forwarded` signals, which request a checkpoint, go to the ranks.

    Ranks inherit the mask of the main thread, which holds the forwarded signals back: none can end a
    rank whose interpreter is still starting. Another thread takes those for the launcher itself."""

    def __init__(
        self,
        raised: Callable[[str, signal.Signals], Exception],
        *,
        stops: Collection[signal.Signals] = (),
        forwarded: Collection[signal.Signals] = (),
    ) -> None:
        numbers = [signal.SIGTERM, signal.SIGINT, *stops, *forwarded]
        # SIGHUP stays ignored under nohup.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        super().__init__(numbers, self._handle)
        self.received: signal.Signals | None = None
        self._raised = raised
        self._forwarded = frozenset(forwarded)
        self._handled_at = -_REPEAT_S
        self._left = threading.Event()

    def __enter__(self) -> Self:
        super().__enter__()
        if self._forwarded:
            threading.Thread(target=self._listen, name="paceline-signals", daemon=True).start()
            signal.pthread_sigmask(signal.SIG_BLOCK, self._forwarded)
        return self

    def __exit__(self, *details: object) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._forwarded)
        self._left.set()
        super().__exit__(*details)

    def _listen(self) -> None:
        """Python runs the handler in the main thread, whichever thread gets the signal."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._forwarded)
        self._left.wait()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number in self._forwarded:
            _send_to_ranks(number)
            return
        if time.monotonic() - self._handled_at < _REPEAT_S:
            return
        self._handled_at = time.monotonic()
        self.received = signal.Signals(number)
        if number != signal.SIGTERM:
            _send_to_ranks(
                number, signal.SIGTERM
            )  # the first that a rank gets is the one it reports
        # Then all get SIGTERM: it ends an interpreter that is still starting without the traceback of
        # SIGINT.
        raise self._raised(f"the launcher got {self.received.name}", signal.SIGTERM)


def _send_to_ranks(*numbers: int) -> None:
    """Sends the first of these signals to the child processes that handle all of them. It would end one
    that is still starting, which has nothing to save."""
    for child in _children():
        with contextlib.suppress(OSError, ValueError, KeyError):
            lines = Path(f"/proc/{child}/status").read_text().splitlines()
            handled = int(dict(line.split(":", 1) for line in lines)["SigCgt"], 16)
            if all(handled >> (number - 1) & 1 for number in numbers):
                os.kill(child, numbers[0])


def _children() -> list[int]:
    """Of this process, where /proc shows them."""
    stats = {pid: process_stat(pid) for pid in process_ids()}
    return [pid for pid, stat in stats.items() if stat is not None and stat.parent == os.getpid()]


class LocalRendezvous(RendezvousHandler):
    """The agent's store for ranks on this host alone; one store serves all restarts.

    Torch's own handlers listen on every address of the host, and the default one (c10d) unpickles what it
    finds in its store, so that whoever reaches the port could run code as this user. This handler
    listens on the loopback address and stores nothing itself: a single node has nothing to negotiate.
    """

    def __init__(self, port: int, run_id: str) -> None:
        """Port 0 takes a free one. Raises OSError where the port cannot be used."""
        listener = socket.create_server((ADDRESS, port), backlog=1024)
        self.port: int = listener.getsockname()[1]
        self._run_id = run_id
        self._store = TCPStore(
            ADDRESS,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=_STORE_TIMEOUT,
            multi_tenant=True,
            # The store takes over the socket, and with it its address.
            master_listen_fd=listener.detach(),
        )

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        store = PrefixStore(self._run_id, self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(ADDRESS, self.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """No other node can join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return LocalRendezvous(int(parameters.endpoint.rpartition(":")[2]), parameters.run_id)


def register() -> str:
    """Registers the handler with torch; returns the name by which a `LaunchConfig` asks for it."""
    # The same function each time: torch refuses another one under the same name.
    rendezvous_handler_registry.register(BACKEND, _create)
    return BACKEND
