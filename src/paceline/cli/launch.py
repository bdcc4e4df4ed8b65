"""The local launcher: starts ranks on this node with torch's elastic agent, as torchrun does.

If ranks fail, only the root cause is shown. After a signal, the launcher stops all ranks and waits until
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
from typing import Self

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
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
# The agent gives ranks 30 s to stop. A signal after this time is handled, in case the first was lost.
_REPEAT_S = 35.0
# The exit codes of ranks that saved and stopped because of a signal.
_ASKED_TO_STOP = {
    128 + number
    for number in (
        signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2,
    )
}  # fmt: skip
# When one rank has ended, the agent sends SIGTERM to the other ranks, which can interrupt their exit.
_TERMINATED = {-signal.SIGTERM}


def launch_ranks(config: RunConfig, processes: int, port: int, max_restarts: int) -> int:
    """Starts ranks that run the command line of this process.

    Args:
        config: The configuration, which is checked once here, before the ranks start.
        processes: The number of ranks.
        port: The port of the rendezvous; 0 finds a free port.
        max_restarts: The maximum number of restarts of the ranks after a failure.

    Returns:
        The exit code.
    """
    _refuse_to_nest(processes)
    if not 0 <= port < 65536:
        raise ConfigError("--master-port", port, "must be 0 to 65535")
    config.check_job(Job(processes=processes))
    asked = requested_batch(config, processes)
    if not config.run.resume:  # a resumed run keeps the sizes in its checkpoint
        sizes = resolve_batch_sizes(*asked)
        if asked[:2] != (None, None):
            batch_stages(config.optim, sizes)
    return launch(
        processes, without_options(sys.argv[1:], _LAUNCHER_OPTIONS), port=port,
        max_restarts=max_restarts,
        stops=user_signals(config.checkpoint, "stop"),
        saves=user_signals(config.checkpoint, "save"),
    )  # fmt: skip


def _refuse_to_nest(processes: int) -> None:
    """Raises ConfigError if this process is a rank itself, because each rank would start ranks."""
    variables = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    variable = next((name for name in variables if name in os.environ), None)
    # A single srun task may start the ranks of a node. Several tasks are ranks themselves.
    if variable is None and Topology.from_env(os.environ).world_size > 1:
        variable = "SLURM_PROCID"
    if variable is not None:
        raise ConfigError(
            "--nproc-per-node", processes,
            f"this process is already a rank of a launcher ({variable} is set)",
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
    """Runs `python -m paceline ARGUMENTS` on several ranks.

    Args:
        processes: The number of ranks.
        arguments: The command-line arguments of a rank, after `paceline`.
        port: The port of the rendezvous; 0 finds a free port.
        max_restarts: The maximum number of restarts of the ranks after a failure.
        stops: The signals that request a stop, besides SIGTERM, SIGINT and SIGHUP.
        saves: The signals that request a checkpoint.

    Returns:
        The exit code of the ranks.

    Raises:
        LaunchError: If the port cannot be used.
    """
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
        # `LaunchSignals` handles the other signals; Ctrl-\ still stops at once, without saving.
        signals_to_handle="SIGQUIT",
    )
    signals = LaunchSignals(SignalException, stops=stops, forwarded=saves)
    # Ranks choose their thread counts themselves; the agent's default is 1, with a warning.
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, available_cores() // processes))
    own = {
        LAUNCHER_VARIABLE: str(os.getpid()),
        COMMAND_VARIABLE: command_line(),
        "OMP_NUM_THREADS": threads,
    }
    if sys.platform == "linux":
        # By default Gloo listens on the address to which the name of the host resolves.
        own["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    try:
        with signals, _environment(own):
            # With -P, as with the command `paceline`, Python imports nothing from the current directory,
            # which may be a foreign run folder. `import_object` adds it for modules that the user names.
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
            f"the launcher cannot listen on 127.0.0.1:{port} ({_reason(error)})",
            "choose a free --master-port, or 0 for any free one",
        ) from None
    return 0


def root_cause(failures: Mapping[int, ProcessFailure]) -> Failure | int:
    """Returns the failure to show, or an exit code if the ranks stopped on request.

    A reported cause has priority over a rank that ended without a report. Both have priority over
    failures that are only consequences of another failure.

    Args:
        failures: The failures by rank, in the order in which the agent saw them. A rank that signal n
            has ended has exit code -n.
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
    # The agent kills ranks that do not stop, but the rank that caused this ended earlier.
    ended = [rank for rank in silent if failures[rank].exitcode not in expected] or silent
    if ended:
        return Failure(_unreported_end(ended[0], failures[ended[0]].exitcode), 1)
    return next(failure for failure in reported.values() if failure)


