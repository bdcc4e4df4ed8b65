"""`paceline train`: trains a model from a recipe and flags, with the flag names of timm."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import typer
from rich.console import Console

from paceline.cli.failure import report_error
from paceline.cli.options import MasterPort, NprocPerNode, Trust, check_at_least, settled
from paceline.config import RunConfig, default_recipe, load_config, parse_assignment, parse_value
from paceline.core.host import StartUp, process_age_s
from paceline.train.display import create_display, print_line
from paceline.train.stop_signals import (
    interrupted_at_once,
    without_save_requests,
)


def train(
    recipe: str | None = typer.Argument(
        None, help="A shipped recipe's name or a TOML file. Default: quickstart, or auto "
        "with --data-dir.",
    ),
    data_dir: str | None = typer.Option(None, help="Tar shards or class folders, train and val."),
    val_split: str | None = typer.Option(
        None, help="Share of the training images for validation, if there is no val.", metavar="X"),
    image_size: str | None = typer.Option(None, help="Edge of the model's images.", metavar="PIXELS"),
    model: str | None = typer.Option(
        None, help="resnet50 …, timm:NAME, torchvision:NAME, module:factory (see paceline models)."),
    batch_size: str | None = typer.Option(
        None, "--batch-size", "-b", help="Of one process.", metavar="N"),
    global_batch_size: str | None = typer.Option(None, help="Of all processes together.", metavar="N"),
    epochs: str | None = typer.Option(None, help="Epochs to train.", metavar="N"),
    minutes: str | None = typer.Option(
        None, help="Time for the whole run, with the recipe auto.", metavar="X"),
    opt: str | None = typer.Option(None, help="sgd, lars, muon, adamw, lamb …, or torch.optim:CLASS."),
    lr: str | None = typer.Option(None, help="Peak learning rate. Default: the rule's.", metavar="X"),
    warmup_epochs: str | None = typer.Option(None, help="Epochs of linear warm-up.", metavar="X"),
    momentum: str | None = typer.Option(None, metavar="X"),
    weight_decay: str | None = typer.Option(None, help="Not on biases and batch norm.", metavar="X"),
    clip_grad: str | None = typer.Option(
        None, help="Largest norm of all gradients together.", metavar="X"),
    layer_decay: str | None = typer.Option(
        None, help="Factor of the rate from each layer to the one before it.", metavar="X"),
    loss: str | None = typer.Option(None, help="cross_entropy, bce, or MODULE:FUNCTION."),
    smoothing: str | None = typer.Option(None, help="Label smoothing.", metavar="X"),
    seed: str | None = typer.Option(None, metavar="N"),
    workers: str | None = typer.Option(None, help="Threads that decode, of one process.", metavar="N"),
    output: str | None = typer.Option(None, help="Run folder. Default: runs/RECIPE-NNN."),
    resume: str | None = typer.Option(None, help="auto, a run folder, or a checkpoint."),
    log_interval: str | None = typer.Option(None, help="Steps between plain log lines.", metavar="N"),
    target_top1: str | None = typer.Option(None, help="Stop at this top-1 (percent).", metavar="X"),
    pretrained: str | None = typer.Option(None, help="Weights to start from, of any trainer."),
    device: str | None = typer.Option(None, help="auto, cpu or cuda."),
    amp_dtype: str | None = typer.Option(None, help="fp16, bf16, fp32 or auto."),
    compile: str | None = typer.Option(  # noqa: A002
        None, help="torch.compile: auto, off or model."),
    plan: str | None = typer.Option(None, help="plan.toml of `paceline tune` or `paceline plan`."),
    trace: bool = typer.Option(False, "--trace", help="Write trace.json, for Perfetto."),
    watch: bool = typer.Option(False, "--watch", help="Serve the live report on this machine."),
    dry: bool = typer.Option(False, "--dry-run", help="Show settings and time; train nothing."),
    nproc_per_node: NprocPerNode = 1,
    nnodes: int = typer.Option(1, help="Nodes."),
    node_rank: int | None = typer.Option(None, help="This node, from 0."),
    master_addr: str | None = typer.Option(None, help="Address of node 0."),
    master_port: MasterPort = 0,
    max_restarts: int = typer.Option(0, help="Restarts, with --resume auto, after a failure."),
    min_ranks: int | None = typer.Option(None, help="Continue without lost ranks, down to N ranks."),
    trust: Trust = False,
    settings: list[str] = typer.Option([], "--set", help="section.key=value, any setting."),
) -> int:  # fmt: skip
    """Train a model."""
    given = locals()
    flags = parse_flags(given, {**FLAGS, "minutes": "run.minutes"})
    flags |= {"run.traced_steps": [10, 30]} if trace else {}
    flags |= {"run.report_port": 0} if watch else {}
    flags |= {} if min_ranks is None else {"comm.min_ranks": min_ranks}
    config = resolve(recipe, flags, settings, trust, chooses=True)
    check_at_least(1, {"--nproc-per-node": nproc_per_node, "--nnodes": nnodes})
    check_at_least(0, {"--max-restarts": max_restarts})
    if dry:
        from paceline.cli.dry_run import dry_run

        return dry_run(config, nproc_per_node * nnodes)
    with without_save_requests(config.checkpoint):
        if nproc_per_node > 1 or nnodes > 1 or max_restarts > 0:
            from paceline.cli.launch import launch_ranks
            from paceline.cli.nodes import Node

            place = (nproc_per_node, nnodes, node_rank, master_addr, master_port)
            return launch_ranks(config, Node.from_flags(*place, os.environ), max_restarts)
        with interrupted_at_once():
            return train_here(config)


# The flags that `rehearse` and `lr-find` share: the setting of each flag, by parameter name.
FLAGS = {
    "data_dir": "data.dir", "val_split": "data.val_split", "image_size": "data.image_size",
    "model": "model.name", "batch_size": "run.batch_size",
    "global_batch_size": "run.global_batch_size", "epochs": "run.epochs", "opt": "optim.name",
    "lr": "optim.lr", "warmup_epochs": "optim.warmup_epochs", "momentum": "optim.momentum",
    "weight_decay": "optim.weight_decay", "clip_grad": "optim.clip_norm",
    "layer_decay": "optim.layer_decay", "loss": "run.loss", "smoothing": "run.smoothing",
    "seed": "run.seed", "workers": "data.workers", "output": "run.output", "resume": "run.resume",
    "log_interval": "run.log_interval", "target_top1": "run.target_top1",
    "pretrained": "run.pretrained", "device": "run.device", "amp_dtype": "precision.amp_dtype",
    "compile": "run.accel.compile", "plan": "comm.plan",
}  # fmt: skip


def parse_flags(given: Mapping[str, Any], settings_of: Mapping[str, str] = FLAGS) -> dict[str, Any]:
    """Returns the values of the flags that were given, by the name of their setting.

    Args:
        given: The values of all parameters of a command; None if a flag was not given.
        settings_of: The setting of each flag, by parameter name.
    """
    return {
        setting: parse_value(setting, given[name])
        for name, setting in settings_of.items()
        if given[name] is not None
    }


def resolve(
    recipe: str | None, flags: dict[str, Any], settings: list[str], trust: bool = False,
    *, chooses: bool = False,
) -> RunConfig:  # fmt: skip
    """Builds the configuration from defaults, the recipe, flags and the values of `--set`.

    With `chooses`, the recipe may choose settings when the run starts; the default one for own data does.
    """
    overrides = flags | dict(parse_assignment(text) for text in settings)
    if "data.dir" in overrides:
        # The user's data replaces the embedded set of a recipe.
        overrides.setdefault("data.source", "auto")
    recipe = recipe or default_recipe(overrides, own_data=chooses and "data.dir" in overrides)
    config = load_config(recipe, overrides, trust=trust)
    return config if chooses else settled(config)


def train_here(config: RunConfig) -> int:
    """Trains in this process, prints the summary and returns the exit code."""
    from paceline.trainer import Trainer

    startup = StartUp(process_age_s())
    # Ranks of mpirun have terminals even if the output of mpirun is redirected.
    console = Console(force_terminal=False if "OMPI_COMM_WORLD_RANK" in os.environ else None)
    outcome = Trainer.from_config(config).run(
        lambda: create_display(console, config.run.log_interval),
        report_error,
        startup,
    )
    stop_signal = outcome.result.stop_signal
    if outcome.rank == 0 and stop_signal is not None:
        hint = f"continue with the same command and --resume auto --output {outcome.folder}"
        print_line(console, hint)
    elif outcome.rank == 0 and outcome.already_finished:
        line = f"{outcome.folder} is already finished; nothing was trained or written"
        print_line(console, line)
    if stop_signal is not None:
        return 128 + int(stop_signal)
    if outcome.report is not None:
        from paceline.cli.summary import print_summary

        print_summary(console, outcome.folder, outcome.report)
    return 0
