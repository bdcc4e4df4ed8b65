"""Reads `optim.batch_schedule`, which makes the global batch grow during training.

The setting is a list of epochs and global batches, or a rule such as `x4`. Both become pairs (epoch,
global batch), called the stages of the run's `BatchPlan`. This module does not import torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.errors import ConfigError

BATCH_RATES = ("auto", "constant", "linear", "sqrt")
FIELD = "optim.batch_schedule"
Stages = tuple[tuple[float, int], ...]
_RULE = re.compile(r"x(\d{1,9})(?::(\d{1,9}))?", re.ASCII)
_STAGE = re.compile(r"(\d{1,9}(?:\.\d+)?):(\d{1,9})", re.ASCII)


@dataclass(frozen=True)
class BatchGrowth:
    """The growth of the global batch, given by a list or a rule. It is falsy if the batch is constant.

    Attributes:
        text: Value of the setting `optim.batch_schedule`.
        stages: Pairs (first epoch, global batch), if the setting is a list.
        factor: Factor by which the batch grows each time, if the setting is a rule; otherwise 1.
        limit: Largest batch of a rule; None without a limit.
    """

    text: str = ""
    stages: Stages = ()
    factor: int = 1
    limit: int | None = None

    @classmethod
    def parse(cls, text: str) -> BatchGrowth:
        """Parses `0:256,8:1024`, `x4`, `x4:4096` or "". Raises ConfigError for any other form."""
        written = text.replace(" ", "")
        if not written:
            return cls()
        if rule := _RULE.fullmatch(written):
            factor, limit = int(rule[1]), int(rule[2]) if rule[2] else None
            if factor < 2 or limit == 0:
                problem = "the factor must be at least 2, and the limit at least 1"
                raise ConfigError(FIELD, text, problem, "try 'x4'")
            return cls(text, factor=factor, limit=limit)
        stages = tuple(_stage(text, part) for part in written.split(","))
        epochs = [epoch for epoch, _ in stages]
        if epochs != sorted(set(epochs)):
            raise ConfigError(FIELD, text, "epochs are not in order", "sort the list by epoch")
        return cls(text, stages)

    def __bool__(self) -> bool:
        return bool(self.stages) or self.factor > 1

    def first_batch(self, global_batch: int | None) -> int | None:
        """Returns the global batch of the first step: the list's entry for epoch 0, or `global_batch`.

        Raises:
            ConfigError: If both are set and differ.
        """
        if not self.stages or self.stages[0][0] > 0:
            return global_batch
        first = self.stages[0][1]
        if global_batch not in (None, first):
            raise ConfigError(
                FIELD, self.text, f"begins with {first}, but run.global_batch_size is {global_batch}",
                "leave one of the two out",
            )  # fmt: skip
        return first

    def after(self, first: int, micro_batch: int, decay_epochs: Sequence[float]) -> Stages:
        """Computes when and to what size the batch grows after the first step.

        Args:
            first: First global batch of the run.
            micro_batch: Size of a micro-batch. Every global batch must be a multiple of it.
            decay_epochs: Epochs at which a rule multiplies the batch.

        Returns:
            Pairs of epoch and new global batch.

        Raises:
            ConfigError: If a batch is not a multiple of `micro_batch`.
        """
        stages = tuple(stage for stage in self.stages if stage[0] > 0)
        if self.factor > 1:
            most = math.inf if self.limit is None else max(self.limit, first)
            grown = (first * self.factor ** (n + 1) for n in range(len(decay_epochs)))
            capped = [int(min(batch, most)) for batch in grown]
            stages = tuple(
                (epoch, batch)
                for epoch, batch, before in zip(
                    decay_epochs, capped, [first, *capped], strict=False
                )
                if batch != before and epoch > 0
            )
        for epoch, batch in stages:
            if batch % micro_batch:
                raise ConfigError(
                    FIELD, self.text,
                    f"the batch of {batch} at epoch {epoch:g} is not a multiple of the micro-batch "
                    f"{micro_batch}",
                    f"use {nearest_multiples(batch, micro_batch)}, or another --batch-size",
                )  # fmt: skip
        return stages

    def rate_factor(self, mode: str, batch: int, first: int) -> float:
        """Returns the factor that multiplies the learning rate while the run uses `batch`.

        Args:
            mode: Value of `optim.batch_rate`.
            batch: Current global batch.
            first: First global batch of the run.
        """
        if mode == "auto":
            mode = "linear" if self.factor > 1 else "constant"
        if batch == first or mode == "constant":
            return 1.0
        return math.sqrt(batch / first) if mode == "sqrt" else batch / first


def largest_micro_batch(batch: int, ranks: int, most: int) -> int:
    """Returns the largest micro-batch of at most `most` samples that keeps all ranks about equally busy.

    If the ranks can divide the batch evenly, the micro-batch divides the part of a rank. Otherwise, it
    divides the batch, and no rank has more than 4/3 of an even part.

    Args:
        batch: Number of samples in a step, over all ranks.
        ranks: Number of ranks.
        most: Largest micro-batch.
    """
    part = -(-batch // ranks)
    if batch % ranks == 0:
        count = -(-part // most)
        while part % count:
            count += 1
        return part // count
    return max(
        size
        for size in range(1, min(batch, most) + 1)
        if batch % size == 0 and 3 * size * -(-batch // (size * ranks)) <= 4 * part
    )


def nearest_multiples(value: int, unit: int) -> str:
    """Returns a text with the multiples of `unit` above 0 next to `value`, such as `128 or 192`."""
    below, above = value // unit * unit, (value // unit + 1) * unit
    return f"{below} or {above}" if below else str(above)


def describe_stages(first: int, stages: Stages) -> str:
    """Returns a text such as `256, from epoch 8 on 1,024, from epoch 12 on 4,096`."""
    return ", ".join([f"{first:,}", *(f"from epoch {epoch:g} on {b:,}" for epoch, b in stages)])


def _stage(text: str, part: str) -> tuple[float, int]:
    stage = _STAGE.fullmatch(part)
    if stage is None or int(stage[2]) < 1:
        problem = f"{part!r} is not EPOCH:BATCH with a batch of at least 1"
        raise ConfigError(FIELD, text, problem, "write it as in '0:256,8:1024', or 'x4'")
    return float(stage[1]), int(stage[2])
