"""Evaluates a model or a checkpoint file: exact top-1 and top-5 over the validation images.

Exactly one rank evaluates each image, and the counts are summed over ranks. The result thus does not
depend on the number of ranks, except that in half precision, rounding can change a few images.
"""

from __future__ import annotations

import copy
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from paceline.comm.group import Group
from paceline.config import RunConfig, stored_config
from paceline.core.errors import CheckpointError, DataError, PacelineError, RunError
from paceline.core.imports import PYTHON, python_object_error
from paceline.core.topology import Topology
from paceline.core.untrusted import one_line
from paceline.data import (
    Batch,
    CorruptSample,
    EvalBatches,
    Normalizer,
    Source,
    allowed_corrupt,
    create_eval_loader,
    open_data,
    open_other,
    open_source,
)
from paceline.models.registry import is_own
from paceline.precision.policy import Policy, allow_tf32, choose_policy
from paceline.train.checkpoint import Checkpoint
from paceline.train.components import Components
from paceline.train.eval_details import EvalDetails
from paceline.train.fast_path import triton_problem
from paceline.train.inputs import common_settings, labels_digest, shared_versions
from paceline.train.loss import LOSSES, CrossEntropy, OwnLoss, TrainingLoss, create_loss
from paceline.train.machine import choose_device, out_of_memory, run_eagerly
from paceline.train.model_checks import explained_forward, find_logits, make_model
from paceline.train.stop_signals import StopSignals, agreed_stop
from paceline.train.weights import checkpoint_weights


@dataclass(frozen=True)
class EvalResult:
    """The result of an evaluation.

    Attributes:
        top1: Top-1 accuracy in percent.
        top5: Top-5 accuracy in percent.
        loss: Mean loss.
        samples: Number of images.
        corrupt_count: Number of corrupt images on all ranks.
        corrupt_here: The corrupt images that this rank has read.
        eval_s: Time of the evaluation in seconds.
    """

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
    *,
    corrupt_limit: int | None = None,
    classes: int | None = None,
    loss_function: TrainingLoss | None = None,
    details: EvalDetails | None = None,
    flip: bool = False,
) -> EvalResult | signal.Signals:
    """Evaluates a model. All ranks call this at the same point.

    Args:
        model: The model, whose batch-norm statistics are already averaged over ranks.
        batches: The batches of this rank.
        normalize: Turns uint8 images into inputs of the model.
        policy: The number format of the forward pass.
        group: The ranks.
        stop: Records signals that ask to stop.
        corrupt_limit: Largest allowed number of corrupt images on all ranks; None for no limit.
        classes: Number of classes, used to find the logits if the model has several outputs.
        loss_function: The reported loss. The default is cross-entropy.
        details: Collects counts by class and the most confident mistakes.
        flip: True to average the logits of each image and its mirror image.

    Returns:
        The result, or the signal that stopped any rank; equal on all ranks.

    Raises:
        DataError: On all ranks, if too many images are corrupt.
    """
    started = time.perf_counter()
    loss_function = loss_function or CrossEntropy()
    sums, failed = _Sums(model, normalize, group.device, loss_function, classes, flip), False
    try:
        with _evaluation_mode(model), policy.compute():
            for batch in batches:
                if stop.received is not None:
                    group.announce_stop()
                if stop.received is not None or group.stop_announced():
                    break
                logits, labels = sums.add(batch)
                if details is not None:
                    details.add(logits, labels, batch.images)
    except (PacelineError, RuntimeError, MemoryError) as error:
        # The other ranks wait in the sum below, which reports the error to them.
        where = f"evaluating {sums.batch_size} images at a time"
        remedy = "use a smaller --batch-size, which also makes this batch smaller"
        own = error if isinstance(error, PacelineError) else None
        fault = own or out_of_memory(error, where, remedy)
        if fault is None:
            raise
        group.post_fault(fault)
        failed = True
    if isinstance(batches, EvalBatches):
        # Includes corrupt samples of a last batch that had no other samples.
        sums.corrupt = list(batches.corrupt)
    asked = stop.stop_flags().values()
    total = sums.to_tensor(float(failed), *asked)
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
        corrupt_here=tuple(sums.corrupt),
        eval_s=time.perf_counter() - started,
    )


