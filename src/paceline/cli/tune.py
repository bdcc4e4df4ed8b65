"""`paceline tune` measures a cluster and writes a plan; `paceline profile` measures a training step.

The plan file of `tune` (`paceline.plan.plan_file`) contains the speed of the links, the times of
all-reduces, and the best algorithm for each size. With a recipe or a model, it also contains the
profiled step, the best plan and the predicted step time.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli import options
from paceline.cli.measure import (
    check_settings,
    chosen_device,
    is_rank,
    parse_algorithms,
    parse_size_range,
    run_on_ranks,
)
from paceline.cli.options import check_at_least
from paceline.config import RunConfig, load_config, parse_assignment
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.topology import Topology
from paceline.core.units import format_bytes
from paceline.models.settings import check_model_name
from paceline.plan.plan_file import LinkFacts, PlanFile, ProbedCluster
from paceline.plan.schedules import tuned_names
from paceline.plan.size_choice import MARGIN, check_noise
from paceline.plan.size_table import MeasuredSize

if TYPE_CHECKING:
    from paceline.planner.workload import Workload
    from paceline.tune.timing import RankGroup
    from paceline.tune.tuner import Tuner


# The number of classes of ImageNet.
_ASSUMED_CLASSES = 1000


def tune(
    recipe: str | None = typer.Argument(None, help="A recipe whose model to profile and plan for."),
    model: str = typer.Option("", help="A model instead of a recipe (docs/models.md)."),
    batch_size: int = typer.Option(0, "--batch-size", "-b", help="Of one rank; else the recipe's."),
    image_size: int = typer.Option(0, help="Edge of the images in pixels; else the recipe's."),
    classes: int = typer.Option(0, help="Number of classes; else that of the data."),
    data_dir: str = typer.Option("", help="The data to train on, for its number of classes."),
    settings: list[str] = typer.Option([], "--set", help="section.key=value, as in training."),
    output: Path = typer.Option(Path("plan.toml"), "--output", "-o", help="The file to write."),
    force: bool = typer.Option(False, "--force", help="Overwrite it."),
    ranks: options.Ranks = 0,
    algorithms: str = typer.Option(
        "", help="Names, with commas; native is always measured. Default: all but central."
    ),
    min_bytes: str = typer.Option("1KiB", help="First size."),
    max_bytes: str = typer.Option("64MiB", help="Last size, if the time limit allows it."),
    factor: options.SizeFactor = 4.0,
    iterations: int = typer.Option(30, help="Samples of each at most; the median counts."),
    limit_s: float = typer.Option(180.0, help="Approximate seconds for all sizes together."),
    margin: float = typer.Option(MARGIN, help="By how much another must beat native."),
    group_size: options.GroupSize = 0,
    device: options.Device = "auto",
    backend: options.Backend = "auto",
    share_gpus: options.ShareGpus = False,
    accept_noise: bool = typer.Option(
        False, "--accept-noise", help="Write it even if repeated samples differ widely."
    ),
    trust: options.Trust = False,
) -> int:
    """Measure this cluster, profile a model on it, and write the plan for training."""
    check_settings(device, backend, group_size)
    trained = {"model.name": model, "run.batch_size": batch_size, "data.image_size": image_size,
               "model.num_classes": classes, "data.dir": data_dir,
               "data.source": "auto" if data_dir else ""}  # fmt: skip
    given = {name: value for name, value in trained.items() if value}
    config = _config(recipe, given, settings, trust)
    names = parse_algorithms(algorithms) or tuned_names()
    check_at_least(3, {"--iterations": iterations})
    check_at_least(1, {"--limit-s": limit_s})
    if not 0 <= margin < 1:
        raise ConfigError("--margin", margin, "must be 0 or more and below 1", "try 0.05")
    low, high = parse_size_range(min_bytes, max_bytes, factor)
    if not is_rank(ranks):
        check_output(output, force)
    if (code := run_on_ranks(ranks)) is not None:
        return code

    from paceline.bench.allreduce import choose_sizes
    from paceline.tune.timing import RankGroup
    from paceline.tune.tuner import TuneJob, Tuner

    # Before the ranks join, because a profiled step creates another group.
    here = {"run.device": device, "comm.backend": backend, "comm.share_gpus": share_gpus}
    profiled, failed, assumed = None, None, ""
    if config is not None:
        try:
            num_classes, assumed = _classes(config)
            profiled = _profile(config, num_classes, RunConfig().with_values(here))
        except PacelineError as error:
            failed = error
    job = TuneJob(choose_sizes(low, high, factor), names, iterations, limit_s, margin)
    with RankGroup(
        backend=backend, device=device, group_size=group_size or None, share_gpus=share_gpus
    ) as joined:
        joined.group.agree("profile", failed)
        # Only rank 0 writes, and all ranks raise its error.
        main = joined.rank == 0
        joined.group.agree_on("output", lambda: check_output(output, force) if main else output)
        show = _show if main else _ignore
        show(assumed)
        file, noisy = _measure(Tuner(joined, job), accept_noise, show)
        if profiled is not None:
            file = _planned(file, profiled, joined, show)
        if main:
            file.write(output)
        show(f"written to {output}; train with --plan {output}")
        show(f"warning: {noisy}" if noisy else "")
    return 0


def _measure(tuner: Tuner, accept_noise: bool, show: Callable[[str], None]) -> tuple[PlanFile, str]:
    """Measures links and all-reduces, and shows each result as soon as it is known.

    Returns:
        The plan file, and a warning if the measurements are noisy, else an empty text.
    """
    cluster = tuner.cluster()
    links = [_link_line("inside a node", cluster.intra),
             _link_line("between nodes", cluster.inter), _hidden_line(cluster)]  # fmt: skip
    for line in links:
        show(line)
    measured = tuner.measure(lambda row: show(_size_line(row)))
    noisy = check_noise(measured, accept_noise)
    file = tuner.conclude(measured, cluster)
    chosen = _size_lines(file, len(tuner.job.sizes))
    for line in chosen:
        show(line)
    why = [*(f"measured: {line}" for line in links if line),
           *(f"chosen: {line}" for line in chosen)]  # fmt: skip
    return replace(file, why=tuple(why)), noisy


def _show(text: str) -> None:
    if text:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def _ignore(text: str) -> None:
    """Replaces `_show` on ranks other than 0, and prints nothing."""


def _config(
    recipe: str | None, flags: dict[str, Any], settings: list[str], trust: bool
) -> RunConfig | None:
    """Returns the configuration to train; None if neither a recipe nor a model is given."""
    overrides = flags | dict(parse_assignment(text) for text in settings)
    if recipe is None and "model.name" not in overrides:
        if overrides:
            name, value = next(iter(overrides.items()))
            raise ConfigError(name, value, "needs a model", "give --model or a recipe")
        return None
    if overrides.get("data.image_size"):
        overrides.setdefault("data.eval_resize", 0)
    return options.settled(load_config(recipe, overrides, trust=trust))


def _classes(config: RunConfig) -> tuple[int, str]:
    """Returns the number of classes, and a line for the user if the number is an assumption."""
    from paceline.data import open_source
    from paceline.train.resolve import check_num_classes

    declared = config.model.num_classes
    if not config.data.dir and config.data.source == "auto":
        line = f"no data given: {_ASSUMED_CLASSES:,} classes assumed (--data-dir or --classes)"
        return declared or _ASSUMED_CLASSES, "" if declared else line
    source = open_source(config.data, "train")
    count = len(source.classes)
    source.close()
    check_num_classes(config, count)
    return declared or count, ""


def _profile(config: RunConfig, classes: int, here: RunConfig) -> tuple[Workload, int]:
    """Profiles the step on all ranks at the same time; returns this rank's profile and batch size."""
    from paceline.train.machine import choose_device
    from paceline.tune.profile import config_row, profile_workload

    topology = Topology.from_env(os.environ)
    row = config_row(config, classes, topology.world_size, choose_device(here, topology).type)
    return profile_workload(row, [row.batch_size]), row.batch_size


