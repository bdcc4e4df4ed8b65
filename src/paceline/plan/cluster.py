"""`Cluster`: how many ranks there are, and what a message costs between them.

Out: start-up time and time a byte inside a node and between nodes, links, contention; and a ConfigError
for figures that cannot be. `paceline.planner.accelerators` makes one of a GPU and flags, and
`paceline.planner.plan_parts` of the file that `paceline tune` wrote on the real cluster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING, Protocol

from paceline.core.errors import ConfigError
from paceline.core.topology import RANKS_LIMIT
from paceline.core.untrusted import LONGEST_S

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# GPUs of one type and lot differ by some percent in clock and temperature, and each in itself from
# step to step. One round number for all clusters, chosen knowing the systems of the planner's record.
RANK_SPREAD = 0.02


@dataclass(frozen=True)
class Link:
    """`alpha_s` to start a message, `beta_s` a byte."""

    alpha_s: float
    beta_s: float

    @classmethod
    def of(cls, latency_us: float, gigabytes_per_s: float) -> Link:
        return cls(latency_us * 1e-6, 1e-9 / gigabytes_per_s)


class ProbedCosts(Protocol):
    """All-reduces as they were measured on this cluster, which go before formulas."""

    @property
    def algorithms(self) -> tuple[str, ...]: ...

    def cost_s(
        self, algorithm: str, cluster: Cluster, sizes: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]: ...


@dataclass(frozen=True)
class Cluster:
    """`nodes` of `ranks_per_node`. `inter` is one link between nodes, of which each node has `links`;
    `oversubscription` divides their rate when all nodes talk at once. `gamma_s` is the time to add up a
    byte, `launch_s` the time that every collective takes beside its messages, `cast_s` the time to
    bring an element into another format for the wire, and back. `hidden_cost` is what a second of an
    exchange costs the compute that hides it, where the same processors or memory serve both.
    `depth_cost` is by how much a byte between nodes takes longer for every doubling of the nodes, whose
    flows meet in more switches. `spread` is the relative standard error of start-ups and rates.
    `probed`, where there is one, knows better than the rest. `has_network`: whether `inter` is known;
    otherwise there is one node."""

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
    probed: ProbedCosts | None = None
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
                "the cluster file is of one node: links between nodes were not measured",
                "run paceline tune on two nodes, or give --node-gbps instead of the file",
            )  # fmt: skip
        if self.ranks > RANKS_LIMIT:
            flag, count = max(("--nodes", self.nodes), ("--gpus-per-node", self.ranks_per_node),
                              key=lambda pair: pair[1])  # fmt: skip
            raise ConfigError(
                flag, count, f"{self.ranks:,} ranks are more than {RANKS_LIMIT:,}",
                "use fewer nodes or fewer GPUs a node",
            )  # fmt: skip
        for flag, link in (("inside a node", self.intra), ("between nodes", self.inter)):
            for what, value in (("latency", link.alpha_s), ("time a byte", link.beta_s)):
                if not 0 <= value <= LONGEST_S:
                    raise ConfigError(
                        f"{what} {flag}", value, f"must be 0 or more, at most {LONGEST_S:g} s",
                        "measure the links again, or give others",
                    )  # fmt: skip
        if not 1 <= self.oversubscription <= LONGEST_S:
            raise ConfigError(
                "--oversubscription", self.oversubscription, f"must be from 1 to {LONGEST_S:g}",
                "4 means that a quarter of the links' sum reaches the other nodes",
            )  # fmt: skip
        for name, value in (
            ("time to add a byte", self.gamma_s),
            ("launch time", self.launch_s),
            ("time to cast an element", self.cast_s),
            ("cost of a hidden exchange", self.hidden_cost),
            ("cost of a doubling of the nodes", self.depth_cost),
        ):
            if not 0 <= value <= LONGEST_S:
                raise ConfigError(name, value, f"must be 0 or more, at most {LONGEST_S:g}")

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def between(self) -> Link:
        """One flow between two nodes, under contention in the switches."""
        deeper = 1 + self.depth_cost * math.log2(self.nodes)
        return replace(self.inter, beta_s=self.inter.beta_s * self.oversubscription * deeper)

    @property
    def slowest(self) -> Link:
        """What bounds a ring over all ranks: each round waits for the slowest hop."""
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
    """How much longer than the mean the slowest rank takes, for which a synchronous step waits: the
    expected maximum of normal times, by Blom's approximation."""
    if ranks <= 1:
        return 1.0
    return 1.0 + spread * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
