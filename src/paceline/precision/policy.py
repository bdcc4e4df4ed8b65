"""`Policy`, the number format of a model, and `LossScale`, which prevents underflow of fp16 gradients.

With fp16 or bf16, the weights of convolutions and linear layers have half precision. Biases and the
parameters of normalization layers stay in fp32. The optimizer holds fp32 master weights.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.errors import ConfigError
from paceline.precision.settings import PrecisionSettings

_FORMATS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# Layers that use matrix units. All other layers have few parameters, which stay in fp32.
_MATRIX_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Policy:
    """The number format of a model.

    Attributes:
        name: `fp16`, `bf16` or `fp32`.
        dtype: Format of activations, of matrix weights, and of the gradients of matrix weights.
        device: The device of the model.
    """

    name: str
    dtype: torch.dtype
    device: torch.device

    @property
    def is_half(self) -> bool:
        """True for fp16 and bf16."""
        return self.dtype != torch.float32

    @property
    def scales_loss(self) -> bool:
        """True for fp16, in which small gradients underflow; bf16 and fp32 have enough exponent bits."""
        return self.dtype == torch.float16

    def convert(self, model: nn.Module) -> nn.Module:
        """Rounds the model's matrix weights to `dtype` in place. Shared weights stay shared."""
        if self.is_half:
            for weight in matrix_weights(model):
                weight.data = weight.data.to(self.dtype)
        return model

    def compute(self) -> AbstractContextManager[object]:
        """Returns the context for forward passes, which casts inputs and biases as autocast does."""
        if not self.is_half:
            return nullcontext()
        # The cache of casts is off, because a captured graph must cast the changed parameters again.
        return torch.autocast(self.device.type, self.dtype, cache_enabled=False)


def matrix_weights(model: nn.Module) -> list[nn.Parameter]:
    """Returns the weights that a half-precision policy rounds; a shared weight appears once.

    A parametrized weight (`weight_norm`, `spectral_norm`) is not included: it is computed from
    parameters that stay in fp32, and autocast rounds the result.
    """
    weights: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, _MATRIX_LAYERS):
            # Not `module.weight`: reading a weight under `spectral_norm` changes the module's buffers.
            weight = module._parameters.get("weight")
            if weight is not None:
                weights.setdefault(id(weight), weight)
    return list(weights.values())


def choose_policy(settings: PrecisionSettings, device: torch.device) -> Policy:
    """Chooses the number format of a model.

    Args:
        settings: The section `[precision]`, which names the format.
        device: The device that computes.

    Returns:
        The policy. `auto` means fp16 on a GPU and fp32 on a CPU.

    Raises:
        ConfigError: If the device cannot compute in the named format.
    """
    name = settings.amp_dtype
    if name == "auto":
        name = "fp16" if device.type == "cuda" else "fp32"
    dtype = _FORMATS[name]
    if dtype != torch.float32:
        problem = _problem(dtype, device)
        if problem:
            raise ConfigError(
                "precision.amp_dtype", name, f"{device} cannot compute in it ({problem})",
                "use --amp-dtype fp32",
            )  # fmt: skip
    return Policy(name, dtype, device)


def allow_tf32(settings: PrecisionSettings) -> None:
    """Sets torch's global switches for TF32 to the value of the setting `precision.tf32`."""
    torch.backends.cuda.matmul.allow_tf32 = settings.tf32
    torch.backends.cudnn.allow_tf32 = settings.tf32


def _problem(dtype: torch.dtype, device: torch.device) -> str:
    """Returns the reason why `device` cannot compute a convolution in `dtype`; "" if it can."""
    try:
        image = torch.ones(2, 4, 4, 4, dtype=dtype, device=device)
        weight = torch.ones(4, 4, 3, 3, dtype=dtype, device=device, requires_grad=True)
        out: Tensor = F.conv2d(image, weight)
        out.float().sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


class LossScale:
    """The loss scale: a dynamic factor if gradients can underflow, else 1.

    The device updates the scale from an overflow flag that is equal on all ranks; the host does not
    wait. A step with fewer samples than the global batch divides the loss by fewer samples, so the
    gradient of each sample is larger than in a full step. `step_value` is the scale divided by a power
    of two that compensates for this.
    """

    def __init__(
        self, policy: Policy, settings: PrecisionSettings, *, fp16_travels: bool = False
    ) -> None:
        """Creates the loss scale, which is dynamic if gradients can underflow, else 1.

        Args:
            policy: The number format of the model.
            settings: The section `[precision]`, with the initial scale and its bounds.
            fp16_travels: True if gradients are sent to other ranks in fp16, so that they can underflow
                there.
        """
        scales = policy.scales_loss or fp16_travels
        self.dynamic = scales
        start = settings.loss_scale_init if scales else 1.0
        self._interval = settings.SCALE_INTERVAL
        self.floor, self.ceiling = settings.LOWEST_SCALE, settings.HIGHEST_SCALE
        self.value = torch.tensor(start, device=policy.device)
        # Multiplies the loss of the current step and divides its gradients.
        self.step_value = self.value.clone()
        self._quiet_steps = torch.zeros((), device=policy.device)

    def begin_step(self, samples: int, global_batch: int) -> None:
        """Sets the loss scale of a step, `step_value`.

        The scale is divided by the smallest power of two d with samples · d ≥ global_batch. Multiplying
        by a power of two does not round, so the update has the same bits unless a gradient over- or
        underflows.

        Args:
            samples: Number of samples in the step, on all ranks together.
            global_batch: Number of samples in a full step.
        """
        missing = -(-global_batch // samples) - 1
        torch.mul(self.value, 2.0 ** -missing.bit_length(), out=self.step_value)

    def update(self, overflow: Tensor, hold: Tensor) -> None:
        """Halves the scale after an overflow, and doubles it after `SCALE_INTERVAL` steps without one.

        Args:
            overflow: Flag on the device, equal on all ranks; positive if a gradient is not finite.
            hold: Flag on the device; if it is not 0, the scale does not change.
        """
        if not self.dynamic:
            return
        bad, free = overflow > 0, hold == 0
        quiet = self._quiet_steps + 1
        due = quiet >= self._interval
        factor = torch.where(bad, 0.5, torch.where(due, 2.0, 1.0))
        scale = (self.value * factor).clamp_(self.floor, self.ceiling)
        self.value.copy_(torch.where(free, scale, self.value))
        restart = torch.where(bad | due, torch.zeros_like(quiet), quiet)
        self._quiet_steps.copy_(torch.where(free, restart, self._quiet_steps))

    def describe(self) -> str:
        """Describes the loss scale, for display at the start of the run."""
        return f"dynamic, from {float(self.value):g}" if self.dynamic else "none"

    def state(self) -> dict[str, float]:
        """Returns the scale and the number of steps since its last change, for a checkpoint."""
        quiet = float(self._quiet_steps) if self.dynamic else -1.0
        return {"scale": float(self.value), "quiet_steps": quiet}

    def restore(self, state: dict[str, float]) -> None:
        """Restores what `LossScale.state` has returned.

        A dynamic scale ignores the state of a run without scaling.
        """
        if self.dynamic and state["quiet_steps"] >= 0:
            self.value.fill_(min(max(state["scale"], self.floor), self.ceiling))
            self._quiet_steps.fill_(state["quiet_steps"])