def _planned(
    tuned: PlanFile, profiled: tuple[Workload, int], joined: RankGroup, show: Callable[[str], None]
) -> PlanFile:
    """Adds the best plan for the model to the plan file, from the profiled step of rank 0."""
    from paceline.planner.workload import Workload
    from paceline.tune.tuner import plan_model

    assert tuned.probed is not None
    counts, (work, batch) = tuned.probed.ranks_per_node, profiled
    if len(set(counts)) > 1 or sum(counts) == 1:
        reason = "nodes differ in their ranks" if sum(counts) > 1 else "one rank exchanges nothing"
        why = f"chosen: no plan of the model, because {reason}"
        planned = replace(tuned, why=(*tuned.why, why))
    else:
        work = Workload.from_table(joined.decided(work.to_table))
        planned = plan_model(tuned, work, batch)
    for line in planned.why[len(tuned.why) :]:
        show(line)
    return planned


def profile(
    model: options.Model = "resnet50",
    batch_size: list[int] = typer.Option(
        [],
        "--batch-size",
        "-b",
        help="May be repeated: two or more separate the fixed part of a step.",
    ),
    image_size: options.ImageSize = 224,
    classes: options.Classes = 1000,
    amp_dtype: options.AmpDtype = "auto",
    steps: int = typer.Option(20, help="Steps to time at each batch; the median counts."),
    warm_up: int = typer.Option(5, help="Steps before."),
    device: options.Device = "auto",
    output: Path = typer.Option(Path("profile.toml"), help="Where to write it."),
    force: bool = typer.Option(False, "--force", help="Overwrite an existing file."),
    as_json: options.AsJson = False,
) -> int:
    """Measure a training step on this device, for the planner."""
    check_model_name(model)
    place = chosen_device(device)
    batches = batch_size or ([64, 256] if place == "cuda" else [4, 16])
    check_at_least(1, {"--batch-size": min(batches), "--steps": steps, "--warm-up": warm_up})
    check_output(output, force)
    from paceline.tune.profile import profile_workload
    from paceline.tune.step import StepRow

    switches = {"precision.amp_dtype": amp_dtype}
    row = StepRow("profile", "ours", model, max(batches), image_size, classes, place, steps, warm_up,
                  switches)  # fmt: skip
    work = profile_workload(row, batches)
    PlanFile(workload=work.to_section()).write(output)
    if as_json:
        typer.echo(json.dumps(work.to_table()))
        return 0
    largest = max(batches)
    typer.echo(
        f"{model}, {work.source}: {1e3 * work.compute_s(largest):.2f} ms at batch {largest}: forward "
        f"{1e3 * work.forward.at(largest):.2f}, backward {1e3 * work.backward.at(largest):.2f}, "
        f"update {1e3 * work.update_s:.2f}. Written to {output}"
    )
    return 0


