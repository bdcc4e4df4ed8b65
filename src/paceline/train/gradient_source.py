"""`GradientSource`: how a step computes the gradients of its micro-batches.

The default is the plain backward pass. The settings class of an optimizer names another one in
`GRADIENTS`, which an extension lists as one of its gradient sources or a program registers. Only
`MicroStep` is captured in CUDA graphs: code of a source never runs inside of a capture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from torch import Tensor

from paceline.config import RunConfig
from paceline.core.errors import PacelineError
from paceline.core.extensions import Registry
from paceline.data import Batch, BatchPlan, TrainBatches

if TYPE_CHECKING:
    from paceline.train.step import TrainStep
    from paceline.train.strategy import MicroBatch

# Creates this rank's loader of a plan, from a step on.
MakeLoader = Callable[[BatchPlan, int], TrainBatches]


class Begun(NamedTuple):
    """What became of the start of a step.

    Attributes:
        fault: The error of this rank, which the step reports to all ranks.
        abandoned: A rank was asked to stop, so that no rank computes the step.
    """

    fault: PacelineError | None = None
    abandoned: bool = False


class GradientSource:
    """The plain backward pass.

    Attributes:
        several_passes: `add` runs the model more than once, so that gradients add up in fp32.
        exchanges: All-reduces of whole gradients a step, on average.
    """

    several_passes: ClassVar[bool] = False
    exchanges: float = 1.0

    @classmethod
    def create(cls, config: RunConfig, plan: BatchPlan, make_loader: MakeLoader) -> GradientSource:
        """Creates the source of a run."""
        return cls()

    def begin(self, step: TrainStep, number: int) -> Begun:
        """Called before the first micro-batch of step `number`. May exchange gradients."""
        return Begun()

    def add(
        self, step: TrainStep, number: int, batch: Batch, part: MicroBatch, mix: Tensor | None
    ) -> None:
        """Adds the gradients of a micro-batch of step `number`; random generators have been seeded."""
        step.micro.run(batch.images, batch.labels, usual=part.usual, last=part.last, mix=mix)

    def describe(self) -> dict[str, str]:
        """Returns lines for the start of the run."""
        return {}


GRADIENT_SOURCES: Registry[type[GradientSource]] = Registry(
    "gradient sources", {"backward": GradientSource}
)


def source_class(config: RunConfig) -> type[GradientSource]:
    """Returns the gradient source that the optimizer needs."""
    return GRADIENT_SOURCES.get(config.optim.own_optimizer.GRADIENTS, "optim.name")
