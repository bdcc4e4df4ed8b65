"""Accelerators and the clusters they form: the catalog, and `gpu_cluster`.

In: flags and a GPU of the catalog. Out: a `Cluster` (`paceline.plan.cluster`). The catalog is
`accelerators.toml` in this folder, with a source for each figure; a user's file has the same form.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path

from paceline.core.errors import ConfigError, nearest
from paceline.core.files import read_regular
from paceline.core.settings import errors_of_file, from_table
from paceline.core.topology import RANKS_LIMIT
from paceline.core.untrusted import one_line, parse_toml
from paceline.plan.cluster import Cluster, Link


@dataclass(frozen=True)
class StepConstants:
    """What a step takes beside the peaks of the chip and of the links: the constants that
    `tools/fit_planner.py` fits to measured systems. `matrix_share` and `memory_share` are of the peaks;
    `layer_cycles` is the latency of one layer's pass in cycles of the chip; clocks go with the
    `power_exponent`-th power of the board's watts; `hidden_cost` and `depth_cost` are those of `Cluster`.
    `residual` is the relative standard error that is left. `software` has, for a chip and a round of
    MLPerf Training, how many times as long a product took with the libraries of that round."""

    matrix_share: float
    memory_share: float
    layer_cycles: float
    power_exponent: float
    hidden_cost: float
    depth_cost: float
    residual: float
    software: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@cache
def step_constants() -> StepConstants:
    text = files("paceline.planner").joinpath("step_constants.toml").read_text(encoding="utf-8")
    return StepConstants(**tomllib.loads(text))


@dataclass(frozen=True)
class Measured:
    """One whole training: images/s of one accelerator at `batch`, among `ranks` of one node."""

    images_per_s: float
    batch: int
    ranks: int = 1
    source: str = "as given"


@dataclass(frozen=True)
class NodeNetwork:
    """The links that connect a node to others: `gbps` of all `links` together. `system` is the reference
    system that has them."""

    gbps: float = 100.0
    links: int = 1
    system: str = ""

    def describe(self, *, with_links: bool = True) -> str:
        """
        >>> NodeNetwork(3200, 8, "DGX H100").describe(), NodeNetwork().describe(with_links=False)
        ('8 × 400 Gb/s a node as in DGX H100', '100 Gb/s a node')
        """
        rate = f"{self.links:,} × {self.gbps / self.links:g}" if with_links else f"{self.gbps:g}"
        return f"{rate} Gb/s a node" + (f" as in {one_line(self.system)}" if self.system else "")


# Triton has no back end for earlier chips.
TRITON_CAPABILITY = 7.0


@dataclass(frozen=True)
class Specification:
    """An accelerator as it is written in TOML; `accelerators.toml` explains the keys."""

    tflops: float
    memory_gb_per_s: float
    memory_gb: float
    node_gb_per_s: float
    processors: int
    clock_ghz: float
    watts: float
    compute_capability: float
    network: NodeNetwork = NodeNetwork()
    source: str = ""
    reference_watts: float | None = None
    family: str = ""
    like: str = ""
    measured: Measured | None = None


@dataclass(frozen=True, kw_only=True)
class Accelerator(Specification):
    """A specification and its name. Peaks hold at `reference_watts` of the board. `measured` corrects the
    law of the step; `like` names a sister chip whose measurement counts. `family` is the chip whose
    software it shares. `compute_capability` is CUDA's, 0 for a CPU. `network` is that of its
    reference system. `is_own`: from a user's file, so that the law of the step was not fitted to it."""

    name: str
    reference_watts: float
    is_own: bool = False

    @classmethod
    def of(cls, name: str, table: Specification, *, is_own: bool = False) -> Accelerator:
        usual = {
            "reference_watts": table.reference_watts or table.watts,
            "family": table.family or name,
        }
        return cls(name=name, is_own=is_own, **{**vars(table), **usual})

    @property
    def flops_per_s(self) -> float:
        return self.tflops * 1e12

    @property
    def memory_bytes_per_s(self) -> float:
        return self.memory_gb_per_s * 1e9

    @property
    def node_bytes_per_s(self) -> float:
        return self.node_gb_per_s * 1e9

    @property
    def clock_hz(self) -> float:
        return self.clock_ghz * 1e9

    @property
    def memory_bytes(self) -> float:
        return self.memory_gb * 1e9

    @property
    def is_gpu(self) -> bool:
        return self.compute_capability > 0

    @property
    def in_half(self) -> bool:
        """Whether its steps are in half precision, as `precision.amp_dtype = "auto"` chooses."""
        return self.is_gpu

    @property
    def runs_triton(self) -> bool:
        """Whether our fused kernels can be built for it."""
        return self.compute_capability >= TRITON_CAPABILITY


