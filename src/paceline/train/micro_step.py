"""`MicroStep`: forward and backward of one micro-batch.

In: pixels and labels. Out: gradients in the exchange's buffers, and the loss added up on the device. The
loss is divided by the samples of the whole global batch and multiplied by the loss scale before the
backward pass, so the sum over ranks and micro-steps is the average, times the scale.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.comm.gradient_exchange import GradientExchange
from paceline.data.normalize import Normalizer
from paceline.precision.loss_scale import LossScale
from paceline.precision.policy import Policy
from paceline.train.captured import Captured


class MicroStep:
    """`forward` is the model, compiled or not."""

    def __init__(
        self,
        forward: Callable[[Tensor], Tensor],
        policy: Policy,
        normalize: Normalizer,
        exchange: GradientExchange,
        scale: LossScale,
        smoothing: float,
        *,
        graphs: bool = False,
    ) -> None:
        self._forward = forward
        self._policy = policy
        self._normalize = normalize
        self._exchange = exchange
        self._scale = scale
        self._smoothing = smoothing
        self._graphs = graphs
        self._share = torch.zeros((), device=policy.device)
        self.loss = torch.zeros((), device=policy.device)
        self._recorded: _Recorded | None = None

    def begin(self, samples: int) -> None:
        """Before the first micro-batch of a step over `samples` samples, those of all ranks."""
        self._share.fill_(1.0 / samples)
        self.loss.zero_()

    def run(self, images: Tensor, labels: Tensor, *, usual: bool) -> None:
        """`usual`: the size that nearly every micro-batch has, worth recording."""
        if not (self._graphs and usual):
            self._drop_recording()
            self._compute(
                images.to(self._policy.device, non_blocking=True),
                labels.to(self._policy.device, non_blocking=True),
            )
            return
        if self._recorded is None:
            self._normalize.prepare(self._policy.device)
            self._recorded = _Recorded(self._compute, images, labels, self._policy.device)
        if self._recorded.run(images, labels):
            self._exchange.note_uses(self._recorded.uses)
        else:
            self._recorded.uses = self._exchange.gathered

    def _drop_recording(self) -> None:
        """A recording holds the memory of a whole micro-batch for good, and a short batch, at the end of
        a run, needs nearly as much once more."""
        if self._recorded is not None:
            torch.cuda.synchronize(self._policy.device)
            self._recorded = None
            torch.cuda.empty_cache()

    def _compute(self, images: Tensor, labels: Tensor) -> None:
        with self._policy.compute():
            outputs = self._forward(self._normalize(images, self._policy.device))
        loss = F.cross_entropy(
            outputs.float(), labels, reduction="sum", label_smoothing=self._smoothing
        )
        part = loss * self._share
        (part * self._scale.value).backward()  # type: ignore[no-untyped-call]
        self.loss.add_(part.detach())
        self._exchange.gather()


class _Recorded:
    """The recording of a micro-batch, with the memory that it reads."""

    def __init__(
        self,
        compute: Callable[[Tensor, Tensor], None],
        images: Tensor,
        labels: Tensor,
        device: torch.device,
    ) -> None:
        self._images = torch.empty_like(images, device=device)
        self._labels = torch.empty_like(labels, device=device)
        self._captured = Captured(lambda: compute(self._images, self._labels), enabled=True)
        self.uses: frozenset[str] = frozenset()

    def run(self, images: Tensor, labels: Tensor) -> bool:
        """Whether it was replayed: no Python of the computation ran."""
        self._images.copy_(images, non_blocking=True)
        self._labels.copy_(labels, non_blocking=True)
        replayed = self._captured.replays
        self._captured()
        return replayed
