"""`paceline train`: trains a model from a recipe and flags, whose names are those of timm and
torchvision; `paceline rehearse`: trains on what is at hand as a cluster would, with a clock of predicted
times.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, get_type_hints

import typer
from rich.console import Console

from paceline.cli.failure import report_error
from paceline.cli.options import MasterPort, NprocPerNode, Trust, check_at_least, without_options
from paceline.config import Job, RunConfig, load_config, parse_assignment, parse_value
from paceline.core.errors import ConfigError
from paceline.core.host import StartUp, process_age_s
from paceline.core.topology import Topology
from paceline.train.display import create_display, print_line
from paceline.train.stop_signals import (
    interrupted_at_once,
    user_signals,
    without_save_requests,
)

_LAUNCHER_OPTIONS = ("--nproc-per-node", "--master-port", "--max-restarts")


def train(
    recipe: str | None = typer.Argument(
        None, help="A shipped recipe's name or a TOML file. Default: quickstart, or plain defaults "
        "where --data-dir is given.",
    ),
    data_dir: str | None = typer.Option(None, help="Tar shards or class folders, train and val."),
    val_split: str | None = typer.Option(
        None, help="Share of the training images for validation, where there is no val.", metavar="X"),
    image_size: str | None = typer.Option(None, help="Edge of the model's images.", metavar="PIXELS"),
    model: str | None = typer.Option(
        None, help="resnet50 …, timm:NAME, torchvision:NAME, module:factory (see paceline models)."),
    batch_size: str | None = typer.Option(
        None, "--batch-size", "-b", help="Of one process.", metavar="N"),
    global_batch_size: str | None = typer.Option(None, help="Of all processes together.", metavar="N"),
    epochs: str | None = typer.Option(None, help="Epochs to train.", metavar="N"),
    opt: str | None = typer.Option(None, help="sgd, lars, muon, adamw, lamb …, or torch.optim:CLASS."),
    lr: str | None = typer.Option(None, help="Peak learning rate, as it is.", metavar="X"),
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
        None, help="torch.compile: auto, off, blocks or model."),
    plan: str | None = typer.Option(None, help="plan.toml of `paceline tune` or `paceline plan`."),
    trace: bool = typer.Option(False, "--trace", help="Write trace.json, for Perfetto."),
    watch: bool = typer.Option(False, "--watch", help="Serve the live report on this machine."),
    dry: bool = typer.Option(False, "--dry-run", help="Show settings, memory and time; train nothing."),
    nproc_per_node: NprocPerNode = 1,
    master_port: MasterPort = 0,
    max_restarts: int = typer.Option(0, help="Restarts, with --resume auto, after a failure."),
    trust: Trust = False,
    settings: list[str] = typer.Option([], "--set", help="section.key=value, any setting."),
) -> int:  # fmt: skip
    """Train a model."""
    given = locals()
    flags = parse_flags(given)
    flags |= {name: True for name, on in (("run.trace", trace), ("run.watch", watch)) if on}
    config = resolve(recipe, flags, settings, trust)
    check_at_least(1, {"--nproc-per-node": nproc_per_node})
    check_at_least(0, {"--max-restarts": max_restarts})
    if dry:
        from paceline.cli.dry_run import dry_run

        return dry_run(config, nproc_per_node)
    with without_save_requests(config.checkpoint):
        if nproc_per_node > 1 or max_restarts > 0:
            return launch_ranks(config, nproc_per_node, master_port, max_restarts)
        with interrupted_at_once():
            return train_here(config)


# The settings of flags that `train` and `rehearse` share, by the names of their parameters.
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
    """Values by setting, of those parameters that were given."""
    return {
        setting: parse_value(setting, given[name])
        for name, setting in settings_of.items()
        if given[name] is not None
    }


def resolve(
    recipe: str | None, flags: dict[str, Any], settings: list[str], trust: bool = False
) -> RunConfig:
    """Defaults < recipe < flags, `--set` included."""
    overrides = flags | dict(parse_assignment(text) for text in settings)
    if "data.dir" in overrides:
        # The user's data replaces the embedded set of a recipe.
        overrides.setdefault("data.source", "auto")
    elif recipe is None and "data.source" not in overrides:
        recipe = "quickstart"
    return load_config(recipe, overrides, trust=trust)


def launch_ranks(config: RunConfig, processes: int, port: int, max_restarts: int) -> int:
    """Checks what can be checked once, before the ranks start."""
    _refuse_to_nest(processes)
    if not 0 <= port < 65536:
        raise ConfigError("--master-port", port, "must be 0 to 65535")
    from paceline.cli.launch import launch
    from paceline.train.batch_sizes import batch_stages, requested_batch, resolve_batch_sizes

    config.check_job(Job(processes=processes))
    asked = requested_batch(config, processes)
    sizes = resolve_batch_sizes(*asked)
    if asked[:2] != (None, None):
        batch_stages(config.optim, sizes, processes)
    return launch(
        processes, without_options(sys.argv[1:], _LAUNCHER_OPTIONS), port=port,
        max_restarts=max_restarts,
        stops=user_signals(config.checkpoint, "stop"),
        saves=user_signals(config.checkpoint, "save"),
    )  # fmt: skip


def _refuse_to_nest(processes: int) -> None:
    """A rank that starts ranks would multiply them, or conflict with its neighbours."""
    variables = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    found = next((name for name in variables if name in os.environ), None)
    # One srun task may start the ranks of a node; several tasks are ranks themselves.
    if found is None and Topology.from_env(os.environ).world_size > 1:
        found = "SLURM_PROCID"
    if found is not None:
        raise ConfigError(
            "--nproc-per-node", processes,
            f"this process is a rank of a launcher already ({found} is set)",
            "leave the flag out under torchrun, srun and mpirun",
        )  # fmt: skip


def train_here(config: RunConfig) -> int:
    from paceline.trainer import Trainer

    startup = StartUp(process_age_s())
    # mpirun gives its ranks terminals, wherever its own output goes.
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


# The settings of the flags that describe the cluster, by the names of their parameters.
_CLUSTER = {
    name: f"run.rehearsal.{name}"
    for name in (
        "nodes", "gpus_per_node", "gpu", "profile", "cluster", "node_gbps", "latency_us", "links",
        "oversubscription", "input_images_per_s", "eval_s", "startup_s", "price_per_gpu_hour",
        "watts_per_gpu",
    )
}  # fmt: skip
# Parameters of `train` that a rehearsal has too.
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
    latency_us: str | None = typer.Option(
        None, help="Start of a message between nodes; 10.", metavar="X"),
    links: str | None = typer.Option(
        None, help="Links of a node; 1 with --node-gbps, else the reference system's.", metavar="N"),
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
    flags = parse_flags(given) | {"run.strategy": "rehearsal"} | parse_flags(given, _CLUSTER)
    config = resolve(given["recipe"], flags, given["settings"], given["trust"])
    with without_save_requests(config.checkpoint), interrupted_at_once():
        return train_here(config)


def take_signature(
    command: Callable[..., int], names: Collection[str], *functions: Callable[..., Any]
) -> None:
    """Gives `command` those parameters of `functions` that are in `names`, from which Typer makes its
    flags. Of two with the same name the later one counts, in the place of the earlier."""
    parameters: dict[str, inspect.Parameter] = {}
    hints: dict[str, Any] = {"return": int}
    for function in functions:
        known = get_type_hints(function, include_extras=True)
        for name, parameter in inspect.signature(function).parameters.items():
            if name in names:
                hints[name] = known[name]
                parameters[name] = parameter.replace(annotation=known[name])
    command.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    command.__annotations__ = hints


take_signature(rehearse, {*_SHARED, *_CLUSTER}, train, _cluster_flags)
