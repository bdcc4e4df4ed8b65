"""`Cluster`: the number of ranks of a cluster, and the cost of messages between them.

`paceline.planner.accelerators` makes a cluster from a GPU and flags, and `paceline.planner.plan_parts`
from the file that `paceline tune` wrote on a real cluster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError
from paceline.core.topology import RANKS_LIMIT
from paceline.core.untrusted import LONGEST_S

if TYPE_CHECKING:
    from paceline.plan.cost import ProbedTable

# Relative standard deviation of the ranks' step times: GPUs of one type differ by some percent, and each
# GPU varies from step to step. One round number for all clusters, based on the systems in the planner's
# record.
RANK_SPREAD = 0.02


@dataclass(frozen=True)
class Link:
    """Seconds that a message takes on a link: `alpha_s` to start it, and `beta_s` for each byte."""

    alpha_s: float
    beta_s: float

    @classmethod
    def of(cls, latency_us: float, gigabytes_per_s: float) -> Link:
        return cls(latency_us * 1e-6, 1e-9 / gigabytes_per_s)


@dataclass(frozen=True)
class Cluster:
    """The number of ranks of a cluster, and the costs that the planner uses to predict collectives.

    Attributes:
        nodes: Number of nodes.
        ranks_per_node: Number of ranks on each node.
        intra: The link between two ranks of a node.
        inter: One link between nodes.
        links: Number of links that a node has to other nodes.
        oversubscription: Factor by which links between nodes are slower if all nodes send
            concurrently.
        gamma_s: Seconds to add one received byte to a sum.
        launch_s: Fixed time of every collective, in addition to the time of its messages.
        cast_s: Seconds to convert one element to the number format in which it is sent, and back.
        hidden_cost: Seconds by which one second of communication delays concurrent compute, because
            both share processors or memory.
        depth_cost: Relative increase of the time per byte between nodes for every doubling of the
            number of nodes, because traffic then shares more switches.
        spread: Relative standard error of the latencies and bandwidths in this class.
        probed: Measured times of all-reduces, which take precedence over the values above.
        has_network: False if `inter` is not known. The cluster must then have one node.
    """

    nodes: int
    ranks_per_node: int
    intra: Link
    inter: Link
    links: int = 1
    oversubscription: float = 1.0
    gamma_s: float = 0.0
    launch_s: float = 0.0
    cast_s: float = 0.0
    hidden_cost: float = 0.0
    depth_cost: float = 0.0
    spread: float = 0.3
    probed: ProbedTable | None = None
    has_network: bool = True

    def __post_init__(self) -> None:
        for flag, count in (
            ("--nodes", self.nodes),
            ("--gpus-per-node", self.ranks_per_node),
            ("--links", self.links),
        ):
            if not 1 <= count <= RANKS_LIMIT:
                raise ConfigError(flag, count, f"must be from 1 to {RANKS_LIMIT:,}")
        if self.nodes > 1 and not self.has_network:
            raise ConfigError(
                "--nodes", self.nodes,
                "the cluster file has one node: links between nodes were not measured",
                "run paceline tune on two nodes, or give --node-gbps instead of the file",
            )  # fmt: skip
        if self.ranks > RANKS_LIMIT:
            flag = "--nodes" if self.nodes >= self.ranks_per_node else "--gpus-per-node"
            raise ConfigError(
                flag, max(self.nodes, self.ranks_per_node),
                f"{self.ranks:,} ranks are more than {RANKS_LIMIT:,}",
                "use fewer nodes or fewer GPUs per node",
            )  # fmt: skip
        for name, value, least in (
            ("latency inside a node", self.intra.alpha_s, 0),
            ("time per byte inside a node", self.intra.beta_s, 0),
            ("latency between nodes", self.inter.alpha_s, 0),
            ("time per byte between nodes", self.inter.beta_s, 0),
            ("--oversubscription", self.oversubscription, 1),
            ("time to add a byte", self.gamma_s, 0),
            ("launch time", self.launch_s, 0),
            ("time to cast an element", self.cast_s, 0),
            ("cost of a hidden exchange", self.hidden_cost, 0),
            ("cost of doubling the nodes", self.depth_cost, 0),
        ):
            if not least <= value <= LONGEST_S:
                raise ConfigError(
                    name, value, f"must be from {least} to {LONGEST_S:g}", "measure it again"
                )

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def between(self) -> Link:
        """The cost of a link between two nodes, including contention in the switches."""
        deeper = 1 + self.depth_cost * math.log2(self.nodes)
        return replace(self.inter, beta_s=self.inter.beta_s * self.oversubscription * deeper)

    @property
    def slowest(self) -> Link:
        """The slowest link, which bounds a ring all-reduce over all ranks."""
        if self.nodes == 1:
            return self.intra
        if self.ranks_per_node == 1:
            return self.between
        return Link(
            max(self.intra.alpha_s, self.between.alpha_s),
            max(self.intra.beta_s, self.between.beta_s),
        )

    def with_nodes(self, nodes: int) -> Cluster:
        return replace(self, nodes=nodes)


def slowest_of(ranks: int, spread: float = RANK_SPREAD) -> float:
    """Returns the expected step time of the slowest rank, relative to the mean step time.

    A synchronous step waits for the slowest rank. The result is the expected maximum of `ranks` normally
    distributed times, by Blom's approximation.
    """
    if ranks <= 1:
        return 1.0
    return 1.0 + spread * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
