"""`step_error`: turns an exception of a forward or backward pass into an error for the user."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.core.errors import PacelineError, RunError, compile_reason, is_compile_error
from paceline.core.imports import first_line
from paceline.train.machine import out_of_memory
from paceline.train.micro_step import Advise, CaptureError, no_advice


def step_error(
    error: Exception, step: int, micro_batch: int, *, foreign: bool = False,
    advise: Advise = no_advice,
) -> PacelineError | None:  # fmt: skip
    """Turns an exception of a forward or backward pass into an error with cause and remedy.

    Args:
        error: The exception.
        step: Number of the step, for messages.
        micro_batch: Number of samples in a micro-batch, for messages.
        foreign: True for a user's model. All exceptions are then treated as errors of the model.
        advise: Returns the remedies that the acceleration knows for an error.

    Returns:
        The error for the user. None for a defect of Paceline, whose traceback must stay visible.
    """
    if isinstance(error, CaptureError):
        return CaptureError(error.cause, _remedies(advise(error), error.remedy))
    if isinstance(error, PacelineError):
        return error
    if is_compile_error(error):
        return _compile_error(error, advise(error))
    smaller = "free memory, or choose a smaller model"
    if micro_batch > 1:
        smaller = f"use --batch-size {micro_batch // 2}; the global batch stays the same"
    where = f"at step {step + 1} with a batch size of {micro_batch} per rank"
    if fault := out_of_memory(error, where, "; ".join([smaller, *advise(error)])):
        return fault
    if "more than 1 value per channel" in str(error):  # one sample with 1 × 1 activations
        return RunError(
            f"batch norm needs more than one sample, but a micro-batch of step {step + 1} has only one",
            "choose a --global-batch-size or --epochs with which the last batch has more samples, or a "
            "larger --batch-size",
        )
    if foreign and not isinstance(error, torch.AcceleratorError):
        return RunError(
            f"the model's forward or backward failed at step {step + 1} on {micro_batch} images: "
            f"{first_line(error)}",
            "check the model's code",
        )
    return None


def _remedies(advice: Sequence[str], remedy: str) -> str:
    return "; if that does not help, ".join(filter(None, (*advice, remedy)))


def _compile_error(error: Exception, advice: Sequence[str]) -> RunError:
    reason = compile_reason(error)
    if type(error).__module__.startswith("triton"):
        remedy = _remedies(advice, "use --set optim.fused=foreach")
        return RunError(f"Triton could not build a kernel ({reason})", remedy)
    return RunError(f"torch.compile failed ({reason})", _remedies(advice, "check the model's code"))
