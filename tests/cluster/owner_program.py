"""An owner of a cluster that waits to be ended.

It starts on every host a program with a child in a session of its own, as torchrun does with ranks, and
then says, as JSON, the names of its namespaces and the ids of these processes.
"""

from __future__ import annotations

import json
import sys
import time

from benchmarks.cluster import EmulatedCluster
from benchmarks.cluster.network import Namespace
from cluster.traces import hear_signals_as_usual


def main() -> None:
    hear_signals_as_usual()
    with EmulatedCluster(2) as cluster:
        for host in range(2):
            cluster.start(host, ["sh", "-c", "setsid sleep 600 & sleep 600"])
        hosts = [Namespace(name) for name in cluster.namespaces[:2]]
        while any(len(host.processes()) < 3 for host in hosts):
            time.sleep(0.01)
        pids = [pid for host in hosts for pid in host.processes()]
        sys.stdout.write(json.dumps([cluster.namespaces, pids]) + "\n")
        sys.stdout.flush()
        time.sleep(600)


if __name__ == "__main__":
    main()
