"""An emulated cluster on one machine: hosts are network namespaces, with links of a chosen rate.
Does not import torch."""

from benchmarks.cluster.emulated import EmulatedCluster
from benchmarks.cluster.job import ClusterJob, Ended
from benchmarks.cluster.link_probe import LinkSpeed
from benchmarks.cluster.network import why_unavailable

__all__ = ["ClusterJob", "EmulatedCluster", "Ended", "LinkSpeed", "why_unavailable"]
