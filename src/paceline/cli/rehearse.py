"""`paceline rehearse`: trains on this machine as a cluster would, and predicts the cluster's times."""

from __future__ import annotations

from typing import Any

import typer

from paceline.cli.signature import take_signature
from paceline.cli.train import FLAGS, parse_flags, resolve, train, train_here
from paceline.train.stop_signals import interrupted_at_once, without_save_requests

# The flags that describe the cluster: the setting of each flag, by the flag's parameter name.
_CLUSTER = {
    name: f"run.rehearsal.{name}"
    for name in (
        "nodes", "gpus_per_node", "gpu", "profile", "cluster", "node_gbps", "input_images_per_s",
        "eval_s", "startup_s", "price_per_gpu_hour",
    )
}  # fmt: skip
# Parameters that `rehearse` has in common with `train`.
_SHARED = ("recipe", *FLAGS, "trust", "settings")


def _cluster_flags(
    nodes: str | None = typer.Option(None, help="Nodes of the cluster to rehearse.", metavar="N"),
    gpus_per_node: str | None = typer.Option(None, help="Ranks of a node; 8.", metavar="N"),
    gpu: str | None = typer.Option(
        None, help="Its accelerator, such as H100, or a TOML file of one, for the clock."),
    profile: str | None = typer.Option(
        None, help="What paceline profile or tune wrote: the step of this model, for the clock."),
    cluster: str | None = typer.Option(
        None, help="What paceline tune wrote there: measured links, for the clock."),
    node_gbps: str | None = typer.Option(
        None, help="All links of a node, Gb/s; those of the GPU's reference system.", metavar="X"),
    input_images_per_s: str | None = typer.Option(
        None, help="What a rank's input delivers; enough.", metavar="X"),
    eval_s: str | None = typer.Option(None, help="Seconds of an evaluation there.", metavar="X"),
    startup_s: str | None = typer.Option(None, help="Seconds until its first step.", metavar="X"),
    price_per_gpu_hour: str | None = typer.Option(None, help="In any currency.", metavar="X"),
) -> None:  # fmt: skip
    """Declares the flags of `rehearse` that `train` does not have."""


def rehearse(**given: Any) -> int:
    """Train on this machine as a cluster would, with the same results, and predict its times."""
    flags = parse_flags(given) | {"run.strategy": "rehearsal"} | parse_flags(given, _CLUSTER)
    config = resolve(given["recipe"], flags, given["settings"], given["trust"])
    with without_save_requests(config.checkpoint), interrupted_at_once():
        return train_here(config)


take_signature(rehearse, {*_SHARED, *_CLUSTER}, train, _cluster_flags)
