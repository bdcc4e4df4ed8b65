"""`MicroStep`: forward and backward of one micro-batch.

In: pixels and labels. Out: gradients in the exchange's buffers, and the loss added up on the device. The
loss is divided by the step's samples, those of all ranks, and multiplied by the step's loss scale before
the backward pass, so the sum over ranks and micro-steps is the average, times that scale. In the last
micro-step of a step an exchange that overlaps sends buffers while backward goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.comm.gradient_exchange import GradientExchange
from paceline.data.normalize import Normalizer
from paceline.precision.policy import LossScale, Policy
from paceline.train.captured import Captured
from paceline.train.mixing import mixed, other_labels

# Images, labels, and a table of `Mixing` where images are mixed.
_Parts = tuple[Tensor, Tensor, Tensor | None]
_Compute = Callable[[Tensor, Tensor, Tensor | None], None]


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
        """`graphs`: micro-steps are recorded; a last one that overlaps only where its carrier can be."""
        self.forward = forward
        self._policy = policy
        self._normalize = normalize
        self._exchange = exchange
        self._scale = scale
        self._smoothing = smoothing
        self._graphs = graphs
        self._share = torch.zeros((), device=policy.device)
        self.loss = torch.zeros((), device=policy.device)
        self._recorded: _Recorded | None = None

    def begin(self, samples: int, global_batch: int) -> None:
        """Before the first micro-batch of a step over `samples` samples, those of all ranks;
        `global_batch` is what a full step has."""
        self._share.fill_(1.0 / samples)
        self._scale.begin_step(samples, global_batch)
        self.loss.zero_()

    def run(
        self, images: Tensor, labels: Tensor, *, usual: bool, last: bool = False,
        mix: Tensor | None = None,
    ) -> None:  # fmt: skip
        """`usual`: the size that nearly every micro-batch has, worth recording. `last` of its step: what
        backward fills may leave. `mix` is a table of `Mixing`, always or never."""
        armed = last and self._exchange.overlaps
        recorded = self._graphs and (not armed or self._exchange.carrier.recordable)
        if not (self._graphs and usual):
            self._drop_recording()
        if not (recorded and usual):
            if armed:
                self._exchange.arm()
            self._compute(*_moved((images, labels, mix), self._policy.device))
            return
        if self._recorded is None:
            self._normalize.prepare(self._policy.device)
            self._recorded = _Recorded(
                self._compute, self._compute_armed, (images, labels, mix), self._policy.device
            )
        self._recorded.run((images, labels, mix), self._exchange, armed=armed)

    def release(self) -> None:
        """Destroys the CUDA graphs, before the process groups whose collectives they hold."""
        recorded, self._recorded = self._recorded, None
        self._graphs = False
        if recorded is not None:
            recorded.release()

    def _drop_recording(self) -> None:
        """A recording holds the memory of a whole micro-batch for good, and a short batch, at the end of
        a run, needs nearly as much once more."""
        recorded, self._recorded = self._recorded, None
        if recorded is not None:
            # The exchange of the step before may still be under way, and wait for a lost rank.
            self._exchange.group.watched(
                "the end of the step before", lambda: torch.cuda.synchronize(self._policy.device)
            )
            recorded.release()
            torch.cuda.empty_cache()

    def _compute(self, images: Tensor, labels: Tensor, mix: Tensor | None) -> None:
        own: Tensor | None = None
        with self._policy.compute():
            inputs = self._normalize(images, self._policy.device)
            if mix is not None:
                inputs, own = mixed(inputs, mix)
            outputs = self.forward(inputs)
        part = self._loss(outputs.float(), labels, own) * self._share
        (part * self._scale.step_value).backward()  # type: ignore[no-untyped-call]
        self.loss.add_(part.detach())
        self._exchange.gather()

    def _loss(self, outputs: Tensor, labels: Tensor, own: Tensor | None) -> Tensor:
        """Summed over the samples; of both labels where two images were mixed."""
        of = partial(F.cross_entropy, outputs, label_smoothing=self._smoothing)
        if own is None:
            return of(labels, reduction="sum")
        first, second = (of(each, reduction="none") for each in (labels, other_labels(labels)))
        return (own * first + (1 - own) * second).sum()

    def _compute_armed(self, images: Tensor, labels: Tensor, mix: Tensor | None) -> None:
        """What left during backward is there at the end: a recording must not end before."""
        self._exchange.arm()
        self._compute(images, labels, mix)
        self._exchange.join()


def _moved(parts: _Parts, device: torch.device) -> _Parts:
    images, labels, mix = parts
    return (
        images.to(device, non_blocking=True), labels.to(device, non_blocking=True),
        None if mix is None else mix.to(device, non_blocking=True),
    )  # fmt: skip


class _Recorded:
    """The recordings of a micro-batch, plain and armed, with the memory that they read.

    Only one runs at a time, and what it leaves is in the exchange's buffers, so they share one pool.
    """

    def __init__(
        self,
        plain: _Compute,
        armed: _Compute,
        parts: _Parts,
        device: torch.device,
    ) -> None:
        images, labels, mix = parts
        self._parts: _Parts = (
            torch.empty_like(images, device=device), torch.empty_like(labels, device=device),
            None if mix is None else torch.empty_like(mix, device=device),
        )  # fmt: skip
        pool = torch.cuda.graph_pool_handle()
        self._captured = {
            kind: Captured(partial(compute, *self._parts), enabled=True, pool=pool)
            for kind, compute in ((False, plain), (True, armed))
        }
        self._uses: dict[bool, frozenset[str]] = {}
        self._sent: dict[bool, int] = {}

    def release(self) -> None:
        for captured in self._captured.values():
            captured.release()

    def run(self, parts: _Parts, exchange: GradientExchange, *, armed: bool) -> None:
        """Replays, and tells the exchange what no Python has told it; records where due."""
        for place, part in zip(self._parts, parts, strict=True):
            if place is not None and part is not None:
                place.copy_(part, non_blocking=True)
        captured = self._captured[armed]
        replayed, records, sent = captured.replays, captured.records, exchange.sent
        try:
            captured()
        except Exception:
            if records:
                exchange.forget_sent(sent)
            raise
        if replayed:
            exchange.note_replay(self._uses[armed], self._sent[armed])
        else:
            self._uses[armed], self._sent[armed] = exchange.gathered, exchange.sent
