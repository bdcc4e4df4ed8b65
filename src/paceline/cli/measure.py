"""Functions for commands that measure: checks of values, starting ranks, and JSON output."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.cli.options import without_options
from paceline.config import RunConfig
from paceline.core.errors import ConfigError
from paceline.core.topology import Topology
from paceline.core.units import parse_bytes
from paceline.plan.schedules import algorithm_names, check_name

if TYPE_CHECKING:
    import torch

_START_OPTIONS = ("--nproc-per-node", "--ranks")  # not passed on to ranks


def is_rank(ranks: int) -> bool:
    """Returns True if this process is a rank, False if it must start `ranks` ranks itself.

    Raises:
        ConfigError: If a launcher has started this process and `ranks` is given, or neither is the case.
    """
    topology = Topology.from_env(os.environ)
    launched = topology.launcher != "single"
    if ranks < 0:
        raise ConfigError("--nproc-per-node", ranks, "must be at least 1")
    if launched and ranks:
        raise ConfigError(
            "--nproc-per-node",
            ranks,
            f"this process is already a rank of a launcher ({topology.launcher})",
            "leave the flag out under torchrun, srun and mpirun",
        )
    if not launched and not ranks:
        raise ConfigError(
            "--nproc-per-node",
            None,
            "the measurement needs several ranks",
            "give --nproc-per-node 8, or start with torchrun",
        )
    return launched


def run_on_ranks(ranks: int) -> int | None:
    """Runs this command line on `ranks` ranks of this host.

    Returns:
        The exit code, or None if this process is a rank itself and continues.
    """
    if is_rank(ranks):
        return None
    from paceline.cli.launch import launch
    from paceline.cli.nodes import Node

    return launch(Node(ranks), without_options(sys.argv[1:], _START_OPTIONS))


def check_settings(device: str, backend: str, group_size: int = 0) -> None:
    """Checks settings before ranks start, so that an error is shown only once."""
    RunConfig().with_values(
        {"run.device": device, "comm.backend": backend, "comm.group_size": group_size}
    )


def parse_size_range(min_bytes: str, max_bytes: str, factor: float) -> tuple[int, int]:
    """Parses and checks the first and last size, in bytes, of a series that grows by `factor`."""
    if factor <= 1:
        raise ConfigError("--factor", factor, "must be above 1", "try 4")
    low, high = parse_bytes("--min-bytes", min_bytes), parse_bytes("--max-bytes", max_bytes)
    if low > high:
        raise ConfigError("--min-bytes", min_bytes, f"is more than --max-bytes {max_bytes}")
    return low, high


def parse_algorithms(text: str) -> tuple[str, ...]:
    """Parses the names of all-reduce algorithms, separated by commas, or `all`."""
    if text == "all":
        return algorithm_names()
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    for name in names:
        check_name(name, "--algorithms")
    return names


def chosen_device(name: str) -> str:
    """Returns `cpu` or `cuda` for the value of `--device`, which can be `auto`."""
    import torch

    from paceline.core.host import ask_for_connections

    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError("--device", name, "unknown", "use auto, cpu or cuda")
    ask_for_connections()
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device", name, "no CUDA device is available", "use --device cpu")
    return name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def print_json(report: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(report, indent=1) + "\n")


def environment(device: torch.device | str) -> dict[str, Any]:
    """Returns versions and hardware for the JSON output of a measurement."""
    import torch

    from paceline.train.machine import hardware, versions

    return {"versions": versions(), "hardware": hardware(torch.device(device))}
