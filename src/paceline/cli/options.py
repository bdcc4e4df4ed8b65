"""Options that several commands share, and helpers for command lines."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from paceline.config import RunConfig

AmpDtype = Annotated[str, typer.Option(help="fp16, bf16, fp32 or auto.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
Backend = Annotated[str, typer.Option(help="auto, gloo or nccl.")]
Classes = Annotated[int, typer.Option(help="Number of classes.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
GroupSize = Annotated[int, typer.Option(help="Ranks of a group; 0: all of a node.")]
ImageSize = Annotated[int, typer.Option(help="Edge of the images in pixels.")]
MasterPort = Annotated[int, typer.Option(help="Port of the rendezvous; 0 finds a free one.")]
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


def without_options(arguments: Sequence[str], options: Collection[str]) -> list[str]:
    """Returns the command-line arguments without the given options and their values."""
    kept, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument.partition("=")[0] in options:
            skip = "=" not in argument
        else:
            kept.append(argument)
    return kept


def check_at_least(least: int, values: Mapping[str, float]) -> None:
    """Checks option values, by option name; raises ConfigError for a value below `least`."""
    for option, value in values.items():
        if value < least:
            raise ConfigError(option, value, f"must be at least {least}")


def settled(config: RunConfig) -> RunConfig:
    """Returns `config`; raises ConfigError if its recipe chooses settings only when a run starts."""
    if config.run.pending is None:
        return config
    raise ConfigError(
        "recipe", config.run.pending.recipe, "chooses settings only in paceline train",
        "give the config.toml of a run, or another recipe",
    )  # fmt: skip
