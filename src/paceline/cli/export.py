"""`paceline export CHECKPOINT OUT`: weights for other programs."""

from __future__ import annotations

from pathlib import Path

import typer


def export_weights(
    checkpoint: Path = typer.Argument(help="A checkpoint, or a run folder (its best)."),
    out: Path = typer.Argument(help="The .safetensors file to write."),
) -> int:
    """Write a checkpoint's weights as safetensors, with torchvision's keys."""
    from paceline.core.errors import ConfigError
    from paceline.train.checkpoint import Checkpoint
    from paceline.train.checkpoint_shelf import find_checkpoint
    from paceline.train.weights_file import checkpoint_weights, write_weights

    if out.suffix != ".safetensors":
        raise ConfigError("OUT", str(out), "is not a safetensors file", "end it in .safetensors")
    path = find_checkpoint(checkpoint)
    found = Checkpoint.read(path)
    state = checkpoint_weights(found)
    names = {"model": found.config["model"]["name"], "step": str(found.step)}
    averaged = ""
    if found.average:
        epochs = f"{found.config['run']['average_epochs']:g}"
        names["average_epochs"], averaged = epochs, f"weights averaged over {epochs} epochs, "
    write_weights(state, out, names)
    words = f"{averaged}batch norm averaged over its ranks"
    typer.echo(f"{out}: {len(state)} tensors of {path}, {words}")
    return 0
