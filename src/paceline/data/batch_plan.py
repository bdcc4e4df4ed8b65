"""`BatchPlan`: which stretch of the sample stream each step and each micro-batch takes.

In: samples, epochs, global batch, micro-batch and the number of ranks. Out: pure arithmetic on
positions. The micro-batches of a step never depend on the number of ranks, only their owners do, so
a run that resumes on other ranks computes the same gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

Stretch = tuple[int, int]


@dataclass(frozen=True)
class BatchPlan:
    """Steps count from 0. A global batch may span an epoch's end; only the last may be short."""

    samples: int
    epochs: int
    global_batch: int
    micro_batch: int
    world_size: int

    def __post_init__(self) -> None:
        for name in ("samples", "epochs", "global_batch", "micro_batch", "world_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        if self.global_batch % (self.micro_batch * self.world_size):
            raise ValueError(
                f"global_batch = {self.global_batch} is not a multiple of micro_batch · "
                f"world_size = {self.micro_batch} · {self.world_size}"
            )

    @property
    def total_samples(self) -> int:
        return self.samples * self.epochs

    @property
    def total_steps(self) -> int:
        return -(-self.total_samples // self.global_batch)

    @property
    def accumulation(self) -> int:
        """Micro-batches that each rank takes in a full step."""
        return self.global_batch // (self.micro_batch * self.world_size)

    def step_range(self, step: int) -> Stretch:
        """Positions of the stream that `step` consumes."""
        if not 0 <= step < self.total_steps:
            raise IndexError(f"step {step} of {self.total_steps}")
        start = step * self.global_batch
        return start, min(start + self.global_batch, self.total_samples)

    def epoch_at(self, step: int) -> float:
        """Epochs consumed once `step` steps are done."""
        return min(step * self.global_batch, self.total_samples) / self.samples

    def micro_batches(self, step: int, rank: int) -> list[Stretch]:
        """This rank's share of `step`; none in a last step too short for all ranks.

        A short step is cut into as few micro-batches as hold it, of sizes that differ by at most
        one; number j belongs to rank j modulo the ranks.
        """
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} of {self.world_size}")
        start, stop = self.step_range(step)
        length = stop - start
        pieces = -(-length // self.micro_batch)
        return [
            (start + j * length // pieces, start + (j + 1) * length // pieces)
            for j in range(rank, pieces, self.world_size)
        ]

    def ends_epoch(self, step: int, every: int = 1) -> bool:
        """Whether an epoch is complete after `step` that was not before it, and whose number `every`
        divides; a step may complete several."""
        start, stop = (position // self.samples for position in self.step_range(step))
        return start // every < stop // every
