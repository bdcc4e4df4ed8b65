"""`paceline profile`: measures a real step on this device, for `paceline plan --profile`."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from paceline.core.errors import ConfigError
from paceline.plan.plan_file import PlanFile


def profile(
    model: str = typer.Option("resnet50", help="Which model (docs/models.md)."),
    batch_size: list[int] = typer.Option(
        [], "--batch-size", "-b", help="May be repeated: two or more give the fixed part of a step."
    ),
    image_size: int = typer.Option(224, help="Edge of the images in pixels."),
    classes: int = typer.Option(1000, help="Number of classes."),
    amp_dtype: str = typer.Option("auto", help="fp16, bf16, fp32 or auto."),
    steps: int = typer.Option(20, help="Steps to time at each batch; the median counts."),
    warm_up: int = typer.Option(5, help="Steps before."),
    device: str = typer.Option("auto", help="auto, cpu or cuda."),
    output: Path = typer.Option(Path("profile.toml"), help="Where to write it."),
    force: bool = typer.Option(False, "--force", help="Write over a file that is there."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on standard output."),
) -> int:
    """Measure a training step on this device, for the planner."""
    from paceline.bench.step import StepRow
    from paceline.cli.bench import chosen_device
    from paceline.cli.tune import check_output
    from paceline.models.settings import check_model_name

    check_model_name(model)
    place = chosen_device(device)
    batches = batch_size or ([64, 256] if place == "cuda" else [4, 16])
    for flag, count in (("--batch-size", min(batches)), ("--steps", steps), ("--warm-up", warm_up)):
        if count < 1:
            raise ConfigError(flag, count, "must be at least 1")
    check_output(output, force)
    from paceline.bench.profile import profile_workload

    switches = {"precision.amp_dtype": amp_dtype}
    row = StepRow("profile", "ours", model, max(batches), image_size, classes, place, steps, warm_up,
                  switches)  # fmt: skip
    work = profile_workload(row, batches)
    PlanFile(workload=work).write(output)
    if as_json:
        typer.echo(json.dumps(work.to_table()))
        return 0
    largest = max(batches)
    typer.echo(
        f"{model}, {work.source}: {1e3 * work.compute_s(largest):.2f} ms at batch {largest}: forward "
        f"{1e3 * work.forward.at(largest):.2f}, backward {1e3 * work.backward.at(largest):.2f}, "
        f"update {1e3 * work.update_s:.2f}; {1e3 * (work.forward.fixed_s + work.backward.fixed_s):.2f}"
        f" ms at any batch; {len(work.gradients)} gradients. Written to {output}"
    )
    return 0
