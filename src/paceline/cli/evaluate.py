"""`paceline eval` and `paceline export`: the accuracy of a checkpoint, and its weights as safetensors."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import typer

from paceline.config import parse_assignment
from paceline.core.errors import ConfigError
from paceline.core.units import format_duration, format_percent
from paceline.core.untrusted import one_line


def evaluate_checkpoint(
    checkpoint: Path = typer.Argument(help="A checkpoint, or a run folder (its best)."),
    data_dir: str | None = typer.Option(None, help="Default: the data that it was trained on."),
    batch_size: int = typer.Option(256, "--batch-size", "-b", min=1, help="Of one process."),
    workers: int | None = typer.Option(None, help="Threads that decode."),
    device: str | None = typer.Option(None, help="auto, cpu or cuda."),
    settings: list[str] = typer.Option([], "--set", help="section.key=value of [data] or [comm]."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on standard output."),
    trust: bool = typer.Option(
        False, "--trust", help="Run the code of the module that a checkpoint names as its model."
    ),
) -> int:
    """Evaluate a checkpoint on the validation images."""
    from paceline.train.checkpoint import find_checkpoint
    from paceline.train.evaluate import evaluate_file

    path = find_checkpoint(checkpoint)
    overrides: dict[str, Any] = dict(parse_assignment(text) for text in settings)
    for name in overrides:
        if not name.startswith(("data.", "comm.")):
            raise ConfigError("--set", name, "a checkpoint keeps it", "change data.* or comm.*")
    overrides["run.device"] = device or "auto"
    if data_dir is not None:
        overrides |= {"data.dir": data_dir, "data.source": "auto"}
    if workers is not None:
        overrides["data.workers"] = workers
    result, config, rank = evaluate_file(path, overrides, batch_size, trust=trust)
    if isinstance(result, signal.Signals):
        return 128 + int(result)
    if rank != 0:
        return 0
    if as_json:
        table = {
            "checkpoint": str(path),
            "model": config.model.name,
            "top1": result.top1,
            "top5": result.top5,
            "loss": result.loss,
            "samples": result.samples,
            "average_epochs": config.run.average_epochs,
            "corrupt_samples": result.corrupt_count,
            "eval_s": result.eval_s,
        }
        typer.echo(json.dumps(table))
        return 0
    for sample in result.corrupt_here:
        typer.echo(one_line(f"corrupt, left out: {sample.name} ({sample.reason})"))
    elsewhere = result.corrupt_count - len(result.corrupt_here)
    if elsewhere:
        typer.echo(f"corrupt, left out: {elsewhere} more on other ranks")
    epochs = config.run.average_epochs
    averaged = f" (weights averaged over {epochs:g} epochs)" if epochs else ""
    typer.echo(
        f"{path}{averaged}: top-1 {format_percent(result.top1)}, top-5 {format_percent(result.top5)}, "
        f"loss {result.loss:.4f} on {result.samples} images in {format_duration(result.eval_s)}"
    )
    return 0


def export_weights(
    checkpoint: Path = typer.Argument(help="A checkpoint, or a run folder (its best)."),
    out: Path = typer.Argument(help="The .safetensors file to write."),
) -> int:
    """Write a checkpoint's weights as safetensors, with torchvision's keys."""
    from paceline.train.checkpoint import Checkpoint, find_checkpoint
    from paceline.train.weights import checkpoint_weights, write_weights

    if out.suffix != ".safetensors":
        raise ConfigError("OUT", str(out), "is not a safetensors file", "end it in .safetensors")
    path = find_checkpoint(checkpoint)
    found = Checkpoint.read(path)
    state = checkpoint_weights(found)
    metadata = {"model": found.config["model"]["name"], "step": str(found.step)}
    averaged = ""
    if found.average:
        epochs = f"{found.config['run']['average_epochs']:g}"
        metadata["average_epochs"] = epochs
        averaged = f"weights averaged over {epochs} epochs, "
    write_weights(state, out, metadata)
    typer.echo(
        f"{out}: {len(state)} tensors of {path}, {averaged}batch norm averaged over its ranks"
    )
    return 0