@cache
def catalogue() -> dict[str, Accelerator]:
    text = files("paceline.planner").joinpath("accelerators.toml").read_text(encoding="utf-8")
    return {
        name: Accelerator.of(name, from_table(Specification, name, table))
        for name, table in tomllib.loads(text).items()
    }


def accelerator(name: str) -> Accelerator:
    """Of the catalogue, or of a file in its form where `name` ends in `.toml`. ConfigError, with the
    nearest name, for one that is unknown."""
    if name.lower().endswith(".toml"):
        return own_accelerator(Path(name))
    known = catalogue()
    for key, found in known.items():
        if key.lower() == name.lower():
            return found
    raise ConfigError(
        "--gpu", name, "unknown accelerator",
        f"{nearest(name.upper(), tuple(known))} (or describe it in a TOML file, "
        "docs/planner.md#own-accelerators, or give --profile)",
    )  # fmt: skip


# Far outside of what chips have; within them no time of a step overflows.
_RANGES = {
    "tflops": (1e-3, 1e6), "memory_gb_per_s": (0.1, 1e7), "memory_gb": (0.1, 1e6),
    "node_gb_per_s": (1e-3, 1e6), "processors": (1, 1e6), "clock_ghz": (0.01, 100), "watts": (1, 1e6),
    "reference_watts": (1, 1e6), "compute_capability": (0, 100),
}  # fmt: skip
_MEASURED_RANGES = {"images_per_s": (1e-3, 1e9), "batch": (1, 1 << 20), "ranks": (1, RANKS_LIMIT)}
# Slower and faster links than there are; within them no time of a step overflows.
_NODE_GBPS_RANGE = (1e-6, 1e9)
_LATENCY_US_RANGE = (1e-6, 1e9)
_NETWORK_RANGES = {"gbps": _NODE_GBPS_RANGE, "links": (1, RANKS_LIMIT)}
_LONGEST_NAME = 60
# Boards of one chip; the law of clocks by watts is not known to hold further out.
_WATTS_RATIOS = (0.5, 2.0)


def own_accelerator(path: Path) -> Accelerator:
    """The one accelerator of a user's file. ConfigError for a file that cannot be read, or that has
    figures which no chip has."""
    remedy = "docs/planner.md#own-accelerators has an example"
    with errors_of_file("--gpu", path, "fix it", remedy):
        tables = parse_toml(read_regular(path))
        if len(tables) != 1:
            raise ConfigError(
                "tables", len(tables), "there must be one, named after the accelerator",
                'write it as ["My GPU"]',
            )  # fmt: skip
        ((key, table),) = tables.items()
        name = one_line(key)[:_LONGEST_NAME]
        if not name.strip():
            raise ConfigError(
                "tables", key, "the table has no name; it is the accelerator's",
                'write it as ["My GPU"]',
            )  # fmt: skip
        found = from_table(Specification, name, table)
        _check_ranges(name, found, _RANGES)
        _check_watts(name, found)
        if found.measured is not None:
            _check_ranges(f"{name}.measured", found.measured, _MEASURED_RANGES)
        _check_ranges(f"{name}.network", found.network, _NETWORK_RANGES)
        _check_sisters(name, found)
        return Accelerator.of(name, found, is_own=True)


def _check_ranges(
    section: str, settings: object, ranges: Mapping[str, tuple[float, float]]
) -> None:
    for key, (least, most) in ranges.items():
        value = getattr(settings, key)
        if value is not None and not least <= value <= most:
            raise ConfigError(f"{section}.{key}", value, f"must be from {least:g} to {most:g}")


