"""`FastPath`: the choice of an acceleration of the forward pass, a memory format and CUDA graphs.

`choose_fast_path` asks the registered accelerations (`models.acceleration`) for a faster forward pass
and decides whether to use CUDA graphs. It raises an error for settings that cannot be obeyed.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from paceline.comm.group import Group
from paceline.config import RunSettings
from paceline.core.errors import ConfigError
from paceline.core.extensions import provided
from paceline.models.acceleration import (
    AccelerationContext,
    Applied,
    Forward,
    Result,
    accelerations,
)
from paceline.models.synced_norm import use_torch_norms
from paceline.train.model_checks import VARIES


@dataclass(frozen=True)
class ModelLimits:
    """Properties of the model that rule out faster implementations of a step. Equal on all ranks.

    Attributes:
        eager: True if a forward or backward pass contains collectives, which no faster implementation
            supports.
        varies: True if the model keeps state or draws random numbers in Python, which a CUDA graph
            would freeze.
    """

    eager: bool = False
    varies: bool = False

    @classmethod
    def of(cls, settings: RunSettings, group: Group, eager: bool, varies: bool) -> ModelLimits:
        """Determines the limits that apply to all ranks. On GPUs, all ranks call this.

        Args:
            settings: The settings.
            group: The ranks.
            eager: True if a forward or backward pass contains collectives.
            varies: True if this rank's model keeps state or draws random numbers in Python.

        Raises:
            ConfigError: If the settings demand CUDA graphs and `varies` is True on any rank.
        """
        if eager:
            return cls(eager=True)
        if group.device.type != "cuda" or settings.cuda_graphs == "off":
            return cls()
        ranks = torch.tensor(float(varies), device=group.device)
        group.all_reduce_sum(ranks)
        if ranks and settings.cuda_graphs == "on":
            raise ConfigError(
                "run.cuda_graphs", "on", f"the model {VARIES}, which a CUDA graph would freeze",
                "use 'auto', or draw with torch's generators",
            )  # fmt: skip
        return cls(varies=bool(ranks))


@dataclass(frozen=True)
class FastPath:
    """How a run computes its forward and backward pass. The choices are not written into the settings.

    Attributes:
        forward: The forward pass of training.
        channels_last: True for the NHWC memory format.
        graphs: True if micro-steps are captured as CUDA graphs.
        applied: The acceleration that provides `forward`; None if `forward` is the plain model.
        remark: Reasons for the choices, appended to the displayed description.
    """

    forward: Forward
    channels_last: bool
    graphs: bool
    applied: Applied | None = None
    remark: str = ""

    @property
    def image_channels(self) -> int | None:
        """Number of channels to which images are padded; None for no padding."""
        return None if self.applied is None else self.applied.input_channels

    @property
    def gradients_at_end(self) -> bool:
        """True if the backward pass yields all gradients only at the end of the pass."""
        return self.applied is not None and self.applied.gradients_at_end

    def advise(self, error: Exception) -> Sequence[str]:
        """Returns remedies that the acceleration knows for an error in a forward or backward pass."""
        return () if self.applied is None else self.applied.advise(error)

    def describe(self) -> str:
        """Describes how a step is computed, for display at the start of the run."""
        pass_ = "plain model" if self.applied is None else self.applied.describe()
        return (
            f"{'NHWC' if self.channels_last else 'NCHW'}, {pass_}, "
            f"CUDA graphs {'on' if self.graphs else 'off'}{self.remark}"
        )


def choose_fast_path(
    settings: RunSettings,
    model: nn.Module,
    device: torch.device,
    triton_problem: str,
    *,
    shared_gpu: bool = False,
    dtype: torch.dtype = torch.float16,
    limits: ModelLimits = ModelLimits(),
) -> FastPath:
    """Chooses how steps are computed (`FastPath`), and applies an acceleration to `model`.

    Args:
        settings: The section `[run]`.
        model: The model on `device`.
        device: The device that trains.
        triton_problem: Reason why Triton's kernels cannot run; "" if they can.
        shared_gpu: True if several ranks use the same GPU. In this case, cuDNN's batch norm hangs if it
            runs concurrently with collectives of another rank.
        dtype: The number format of activations and convolutions.
        limits: Properties of the model that rule out faster implementations.

    Returns:
        The choices.

    Raises:
        ConfigError: If a setting cannot be obeyed.
    """
    on_gpu = device.type == "cuda"
    if on_gpu:
        # Shapes rarely change in training, so the search for the fastest algorithm pays off.
        torch.backends.cudnn.benchmark = True
    # The exchange runs between the graphs, so graphs work with any number of ranks and any backend.
    graphs = settings.cuda_graphs == "on" or (settings.cuda_graphs == "auto" and on_gpu)
    if graphs and not on_gpu:
        raise ConfigError("run.cuda_graphs", "on", f"needs a GPU, not {device}", "use 'auto'")
    remark = f" (Triton: {triton_problem})" if on_gpu and triton_problem else ""
    if on_gpu and shared_gpu and use_torch_norms(model):
        remark += ", no batch norm by cuDNN (shared GPU)"
    context = AccelerationContext(
        device=device, dtype=dtype, channels_last=settings.channels_last,
        kernel_problem=triton_problem, collective_norms=limits.eager,
    )  # fmt: skip
    applied, reason = accelerate(settings, model, context)
    if reason:
        remark += f"; {reason}"
    return FastPath(
        model if applied is None else applied.forward, settings.channels_last,
        graphs and not limits.eager and not limits.varies, applied, remark,
    )  # fmt: skip


def accelerate(
    settings: RunSettings, model: nn.Module, context: AccelerationContext
) -> tuple[Applied | None, str]:
    """Applies the first acceleration that supports the model.

    On a CPU, an acceleration is asked only if the settings contain a table for it.

    Args:
        settings: The section `[run]`.
        model: The model on its device.
        context: Device, formats and limits.

    Returns:
        The acceleration and a note on settings of other accelerations, which have no effect; or None
        and the reasons why no acceleration supports the model.

    Raises:
        ConfigError: If a setting cannot be obeyed, or an acceleration returns a wrong type.
    """
    on_gpu, reasons = context.device.type == "cuda", []
    for name, acceleration in accelerations(lambda name: on_gpu or name in settings.owned):
        own = replace(context, settings=settings.owned.get(name))
        reason: object = acceleration.supports(model, own)
        if not isinstance(reason, str):
            raise _error(name, f"its supports returned {reason!r}", "return '' or the reason")
        if not reason:
            applied: object = acceleration.apply(model, own)
            if not isinstance(applied, Applied):
                problem = f"its apply returned {type(applied).__name__}"
                raise _error(name, problem, "return an object of a subclass of Applied")
            idle = [f"run.{o}" for o in provided("accelerations") if o in settings.owned]
            given = name not in settings.owned and idle
            return applied, f"{', '.join(idle)} without effect with {name}" if given else ""
        reasons.append(f"{name}: {reason}")
    if on_gpu and not reasons:
        reasons = ["no acceleration is installed"]
    return None, "; ".join(reasons)


def _error(name: str, problem: str, remedy: str) -> ConfigError:
    return ConfigError("acceleration", name, problem, remedy)


@dataclass(frozen=True)
class AllRanks:
    """Passes the collectives that `Applied.calibrate` needs on to a group of ranks."""

    group: Group

    def agree_on(self, phase: str, make: Callable[[], Result]) -> Result:
        return self.group.agree_on(phase, make)

    def all_gather(self, value: Any) -> list[Any]:
        gathered = self.group.gather_bytes(json.dumps(value).encode())
        rows = None if gathered is None else [json.loads(row) for row in gathered]
        sent = self.group.broadcast_bytes(None if rows is None else json.dumps(rows).encode())
        values: list[Any] = json.loads(sent)
        return values


@functools.cache
def triton_problem(device: torch.device) -> str:
    """Returns "" if Triton's kernels can run on `device`, else the reason why not.

    The function builds and launches one small kernel, because a list of supported versions and GPUs would
    become outdated. Reasons are, for example, a missing package, a missing C compiler or an old GPU.
    """
    if device.type != "cuda":
        return "needs a GPU"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    try:
        from paceline.data.device.kernels import normalized

        pixel = torch.ones((1, 1, 1, 1), dtype=torch.uint8, device=device)
        one = torch.ones((1, 1, 1, 1), device=device)
        value = normalized(pixel, one, one, torch.float32, 0)
        return "" if float(value) == 2.0 else "a kernel gave a wrong result"
    except Exception as error:  # noqa: BLE001  (compilers and drivers raise what they like)
        lines = str(error).splitlines()
        return f"no kernel can be built: {lines[0][:160] if lines else type(error).__name__}"
