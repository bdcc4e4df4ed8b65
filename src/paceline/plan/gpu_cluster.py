"""A `Cluster` of GPUs that are not here, from a few published figures.

In: the accelerator, nodes, GPUs a node, the node's bandwidth and latency. Out: a cluster. What is not
published is taken to be the same everywhere, and stated here.
"""

from __future__ import annotations

import math

from paceline.core.errors import ConfigError
from paceline.plan.accelerator import Accelerator
from paceline.plan.cluster import Cluster, Link

# Of a link's signalling rate, what an all-reduce's payload gets.
PAYLOAD_SHARE = 0.8
INTRA_LATENCY_US = 3.0
INTER_LATENCY_US = 10.0
# Start of a collective: kernel launch and the ranks' handshake.
LAUNCH_US = 20.0
# A cast reads one format and writes the other, there and back: 2 · (4 + 2) bytes an element.
CAST_BYTES = 12


def gpu_cluster(
    gpu: Accelerator, nodes: int, gpus_per_node: int, node_gbps: float,
    latency_us: float = INTER_LATENCY_US, links: int = 1, oversubscription: float = 1.0,
) -> Cluster:  # fmt: skip
    """`node_gbps` is the sum over a node's links."""
    for flag, value in (("--node-gbps", node_gbps), ("--latency-us", latency_us)):
        if not 0 < value < math.inf:
            raise ConfigError(flag, value, "must be above 0", "100 Gb/s and 10 us are usual")
    if links < 1:
        raise ConfigError("--links", links, "must be at least 1")
    return Cluster(
        nodes=nodes,
        ranks_per_node=gpus_per_node,
        intra=Link.of(INTRA_LATENCY_US, PAYLOAD_SHARE * gpu.node_bytes_per_s / 1e9),
        inter=Link.of(latency_us, PAYLOAD_SHARE * node_gbps / links / 8),
        links=links,
        oversubscription=oversubscription,
        launch_s=LAUNCH_US * 1e-6,
        cast_s=CAST_BYTES / gpu.memory_bytes_per_s,
    )
