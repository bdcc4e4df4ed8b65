"""What a forward or backward pass raised, in the user's words.

In: an exception out of a micro-step. Out: the error that names cause and remedy, or None where it is a
defect of ours and must keep its traceback.
"""

from __future__ import annotations

from paceline.core.errors import PacelineError, RunError
from paceline.train.machine import out_of_memory


def step_error(error: Exception, step: int, micro_batch: int) -> PacelineError | None:
    if isinstance(error, PacelineError):
        return error
    if _is_compile_error(error):
        return _compile_error(error)
    return _memory_error(error, step, micro_batch) or _single_value_error(error, step)


def _memory_error(error: Exception, step: int, size: int) -> RunError | None:
    return out_of_memory(
        error,
        f"at step {step + 1} with a batch size of {size} a process",
        f"use a smaller one, such as --batch-size {max(1, size // 2)}; "
        "the global batch and the result stay the same",
    )


def _single_value_error(error: Exception, step: int) -> RunError | None:
    """Batch norm has no variance to take of one sample with 1 × 1 maps."""
    if "more than 1 value per channel" not in str(error):
        return None
    return RunError(
        f"a micro-batch of one sample at step {step + 1} leaves batch norm a single value",
        "choose a --global-batch-size or --epochs with which the last batch has more samples, or a "
        "larger --batch-size",
    )


def _is_compile_error(error: Exception) -> bool:
    """By name: importing the compiler takes a second, which a run without it need not spend."""
    return any(
        kind.__module__.startswith(("torch._dynamo", "torch._inductor", "triton"))
        for kind in type(error).__mro__
    )


def _compile_error(error: Exception) -> RunError:
    """The first line that says something: torch wraps the cause in pages of advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # "backend='inductor' raised:" only announces it.
    reason = next((line for line in lines if not line.endswith(":")), type(error).__name__)
    if type(error).__module__.startswith("triton"):
        remedy = "use --set run.fused_norm=off --set optim.fused=foreach"
        return RunError(f"Triton could not build a kernel ({reason[:200]})", remedy)
    return RunError(f"torch.compile failed ({reason[:200]})", "use --compile off")
