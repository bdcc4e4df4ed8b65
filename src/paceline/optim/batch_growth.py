"""Batches that grow during training: `optim.batch_schedule` and what it means for the learning rate.

A list of (epoch, global batch) or a rule becomes the stages of the run's `BatchPlan`. Without torch,
because settings are read without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.errors import ConfigError

BATCH_RATES = ("auto", "constant", "linear", "sqrt")
FIELD = "optim.batch_schedule"
Stages = tuple[tuple[float, int], ...]


@dataclass(frozen=True)
class BatchGrowth:
    """`stages` of a list, from epoch 0 or later, or the `factor` of a rule and its largest batch, if it
    has one; neither if the batch stays as it is."""

    text: str = ""
    stages: Stages = ()
    factor: int = 1
    limit: int | None = None

    @classmethod
    def parse(cls, text: str) -> BatchGrowth:
        """Reads `0:256,8:1024`, `x4`, `x4:4096` or an empty text. ConfigError for anything else."""
        written = text.replace(" ", "")
        if not written:
            return cls()
        if written[0] in "xX×":
            digits, colon, most = written[1:].partition(":")
            factor, limit = _integer(text, digits), _integer(text, most) if colon else None
            if factor < 2 or limit == 0:
                least = "factor must be at least 2" if factor < 2 else "limit must be at least 1"
                raise ConfigError(FIELD, text, f"the {least}", "try 'x4'")
            return cls(text, factor=factor, limit=limit)
        stages = tuple(_stage(text, part) for part in written.split(","))
        epochs = [epoch for epoch, _ in stages]
        if epochs != sorted(set(epochs)):
            raise ConfigError(FIELD, text, "epochs must rise", "sort the list by epoch")
        return cls(text, stages)

    def __bool__(self) -> bool:
        return bool(self.stages) or self.factor > 1

    def first_batch(self, global_batch: int | None) -> int | None:
        """The batch of the first step: that of epoch 0, or the one of the run's settings."""
        if not self.stages or self.stages[0][0] > 0:
            return global_batch
        first = self.stages[0][1]
        if global_batch not in (None, first):
            raise ConfigError(
                FIELD, self.text, f"begins with {first}, but run.global_batch_size is {global_batch}",
                "leave one of the two out",
            )  # fmt: skip
        return first

    def after(self, first: int, unit: int, decay_epochs: Sequence[float]) -> Stages:
        """(epoch, batch) after a run's `first` batch. `unit` is the micro-batch times the ranks, of
        which every batch is a multiple. A rule grows the batch at `decay_epochs`, up to its limit."""
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
            if batch % unit:
                below, above = batch // unit * unit, (batch // unit + 1) * unit
                raise ConfigError(
                    FIELD, self.text,
                    f"the batch of {batch} at epoch {epoch:g} is not a multiple of {unit}, the "
                    "micro-batches of all ranks",
                    f"use {below or above}" + (f" or {above}" if below else "")
                    + ", or another --batch-size",
                )  # fmt: skip
        return stages

    def rate_factor(self, mode: str, batch: int, first: int) -> float:
        """By how much the rate of the schedule is multiplied while the batch is `batch`."""
        if mode == "auto":
            mode = "linear" if self.factor > 1 else "constant"
        if batch == first or mode == "constant":
            return 1.0
        return math.sqrt(batch / first) if mode == "sqrt" else batch / first


def describe_stages(first: int, stages: Stages) -> str:
    """`256, from epoch 8 on 1,024, from epoch 12 on 4,096`."""
    return ", ".join([f"{first:,}", *(f"from epoch {epoch:g} on {b:,}" for epoch, b in stages)])


def _stage(text: str, part: str) -> tuple[float, int]:
    epoch, colon, batch = part.partition(":")
    try:
        at = float(epoch)
    except ValueError:
        at = math.nan
    if not colon or not 0 <= at < math.inf:
        raise ConfigError(
            FIELD, text, f"{part!r} is not EPOCH:BATCH", "write it as in '0:256,8:1024', or 'x4'"
        )
    value = _integer(text, batch)
    if value < 1:
        raise ConfigError(FIELD, text, f"a batch of {value}", "use at least 1")
    return at, value


def _integer(text: str, digits: str) -> int:
    if not (digits.isascii() and digits.isdigit() and len(digits) < 10):
        raise ConfigError(
            FIELD,
            text,
            f"{digits!r} is not a whole number",
            "write it as in '0:256,8:1024', or 'x4'",
        )
    return int(digits)
