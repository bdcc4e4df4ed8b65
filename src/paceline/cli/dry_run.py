"""`paceline train --dry-run`: describes a run without training or writing anything.

The dry run resolves the configuration, opens the data, builds the model and measures a few steps on
synthetic images.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import tomli_w
import typer

from paceline.config import Job, RunConfig, changed_settings, unflatten
from paceline.core.topology import Topology
from paceline.core.units import format_bytes, format_duration

if TYPE_CHECKING:
    from torch import nn

    from paceline.comm.group import Group
    from paceline.train.batch_sizes import BatchSizes


def dry_run(config: RunConfig, ranks: int) -> int:
    """Prints settings, data, model and expected time of a run, without training.

    Args:
        config: The configuration of the run.
        ranks: Number of ranks on this node.

    Returns:
        The exit code.
    """
    from paceline.comm.group import Group
    from paceline.optim.scaling_report import describe_in_lines
    from paceline.train.choices import choices_of, look
    from paceline.train.components import Components
    from paceline.train.exchange_plan import describe_idle
    from paceline.train.inputs import check_trackers
    from paceline.train.machine import choose_device, choose_threads
    from paceline.train.resolve import Facts, refuse, resolve
    from paceline.train.strategy import strategy_class

    device = choose_device(config, Topology())
    if config.run.pending is not None:
        threads = max(1, choose_threads(config, Topology()) // ranks)
        with look(config, Components(), device, ranks, threads) as situation:
            choices = choices_of(situation)
        for name, text in choices.reasons.items():
            _show(name, text)
        config = choices.apply(config)
    job, program = Job(processes=ranks, device=device.type), Components()
    refuse(config, job, program)
    check_trackers(config)
    processes, strategy = ranks, strategy_class(config)
    ranks = strategy.ranks(config, processes)
    typer.echo("# settings that differ from the defaults; docs/settings.md has all")
    typer.echo(tomli_w.dumps(_changed(config)).strip())
    samples, classes, about = _data(config)
    _show("data", about)
    resolved = resolve(config, Facts(job=job, program=program, samples=samples, classes=classes))
    config, sizes, plan = resolved.config, resolved.sizes, resolved.batches
    if resolved.scaling:
        _show("scaling", describe_in_lines(resolved.scaling, indent="  "))
    import torch

    torch.set_num_threads(max(1, choose_threads(config, Topology()) // processes))
    with Group(Topology(), config.comm, device) as group:
        images_s, update_s = _measure(
            config, group, sizes, classes, samples / sizes.global_batch, ranks
        )
    # A process that computes several ranks makes one update.
    images_s *= ranks / processes
    passes = config.optim.own_optimizer.passes(plan.steps_per_epoch)
    # The time of an epoch is proportional to its samples, even if the batch grows.
    batches = plan.total_samples / sizes.global_batch
    train_s = batches * passes * images_s + plan.total_steps * update_s
    _show("batch", sizes.describe(ranks))
    _show("peak_lr", f"{resolved.peak_lr:g}")
    if resolved.hint:
        _show("hint", resolved.hint)
    if idle := describe_idle(config, ranks):
        _show("no effect", idle)
    _show("steps", f"{plan.total_steps:,} in {config.run.epochs} epochs")
    update = f"update {format_duration(update_s)} per step"
    each = f"{' per pass' if passes > 1 else ''} and {update}"
    counted = f", {passes:.3g} passes over the data per epoch" if passes > 1 else ""
    _show("estimated training time", f"{format_duration(train_s)}; forward and backward "
          f"{format_duration(images_s)}{each}{counted}, measured on {device} with synthetic images; "
          "excludes data loading, evaluation and exchange")  # fmt: skip
    typer.echo("dry run: nothing was trained or written")
    return 0


def _show(name: str, text: str) -> None:
    typer.echo(f"{name}: {text}")


def _changed(config: RunConfig) -> Mapping[str, Any]:
    flat = config.flat()
    names = changed_settings(config)
    return unflatten({name: flat[name] for name in names if flat[name] is not None})


def _data(config: RunConfig) -> tuple[int, int, str]:
    """Returns the number of training images, the number of classes, and a description of the data."""
    from paceline.data import open_source

    settings = replace(config.data, cache="none")
    with closing(open_source(settings, "train")) as source:
        classes = source.classes
        with closing(open_source(settings, "val", classes)) as validation:
            counts = f"{len(source):,} training and {len(validation):,} validation images"
            about = f"{source.kind}, {counts}, {len(classes)} classes"
            return len(source), len(classes), about


def _exchange(config: RunConfig, model: nn.Module, ranks: int) -> dict[str, str]:
    """Describes how several ranks would all-reduce gradients, as rows of the output.

    Raises:
        ConfigError: If the plan or the size table does not fit the model and the number of ranks.
    """
    from paceline.train.exchange_plan import ChosenPlan, check_wires
    from paceline.train.strategy import strategy_class

    if ranks == 1:
        return {}
    comm, strategy = config.comm, strategy_class(config)
    chosen = ChosenPlan.of(comm, model, strategy.cluster(config, ranks, nodes=1))
    wire = "" if comm.wire == "auto" else f", {comm.wire} wire"
    measured = ", measured at the start" * (comm.algorithm == "auto" and ranks > 2)
    text = f"plan {comm.plan}" if comm.plan else f"algorithm {comm.algorithm}{measured}{wire}"
    if chosen.plan is not None:
        check_wires(config, chosen.plan, chosen.origin)
        text += f", {len(chosen.plan.buckets)} bucket(s)"
    lines = strategy.outline(config, ranks)
    return {**lines, "exchange": f"between {ranks:,} ranks: {lines.get('exchange', text)}"}


def _measure(
    config: RunConfig, group: Group, sizes: BatchSizes, classes: int, steps_per_epoch: float,
    ranks: int,
) -> tuple[float, float]:  # fmt: skip
    """Measures steps of one rank without communication; prints the model and automatic choices.

    Returns:
        The seconds for forward and backward of all images of a step, and the seconds for the update.
    """

    from paceline.models.synced_norm import keep_last_statistics
    from paceline.train.components import Components
    from paceline.train.machine import peak_memory_bytes
    from paceline.train.model_checks import make_model
    from paceline.train.step_time import measure_step
    from paceline.train.strategy import strategy_class

    device = group.device
    model = make_model(config, config.model.num_classes or classes, Components())
    if config.model.norm_statistics == "last":
        keep_last_statistics(model)
    strategy_class(config).check_model(model)
    exchange = _exchange(config, model, ranks)
    weights = sum(parameter.numel() for parameter in model.parameters())
    _show("model", f"{config.model.name}, {weights:,} parameters")
    before_bytes = peak_memory_bytes(device)
    measured = measure_step(
        config, model, group, micro_batch=sizes.micro_batch, classes=classes, ranks=ranks,
        steps_per_epoch=steps_per_epoch,
    )  # fmt: skip
    for name, text in (measured.choices | exchange).items():
        if text:
            _show(name, text)
    peak = peak_memory_bytes(device)
    if device.type == "cuda":
        _show("memory measured", f"{format_bytes(peak)} on {device}")
    else:  # the measured steps have fewer images; gradients and optimizer do not depend on them
        images = max(0, peak - before_bytes - 12 * weights)
        expected = peak + round(images * (sizes.micro_batch / measured.images - 1))
        _show("expected memory", f"about {format_bytes(expected)} per rank, without data")
    parts = sizes.micro_batch * sizes.accumulation / measured.images
    return parts * measured.images_s, measured.update_s
