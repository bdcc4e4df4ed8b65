"""Divergence: when skipped steps mean that a run will not recover, and where it went wrong.

In: a step that was skipped because its gradients were not finite. Out: nothing while there is hope;
else an error, equal on all ranks, that names step and layer. The last good checkpoint stays.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.errors import RunError
from paceline.models.resnet import fuse_norms
from paceline.precision.policy import Policy
from paceline.train.step import StepOutcome
from paceline.train.training import Training

# A loss that is not finite comes from the forward pass, which no loss scale can mend.
_BAD_LOSSES = 10
# Enough for batch norm to have a variance.
_IMAGES = 4


def check_divergence(training: Training, outcome: StepOutcome) -> None:
    """All its grounds are numbers that the exchange made equal on all ranks."""
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
    # Steps are counted as the display does, from 1; the first of the row is where it began.
    began = outcome.number + 1 - row + 1
    place = (_forward_place(training) if bad_loss else "") or _backward_place(training, outcome)
    kept = "; the last good checkpoint is kept" if training.saved_step >= 0 else ""
    raise RunError(
        f"diverged at step {began}: {cause}; {place}",
        f"lower --lr (now {training.schedule.peak:g} at its peak) or lengthen --warmup-epochs{kept}",
    )


def _forward_place(training: Training) -> str:
    data = training.config.data
    shape = (_IMAGES, data.channels, data.image_size, data.image_size)
    return find_bad_layer(training.model, training.step.policy, shape)


def _backward_place(training: Training, outcome: StepOutcome) -> str:
    """The parameter nearest to the loss whose gradient was not finite: backward met it first."""
    names = training.step.exchange.names
    first = next((name for name in names if name in outcome.bad), None)
    if first is None:
        return "no gradient tells the layer"
    return f"first in the gradient of {first} ({len(outcome.bad)} of {len(names)} tensors)"


# Where numbers stop being finite, found by looking.
#
# In: a model whose loss is not finite. Out: the first weight, else the first layer's output, that
# is not. Every rank holds the same weights and looks at the same noise, so all come to the same
# answer.


def find_bad_layer(model: nn.Module, policy: Policy, images: tuple[int, ...]) -> str:
    """Words for the place, or nothing. `images` is the shape of a few images. Leaves running statistics
    changed: the run is over."""
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
    fuse_norms(model, False)  # only torch's own operators call hooks
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(images, generator=generator).to(policy.device, policy.dtype)
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), policy.compute():
            model(noise.contiguous(memory_format=torch.channels_last))
    finally:
        for handle in handles:
            handle.remove()
    return f"the output of {found[0]} is not finite" if found else ""
