"""Divergence: ends a run that keeps skipping steps, with an error that names step and layer.

The error is equal on all ranks, and the last good checkpoint is kept.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.errors import DivergedError
from paceline.models.resnet import fuse_norms
from paceline.precision.policy import Policy
from paceline.train.machine import run_eagerly
from paceline.train.step import StepOutcome
from paceline.train.training import Training

# Allowed steps in a row with a non-finite loss, which no loss scale can fix.
_BAD_LOSSES = 10
# Images of the probe, enough for a batch-norm variance.
_IMAGES = 4


def check_divergence(training: Training, outcome: StepOutcome) -> None:
    """Called after a skipped step. Uses only numbers that the exchange has made equal on all ranks."""
    row, limit = training.progress.skipped_in_a_row, training.config.run.max_skipped_steps
    scale = training.step.scale
    bad_loss = not math.isfinite(outcome.loss)
    if bad_loss and row >= min(_BAD_LOSSES, limit):
        cause = f"the loss was not finite in {row} steps in a row"
    elif scale.dynamic and outcome.loss_scale <= scale.floor:
        cause = f"gradients overflow even at the lowest loss scale, {scale.floor:g}"
    elif row >= limit:
        cause = f"gradients were not finite in {row} steps in a row"
    else:
        return
    # The first skipped step of the row, counted from 1 as in the display.
    began = outcome.number + 1 - row + 1
    place = ""
    if bad_loss:
        data = training.config.data
        shape = (_IMAGES, data.channels, data.image_size, data.image_size)
        place = find_bad_layer(training.model, training.step.policy, shape)
    place = place or _bad_gradient(training, outcome)
    kept = "; the last good checkpoint is kept" if training.saved_step >= 0 else ""
    raise DivergedError(
        f"diverged at step {began}: {cause}; {place}",
        f"lower --lr (now {training.schedule.peak:g} at its peak) or lengthen --warmup-epochs{kept}",
    )


def _bad_gradient(training: Training, outcome: StepOutcome) -> str:
    """The parameter closest to the loss whose gradient was not finite, which backward computed
    first."""
    names = training.step.exchange.names
    first = next((name for name in names if name in outcome.bad), None)
    if first is None:
        return "no gradient identifies the layer"
    return f"first in the gradient of {first} ({len(outcome.bad)} of {len(names)} tensors)"


def find_bad_layer(model: nn.Module, policy: Policy, images: tuple[int, ...]) -> str:
    """Describes the first non-finite weight, else the first layer with a non-finite output, else "".

    Runs a forward pass on noise of the shape `images`, equal on all ranks, which changes running
    statistics.
    """
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            return f"the weight {name} is not finite"
    found: list[str] = []

    def look(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not bool(torch.isfinite(output).all()):
                found.append(name)

        return hook

    leaves = [(name, m) for name, m in model.named_modules() if not list(m.children())]
    handles = [module.register_forward_hook(look(name)) for name, module in leaves]
    fuse_norms(model, False)  # fused kernels bypass hooks
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(images, generator=generator).to(policy.device, policy.dtype)
    try:
        with torch.no_grad(), run_eagerly(), policy.compute():
            model(noise.contiguous(memory_format=torch.channels_last))
    finally:
        for handle in handles:
            handle.remove()
    return f"the output of {found[0]} is not finite" if found else ""
