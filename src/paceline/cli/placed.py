"""Commands that run on several ranks: `bench allreduce`, `bench exchange`, `tune`.

In: a `Placement`. Out: None in a process that is a rank, and goes on; else the exit code, after the same
command line has run on the ranks that were asked for.
"""

from __future__ import annotations

import sys

from paceline.bench.placement import Placement, rank_arguments
from paceline.core.errors import LaunchError


def run_placed(placement: Placement) -> int | None:
    """Starts the ranks, unless this process is one."""
    if placement.is_launched():
        return None
    arguments = rank_arguments(sys.argv[1:])
    if placement.ranks:
        from paceline.cli.launch import launch

        return launch(placement.ranks, arguments, port=0, max_restarts=0)
    from paceline.bench.cluster import EmulatedCluster, why_unavailable
    from paceline.bench.cluster.rank_output import show

    problem = why_unavailable()
    if problem:
        raise LaunchError(
            f"no emulated cluster: {problem}", "use --ranks, or torchrun on real hosts"
        )
    with EmulatedCluster(placement.hosts, placement.rate) as cluster:
        return show(cluster.ranks(["-m", "paceline", *arguments], placement.ranks_per_host))