def check_output(output: Path, force: bool) -> Path:
    """Returns `output` if the file can be written.

    Raises:
        ConfigError: If the file exists and `force` is False, or if the folder does not exist.
    """
    if output.exists() and not force:
        raise ConfigError("--output", str(output), "exists already", "give --force or another name")
    if not output.parent.is_dir():
        raise ConfigError(
            "--output", str(output), "is in a folder that does not exist", "create it"
        )
    return output


def _link_line(where: str, link: LinkFacts | None) -> str:
    if link is None:
        return ""
    return (
        f"{where}: {1e6 * link.alpha_s:.0f} µs + {8e-6 / (link.beta_s_per_byte or 1e-15):.0f} Mbit/s, "
        f"fit off by {100 * link.residual:.0f} %; {link.contention:.1f} times as long when all send"
    )


def _hidden_line(cluster: ProbedCluster) -> str:
    if cluster.hidden_cost is not None:
        return (
            f"a hidden exchange slows compute by {cluster.hidden_cost:.2f} of the exchange's time"
        )
    if cluster.device == "cpu" and cluster.facts.ranks > 1:
        return "the slowdown of compute by a hidden exchange was not measured: too slow"
    return ""


def _size_line(row: MeasuredSize) -> str:
    ordered = sorted(row.medians_s.items(), key=lambda item: item[1])
    times = ", ".join(f"{name} {1e3 * seconds:.3g}" for name, seconds in ordered)
    return f"{format_bytes(row.size_bytes):>9}: {times} ms"


def _size_lines(file: PlanFile, wanted: int) -> list[str]:
    rows = file.table.rows
    lines = [f"every size: {rows[0].algorithm}"]
    if len(rows) > 1:
        limits = [row.up_to_bytes for row in rows]
        sizes = ["larger" if limit is None else f"up to {format_bytes(limit)}" for limit in limits]
        lines = [f"{size}: {row.algorithm}" for size, row in zip(sizes, rows, strict=True)]
    if len(file.measured) < wanted:
        last = format_bytes(file.measured[-1].size_bytes)
        lines.append(
            f"sizes above {last} were not measured: the time limit was reached (--limit-s)"
        )
    return lines
