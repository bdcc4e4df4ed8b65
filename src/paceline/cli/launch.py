"""The local launcher: starts the ranks of a job on this node under a `Supervisor`, as torchrun does.

If ranks fail, only the root cause is shown. After a signal, the launcher stops all ranks and waits until
they have saved. Ranks do not outlive their launcher.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from paceline.cli.failure import Failure
from paceline.cli.nodes import Node
from paceline.cli.options import without_options
from paceline.cli.supervisor import ASKED_TO_STOP, JobEnd, RankEnd, Supervisor, unreported_end
from paceline.config import Job, RunConfig
from paceline.core.errors import ConfigError
from paceline.core.host import available_cores
from paceline.core.topology import Topology
from paceline.train.batch_sizes import batch_stages, requested_batch, resolve_batch_sizes
from paceline.train.machine import COMMAND_VARIABLE, command_line
from paceline.train.resolve import check_min_ranks
from paceline.train.stop_signals import user_signals

_LAUNCHER_OPTIONS = (
    "--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port",
    "--max-restarts",
)  # fmt: skip
# When one rank has ended, the supervisor sends SIGTERM to the others, which can interrupt their exit.
_TERMINATED = {-signal.SIGTERM}


def launch_ranks(config: RunConfig, node: Node, max_restarts: int) -> int:
    """Starts ranks that run the command line of this process.

    Args:
        config: The configuration, which is checked once here, before the ranks start.
        node: Number of ranks and nodes, and which node this is.
        max_restarts: The maximum number of restarts of the ranks after a failure.

    Returns:
        The exit code.
    """
    _refuse_to_nest(node)
    min_ranks, job = config.comm.min_ranks, Job(processes=node.world_size)
    if max_restarts and min_ranks:
        problem = "ranks that are left continue, and do not start again"
        raise ConfigError("--max-restarts", max_restarts, problem, "leave it or --min-ranks out")
    if max_restarts and node.count > 1:
        raise ConfigError("--max-restarts", max_restarts, "needs one node", "start with torchrun")
    config.check_job(job)
    check_min_ranks(config, job)
    asked = requested_batch(config, node.world_size)
    if not config.run.resume:  # a resumed run keeps the sizes in its checkpoint
        sizes = resolve_batch_sizes(*asked)
        if asked[:2] != (None, None):
            batch_stages(config.optim, sizes)
    return launch(
        node, without_options(sys.argv[1:], _LAUNCHER_OPTIONS), max_restarts=max_restarts,
        stops=user_signals(config.checkpoint, "stop"),
        saves=user_signals(config.checkpoint, "save"),
        min_ranks=min_ranks,
    )  # fmt: skip


def _refuse_to_nest(node: Node) -> None:
    """Raises ConfigError if a launcher has started this process, which must not start ranks, too."""
    variables = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    variable = next((name for name in variables if name in os.environ), None)
    # srun may start one task per node, which starts the ranks of the node. Others are ranks themselves.
    if variable is None and Topology.from_env(os.environ).world_size not in (1, node.count):
        variable = "SLURM_PROCID"
    if variable is not None:
        raise ConfigError(
            "--nproc-per-node", node.processes,
            f"this process is already a rank of a launcher ({variable} is set)",
            "leave the flag out under torchrun, srun and mpirun",
        )  # fmt: skip


def launch(
    node: Node,
    arguments: Sequence[str],
    *,
    max_restarts: int = 0,
    stops: Collection[signal.Signals] = (),
    saves: Collection[signal.Signals] = (),
    min_ranks: int = 0,
) -> int:
    """Runs `python -m paceline ARGUMENTS` on several ranks.

    Args:
        node: Number of ranks and nodes, and which node this is.
        arguments: The command-line arguments of a rank, after `paceline`.
        max_restarts: The maximum number of restarts of the ranks after a failure.
        stops: The signals that request a stop, besides SIGTERM, SIGINT and SIGHUP.
        saves: The signals that request a checkpoint.
        min_ranks: If above 0, ranks continue when other ranks are lost.

    Returns:
        The exit code of the ranks.

    Raises:
        LaunchError: If the port cannot be used.
    """
    # Ranks choose their thread counts themselves; without this, torch would warn.
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, available_cores() // node.processes))
    own = {COMMAND_VARIABLE: command_line(), "OMP_NUM_THREADS": threads}
    if sys.platform == "linux" and node.count == 1:
        # By default Gloo listens on the address to which the name of the host resolves.
        own["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    start = partial(start_rank, arguments, own)
    with Supervisor(start, node, min_ranks=min_ranks, max_restarts=max_restarts) as supervisor:
        end = supervisor.run(stops, saves, lambda failed: isinstance(root_cause(failed), Failure))
    cause = exit_code_or_cause(end)
    if isinstance(cause, int):
        return cause
    cause.show()
    return cause.exit_code


def start_rank(
    arguments: Sequence[str], own: Mapping[str, str], rank: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Starts a rank in a separate session, so that Ctrl-C reaches the launcher only.

    With -P, as with the command `paceline`, Python imports nothing from the current directory, which may
    be a foreign run folder. `import_object` adds it for modules that the user names.
    """
    command = [sys.executable, "-P", "-m", "paceline", *arguments]
    return subprocess.Popen(command, env={**os.environ, **own, **rank}, start_new_session=True)


def exit_code_or_cause(end: JobEnd) -> Failure | int:
    """Returns the exit code of the job, or the failure that the launcher has to show."""
    if end.stopped_by is not None:
        return 128 + end.stopped_by
    failures = end.failures
    if end.survived:
        # Ranks that were lost without a message are no failure of the job.
        failures = {rank: one for rank, one in failures.items() if isinstance(one.message, dict)}
    return root_cause(failures) if failures else 0


def root_cause(failures: Mapping[int, RankEnd]) -> Failure | int:
    """Returns the failure to show, or an exit code if the ranks stopped on request.

    An error that a rank reported has priority over a rank that ended without a message. Both have
    priority over failures that are only consequences of another failure.

    Args:
        failures: The failures by rank, in the order in which the ranks ended. A rank that signal n
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
    expected = ASKED_TO_STOP | _TERMINATED
    if codes & ASKED_TO_STOP and codes <= expected:
        return max(codes)
    # Ranks that do not stop are killed, but the rank that caused this ended earlier.
    ended = [rank for rank in silent if failures[rank].exitcode not in expected] or silent
    if ended:
        return Failure(unreported_end(ended[0], failures[ended[0]].exitcode), 1)
    return next(failure for failure in reported.values() if failure)
