"""`paceline rehearse`: trains on what is at hand as a cluster would, with a clock of predicted times."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import typer

from paceline.cli.train import FLAGS, parse_flags, resolve_trusted, train, train_here
from paceline.core.errors import ConfigError
from paceline.train.stop_signals import interrupted_at_once, without_save_requests

# The settings of the flags that describe the cluster, by the names of their parameters.
_CLUSTER = {
    name: f"rehearse.{name}"
    for name in (
        "nodes", "gpus_per_node", "gpu", "profile", "cluster", "node_gbps", "latency_us", "links",
        "oversubscription", "input_images_per_s", "eval_s", "startup_s", "price_per_gpu_hour",
        "watts_per_gpu",
    )
}  # fmt: skip
# Flags of `train` that a rehearsal has too.
_SHARED = ("recipe", *FLAGS, "trust", "settings")


def _cluster_flags(
    nodes: str | None = typer.Option(None, help="Nodes of the cluster to rehearse.", metavar="N"),
    gpus_per_node: str | None = typer.Option(None, help="Ranks of a node; 8.", metavar="N"),
    gpu: str | None = typer.Option(None, help="Its accelerator, such as H100, for the clock."),
    profile: str | None = typer.Option(
        None, help="What paceline profile or tune wrote: the step of this model, for the clock."),
    cluster: str | None = typer.Option(
        None, help="What paceline tune wrote there: measured links, for the clock."),
    node_gbps: str | None = typer.Option(None, help="All links of a node, Gb/s; 100.", metavar="X"),
    latency_us: str | None = typer.Option(
        None, help="Start of a message between nodes; 10.", metavar="X"),
    links: str | None = typer.Option(None, help="Links of a node; 1.", metavar="N"),
    oversubscription: str | None = typer.Option(None, help="Between nodes; 1.", metavar="X"),
    input_images_per_s: str | None = typer.Option(
        None, help="What a rank's input delivers; enough.", metavar="X"),
    eval_s: str | None = typer.Option(None, help="Seconds of an evaluation there.", metavar="X"),
    startup_s: str | None = typer.Option(None, help="Seconds until its first step.", metavar="X"),
    price_per_gpu_hour: str | None = typer.Option(None, help="In any currency.", metavar="X"),
    watts_per_gpu: str | None = typer.Option(None, help="With its share of the node.", metavar="X"),
) -> None:  # fmt: skip
    """The flags that `rehearse` has beside those of `train`."""


def rehearse(**given: Any) -> int:
    """Train here as a cluster would: same sums, same batch norm, predicted time."""
    flags = parse_flags(given) | parse_flags(given, _CLUSTER)
    config = resolve_trusted(given["recipe"], flags, given["settings"], given["trust"])
    if not config.rehearse.ranks:
        raise ConfigError("--nodes", None, "says which cluster to rehearse", "try --nodes 64")
    with without_save_requests(config.checkpoint), interrupted_at_once():
        return train_here(config)


def _take_signature(command: Callable[..., int], *functions: Callable[..., Any]) -> None:
    """Gives `command` the parameters of `functions`, from which Typer makes its flags."""
    parameters: list[inspect.Parameter] = []
    hints: dict[str, Any] = {"return": int}
    for function in functions:
        known = get_type_hints(function)
        for name, parameter in inspect.signature(function).parameters.items():
            if name in _SHARED or name in _CLUSTER:
                hints[name] = known[name]
                parameters.append(parameter.replace(annotation=known[name]))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = hints


_take_signature(rehearse, train, _cluster_flags)
