"""Reads the catalog of accelerators, and builds clusters of accelerators.

The catalog is `accelerators.toml` in this folder and gives the source of each figure. Users can
describe further accelerators in files of the same format.
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
    """Constants of the step-time model, fitted to measured systems by `tools/fit_planner.py`.

    Attributes:
        matrix_share: The fraction of the peak FLOP/s that matrix products reach in a step.
        memory_share: The fraction of the peak memory bandwidth that a step reaches.
        layer_cycles: The latency of one forward pass of a layer, in clock cycles of the chip.
        power_exponent: The exponent x in the law that the clock rate is proportional to watts ** x.
        hidden_cost: The value for `Cluster.hidden_cost`.
        depth_cost: The value for `Cluster.depth_cost`.
        residual: The relative standard error of predicted step times after the fit.
        software: The factor by which matrix products are slower with older libraries, by chip and
            round of MLPerf Training.
    """

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
    """Reads the fitted constants from `step_constants.toml`."""
    text = files("paceline.planner").joinpath("step_constants.toml").read_text(encoding="utf-8")
    return StepConstants(**tomllib.loads(text))


@dataclass(frozen=True)
class Measured:
    """A measured training of ResNet-50 on `ranks` accelerators: `images_per_s` and `batch` of each."""

    images_per_s: float
    batch: int
    ranks: int = 1
    source: str = "as given"


@dataclass(frozen=True)
class NodeNetwork:
    """The network links of a node: their number, and their total bandwidth `gbps` in Gb/s.

    `system` is the name of the reference system that has these links.
    """

    gbps: float = 100.0
    links: int = 1
    system: str = ""

    def describe(self, *, with_links: bool = True) -> str:
        """Describes the links of a node.

        >>> NodeNetwork(3200, 8, "DGX H100").describe(), NodeNetwork().describe(with_links=False)
        ('8 × 400 Gb/s a node as in DGX H100', '100 Gb/s a node')
        """
        rate = f"{self.links:,} × {self.gbps / self.links:g}" if with_links else f"{self.gbps:g}"
        return f"{rate} Gb/s a node" + (f" as in {one_line(self.system)}" if self.system else "")


# Triton does not support earlier chips.
TRITON_CAPABILITY = 7.0


@dataclass(frozen=True)
class Specification:
    """The description of an accelerator in a TOML file; `accelerators.toml` explains the keys."""

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
    """An accelerator, with default values for keys that its description omits.

    `is_own` is True if a user's file describes it. The fitted `StepConstants` were not tested with
    such accelerators.
    """

    name: str
    reference_watts: float
    is_own: bool = False

    @classmethod
    def of(cls, name: str, table: Specification, *, is_own: bool = False) -> Accelerator:
        defaults = {
            "reference_watts": table.reference_watts or table.watts,
            "family": table.family or name,
        }
        return cls(name=name, is_own=is_own, **{**vars(table), **defaults})

    @property
    def memory_bytes_per_s(self) -> float:
        return self.memory_gb_per_s * 1e9

    @property
    def memory_bytes(self) -> float:
        return self.memory_gb * 1e9

    @property
    def is_gpu(self) -> bool:
        return self.compute_capability > 0

    @property
    def in_half(self) -> bool:
        """True if `precision.amp_dtype = "auto"` chooses half precision."""
        return self.is_gpu


@cache
def catalogue() -> dict[str, Accelerator]:
    """Reads the catalog and returns its accelerators by name."""
    text = files("paceline.planner").joinpath("accelerators.toml").read_text(encoding="utf-8")
    return {
        name: Accelerator.of(name, from_table(Specification, name, table))
        for name, table in tomllib.loads(text).items()
    }


def accelerator(name: str) -> Accelerator:
    """Returns the accelerator `name` of the catalog, or of the user's file `name` if it ends in `.toml`.

    Raises:
        ConfigError: If the name is unknown, or the file is invalid.
    """
    if name.lower().endswith(".toml"):
        return own_accelerator(Path(name))
    catalog = catalogue()
    for key, entry in catalog.items():
        if key.lower() == name.lower():
            return entry
    raise ConfigError(
        "--gpu", name, "unknown accelerator",
        f"{nearest(name.upper(), tuple(catalog))} (or describe it in a TOML file, "
        "docs/planner.md#own-accelerators, or give --profile)",
    )  # fmt: skip


# These ranges are wider than the range of real chips. Within them, no time of a step overflows.
_RANGES = {
    "tflops": (1e-3, 1e6), "memory_gb_per_s": (0.1, 1e7), "memory_gb": (0.1, 1e6),
    "node_gb_per_s": (1e-3, 1e6), "processors": (1, 1e6), "clock_ghz": (0.01, 100), "watts": (1, 1e6),
    "compute_capability": (0, 100),
}  # fmt: skip
_MEASURED_RANGES = {"images_per_s": (1e-3, 1e9), "batch": (1, 1 << 20), "ranks": (1, RANKS_LIMIT)}
_NODE_GBPS_RANGE = (1e-6, 1e9)
_LATENCY_US_RANGE = (1e-6, 1e9)
_NETWORK_RANGES = {"gbps": _NODE_GBPS_RANGE, "links": (1, RANKS_LIMIT)}
_LONGEST_NAME = 60


def own_accelerator(path: Path) -> Accelerator:
    """Reads the accelerator of a user's file.

    Raises:
        ConfigError: If the file cannot be read, or a figure is missing or out of range.
    """
    with errors_of_file("--gpu", path, "fix it", "docs/planner.md#own-accelerators has an example"):
        tables = parse_toml(read_regular(path))
        if len(tables) != 1 or not next(iter(tables)).strip():
            raise ConfigError(
                "tables", ", ".join(tables), "the file must have one table, named after the accelerator",
                'write it as ["My GPU"]',
            )  # fmt: skip
        ((key, table),) = tables.items()
        name = one_line(key)[:_LONGEST_NAME]
        chip = from_table(Specification, name, table)
        # Outside of this range, the law that relates clock and watts was not tested.
        watts = {"reference_watts": (0.5 * chip.watts, 2 * chip.watts)}
        _check_ranges(name, chip, _RANGES | watts)
        _check_ranges(f"{name}.network", chip.network, _NETWORK_RANGES)
        if chip.measured is not None:
            _check_ranges(f"{name}.measured", chip.measured, _MEASURED_RANGES)
        known = catalogue()
        measured = [other for other, entry in known.items() if entry.measured is not None]
        for field_name, value, names in (
            ("like", chip.like, measured), ("family", chip.family, list(known)),
        ):  # fmt: skip
            if value and value not in names:
                raise ConfigError(
                    f"{name}.{field_name}", value, "is not in the catalog",
                    f"use one of {', '.join(names)}",
                )  # fmt: skip
        return Accelerator.of(name, chip, is_own=True)


def _check_ranges(
    section: str, settings: object, ranges: Mapping[str, tuple[float, float]]
) -> None:
    for key, (least, most) in ranges.items():
        value = getattr(settings, key)
        if value is not None and not least <= value <= most:
            raise ConfigError(f"{section}.{key}", value, f"must be from {least:g} to {most:g}")


# The share of a link's signalling rate that the payload of an all-reduce reaches.
PAYLOAD_SHARE = 0.8
INTRA_LATENCY_US = 3.0
INTER_LATENCY_US = 10.0
GPUS_PER_NODE = 8
# The start-up time of a collective: the kernel launch and the handshake of the ranks.
LAUNCH_US = 20.0
# A cast reads one format and writes the other, twice: 2 · (4 + 2) bytes an element.
CAST_BYTES = 12


def gpu_cluster(
    gpu: Accelerator, nodes: int, gpus_per_node: int = GPUS_PER_NODE, node_gbps: float | None = None,
    latency_us: float = INTER_LATENCY_US, links: int | None = None, oversubscription: float = 1.0,
    constants: StepConstants | None = None,
) -> Cluster:  # fmt: skip
    """Builds a cluster of accelerators.

    Args:
        gpu: The accelerator.
        nodes: The number of nodes.
        gpus_per_node: The number of accelerators in a node.
        node_gbps: The bandwidth of all links of a node together in Gb/s. The default is that of the
            accelerator's reference system.
        latency_us: The start-up time of a message between nodes in microseconds.
        links: The number of links of a node. The default is 1 if `node_gbps` is given, otherwise the
            number in the reference system.
        oversubscription: The factor by which the network between nodes is oversubscribed.
        constants: The fitted constants; `step_constants()` by default.

    Raises:
        ConfigError: If a figure is out of range.
    """
    constants = constants or step_constants()
    if links is None:
        links = gpu.network.links if node_gbps is None else 1
    if node_gbps is None:
        node_gbps = gpu.network.gbps
    for flag, value, least, most, hint in (
        ("--node-gbps", node_gbps, *_NODE_GBPS_RANGE, "100 Gb/s is usual for one link"),
        ("--latency-us", latency_us, *_LATENCY_US_RANGE, "10 us is usual between nodes"),
    ):
        if not least <= value <= most:
            raise ConfigError(flag, value, f"must be from {least:g} to {most:g}", hint)
    if not 1 <= links <= RANKS_LIMIT:
        raise ConfigError("--links", links, f"must be from 1 to {RANKS_LIMIT:,}")
    return Cluster(
        nodes=nodes,
        ranks_per_node=gpus_per_node,
        intra=Link.of(INTRA_LATENCY_US, PAYLOAD_SHARE * gpu.node_gb_per_s),
        inter=Link.of(latency_us, PAYLOAD_SHARE * node_gbps / links / 8),
        links=links,
        oversubscription=oversubscription,
        launch_s=LAUNCH_US * 1e-6,
        cast_s=CAST_BYTES / gpu.memory_bytes_per_s,
        # Fitted to GPUs; on CPUs, `paceline tune` measures the cost of hidden exchanges.
        hidden_cost=constants.hidden_cost if gpu.is_gpu else 0.0,
        depth_cost=constants.depth_cost,
    )


def assumed(gpu: Accelerator, given: Collection[str]) -> dict[str, str]:
    """Describes the defaults that `gpu_cluster` uses for arguments not in `given`, by argument."""
    network = gpu.network
    words = {
        "gpus_per_node": f"{GPUS_PER_NODE} GPUs a node",
        "node_gbps": network.describe(with_links="links" not in given),
        "latency_us": f"{INTER_LATENCY_US:g} µs a message between nodes",
        "links": "one link a node" if "node_gbps" in given else "",
        "oversubscription": "no oversubscription",
    }
    return {name: text for name, text in words.items() if text and name not in given}
