"""Options that several commands share, checks of their values, and where the ranks of a command run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.config import RunConfig
from paceline.core.errors import ConfigError, LaunchError
from paceline.core.topology import Topology
from paceline.core.units import parse_bytes
from paceline.plan.schedules import algorithm_names, check_name

if TYPE_CHECKING:
    import torch

AmpDtype = Annotated[str, typer.Option(help="fp16, bf16, fp32 or auto.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
Backend = Annotated[str, typer.Option(help="auto, gloo or nccl.")]
Classes = Annotated[int, typer.Option(help="Number of classes.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
GroupSize = Annotated[int, typer.Option(help="Ranks of a group; 0: those of a node.")]
Hosts = Annotated[
    int, typer.Option(help="Hosts of an emulated cluster (root on Linux; docs/cluster.md).")
]
ImageSize = Annotated[int, typer.Option(help="Edge of the images in pixels.")]
LinkMbit = Annotated[float, typer.Option(help="Rate of each host's link; 0: no limit.")]
MasterPort = Annotated[int, typer.Option(help="Port for the ranks to meet; 0 finds a free one.")]
Model = Annotated[str, typer.Option(help="Which model (docs/models.md).")]
_MOST_RANKS = 1024  # that one command starts on one host
NprocPerNode = Annotated[int, typer.Option(max=_MOST_RANKS, help="Ranks to start on this node.")]
Ranks = Annotated[
    int,
    typer.Option(
        "--nproc-per-node", "--ranks", max=_MOST_RANKS, help="Ranks to start on this host."
    ),
]
RanksPerHost = Annotated[int, typer.Option(max=_MOST_RANKS, help="Ranks on each of these hosts.")]
ShareGpus = Annotated[
    bool, typer.Option("--share-gpus", help="NCCL ranks may share a GPU, under MPS.")
]
SizeFactor = Annotated[float, typer.Option(help="From one size to the next.")]
Trust = Annotated[
    bool, typer.Option("--trust", help="Run code that a recipe, run or checkpoint names.")
]
Workers = Annotated[int | None, typer.Option(min=0, help="Threads. Default: a core each.")]

# Not passed on to ranks; --link-mbit is, to compute the share of the link.
_START_OPTIONS = ("--hosts", "--ranks-per-host", "--nproc-per-node", "--ranks")


@dataclass(frozen=True)
class Placement:
    """Where the ranks of a benchmark run. `hosts` > 0: on an emulated cluster (--hosts,
    --ranks-per-host, --link-mbit); `ranks` > 0: as processes of this host (--nproc-per-node); otherwise
    as started by a launcher."""

    hosts: int = 0
    ranks_per_host: int = 1
    link_mbit: float = 0.0
    ranks: int = 0

    def __post_init__(self) -> None:
        for flag, value in (("--hosts", self.hosts), ("--nproc-per-node", self.ranks)):
            if value < 0:
                raise ConfigError(flag, value, "must be at least 1")
        check_at_least(1, {"--ranks-per-host": self.ranks_per_host})
        if self.link_mbit < 0:
            raise ConfigError("--link-mbit", self.link_mbit, "must be above 0", "try 200")
        if self.hosts and self.ranks:
            raise ConfigError(
                "--nproc-per-node",
                self.ranks,
                "cannot be given with --hosts",
                "use --ranks-per-host",
            )
        if self.ranks_per_host > 1 and not self.hosts:
            raise ConfigError(
                "--ranks-per-host", self.ranks_per_host, "needs --hosts", "or use --nproc-per-node"
            )

    @property
    def rate(self) -> str | None:
        """Rate of the links of an emulated cluster; None: unlimited."""
        return f"{self.link_mbit:g}mbit" if self.link_mbit else None

    def is_launched(self) -> bool:
        """Whether this process is a rank. Raises ConfigError if it is and the flags ask to start
        ranks, or if it is not and they do not."""
        topology = Topology.from_env(os.environ)
        launched = topology.launcher != "single"
        flag = "--hosts" if self.hosts else "--nproc-per-node"
        if launched and (self.hosts or self.ranks):
            raise ConfigError(
                flag,
                self.hosts or self.ranks,
                f"this process is a rank of a launcher already ({topology.launcher})",
                "leave the flag out under torchrun, srun and mpirun",
            )
        if not launched and not self.hosts and not self.ranks:
            raise ConfigError(
                "--nproc-per-node",
                None,
                "no ranks to measure between",
                "give --nproc-per-node 8, or --hosts 4 --ranks-per-host 4, or start with torchrun",
            )
        return launched


def run_on_ranks(placement: Placement) -> int | None:
    """Runs this command line on the ranks of `placement` and returns the exit code; None in a process
    that is a rank itself, and continues."""
    if placement.is_launched():
        return None
    arguments = without_options(sys.argv[1:], _START_OPTIONS)
    if placement.ranks:
        from paceline.cli.launch import launch

        return launch(placement.ranks, arguments, port=0, max_restarts=0)
    from paceline.bench.cluster import EmulatedCluster, why_unavailable
    from paceline.bench.cluster.job import show

    problem = why_unavailable()
    if problem:
        raise LaunchError(
            f"no emulated cluster: {problem}", "use --nproc-per-node, or torchrun on real hosts"
        )
    with EmulatedCluster(placement.hosts, placement.rate) as cluster:
        return show(cluster.ranks(["-m", "paceline", *arguments], placement.ranks_per_host))


def without_options(arguments: Sequence[str], options: Collection[str]) -> list[str]:
    """The command line for a rank: without the options that start ranks, and their values."""
    kept, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument.partition("=")[0] in options:
            skip = "=" not in argument
        else:
            kept.append(argument)
    return kept


def check_settings(device: str, backend: str, group_size: int = 0) -> None:
    """Before any rank starts, so that an error is shown once."""
    RunConfig().with_values(
        {"run.device": device, "comm.backend": backend, "comm.group_size": group_size}
    )


def check_at_least(least: int, values: Mapping[str, float]) -> None:
    """`values` by option."""
    for option, value in values.items():
        if value < least:
            raise ConfigError(option, value, f"must be at least {least}")


def parse_size_range(min_bytes: str, max_bytes: str, factor: float) -> tuple[int, int]:
    """First and last size of a series that grows by `factor`."""
    if factor <= 1:
        raise ConfigError("--factor", factor, "must be above 1", "try 4")
    low, high = parse_bytes("--min-bytes", min_bytes), parse_bytes("--max-bytes", max_bytes)
    if low > high:
        raise ConfigError("--min-bytes", min_bytes, f"is more than --max-bytes {max_bytes}")
    return low, high


def parse_algorithms(text: str) -> tuple[str, ...]:
    if text == "all":
        return algorithm_names()
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    for name in names:
        check_name(name, "--algorithms")
    return names


def chosen_device(name: str) -> str:
    """`cpu` or `cuda`, for --device."""
    import torch

    from paceline.core.host import ask_for_connections

    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError("--device", name, "unknown", "use auto, cpu or cuda")
    ask_for_connections()
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device", name, "no CUDA device here", "use --device cpu")
    return name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def print_json(report: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(report, indent=1) + "\n")


def environment(device: torch.device | str) -> dict[str, Any]:
    import torch

    from paceline.train.machine import hardware, versions

    return {"versions": versions(), "hardware": hardware(torch.device(device))}
