"""Evaluating a checkpoint on disk.

In: a file, and settings that override the checkpoint's. Out: the same exact counts that a run
reports, on one rank or many; in half precision, within rounding of a few images.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.comm.group import Group
from paceline.config import RunConfig
from paceline.core.errors import CheckpointError
from paceline.core.topology import Topology
from paceline.core.untrusted import one_line
from paceline.data.corrupt import allowed_corrupt
from paceline.data.create_loader import create_eval_loader
from paceline.data.normalize import Normalizer
from paceline.data.sources.source import Source, open_source
from paceline.models.registry import create_model
from paceline.precision.policy import allow_tf32, choose_policy
from paceline.train.checkpoint import Checkpoint
from paceline.train.evaluate import EvalResult, evaluate
from paceline.train.inputs import common_settings
from paceline.train.machine import choose_device
from paceline.train.stop_signals import StopSignals
from paceline.train.triton_probe import triton_problem
from paceline.train.weights_file import checkpoint_weights


def evaluate_file(
    path: Path, overrides: Mapping[str, Any], batch_size: int
) -> tuple[EvalResult | signal.Signals, RunConfig, int]:
    """Result (or the signal that ended it), configuration and rank.

    The checkpoint's own settings say how to read the images.
    """
    checkpoint = Checkpoint.read(path)
    config = RunConfig.from_tables(checkpoint.config).with_values(overrides)
    topology = Topology.from_env(os.environ)
    device = choose_device(config, topology)
    shared = {"program": "eval", **common_settings(config)}
    with Group(topology, config.comm, device, shared=shared) as group:
        source = group.settled("data", lambda: _open(config, checkpoint, path))
        model = _restored(config, checkpoint).to(group.device)
        policy = group.settled("precision", lambda: choose_policy(config.precision, group.device))
        allow_tf32(config.precision)
        policy.convert(model)
        loader = group.settled(
            "loader",
            lambda: create_eval_loader(
                source, config.data, rank=group.rank, world_size=group.world_size,
                batch_size=batch_size, device=group.device,
            ),
        )  # fmt: skip
        limit = allowed_corrupt(config.data.max_corrupt_share, len(source))
        normalize = Normalizer(
            config.data.mean, config.data.std, config.data.channels, policy.dtype,
            channels_last=config.run.channels_last, kernel=not triton_problem(group.device),
        )  # fmt: skip
        with loader, StopSignals() as stop:
            result = evaluate(model, loader, normalize, policy, group, stop, limit)
        if remark := loader.remark():
            sys.stderr.write(f"paceline: note: {one_line(remark)}\n")
        return result, config, group.rank


def _open(config: RunConfig, checkpoint: Checkpoint, path: Path) -> Source:
    source = open_source(config.data, "val", checkpoint.classes)
    _check_classes(source.classes, checkpoint.classes, path)
    return source


def _restored(config: RunConfig, checkpoint: Checkpoint) -> nn.Module:
    model = create_model(
        config.model,
        num_classes=config.model.num_classes or len(checkpoint.classes),
        in_channels=config.data.channels,
        image_size=config.data.image_size,
    )
    model.load_state_dict(checkpoint_weights(checkpoint))
    if config.run.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def _check_classes(here: Sequence[str], trained: Sequence[str], path: Path) -> None:
    """Other names under the same numbers would give a figure that means nothing."""
    if list(here) == list(trained):
        return
    if len(here) != len(trained):
        cause = f"the data has {len(here)} classes, {path} {len(trained)}"
    else:
        number = next(i for i, name in enumerate(here) if name != trained[i])
        cause = f"class {number} is {here[number]!r} in the data, {trained[number]!r} in {path}"
    raise CheckpointError(cause, "evaluate on the classes that it was trained on")