@dataclass
class _Sums:
    """Evaluates batches; sums loss and correct predictions. If `flip` is set, also uses mirror images.

    The sums of this rank stay on the device until the end.
    """

    model: nn.Module
    normalize: Normalizer
    device: torch.device
    loss_function: TrainingLoss
    classes: int | None
    flip: bool
    corrupt: list[CorruptSample] = field(default_factory=list)
    # Size of the current batch.
    batch_size: int = 0

    def __post_init__(self) -> None:
        self._right1 = torch.zeros((), dtype=torch.float64, device=self.device)
        self._right5, self._loss = self._right1.clone(), self._right1.clone()
        self._samples = 0

    def add(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Evaluates one batch; returns logits and labels on the device."""
        self.batch_size = len(batch)
        images = self.normalize(batch.images, self.device)
        views = [_outputs(self.model, images)]
        if self.flip:
            views.append(_outputs(self.model, images.flip(3)))
        logits = torch.stack([find_logits(v, self.classes).float() for v in views]).mean(0)
        labels = batch.labels.to(self.device, non_blocking=True)
        own = isinstance(self.loss_function, OwnLoss) and self.loss_function.in_evaluation
        # A user's loss gets all outputs, which cannot be averaged. The losses of the views are averaged.
        outputs = views if own else [logits]
        self._loss += torch.stack([self.loss_function.evaluated(v, labels) for v in outputs]).mean(
            0
        )
        ranked = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
        self._right1 += ranked[:, 0].sum()
        self._right5 += ranked.sum()
        self._samples += len(labels)
        self.corrupt += batch.corrupt
        return logits, labels

    def to_tensor(self, *flags: float) -> Tensor:
        counts = torch.tensor([self._samples, len(self.corrupt), *flags], dtype=torch.float64)
        sums = torch.stack([self._right1, self._right5, self._loss])
        return torch.cat([sums, counts.to(sums.device)])


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Sets evaluation mode without gradients; restores the mode of each module at the end.

    The modes of modules can differ, because frozen batch norms are in evaluation mode during training.
    """
    modes = [(module, module.training) for module in model.modules()]
    # A user's model may keep tensors, and training cannot use tensors of inference mode.
    no_gradients = torch.inference_mode() if is_own(model) else torch.no_grad()
    model.eval()
    try:
        # Eager, because the compiler would compile blocks again for this mode.
        with no_gradients, run_eagerly():
            yield
    finally:
        for module, training in modes:
            module.training = training


def takes_evaluation(
    loss: TrainingLoss,
    model: nn.Module,
    normalize: Normalizer,
    policy: Policy,
    images: Sequence[int],
) -> bool:
    """Returns True if a loss function accepts the outputs of a model in evaluation mode.

    A user's loss might need outputs that the model only has in training mode.

    Args:
        loss: The training loss.
        model: The model that produces the outputs.
        normalize: Turns uint8 images into inputs of the model.
        policy: The number format of the model.
        images: Shape of a batch of images.
    """
    zeros = torch.zeros(tuple(images), dtype=torch.uint8, device=policy.device)
    labels = torch.zeros(len(zeros), dtype=torch.int64, device=policy.device)
    try:
        with _evaluation_mode(model), policy.compute():
            loss.evaluated(model(normalize(zeros, policy.device)), labels)
    except RunError:
        return False
    return True


def _outputs(model: nn.Module, images: Tensor) -> object:
    if is_own(model):
        return model(images)
    with explained_forward(images.shape, "the model's forward in evaluation mode"):
        return model(images)


def _check_counts(samples: float, bad: float, corrupt_limit: int | None) -> None:
    if corrupt_limit is not None and bad > corrupt_limit:
        raise DataError(
            f"{bad:.0f} corrupt validation images, more than data.max_corrupt_share allows "
            f"({corrupt_limit})",
            "fix the data (metrics*.jsonl names the samples), or raise the share",
        )
    if not samples:
        raise DataError("no validation image could be decoded", "check the validation images")


def evaluate_file(
    path: Path,
    overrides: Mapping[str, Any],
    batch_size: int,
    components: Components | None = None,
    *,
    trust: bool | RunConfig = False,
) -> tuple[EvalResult | signal.Signals, RunConfig, int]:
    """Evaluates a checkpoint with the settings that it contains.

    Args:
        path: The checkpoint.
        overrides: Settings that replace settings of the checkpoint. If `data.dir` is given without
            `data.val_split`, the images are not those of the run; see `open_other`.
        batch_size: Number of images per forward pass on one rank.
        components: Python objects that replace objects that the settings name.
        trust: True to allow all code that the settings of the checkpoint name; see `stored_config`.

    Returns:
        The result, or the signal that stopped the evaluation; the settings in use; and the number of
        this rank.

    Raises:
        PacelineError: If the checkpoint or the data cannot be used.
    """
    components = components or Components()
    checkpoint = Checkpoint.read(path)
    config = stored_config(checkpoint.config, overrides, path, trust)
    topology = Topology.from_env(os.environ)
    device = choose_device(config, topology)
    shared = {"program": "eval", **common_settings(config)}
    with Group(topology, config.comm, device, shared=shared, versions=shared_versions()) as group:
        with group.phase("evaluation"):
            elsewhere = "data.dir" in overrides and "data.val_split" not in overrides
            source, opened = _open_validation(config, checkpoint, path, components, elsewhere)
            model = restore_model(config, checkpoint, path, components).to(group.device)
            policy = choose_policy(config.precision, group.device)
            allow_tf32(config.precision)
            policy.convert(model)
            loader = create_eval_loader(
                source, config.data, rank=group.rank, world_size=group.world_size,
                batch_size=batch_size, device=group.device,
            )  # fmt: skip
        limit = allowed_corrupt(config.data.max_corrupt_share, len(source))
        normalize = Normalizer(
            config.data.mean, config.data.std, config.data.channels, policy.dtype,
            channels_last=config.run.channels_last, kernel=not triton_problem(group.device),
        )  # fmt: skip
        with loader, StopSignals() as stop:
            classes = config.model.num_classes or len(checkpoint.classes)
            loss = _evaluation_loss(config, components, classes)
            if isinstance(loss, OwnLoss):
                size = config.data.image_size
                shape = (1, size, size, config.data.channels)
                loss.in_evaluation = takes_evaluation(loss, model, normalize, policy, shape)
            result = evaluate(
                model, loader, normalize, policy, group, stop, corrupt_limit=limit,
                classes=classes, loss_function=loss, flip=config.data.eval_flip,
            )  # fmt: skip
        notes = [opened, loader.note()]
        in_evaluation = (
            loss.in_evaluation if isinstance(loss, OwnLoss) else config.run.loss in LOSSES
        )
        if not in_evaluation:
            notes.append(f"run.loss = {config.run.loss} is not run here; the loss is cross_entropy")
        for note in filter(None, notes):
            if group.rank == 0:
                sys.stderr.write(f"paceline: note: {one_line(note)}\n")
        return result, config, group.rank


def _evaluation_loss(config: RunConfig, components: Components, classes: int) -> TrainingLoss:
    """Returns the loss that the program has passed or, without one, that the settings name.

    Returns cross-entropy if the loss was a Python object of another program.
    """
    if components.loss is None and config.run.loss.startswith(f"{PYTHON}:"):
        return CrossEntropy()
    return create_loss(config.run, components.loss, classes)


def _open_validation(
    config: RunConfig, checkpoint: Checkpoint, path: Path, components: Components, elsewhere: bool
) -> tuple[Source, str]:
    """Opens the images to evaluate.

    Args:
        config: The settings of the run.
        checkpoint: The checkpoint.
        path: File of the checkpoint, for messages.
        components: Python objects that replace objects that the settings name.
        elsewhere: True if `data.dir` is not the directory of the run's data.

    Returns:
        The images, and a note if they are not the validation set of the run.
    """

    def is_training_data(labels: npt.NDArray[np.int64]) -> bool:
        trained = str(checkpoint.config.get("data", {}).get("dir", ""))
        same_place = bool(trained) and Path(trained).resolve() == Path(config.data.dir).resolve()
        # The digest of the labels comes first; a digest of the shards' sizes may follow.
        digest = str(checkpoint.sampler["labels"]).partition(",")[0]
        return same_place or labels_digest(labels) == digest

    note = ""
    if components.val_data is not None or components.train_data is not None:
        source = components.val_data
        if source is None:
            source = open_data(config.data, components.train_data)[1]
    elif elsewhere:
        source, note = open_other(config.data, checkpoint.classes, is_training_data)
    else:
        source = open_source(config.data, "val", checkpoint.classes)
    here, trained = list(source.classes), list(checkpoint.classes)
    if here != trained:
        names = sorted(set(here) ^ set(trained))
        difference = ", ".join(map(repr, names[:3])) or "the order"
        raise CheckpointError(
            f"the data has {len(here)} classes, {path} has {len(trained)}; they differ in {difference}",
            "evaluate on data with the classes of the training data",
        )
    return source, note


def restore_model(
    config: RunConfig, checkpoint: Checkpoint, path: Path, components: Components
) -> nn.Module:
    """Creates the model of a checkpoint with its weights.

    Args:
        config: The settings of the run.
        checkpoint: The checkpoint.
        path: File of the checkpoint, for messages.
        components: Python objects of the program. `model` is needed if the model of the run was a
            Python object.

    Raises:
        CheckpointError: If the weights do not fit the model.
    """
    classes = config.model.num_classes or len(checkpoint.classes)
    if components.model is None and config.model.name.startswith(f"{PYTHON}:"):
        raise python_object_error("model.name", config.model.name)
    if isinstance(components.model, nn.Module):
        # A copy, because the program may continue to train the object.
        components = replace(components, model=copy.deepcopy(components.model))
    model = make_model(config, classes, components)
    weights = checkpoint_weights(checkpoint)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise CheckpointError(
            f"{path} does not fit this version of {config.model.name} ({reason})",
            "use the code with which it was trained; a checkpoint cannot recreate a Python object",
        ) from error
    if config.run.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model
