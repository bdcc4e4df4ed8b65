"""`paceline train`: from a recipe and flags to a trained model.

In: flags with the names that users of timm and torchvision know. Out: a run folder, a table, and the
path of the report.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
from rich.console import Console

from paceline.config import RunConfig, load_config, parse_assignment, parse_value
from paceline.core.errors import ConfigError


def train(
    recipe: str | None = typer.Argument(
        None, help="A shipped recipe's name or a TOML file. Default: quickstart, or plain defaults "
        "where --data-dir is given.",
    ),
    data_dir: str | None = typer.Option(None, help="Tar shards or class folders, train and val."),
    model: str | None = typer.Option(None, help="Model name."),
    batch_size: str | None = typer.Option(None, "--batch-size", "-b", help="Of one process.", metavar="N"),
    global_batch_size: str | None = typer.Option(None, help="Of all processes together.", metavar="N"),
    epochs: str | None = typer.Option(None, help="Epochs to train.", metavar="N"),
    opt: str | None = typer.Option(None, help="Optimizer."),
    lr: str | None = typer.Option(None, help="Peak learning rate, as it is.", metavar="X"),
    warmup_epochs: str | None = typer.Option(None, help="Epochs of linear warm-up.", metavar="X"),
    momentum: str | None = typer.Option(None, metavar="X"),
    weight_decay: str | None = typer.Option(None, help="Not on biases and batch norm.", metavar="X"),
    smoothing: str | None = typer.Option(None, help="Label smoothing.", metavar="X"),
    seed: str | None = typer.Option(None, metavar="N"),
    workers: str | None = typer.Option(None, help="Threads that decode, of one process.", metavar="N"),
    output: str | None = typer.Option(None, help="Run folder. Default: runs/RECIPE-NNN."),
    resume: str | None = typer.Option(None, help="auto, a run folder, or a checkpoint."),
    log_interval: str | None = typer.Option(None, help="Steps between plain log lines.", metavar="N"),
    target_top1: str | None = typer.Option(None, help="Stop at this top-1 (percent).", metavar="X"),
    pretrained: str | None = typer.Option(None, help="Weights with torchvision's or timm's keys."),
    device: str | None = typer.Option(None, help="auto, cpu or cuda."),
    nproc_per_node: int = typer.Option(1, help="Ranks to start on this node."),
    master_port: int = typer.Option(0, help="Port for the ranks to meet; 0 finds a free one."),
    max_restarts: int = typer.Option(0, help="Restarts, with --resume auto, after a failure."),
    settings: list[str] = typer.Option([], "--set", help="section.key=value, any setting."),
) -> int:  # fmt: skip
    """Train a model."""
    given = {
        "data.dir": data_dir, "model.name": model, "run.batch_size": batch_size,
        "run.global_batch_size": global_batch_size, "run.epochs": epochs, "optim.name": opt,
        "optim.lr": lr, "optim.warmup_epochs": warmup_epochs, "optim.momentum": momentum,
        "optim.weight_decay": weight_decay, "run.smoothing": smoothing, "run.seed": seed,
        "data.workers": workers, "run.output": output, "run.resume": resume,
        "run.log_interval": log_interval, "run.target_top1": target_top1,
        "run.pretrained": pretrained, "run.device": device,
    }  # fmt: skip
    flags = {name: parse_value(name, text) for name, text in given.items() if text is not None}
    config = resolve(recipe, flags, settings)
    if nproc_per_node > 1 or max_restarts > 0:
        return _launch(config, nproc_per_node, master_port, max_restarts)
    if nproc_per_node < 1:
        raise ConfigError("--nproc-per-node", nproc_per_node, "must be at least 1")
    return _train_here(config)


def resolve(recipe: str | None, flags: dict[str, Any], settings: list[str]) -> RunConfig:
    """Defaults < recipe < flags; `--set` is a flag like any other."""
    overrides = flags | dict(parse_assignment(text) for text in settings)
    if "data.dir" in overrides:
        # Data of one's own takes the place of a recipe's embedded set.
        overrides.setdefault("data.source", "auto")
    elif recipe is None and "data.source" not in overrides:
        recipe = "quickstart"
    return load_config(recipe, overrides)


def _launch(config: RunConfig, processes: int, port: int, max_restarts: int) -> int:
    """Checks what can be checked before any rank starts, then starts them."""
    if "RANK" in os.environ:
        raise ConfigError(
            "--nproc-per-node", processes, "this process is a rank of a launcher already",
            "leave the flag out under torchrun, srun and mpirun",
        )  # fmt: skip
    if not 0 <= port < 65536:
        raise ConfigError("--master-port", port, "must be 0 to 65535")
    from paceline.cli.launch import launch
    from paceline.train.batch_sizes import resolve_batch_sizes

    resolve_batch_sizes(config.run.global_batch_size, config.run.batch_size, processes)
    return launch(processes, child_arguments(sys.argv[1:]), port=port, max_restarts=max_restarts)


def child_arguments(arguments: list[str]) -> list[str]:
    """The same command line without the launcher's own flags."""
    kept, skip = [], False
    for argument in arguments:
        name = argument.partition("=")[0]
        if skip:
            skip = False
        elif name in ("--nproc-per-node", "--master-port", "--max-restarts"):
            skip = "=" not in argument
        else:
            kept.append(argument)
    return kept


def _train_here(config: RunConfig) -> int:
    from paceline.cli.display import create_display
    from paceline.cli.result_table import print_summary
    from paceline.train.run import run_training

    console = Console()
    outcome = run_training(config, lambda: create_display(console, config.run.log_interval))
    if outcome.result.stop_signal is not None:
        if outcome.rank == 0:
            console.print(f"continue with: --resume auto --output {outcome.folder}", markup=False)
        return 128 + int(outcome.result.stop_signal)
    if outcome.report is not None:
        print_summary(console, outcome.folder, outcome.report)
    return 0