def _unreported_end(rank: int, exit_code: int) -> str:
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


def end_ranks(limit_s: float = 30.0) -> None:
    """Ends ranks that the agent had not registered yet when a signal arrived.

    The rendezvous ends with the agent, and these ranks would report that it is lost. Ranks that have not
    ended after `limit_s` seconds are killed.
    """
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
    """Silences the agent, which logs several paragraphs for each rank that ends."""
    for name in list(logging.root.manager.loggerDict):
        # Each module of the agent has its own logger with its own level.
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Sets environment variables in the block, so that processes started there inherit them."""
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
    """Returns a short reason for an error of the store: a known one, or the first line of its text."""
    text = str(error.__cause__ or error).strip()
    if "EADDRINUSE" in text or "in use" in text.lower():
        return "the port is in use"
    lines = text.splitlines()
    return (lines[0] if lines else type(error).__name__)[:120]


class LaunchSignals(SignalContext):
    """A context that handles the signals to the launcher.

    The first signal that requests a stop is sent on to the ranks, which report it. Then an exception ends
    the loop of the agent, which sends SIGTERM to the ranks and waits for them. Further signals are
    ignored while ranks save.

    The main thread blocks the forwarded signals. Ranks inherit this signal mask, so that no forwarded
    signal can end a rank whose interpreter is still starting. Another thread receives the blocked signals
    for the launcher.

    Args:
        raised: Makes the exception from a text and a signal.
        stops: The signals that request a stop, besides SIGTERM, SIGINT and SIGHUP.
        forwarded: The signals that request a checkpoint and are sent to the ranks.
    """

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
        """Receives the forwarded signals in this thread; Python runs the handler in the main thread."""
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
            # A rank reports the first signal that it gets.
            _send_to_ranks(number, signal.SIGTERM)
        # All ranks get SIGTERM, which ends a starting interpreter without the traceback of SIGINT.
        raise self._raised(f"the launcher received {self.received.name}", signal.SIGTERM)


def _send_to_ranks(*numbers: int) -> None:
    """Sends the first of these signals to the child processes that handle all of them.

    The signal would end a process that is still starting and has no handler yet.
    """
    for child in _children():
        with contextlib.suppress(OSError, ValueError, KeyError):
            lines = Path(f"/proc/{child}/status").read_text().splitlines()
            handled = int(dict(line.split(":", 1) for line in lines)["SigCgt"], 16)
            if all(handled >> (number - 1) & 1 for number in numbers):
                os.kill(child, numbers[0])


def _children() -> list[int]:
    """Returns the process ids of the children of this process, as /proc shows them."""
    stats = {pid: process_stat(pid) for pid in process_ids()}
    return [pid for pid, stat in stats.items() if stat is not None and stat.parent == os.getpid()]


class LocalRendezvous(RendezvousHandler):
    """The rendezvous of ranks on this host; one store serves all restarts.

    Torch's handlers listen on every address of the host, and the default one (c10d) unpickles the
    contents of its store: anyone who reaches the port could run code as this user. This handler listens
    on the loopback address and stores nothing itself, because a single node has nothing to negotiate.

    Args:
        port: The port to listen on; 0 finds a free one.
        run_id: The prefix of the keys in the store.

    Raises:
        OSError: If the port cannot be used.
    """

    def __init__(self, port: int, run_id: str) -> None:
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
            # The store uses the address of this socket.
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
        """Does nothing: no other node can join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return LocalRendezvous(int(parameters.endpoint.rpartition(":")[2]), parameters.run_id)


def register() -> str:
    """Registers `LocalRendezvous` with torch and returns its backend name for a `LaunchConfig`."""
    # Under a registered name, torch accepts the same function again, but no other function.
    rendezvous_handler_registry.register(BACKEND, _create)
    return BACKEND
