"""Computes the gradients of SVRG and HALP: full gradients, and differences of two passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from paceline.alternatives.svrg.optimizer import SVRG
from paceline.alternatives.svrg.settings import SvrgSettings
from paceline.comm.exchange import SIGNALS, Signals
from paceline.config import RunConfig
from paceline.data import Batch, BatchPlan, TrainBatches
from paceline.train.machine import seed_micro_batch
from paceline.train.micro_step import Begun, GradientSource, MakeLoader
from paceline.train.model_checks import step_error
from paceline.train.step import TrainStep
from paceline.train.strategy import MicroBatch


@dataclass(frozen=True)
class SvrgSource(GradientSource):
    """Computes the gradients of SVRG: of all samples at times, and of each micro-batch in two passes.

    The gradient of a micro-batch is the gradient at the weights minus the gradient at the anchor, an
    earlier value of the weights.

    Attributes:
        interval: Number of steps from one full gradient to the next.
        plan: Divides all samples into micro-batches for a full gradient.
        loader: Creates the loader for a full gradient.
    """

    interval: int
    plan: BatchPlan
    loader: Callable[[], TrainBatches]

    fixed_ranks = "a full gradient is a sum over all ranks and several steps"
    several_passes: ClassVar[bool] = True

    @classmethod
    def create(cls, config: RunConfig, plan: BatchPlan, make_loader: MakeLoader) -> GradientSource:
        own = config.optim.own_optimizer
        assert isinstance(own, SvrgSettings)
        # One micro-batch per rank and step, because only the sum over all micro-batches matters.
        whole = replace(plan, epochs=1, global_batch=plan.micro_batch * plan.world_size)
        return cls(own.interval(plan.steps_per_epoch), whole, lambda: make_loader(whole, 0))

    @property
    def exchanges(self) -> float:  # type: ignore[override] # read only
        return 1 + 1 / self.interval

    def begin(self, step: TrainStep, number: int) -> Begun:
        """Every `interval` steps, computes the gradient of all samples and moves the anchor.

        If a rank fails in this pass, the next step raises the error again and reports it to all
        ranks. A rank that is asked to stop leaves the pass between two batches; a resumed run
        repeats the pass.
        """
        if number % self.interval:
            return Begun()
        with step.spans.span("full gradient"):
            return self._center(step, number)

    def _center(self, step: TrainStep, number: int) -> Begun:
        step.exchange.begin(number)
        step.batch_norm.remember()
        step.micro.begin(self.plan.samples, self.plan.samples)
        fault, abandoned = step.fault, False
        try:
            if fault is None:
                abandoned = not self._add_all_samples(step, number)
        except Exception as error:  # `step_error` raises errors of the program itself again
            fault = step_error(
                error, number, step.plan.micro_batch, foreign=step.foreign, advise=step.micro.advise
            )
            if fault is None:
                raise
        step.batch_norm.roll_back()
        step.reduce(Signals(fault=float(fault is not None), abandon=float(abandoned)))
        # This synchronizes with the device, which is cheap compared to a full pass.
        tail = step.exchange.tail[: len(SIGNALS)]
        sums = dict(zip(SIGNALS, step.group.watched("the full gradient", tail.tolist), strict=True))
        # If one rank has left the pass, the sum is incomplete and no rank makes the step.
        if not sums["fault"] and not sums["abandon"]:
            _optimizer(step).center()
        return Begun(fault, sums["abandon"] > 0)

    def _add_all_samples(self, step: TrainStep, number: int) -> bool:
        """Adds this rank's part of the gradient of all samples.

        Returns False if a rank was asked to stop.
        """
        with self.loader() as batches:
            for place, batch in enumerate(batches):
                if step.given_up or step.asked_to_stop():
                    return False
                seed_micro_batch(step.seed, number, place)
                full_size = len(batch.labels) == self.plan.micro_batch
                step.micro.run(batch.images, batch.labels, full_size=full_size)
        return True

    def add(
        self, step: TrainStep, number: int, batch: Batch, part: MicroBatch, mix: Tensor | None
    ) -> None:
        """Subtracts the gradients at the anchor and adds the gradients at the weights.

        The pass at the anchor changes neither batch-norm statistics nor the loss.
        """
        micro, norms = step.micro, step.batch_norm
        kept = micro.loss, norms.flat, norms.tracked
        values = [tensor.clone() for tensor in kept]
        micro.sample_weight.neg_()
        with _optimizer(step).at_anchor():
            micro.run(batch.images, batch.labels, full_size=part.full_size)
        micro.sample_weight.neg_()
        for tensor, value in zip(kept, values, strict=True):
            tensor.copy_(value)
        seed_micro_batch(step.seed, number, part.number)
        super().add(step, number, batch, part, mix)

    def describe(self) -> dict[str, str]:
        every = f"every {self.interval:,} steps, over {self.plan.samples:,} images"
        return {"full gradient": every}


def _optimizer(step: TrainStep) -> SVRG:
    optimizer = step.optimizer
    assert isinstance(optimizer, SVRG)
    return optimizer
