"""Several ranks on this node, through torch's own elastic agent (the engine of torchrun).

In: a number of processes and the arguments of `paceline train`. Out: their exit code; when one fails,
only the root cause is shown. A signal to the launcher stops all ranks, and their save is awaited; ranks
never outlive their launcher.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from paceline.cli.failure import CHILD_MARK, Failure
from paceline.cli.launch_signals import LaunchSignals
from paceline.cli.root_cause import root_cause
from paceline.core.cores import available_cores
from paceline.core.errors import LaunchError


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

    from paceline.cli import local_rendezvous

    _silence_agent()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend=local_rendezvous.register(),
        rdzv_endpoint=f"{local_rendezvous.ADDRESS}:{port}",
        local_addr=local_rendezvous.ADDRESS,
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
