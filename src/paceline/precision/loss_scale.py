"""`LossScale`: the factor that keeps fp16 gradients clear of underflow.

In: after each step, whether a gradient overflowed, as a flag on the device, equal on all ranks since it
comes from their sum. Out: the scale, on the device: no host waits for the decision.

A step over fewer samples than the global batch divides its loss by fewer samples, so each sample's
gradient is larger than in a full step. `step_value` makes up for it: it is the scale divided by the power
of two that keeps each sample's gradient at most as large as in a full step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.precision.policy import Policy
from paceline.precision.settings import PrecisionSettings


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
