"""Several ranks on this node, through torch's own elastic agent (the engine of torchrun).

In: a number of processes and the arguments of `paceline train`. Out: their exit code; when one fails,
only the root cause is shown.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence

from paceline.cli.failure import CHILD_MARK, Failure
from paceline.core.errors import LaunchError


def launch(processes: int, arguments: Sequence[str], *, port: int, max_restarts: int) -> int:
    """Runs `python -m paceline ARGUMENTS` on `processes` ranks and waits for them."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The agent logs every child's end in paragraphs of its own; we tell the root cause instead.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ[CHILD_MARK] = "1"
    # Ranks choose their own thread counts; the agent's default would be 1, and a printed warning.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{port}",
        local_addr="127.0.0.1",
        max_restarts=max_restarts,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "paceline", *arguments)
    except ChildFailedError as error:
        failure = _root_cause(error)
        failure.show()
        return failure.exit_code
    except SignalException as error:
        return 128 + int(error.sigval)
    except (RendezvousError, OSError) as error:
        cause = error.__cause__ or error
        raise LaunchError(
            f"cannot listen on 127.0.0.1:{port} for the ranks to meet ({_first_line(cause)})",
            "choose a free --master-port, or 0 to have one chosen",
        ) from None
    return 0


def _root_cause(error: object) -> Failure:
    """The failure that is no other one's consequence; the first of those."""
    failures = dict(sorted(error.failures.items()))  # type: ignore[attr-defined]
    told = {
        rank: Failure.from_record(failure.message, failure.exitcode)
        for rank, failure in failures.items()
    }
    causes = [failure for failure in told.values() if failure and not failure.consequence]
    if causes:
        return causes[0]
    for rank, failure in failures.items():
        if told[rank] is None:
            return Failure(_silent_end(rank, failure.exitcode), 1)
    return next(failure for failure in told.values() if failure)


def _silent_end(rank: int, exit_code: int) -> str:
    """A child that left no word: killed, or crashed in native code."""
    if exit_code >= 0:
        return f"rank {rank} ended with exit code {exit_code} without a word; see its output above"
    name = signal.Signals(-exit_code).name
    hint = "was it out of memory? lower --batch-size or --workers; " if name == "SIGKILL" else ""
    return f"rank {rank} was ended by {name}; {hint}continue with --resume auto"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:120]
