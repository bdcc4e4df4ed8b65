"""`Policy`: which number format computes, and how a model is made ready for it.

In: the settings and the device. Out: a model whose convolutions and linear layers hold half-precision
weights, while biases and normalisation keep fp32 parameters, and the context in which it computes.
The fp32 masters are the optimizer's.
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
# The layers that compute in matrix units; everything else has few parameters, and gains from fp32.
_MATRIX_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Policy:
    """`dtype` is the format of activations, matrix weights and their gradients."""

    name: str
    dtype: torch.dtype
    device: torch.device

    @property
    def is_half(self) -> bool:
        return self.dtype != torch.float32

    @property
    def scales_loss(self) -> bool:
        """fp16 loses small gradients to underflow; bf16 and fp32 have exponents enough."""
        return self.dtype == torch.float16

    def convert(self, model: nn.Module) -> nn.Module:
        """Rounds the matrix weights in place; a weight shared with another layer stays shared."""
        if self.is_half:
            for weight in matrix_weights(model):
                weight.data = weight.data.to(self.dtype)
        return model

    def compute(self) -> AbstractContextManager[object]:
        """Around forward passes: casts inputs and biases, and computes losses in fp32."""
        if not self.is_half:
            return nullcontext()
        # Without the cache: a captured graph must cast anew, because parameters change under it.
        return torch.autocast(self.device.type, self.dtype, cache_enabled=False)


def matrix_weights(model: nn.Module) -> list[nn.Parameter]:
    """The weights that travel and compute in half precision, each once."""
    found: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, _MATRIX_LAYERS):
            assert isinstance(module.weight, nn.Parameter)
            found.setdefault(id(module.weight), module.weight)
    return list(found.values())


def choose_policy(settings: PrecisionSettings, device: torch.device) -> Policy:
    """Refuses a format that the device cannot compute in, before anything is built."""
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
    """For the whole process: torch keeps these switches globally."""
    torch.backends.cuda.matmul.allow_tf32 = settings.tf32
    torch.backends.cudnn.allow_tf32 = settings.tf32


def _problem(dtype: torch.dtype, device: torch.device) -> str:
    """One small convolution, forward and backward: tables of what devices can do grow old."""
    try:
        image = torch.ones(2, 4, 4, 4, dtype=dtype, device=device)
        weight = torch.ones(4, 4, 3, 3, dtype=dtype, device=device, requires_grad=True)
        out: Tensor = F.conv2d(image, weight)
        out.float().sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


# `LossScale`: the factor that keeps fp16 gradients clear of underflow.
#
# In: after each step, whether a gradient overflowed, as a flag on the device, equal on all ranks
# since it comes from their sum. Out: the scale, on the device: no host waits for the decision.
#
# A step over fewer samples than the global batch divides its loss by fewer samples, so each
# sample's gradient is larger than in a full step. `step_value` makes up for it: it is the scale
# divided by the power of two that keeps each sample's gradient at most as large as in a full
# step.


class LossScale:
    """Dynamic where the policy needs a scale and the settings give none; else constant."""

    def __init__(
        self, policy: Policy, settings: PrecisionSettings, *, fp16_travels: bool = False
    ) -> None:
        """`fp16_travels`: gradients pass through fp16 on their way between ranks, which is as small a
        range as if they were computed in it."""
        scales = policy.scales_loss or fp16_travels
        self.dynamic = scales and settings.loss_scale is None
        start = settings.loss_scale_init if scales else 1.0
        if settings.loss_scale is not None:
            start = settings.loss_scale
        self._interval = settings.loss_scale_interval
        self.floor, self.ceiling = settings.loss_scale_min, settings.loss_scale_max
        self.value = torch.tensor(start, device=policy.device)
        # What the current step multiplies its loss by, and divides its gradients by.
        self.step_value = self.value.clone()
        self._quiet_steps = torch.zeros((), device=policy.device)

    def begin_step(self, samples: int, global_batch: int) -> None:
        """Sets `step_value` for a step over `samples` samples, those of all ranks.

        The divisor is the smallest power of two that makes `samples` times it at least `global_batch`.
        A power of two scales gradients without rounding, so the update has the same bits as without it,
        unless a gradient overflows or underflows.
        """
        missing = -(-global_batch // samples) - 1
        torch.mul(self.value, 2.0 ** -missing.bit_length(), out=self.step_value)

    def update(self, overflow: Tensor, hold: Tensor) -> None:
        """Halves after an overflow, doubles after a long time without; nothing while `hold` is set."""
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
        scale = float(self.value)
        if self.dynamic:
            return f"dynamic, from {scale:g}"
        return f"constant {scale:g}" if scale != 1.0 else "none"

    def state(self) -> dict[str, float]:
        """For the checkpoint."""
        quiet = float(self._quiet_steps) if self.dynamic else -1.0
        return {"scale": float(self.value), "quiet_steps": quiet}

    def restore(self, state: dict[str, float]) -> None:
        """A constant scale stays what the settings say, and has nothing to give to a dynamic one."""
        if self.dynamic and state["quiet_steps"] >= 0:
            self.value.fill_(min(max(state["scale"], self.floor), self.ceiling))
            self._quiet_steps.fill_(state["quiet_steps"])
