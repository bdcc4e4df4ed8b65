"""`Anchors`: what SVRG and its relatives compute beside a step's own gradients.

Passes over all samples, and computes the gradients of each micro-batch at the anchor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from paceline.comm.group import Group
from paceline.config import RunConfig
from paceline.data import Batch, BatchPlan, Source, TrainBatches, create_train_loader
from paceline.optim.base import MasterOptimizer
from paceline.optim.svrg import SVRG
from paceline.train.batch_norm import BatchNormState
from paceline.train.components import Components
from paceline.train.machine import seed_micro_batch
from paceline.train.micro_step import MicroStep


@dataclass(frozen=True)
class Anchors:
    """Every `interval` steps a pass over all samples, in the micro-batches of `plan`, which `loader`
    makes."""

    optimizer: SVRG
    interval: int
    plan: BatchPlan
    loader: Callable[[], TrainBatches]

    def add_all_samples(
        self, micro: MicroStep, seed: int, step: int, stops: Callable[[], bool]
    ) -> bool:
        """Adds up this rank's part of the gradient of all samples. False where `stops` has ended it
        between two micro-batches."""
        with self.loader() as batches:
            for number, batch in enumerate(batches):
                if stops():
                    return False
                seed_micro_batch(seed, step, number)
                usual = len(batch.labels) == self.plan.micro_batch
                micro.run(batch.images, batch.labels, usual=usual)
        return True

    def subtract(
        self, micro: MicroStep, batch_norm: BatchNormState, batch: Batch, *, usual: bool
    ) -> None:
        """Subtracts the gradients of a micro-batch at the anchor, without a trace in batch norm."""
        flat, tracked = batch_norm.flat.clone(), batch_norm.tracked.clone()
        with self.optimizer.at_anchor():
            micro.run(batch.images, batch.labels, usual=usual, subtract=True)
        batch_norm.flat.copy_(flat)
        batch_norm.tracked.copy_(tracked)

    def describe(self) -> str:
        return f"every {self.interval:,} steps, over {self.plan.samples:,} images"


def create_anchors(
    config: RunConfig, source: Source, plan: BatchPlan, optimizer: MasterOptimizer, group: Group,
    components: Components,
) -> Anchors | None:  # fmt: skip
    """None for optimizers that need no full gradient."""
    if not isinstance(optimizer, SVRG) or not optimizer.anchored:
        return None
    # As many micro-batches to a step as there are ranks: only their sum counts.
    whole = replace(plan, epochs=1, global_batch=plan.micro_batch * plan.world_size)

    def loader() -> TrainBatches:
        return create_train_loader(
            source, whole, config.data, seed=config.run.seed, rank=group.rank, first_step=0,
            device=group.device, augment=components.augment,
        )  # fmt: skip

    interval = max(1, round(config.optim.center_epochs * plan.steps_per_epoch))
    return Anchors(optimizer, interval, whole, loader)
