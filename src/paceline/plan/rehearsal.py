"""The cluster that a rehearsal stands for: its settings, and a clock of predicted times.

`RehearseSettings` is the section `[rehearse]`. `ClusterClock` turns completed work into the cluster's
time, cost and energy; `paceline.rehearsal.cluster_clock` predicts it. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.settings import SettingChecks, check_input_rate
from paceline.core.topology import RANKS_LIMIT
from paceline.core.units import format_duration

# The order of additions is worked out in time and memory in proportion to the square of the ranks: for
# 1,024, the most that were tried, 18 s and 0.9 GB with `ring` (records/2026-11-17_rehearse_2-core-cpu).
MOST_RANKS = 1024


@dataclass(frozen=True)
class RehearseSettings:
    """The cluster that `paceline rehearse` stands for; without `nodes` a run is no rehearsal."""

    nodes: int = 0
    """Nodes of the cluster to rehearse; 0 trains as usual."""
    gpus_per_node: int = 8
    """Ranks of each of its nodes."""
    gpu: str = ""
    """Its accelerator, from the planner's catalog, such as `H100`, or a TOML file that describes another
    (docs/planner.md); for the predicted times."""
    profile: str = ""
    """File of `paceline profile` or `tune` with the measured step of this model, in place of one that is
    predicted from its layers."""
    cluster: str = ""
    """File of `paceline tune` with the cluster's measured links, instead of the four settings below."""
    node_gbps: float | None = None
    """All links of a node together, in Gb/s; unset, those of the reference system of `gpu`."""
    latency_us: float = 10.0
    """Start of a message between nodes, in microseconds."""
    links: int | None = None
    """Links of a node; unset, 1 with `node_gbps`, otherwise those of the reference system."""
    oversubscription: float = 1.0
    """By how much the rate between nodes falls when all of them send."""
    input_images_per_s: float = 0.0
    """Images that the input of one rank delivers in a second; 0: enough."""
    eval_s: float | None = None
    """Seconds of one evaluation on the cluster; unset, predicted from the forward pass."""
    startup_s: float | None = None
    """Seconds until the first step; unset, an estimate by the number of ranks."""
    price_per_gpu_hour: float = 0.0
    """Price of a GPU for an hour, in any currency; 0 leaves the cost out."""
    watts_per_gpu: float = 0.0
    """Power of a GPU with its share of the node, in watts; 0 takes the board's from the planner's
    catalog where `gpu` is given, and leaves the energy out otherwise."""

    def __post_init__(self) -> None:
        if self.nodes and not 1 <= self.nodes <= RANKS_LIMIT:
            raise ConfigError("rehearse.nodes", self.nodes, f"must be 0 to {RANKS_LIMIT:,}")
        check = SettingChecks("rehearse", self)
        for name in ("gpus_per_node", "links"):
            check.number(name, "at least 1")
        if self.ranks > MOST_RANKS:
            raise ConfigError(
                "rehearse.nodes", self.nodes, f"{self.ranks:,} ranks are more than {MOST_RANKS:,}",
                "rehearse a smaller cluster; paceline plan predicts the time of larger ones",
            )  # fmt: skip
        for name in ("node_gbps", "latency_us", "oversubscription"):
            check.number(name, "above 0")
        for name in (
            "input_images_per_s", "eval_s", "startup_s", "price_per_gpu_hour", "watts_per_gpu",
        ):  # fmt: skip
            check.number(name, "0 or more")
        check_input_rate(self.input_images_per_s, "rehearse.input_images_per_s")
        if not self.nodes:
            self._refuse_without_nodes()

    def _refuse_without_nodes(self) -> None:
        for name in ("gpu", "profile", "cluster"):
            if getattr(self, name):
                raise ConfigError(
                    f"rehearse.{name}", getattr(self, name), "has no meaning without rehearse.nodes",
                    "use paceline rehearse --nodes N",
                )  # fmt: skip

    @property
    def ranks(self) -> int:
        """Virtual ranks; 0 where nothing is rehearsed."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class ClusterClock:
    """Predicted seconds on the cluster. `uncertainty` is the relative standard error of a step."""

    ranks: int
    step_s: float
    eval_s: float
    startup_s: float
    uncertainty: float
    images_per_s: float
    efficiency: float
    price_per_gpu_hour: float = 0.0
    watts_per_gpu: float = 0.0
    # What the run does and the times have not.
    left_out: tuple[str, ...] = ()
    # Where the step comes from.
    source: str = ""
    # Links between nodes that nothing has set.
    assumed: tuple[str, ...] = ()

    def describe(self) -> str:
        without = f"; without {' and '.join(self.left_out)}" if self.left_out else ""
        return (
            f"a step {format_duration(self.step_s)} (± {self.uncertainty:.0%}), an evaluation "
            f"{format_duration(self.eval_s)}, the start {format_duration(self.startup_s)}; "
            f"{self.images_per_s:,.0f} images/s, efficiency {self.efficiency:.0%}{without}"
            f"{f'; from {self.source}' if self.source else ''}"
            f"{'; assumed: ' if self.assumed else ''}{', '.join(self.assumed)}"
        )

    def totals(self, predicted_s: float) -> dict[str, Any]:
        """What `predicted_s` on the cluster amount to, for the summary."""
        gpu_hours = self.ranks * predicted_s / 3600
        found: dict[str, Any] = {"predicted_s": predicted_s, "gpu_hours": gpu_hours}
        if self.price_per_gpu_hour:
            found["cost"] = gpu_hours * self.price_per_gpu_hour
        if self.watts_per_gpu:
            found["energy_kwh"] = gpu_hours * self.watts_per_gpu / 1000
        return found
