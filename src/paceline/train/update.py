"""`Update`: from summed gradients to new weights, decided on the device.

Updates masters, momenta and half-precision weights from the exchange's buffers after `reduce`; where a
gradient is not finite or a rank has given up, all stay as they were. A short row of numbers says which;
the step reads it later, so that nothing waits here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.comm.exchange import SIGNALS, GradientExchange
from paceline.optim.build import set_rate
from paceline.optim.lars import LARS
from paceline.precision.policy import LossScale
from paceline.train.micro_step import Captured
from paceline.train.weights import BatchNormState, WeightAverage

# What follows the sums of the signals in the row.
EXTRAS = ("overflow", "halted", "scale")


class Update:
    """A rank's fault, or a stop in mid-step, halts the weights for good: the run then ends."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: LARS,
        exchange: GradientExchange,
        batch_norm: BatchNormState,
        scale: LossScale,
        *,
        graphs: bool = False,
        average: WeightAverage | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.average = average
        self.names = _names(model, optimizer)
        self._exchange = exchange
        self._batch_norm = batch_norm
        self._scale = scale
        device = scale.value.device
        place = {name: i for i, name in enumerate(exchange.names)}
        self._order = torch.tensor([place[name] for name in self.names], device=device)
        self._halted = torch.zeros((), device=device)
        self.row = torch.zeros(len(SIGNALS) + len(EXTRAS) + len(self.names), device=device)
        optimizer.hold = self._halted
        optimizer.active = torch.zeros(len(self.names), device=device)
        optimizer.grad_scale = scale.step_value
        self._captured = Captured(self._run, enabled=graphs and optimizer.path == "triton")

    def run(self, rate: float) -> None:
        """One update at the learning rate `rate`."""
        set_rate(self.optimizer, rate)
        self.optimizer.upload()
        self._captured()

    def release(self) -> None:
        """Destroys the CUDA graph."""
        self._captured.release()

    def _run(self) -> None:
        tail = self._exchange.tail
        given_up = tail[SIGNALS.index("fault")] + tail[SIGNALS.index("abandon")]
        self._halted.copy_(torch.maximum(self._halted, (given_up > 0).to(torch.float32)))
        assert self.optimizer.active is not None
        torch.index_select(self._exchange.uses, 0, self._order, out=self.optimizer.active)
        self.optimizer.step()
        overflow = self.optimizer.overflow
        discard = torch.maximum(overflow, self._halted)
        self._batch_norm.discard_if(discard)
        if self.average is not None:
            self.average.add(discard)
        extras = torch.stack([overflow, self._halted, self._scale.value])
        bad = self.optimizer.bad.to(torch.float32)
        self.row.copy_(torch.cat([tail[: len(SIGNALS)], extras, bad]))
        self._scale.update(overflow, self._halted)


def _names(model: nn.Module, optimizer: LARS) -> list[str]:
    """The parameters' names in the optimizer's order."""
    names: dict[int, str] = {id(p): name for name, p in model.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def row_values(row: Tensor) -> tuple[dict[str, float], list[int]]:
    """The row by name, once it lies in host memory, and the indices of gradients that were not finite."""
    names, values = (*SIGNALS, *EXTRAS), row.tolist()
    bad = [index for index, flag in enumerate(values[len(names) :]) if flag]
    return dict(zip(names, values[: len(names)], strict=True)), bad
