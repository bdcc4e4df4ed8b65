"""A cluster on one machine: hosts as network namespaces, with links of a chosen rate.

In: a number of hosts, ranks for each, a rate. Out: real processes that meet over a real network stack.
Nothing here imports torch; only what runs on the cluster does.
"""

from paceline.bench.cluster.emulated import EmulatedCluster
from paceline.bench.cluster.job import ClusterJob, Ended
from paceline.bench.cluster.link_probe import LinkSpeed
from paceline.bench.cluster.network import why_unavailable

__all__ = ["ClusterJob", "EmulatedCluster", "Ended", "LinkSpeed", "why_unavailable"]
