"""Several ranks on this node, through torch's own elastic agent (the engine of torchrun).

In: a number of processes and the arguments of `paceline train`. Out: their exit code; when one fails,
only the root cause is shown. A signal to the launcher stops all ranks, and their save is awaited; ranks
never outlive their launcher.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from paceline.cli.failure import CHILD_MARK, Failure, root_cause
from paceline.core.cores import available_cores
from paceline.core.errors import LaunchError
from paceline.core.signal_context import SignalContext


def launch(
    processes: int,
    arguments: Sequence[str],
    *,
    port: int,
    max_restarts: int,
    stops: Sequence[signal.Signals] = (),
    saves: Sequence[signal.Signals] = (),
) -> int:
    """Runs `python -m paceline ARGUMENTS` on `processes` ranks and waits for them. `stops` and `saves`
    are the signals that ask for that, besides SIGTERM, SIGINT and SIGHUP."""
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
        # The other signals are ours; Ctrl-\ stays the way out that saves nothing.
        signals_to_handle="SIGQUIT",
    )
    signals = LaunchSignals(SignalException, stops=stops, forwarded=saves)
    # Ranks choose their own thread counts; the agent's default would be 1, and a printed warning.
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, available_cores() // processes))
    own = {CHILD_MARK: str(os.getpid()), "OMP_NUM_THREADS": threads}
    if sys.platform == "linux":
        # Gloo would listen on the address that the host's name resolves to.
        own["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    try:
        with signals, _environment(own):
            elastic_launch(config, sys.executable)("-m", "paceline", *arguments)
    except ChildFailedError as error:
        return _conclude(root_cause(error.failures))
    except SignalException as error:
        return 128 + int(signals.received or error.sigval)
    except (RendezvousError, OSError) as error:
        raise LaunchError(
            f"cannot listen on 127.0.0.1:{port} for the ranks to meet ({_reason(error)})",
            "choose a free --master-port, or 0 to have one chosen",
        ) from None
    return 0


def _silence_agent() -> None:
    """The agent logs every child's end in paragraphs of its own; we tell the root cause instead."""
    for name in list(logging.root.manager.loggerDict):
        # Each of its modules has a logger with a level of its own.
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _conclude(failure: Failure | int) -> int:
    if isinstance(failure, int):
        return failure
    failure.show()
    return failure.exit_code


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Children inherit these; whatever this process starts later does not."""
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
    """The first line of what torch says, or its essence where it is known."""
    text = str(error.__cause__ or error).strip()
    if "EADDRINUSE" in text or "in use" in text.lower():
        return "the port is in use"
    lines = text.splitlines()
    return (lines[0] if lines else type(error).__name__)[:120]


# Signals to the launcher of `paceline train --nproc-per-node`.
#
# In: signals at the launcher. Out: for one that asks to stop (SIGTERM, SIGINT, SIGHUP, and
# SIGUSR1 or SIGUSR2 where set so) one exception in the agent's loop, which hands the ranks a
# SIGTERM and waits for them; what comes while they save changes nothing. A signal that asks for a
# save goes on to the ranks.


# The agent gives ranks 30 s. Should it ever have lost the first signal, one after that counts again.
_DEAF_S = 35.0


class LaunchSignals(SignalContext):
    """A context in which the first signal raises `raised(text, signal)`, and the next ones nothing;
    those of `forwarded` go to the ranks."""

    def __init__(
        self,
        raised: Callable[[str, signal.Signals], Exception],
        *,
        stops: Collection[signal.Signals] = (),
        forwarded: Collection[signal.Signals] = (),
    ) -> None:
        """`stops`: besides SIGTERM, SIGINT and SIGHUP."""
        numbers = [signal.SIGTERM, signal.SIGINT, *stops, *forwarded]
        # A hang-up that is ignored is nohup's will; the other two are always meant.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        super().__init__(numbers, self._hear)
        self.received: signal.Signals | None = None
        self._raised = raised
        self._forwarded = frozenset(forwarded)
        self._heard_at = -_DEAF_S

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if number in self._forwarded:
            for rank in _ranks_that_hear(number):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank, number)
            return
        if time.monotonic() - self._heard_at < _DEAF_S:
            return
        self._heard_at = time.monotonic()
        self.received = signal.Signals(number)
        # Whatever it was, ranks get SIGTERM: it makes them save, also where a terminal was lost, and it
        # ends a Python that is still starting without the traceback that SIGINT leaves.
        raise self._raised(f"the launcher got {self.received.name}", signal.SIGTERM)


def _ranks_that_hear(number: int) -> list[int]:
    """Child processes that have set up what this signal does to them. One that is still starting would be
    ended by it, and has nothing to save."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError, ValueError, KeyError):
            lines = (entry / "status").read_text().splitlines()
            status = {name: value.strip() for name, _, value in (x.partition(":") for x in lines)}
            handled = int(status["SigCgt"], 16) | int(status["SigIgn"], 16)
            if int(status["PPid"]) == os.getpid() and handled >> (number - 1) & 1:
                found.append(int(entry.name))
    return found


# `LocalRendezvous`: the agent's store for ranks on this host alone, on the loopback address.
#
# In: a port, or 0 for a free one. Out: a rendezvous handler for torch's elastic agent. Torch's
# own handlers listen on every address of the host, and the default one (c10d) unpickles what it
# finds in its store: whoever reaches the port could run code as this user. One node has nobody to
# negotiate with, so this handler stores nothing of its own and keeps its port closed to the
# network.


ADDRESS = "127.0.0.1"
BACKEND = "paceline-local"
_TIMEOUT = timedelta(seconds=60)


class LocalRendezvous(RendezvousHandler):
    """The same store serves every restart of the ranks, as the agent expects."""

    def __init__(self, port: int, run_id: str) -> None:
        """Raises OSError where the port cannot be had."""
        listener = socket.create_server((ADDRESS, port), backlog=1024)
        self.port: int = listener.getsockname()[1]
        self._run_id = run_id
        self._store = TCPStore(
            ADDRESS,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=_TIMEOUT,
            multi_tenant=True,
            # The store takes the socket over, and with it its address.
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
        """Nobody else could still come."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def create(parameters: RendezvousParameters) -> RendezvousHandler:
    """For torch's registry of handlers; the port is the endpoint's."""
    return LocalRendezvous(int(parameters.endpoint.rpartition(":")[2]), parameters.run_id)


def register() -> str:
    """Makes the handler known to the agent; returns the name by which a `LaunchConfig` asks for it."""
    rendezvous_handler_registry.register(BACKEND, create)
    return BACKEND
