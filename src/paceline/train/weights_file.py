"""Weights for other programs.

In: a model's state dict with averaged batch-norm statistics. Out: a safetensors file with
torchvision's keys, and a fingerprint by which ranks and runs compare their weights bit by bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn

from paceline.core.errors import CheckpointError
from paceline.train.atomic_file import write_atomically
from paceline.train.batch_norm import pool
from paceline.train.checkpoint import Checkpoint


def write_weights(state: Mapping[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Atomically, each tensor contiguous in torchvision's (NCHW) order."""
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}
    write_atomically(path, save(tensors, metadata={"format": "pt", **metadata}))


def checkpoint_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The state dict of a checkpoint, of its `WeightAverage` where it has one; batch-norm statistics
    averaged over the ranks. CheckpointError where its parts do not fit each other."""
    try:
        return _pooled_weights(checkpoint)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
        raise CheckpointError(
            f"the checkpoint's batch-norm statistics do not fit its model ({error})",
            "use another checkpoint",
        ) from None


def _pooled_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    average = checkpoint.average
    state = {**checkpoint.model, **average.get("weights", {})}
    pooled = pool(average.get("rows", checkpoint.batch_norm["rows"]))
    start = 0
    for name, width, tracked in zip(
        checkpoint.batch_norm["names"],
        checkpoint.batch_norm["widths"],
        checkpoint.batch_norm["tracked"],
        strict=True,
    ):
        state[f"{name}.running_mean"] = pooled[0, start : start + width]
        state[f"{name}.running_var"] = pooled[1, start : start + width]
        state[f"{name}.num_batches_tracked"] = tracked
        start += width
    return state


def fingerprint(weights: nn.Module | Mapping[str, Tensor]) -> str:
    """SHA-256 over all parameters, in order. Equal iff the weights are bit-identical."""
    named = weights.named_parameters() if isinstance(weights, nn.Module) else weights.items()
    digest = hashlib.sha256()
    for name, parameter in named:
        digest.update(name.encode())
        flat = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(flat.numpy().tobytes())
    return digest.hexdigest()