def _check_watts(name: str, table: Specification) -> None:
    least, most = (ratio * table.watts for ratio in _WATTS_RATIOS)
    if table.reference_watts is not None and not least <= table.reference_watts <= most:
        raise ConfigError(
            f"{name}.reference_watts", table.reference_watts,
            f"must be from {least:g} to {most:g}, half to twice the watts of the board",
            "give tflops as they are at a power in that range, or leave it out",
        )  # fmt: skip


def _check_sisters(name: str, table: Specification) -> None:
    """`like` and `family` are of the catalogue."""
    known = catalogue()
    measured = [key for key, chip in known.items() if chip.measured is not None]
    for key, value, names in (
        ("like", table.like, measured),
        ("family", table.family, list(known)),
    ):
        if value and value not in names:
            raise ConfigError(
                f"{name}.{key}", value, "is none of the catalog", f"use one of {', '.join(names)}"
            )


# Of a link's signalling rate, what an all-reduce's payload gets.
PAYLOAD_SHARE = 0.8
INTRA_LATENCY_US = 3.0
INTER_LATENCY_US = 10.0
# Of a cluster of which nothing else is said.
GPUS_PER_NODE = 8
# Start of a collective: kernel launch and the ranks' handshake.
LAUNCH_US = 20.0
# A cast reads one format and writes the other, there and back: 2 · (4 + 2) bytes an element.
CAST_BYTES = 12


def gpu_cluster(
    gpu: Accelerator, nodes: int, gpus_per_node: int = GPUS_PER_NODE, node_gbps: float | None = None,
    latency_us: float = INTER_LATENCY_US, links: int | None = None, oversubscription: float = 1.0,
    constants: StepConstants | None = None,
) -> Cluster:  # fmt: skip
    """`node_gbps` is the sum over a node's links; without it, that of the GPU's reference system. `links`
    of a given `node_gbps` is 1 by default."""
    constants = constants or step_constants()
    if links is None:
        links = gpu.network.links if node_gbps is None else 1
    if node_gbps is None:
        node_gbps = gpu.network.gbps
    for flag, value, least, most, usual in (
        ("--node-gbps", node_gbps, *_NODE_GBPS_RANGE, "100 Gb/s is usual for one link"),
        ("--latency-us", latency_us, *_LATENCY_US_RANGE, "10 us is usual between nodes"),
    ):
        if not least <= value <= most:
            raise ConfigError(flag, value, f"must be from {least:g} to {most:g}", usual)
    if not 1 <= links <= RANKS_LIMIT:
        raise ConfigError("--links", links, f"must be from 1 to {RANKS_LIMIT:,}")
    return Cluster(
        nodes=nodes,
        ranks_per_node=gpus_per_node,
        intra=Link.of(INTRA_LATENCY_US, PAYLOAD_SHARE * gpu.node_bytes_per_s / 1e9),
        inter=Link.of(latency_us, PAYLOAD_SHARE * node_gbps / links / 8),
        links=links,
        oversubscription=oversubscription,
        launch_s=LAUNCH_US * 1e-6,
        cast_s=CAST_BYTES / gpu.memory_bytes_per_s,
        # Fitted to GPUs; on CPU ranks `paceline tune` measures what hidden exchanges cost.
        hidden_cost=constants.hidden_cost if gpu.is_gpu else 0.0,
        depth_cost=constants.depth_cost,
    )


def assumed(gpu: Accelerator, given: Collection[str]) -> dict[str, str]:
    """Returns what `gpu_cluster` assumes for the arguments that are not `given`, by argument."""
    network = gpu.network
    words = {
        "gpus_per_node": f"{GPUS_PER_NODE} GPUs a node",
        "node_gbps": network.describe(with_links="links" not in given),
        "latency_us": f"{INTER_LATENCY_US:g} µs a message between nodes",
        "links": "one link a node" if "node_gbps" in given else "",
        "oversubscription": "no oversubscription",
    }
    return {name: text for name, text in words.items() if text and name not in given}
