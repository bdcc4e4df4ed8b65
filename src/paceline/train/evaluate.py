"""Evaluation: top-1 and top-5 over the validation images, exact over all ranks.

In: a model that already holds the averaged batch-norm statistics. Out: counts summed over ranks; each
image is seen by exactly one rank, so the result does not depend on how many there are.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from paceline.comm.group import Group
from paceline.core.errors import DataError, PacelineError, RunError
from paceline.data.batch import Batch, CorruptSample
from paceline.data.loader_protocol import EvalBatches
from paceline.data.normalize import Normalizer
from paceline.precision.policy import Policy
from paceline.train.memory import memory_error
from paceline.train.stop_signals import StopSignals, agreed_stop


@dataclass(frozen=True)
class EvalResult:
    """Percentages and the mean loss over `samples` images. `corrupt_here` is this rank's."""

    top1: float
    top5: float
    loss: float
    samples: int
    corrupt_count: int
    corrupt_here: tuple[CorruptSample, ...]
    eval_s: float


def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    normalize: Normalizer,
    policy: Policy,
    group: Group,
    stop: StopSignals,
    corrupt_limit: int | None = None,
) -> EvalResult | signal.Signals:
    """The signal, on all ranks, when one was asked to stop: the counts would be incomplete.

    More corrupt images than `corrupt_limit`, over all ranks together, are an error on all of them.
    """
    started = time.perf_counter()
    model.eval()
    correct1 = torch.zeros((), dtype=torch.float64, device=group.device)
    correct5, loss = correct1.clone(), correct1.clone()
    seen, failed, size = 0, 0, 0
    corrupt: list[CorruptSample] = []
    try:
        # Blocks that are compiled for training would be compiled once more for this.
        with torch.inference_mode(), torch.compiler.set_stance("force_eager"), policy.compute():
            for batch in batches:
                if stop.received is not None:
                    group.announce_stop()
                if stop.received is not None or group.stop_announced():
                    break
                size = len(batch)
                outputs = model(normalize(batch.images, group.device)).float()
                labels = batch.labels.to(group.device, non_blocking=True)
                ranked = outputs.topk(min(5, outputs.shape[1]), dim=1).indices == labels[:, None]
                correct1 += ranked[:, 0].sum()
                correct5 += ranked.sum()
                loss += F.cross_entropy(outputs, labels, reduction="sum")
                seen += len(labels)
                corrupt += batch.corrupt
    except (PacelineError, RuntimeError, MemoryError) as error:
        # The other ranks wait in the sum below, and are told there.
        fault = error if isinstance(error, PacelineError) else _memory_error(error, size)
        if fault is None:
            raise
        group.post_fault(fault)
        failed = 1
    finally:
        model.train()
    if isinstance(batches, EvalBatches):
        # It also knows those of a last batch of which nothing was left to hand over.
        corrupt = list(batches.corrupt)
    asked = stop.stop_flags().values()
    own = torch.tensor([seen, len(corrupt), failed, *asked], dtype=torch.float64)
    total = torch.cat([torch.stack([correct1, correct5, loss]), own.to(group.device)])
    group.all_reduce_sum(total)
    right1, right5, loss_sum, samples, bad, failures, *stops = total.tolist()
    if failures:
        raise group.fault()
    stopped = agreed_stop(stops)
    if stopped is not None:
        return stopped
    _check_counts(samples, bad, corrupt_limit)
    return EvalResult(
        top1=100 * right1 / samples,
        top5=100 * right5 / samples,
        loss=loss_sum / samples,
        samples=round(samples),
        corrupt_count=round(bad),
        corrupt_here=tuple(corrupt),
        eval_s=time.perf_counter() - started,
    )


def _check_counts(samples: float, bad: float, corrupt_limit: int | None) -> None:
    """Counts are equal on all ranks here, and so is the error."""
    if corrupt_limit is not None and bad > corrupt_limit:
        raise DataError(
            f"{bad:.0f} corrupt validation images, more than data.max_corrupt_share allows "
            f"({corrupt_limit})",
            "mend the data (metrics*.jsonl names the samples), or raise the share",
        )
    if not samples:
        raise DataError("no validation image could be decoded", "check the validation images")


def _memory_error(error: Exception, size: int) -> RunError | None:
    return memory_error(
        error,
        f"evaluating {size} images at a time",
        "use a smaller --batch-size, which lowers it too",
    )
