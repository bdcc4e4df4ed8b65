"""`Update`: from summed gradients to new weights, decided on the device.

Updates masters, momenta and half-precision weights from the exchange's buffers after `reduce`; where a
gradient is not finite or a rank has given up, all stay as they were. A short row of numbers says which;
the step reads it later, so that nothing waits here.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.comm.exchange import SIGNALS, GradientExchange
from paceline.optim.base import MasterOptimizer
from paceline.optim.rule import accurate_norms
from paceline.optim.schedule import set_rate
from paceline.precision.policy import LossScale
from paceline.train.batch_norm import BatchNormState
from paceline.train.micro_step import Captured
from paceline.train.weights import WeightAverage

# What follows the sums of the signals in the row.
EXTRAS = ("overflow", "halted", "scale", "grad_norm", "whole_squared", "parts_squared")


class Update:
    """A rank's fault, or a stop in mid-step, halts the weights for good: the run then ends."""

    def __init__(
        self,
        optimizer: MasterOptimizer,
        exchange: GradientExchange,
        batch_norm: BatchNormState,
        scale: LossScale,
        *,
        graphs: bool = False,
        average: WeightAverage | None = None,
        clip_norm: float = 0.0,
    ) -> None:
        """`clip_norm`: largest norm of all gradients together, after their mean over ranks; 0: any."""
        self.optimizer = optimizer
        self.average = average
        self.names = parameter_names(exchange, optimizer)
        self._exchange = exchange
        self._batch_norm = batch_norm
        self._scale = scale
        device = scale.value.device
        place = {name: i for i, name in enumerate(exchange.names)}
        self._order = torch.tensor([place[name] for name in self.names], device=device)
        self._halted = torch.zeros((), device=device)
        # Whether this step leaves no trace.
        self._discard = torch.zeros((), device=device)
        self.row = torch.zeros(len(SIGNALS) + len(EXTRAS) + len(self.names), device=device)
        optimizer.hold = self._halted
        optimizer.active = torch.zeros(len(self.names), device=device)
        self._clip_norm = clip_norm
        self._grad_norm = torch.zeros((), device=device)
        # Squared norms of the whole gradient and, summed, of the micro-steps'; 0 where unmeasured.
        self._squares = torch.zeros(2, device=device)
        # Clipping divides by more than the loss scale, and costs no pass over the gradients of its own.
        self._divisor = scale.step_value.clone()
        optimizer.grad_scale = self._divisor if clip_norm else scale.step_value
        # A wrapped optimizer reads flags on the host, and waits for the exchange there.
        self._waits = optimizer.path == "torch" and device.type == "cuda"
        self._captured = Captured(self._run, enabled=graphs and optimizer.path == "triton")

    def run(self, rate: float, others: Mapping[str, float] | None = None) -> None:
        """One update at the learning rate `rate`, with `others` of the schedule's values."""
        set_rate(self.optimizer, rate, others)
        if self.average is not None:
            self.average.set_rate(rate)
        self.optimizer.upload()
        if self._waits:
            self._exchange.group.watched("the update", self._captured)
        else:
            self._captured()
        if (memory := self._exchange.memory) is not None:
            memory.settle(self._discard)

    def release(self) -> None:
        """Destroys the CUDA graph."""
        self._captured.release()

    def _run(self) -> None:
        tail = self._exchange.tail
        given_up = tail[SIGNALS.index("fault")] + tail[SIGNALS.index("abandon")]
        self._halted.copy_(torch.maximum(self._halted, (given_up > 0).to(torch.float32)))
        assert self.optimizer.active is not None
        torch.index_select(self._exchange.uses, 0, self._order, out=self.optimizer.active)
        if self._clip_norm or self._exchange.squares is not None:
            self._measure()
        self.optimizer.step()
        overflow = self.optimizer.overflow
        discard = self._discard.copy_(torch.maximum(overflow, self._halted))
        self._batch_norm.discard_if(discard)
        if self.average is not None:
            self.average.add(discard)
        extras = torch.stack(
            [overflow, self._halted, self._scale.value, self._grad_norm, *self._squares.unbind()]
        )
        bad = self.optimizer.bad.to(torch.float32)
        self.row.copy_(torch.cat([tail[: len(SIGNALS)], extras, bad]))
        self._scale.update(overflow, self._halted)

    def _measure(self) -> None:
        """The norm of all gradients, for clipping and for the noise scale."""
        gradients = [p.grad for p in self.optimizer.parameters() if p.grad is not None]
        norms = torch.stack([norm.double() for norm in gradient_norms(gradients)])
        scale = self._scale.step_value.double()
        norm = torch.linalg.vector_norm(norms) / scale
        if (parts := self._exchange.squares) is not None:
            self._squares.copy_(torch.stack([norm.square(), parts.double() / scale.square()]))
        if self._clip_norm:
            self._clip(norm, scale)

    def _clip(self, norm: Tensor, scale: Tensor) -> None:
        """Sets the divisor of the gradients. Where their norm is not finite the optimizer skips the
        step, for which it needs the gradients as they are."""
        self._grad_norm.copy_(norm)
        over = (norm / self._clip_norm).clamp(min=1.0)
        self._divisor.copy_(scale * torch.where(torch.isfinite(over), over, 1.0))


def gradient_norms(gradients: list[Tensor]) -> list[Tensor]:
    """2-norms in fp32, those of one format after those of another."""
    if gradients[0].device.type == "cpu":
        return accurate_norms([gradient.float() for gradient in gradients])
    norms: list[Tensor] = []
    for kind in dict.fromkeys(gradient.dtype for gradient in gradients):
        own = [gradient for gradient in gradients if gradient.dtype == kind]
        norms += torch._foreach_norm(own, 2, dtype=torch.float32)
    return norms


def parameter_names(exchange: GradientExchange, optimizer: MasterOptimizer) -> list[str]:
    """The parameters' names in the optimizer's order. The model itself may have others by now, which
    the first step reports."""
    names: dict[int, str] = {id(p): name for name, p in exchange.parameters.items()}
    return [names[id(p)] for p in optimizer.parameters()]


def row_values(row: Tensor) -> tuple[dict[str, float], list[int]]:
    """The row by name, once it lies in host memory, and the indices of gradients that were not finite."""
    names, values = (*SIGNALS, *EXTRAS), row.tolist()
    bad = [index for index, flag in enumerate(values[len(names) :]) if flag]
    return dict(zip(names, values[: len(names)], strict=True)), bad
