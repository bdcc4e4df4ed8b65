"""`paceline eval`, `paceline predict` and `paceline export`: commands for a trained model."""

from __future__ import annotations

import csv
import io
import json
import signal
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.options import AsJson, Device, Trust
from paceline.config import parse_assignment
from paceline.core.errors import ConfigError, DataError
from paceline.core.units import format_duration, format_percent
from paceline.core.untrusted import one_line

if TYPE_CHECKING:
    from paceline.train.inference import Prediction


def evaluate_checkpoint(
    checkpoint: Path = typer.Argument(help="A checkpoint, or a run folder (its best)."),
    data_dir: str | None = typer.Option(None, help="Default: the data that it was trained on."),
    batch_size: int = typer.Option(256, "--batch-size", "-b", min=1, help="Of one process."),
    workers: int | None = typer.Option(None, help="Threads that decode."),
    device: str | None = typer.Option(None, help="auto, cpu or cuda."),
    settings: list[str] = typer.Option([], "--set", help="section.key=value of [data] or [comm]."),
    as_json: AsJson = False,
    trust: Trust = False,
) -> int:
    """Evaluate a checkpoint on the validation images."""
    from paceline.train.checkpoint import find_checkpoint
    from paceline.train.evaluate import evaluate_file

    path = find_checkpoint(checkpoint)
    overrides: dict[str, Any] = dict(parse_assignment(text) for text in settings)
    for name in overrides:
        if not name.startswith(("data.", "comm.")):
            raise ConfigError(
                "--set", name, "is fixed by the checkpoint", "change data.* or comm.*"
            )
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


def predict_images(
    run: Path = typer.Argument(help="A run folder (its best checkpoint), or a checkpoint."),
    images: list[Path] = typer.Argument(help="Image files, or folders of them."),
    top: int = typer.Option(1, min=1, help="Classes to show for each image."),
    batch_size: int = typer.Option(64, "--batch-size", "-b", min=1, help="Images at a time."),
    device: Device = "auto",
    csv_file: Path | None = typer.Option(None, "--csv", help="Also write a CSV file."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object for each image."),
    trust: Trust = False,
) -> int:
    """Classify images."""
    from paceline.train.checkpoint import write_atomically
    from paceline.train.inference import Predictor, find_images

    predictor = Predictor.load(run, device=device, trust=trust)
    predictions = predictor.predict(find_images(images), top=top, batch_size=batch_size)
    for image in predictions:
        if as_json:
            typer.echo(json.dumps(asdict(image)))
        elif not image.error:
            pairs = zip(image.labels, image.confidences, strict=True)
            shown = ", ".join(f"{label} {format_percent(100 * c, 1)}" for label, c in pairs)
            typer.echo(one_line(f"{image.name}: {shown}"))
    if csv_file is not None:
        write_atomically(csv_file, _as_csv(predictions, min(top, len(predictor.classes))))
    failed = [image for image in predictions if image.error]
    for image in failed:
        typer.echo(one_line(f"paceline: note: {image.name}: {image.error}"), err=True)
    if failed:
        raise DataError(
            f"{len(failed)} of {len(predictions)} images could not be classified",
            "remove them, or convert them to JPEG or PNG",
        )
    return 0


def _as_csv(predictions: Sequence[Prediction], top: int) -> bytes:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    columns = [f"{what}{n}" for n in range(1, top + 1) for what in ("label", "confidence")]
    rows.writerow(["name", *columns, "error"])
    for image in predictions:
        pairs = zip(image.labels, image.confidences, strict=True)
        cells: list[Any] = [cell for label, c in pairs for cell in (label, f"{c:.6f}")]
        rows.writerow([image.name, *cells, *[""] * (2 * top - len(cells)), image.error])
    return text.getvalue().encode()


def export_weights(
    checkpoint: Path = typer.Argument(help="A checkpoint, or a run folder (its best)."),
    out: Path = typer.Argument(help="The .onnx, .pt2 or .safetensors file to write."),
    opset: int | None = typer.Option(None, help="Version of ONNX's operators; that of torch."),
    trust: Trust = False,
) -> int:
    """Write a checkpoint's model as ONNX, torch.export program or safetensors."""
    from paceline.train.export import check_export, export_stored_weights
    from paceline.train.inference import Predictor

    check_export(out, opset)
    if out.suffix == ".safetensors":
        typer.echo(export_stored_weights(checkpoint, out))
        return 0
    predictor = Predictor.load(checkpoint, device="cpu", precision="fp32", trust=trust)
    averaged = ""
    if epochs := predictor.config.run.average_epochs:
        averaged = f"weights averaged over {epochs:g} epochs, "
    typer.echo(f"{predictor.export(out, opset)}; {averaged}batch norm averaged over its ranks")
    return 0
