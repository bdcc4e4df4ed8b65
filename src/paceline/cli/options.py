"""Options that several commands share, checks of their values, and the start of their ranks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.config import RunConfig
from paceline.core.errors import ConfigError
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
ImageSize = Annotated[int, typer.Option(help="Edge of the images in pixels.")]
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
ShareGpus = Annotated[
    bool, typer.Option("--share-gpus", help="NCCL ranks may share a GPU, under MPS.")
]
SizeFactor = Annotated[float, typer.Option(help="From one size to the next.")]
Trust = Annotated[
    bool, typer.Option("--trust", help="Run code that a recipe, run or checkpoint names.")
]
Workers = Annotated[int | None, typer.Option(min=0, help="Threads. Default: a core each.")]

_START_OPTIONS = ("--nproc-per-node", "--ranks")  # not passed on to ranks


def is_rank(ranks: int) -> bool:
    """Returns True if a launcher has started this process as a rank; `ranks` is --nproc-per-node.

    Raises:
        ConfigError: If both a launcher and `ranks` start ranks, or neither does.
    """
    topology = Topology.from_env(os.environ)
    launched = topology.launcher != "single"
    if ranks < 0:
        raise ConfigError("--nproc-per-node", ranks, "must be at least 1")
    if launched and ranks:
        raise ConfigError(
            "--nproc-per-node",
            ranks,
            f"this process is a rank of a launcher already ({topology.launcher})",
            "leave the flag out under torchrun, srun and mpirun",
        )
    if not launched and not ranks:
        raise ConfigError(
            "--nproc-per-node",
            None,
            "no ranks to measure between",
            "give --nproc-per-node 8, or start with torchrun",
        )
    return launched


def run_on_ranks(ranks: int) -> int | None:
    """Runs this command line on `ranks` ranks of this host and returns the exit code; None in a
    process that is a rank itself, and continues."""
    if is_rank(ranks):
        return None
    from paceline.cli.launch import launch

    arguments = without_options(sys.argv[1:], _START_OPTIONS)
    return launch(ranks, arguments, port=0, max_restarts=0)


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
