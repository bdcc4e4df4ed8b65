"""An emulated cluster on one machine: hosts are network namespaces, with links of a chosen rate.
Torch-free."""

from paceline.bench.cluster.emulated import EmulatedCluster
from paceline.bench.cluster.job import ClusterJob, Ended
from paceline.bench.cluster.link_probe import LinkSpeed
from paceline.bench.cluster.network import why_unavailable

__all__ = ["ClusterJob", "EmulatedCluster", "Ended", "LinkSpeed", "why_unavailable"]
