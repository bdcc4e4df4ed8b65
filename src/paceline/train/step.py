"""One training step, top to bottom: batch → forward → backward → reduce → finite check → update.

In: the step's number and rate. Out: what happened, equal on all ranks. Whatever goes wrong on one
rank rides with the gradients, so that all ranks skip, stop or fail at the same step.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.comm.gradient_exchange import GradientExchange, Signals
from paceline.comm.group import Group
from paceline.core.errors import PacelineError, RunError
from paceline.data.batch import CorruptSample
from paceline.data.batch_plan import BatchPlan
from paceline.data.loader import TrainLoader
from paceline.data.normalize import Normalizer
from paceline.optim.build import set_rate
from paceline.precision.finite import all_finite
from paceline.train.batch_norm import BatchNormState
from paceline.train.memory import memory_error
from paceline.train.seeds import seed_micro_batch
from paceline.train.stop_signals import StopSignals


@dataclass(frozen=True)
class StepOutcome:
    """`done` is False when a stop signal cut the step short: nothing of it remains."""

    done: bool
    skipped: bool
    stop: signal.Signals | None
    loss: float
    corrupt_count: int
    corrupt_here: tuple[CorruptSample, ...]
    step_s: float
    data_s: float


@dataclass
class TrainStep:
    """Everything one step touches."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    exchange: GradientExchange
    batch_norm: BatchNormState
    loader: TrainLoader
    normalize: Normalizer
    plan: BatchPlan
    group: Group
    stop: StopSignals
    smoothing: float
    seed: int
    # An error between steps waits here for the next exchange, which tells all ranks.
    fault: PacelineError | None = None

    def run(self, step: int, rate: float) -> StepOutcome:
        """Computes, exchanges and applies the gradient of global batch number `step`."""
        started, data_s = time.perf_counter(), 0.0
        loss = torch.zeros((), device=self.group.device)
        corrupt: list[CorruptSample] = []
        signals = Signals()
        # The sum over ranks and micro-batches of (sum of losses / samples of the global batch) is
        # the mean over the global batch, whoever holds how many of its samples.
        first, last = self.plan.step_range(step)
        share = 1.0 / (last - first)

        self.exchange.zero()
        self.batch_norm.remember()
        try:
            if self.fault is not None:
                raise self.fault
            for turn, _ in enumerate(self.plan.micro_batches(step, self.group.rank)):
                if self._asked_to_stop():
                    signals.abandon = 1.0
                    break
                waiting = time.perf_counter()
                batch = next(self.loader)
                data_s += time.perf_counter() - waiting
                corrupt += batch.corrupt
                seed_micro_batch(self.seed, step, self.group.rank + turn * self.group.world_size)
                images = self.normalize(batch.images, self.group.device)
                labels = batch.labels.to(self.group.device, non_blocking=True)
                part = self._loss(self.model(images), labels) * share
                part.backward()  # type: ignore[no-untyped-call]
                loss += part.detach()
        except PacelineError as error:
            self.group.post_fault(error)
            signals.fault = 1.0
        except (RuntimeError, MemoryError, ValueError) as error:
            fault = self._memory_error(step, error) or _single_value_error(step, error)
            if fault is None:
                raise
            self.group.post_fault(fault)
            signals.fault = 1.0

        signals.loss = float(loss)
        signals.corrupt = float(len(corrupt))
        signals.interrupt = float(self.stop.received is signal.SIGINT)
        signals.terminate = float(self.stop.received is signal.SIGTERM)
        agreed = self.exchange.reduce(signals)
        if agreed.fault:
            raise self.group.fault()

        done = not agreed.abandon
        finite = done and all_finite(self.exchange.gradients)
        if finite:
            set_rate(self.optimizer, rate)
            self.optimizer.step()
        else:
            self.batch_norm.recall()
        return StepOutcome(
            done=done,
            skipped=done and not finite,
            stop=_stop_signal(agreed),
            loss=agreed.loss,
            corrupt_count=round(agreed.corrupt),
            corrupt_here=tuple(corrupt),
            step_s=time.perf_counter() - started,
            data_s=data_s,
        )

    def _memory_error(self, step: int, error: Exception) -> RunError | None:
        size = self.plan.micro_batch
        return memory_error(
            error,
            f"at step {step} with a batch size of {size} a process",
            f"use a smaller one, such as --batch-size {max(1, size // 2)}; "
            "the global batch and the result stay the same",
        )

    def _asked_to_stop(self) -> bool:
        """Here, or on another rank, which then waits for us with seconds to spare."""
        if self.stop.received is not None:
            self.group.announce_stop()
            return True
        return self.group.stop_announced()

    def _loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs, labels, reduction="sum", label_smoothing=self.smoothing)


def _single_value_error(step: int, error: Exception) -> RunError | None:
    """Batch norm has no variance to take of one sample with 1 × 1 maps."""
    if "more than 1 value per channel" not in str(error):
        return None
    return RunError(
        f"a micro-batch of one sample at step {step} leaves batch norm a single value",
        "choose a --global-batch-size or --epochs with which the last batch has more samples, or a "
        "larger --batch-size",
    )


def _stop_signal(agreed: Signals) -> signal.Signals | None:
    if agreed.terminate:
        return signal.SIGTERM
    return signal.SIGINT if agreed.interrupt else None
