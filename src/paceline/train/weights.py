"""The weights of a run in full precision: masters, those of a checkpoint, export files, fingerprints.

The model computes in half precision while the optimizer holds fp32 masters; checkpoints, export and
comparisons use the masters.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from paceline.config import RunConfig
from paceline.core.errors import CheckpointError
from paceline.optim.base import MasterOptimizer
from paceline.train.batch_norm import pool
from paceline.train.checkpoint import Checkpoint, write_atomically


def master_weights(
    model: nn.Module, optimizer: MasterOptimizer, weights: Sequence[Tensor] | None = None
) -> dict[str, Tensor]:
    """Masters by parameter name, or `weights` in their place; frozen parameters as they are."""
    chosen = optimizer.masters() if weights is None else weights
    masters = {id(p): m for p, m in zip(optimizer.parameters(), chosen, strict=True)}
    return {name: masters.get(id(p), p).detach() for name, p in model.named_parameters()}


def full_state(
    model: nn.Module, optimizer: MasterOptimizer, weights: Sequence[Tensor] | None = None
) -> dict[str, Tensor]:
    """The model's state dict with masters, or `weights` in their order, instead of parameters."""
    chosen = optimizer.masters() if weights is None else weights
    # A parameter shared by two modules has two keys and one master.
    masters = {id(p): m for p, m in zip(optimizer.parameters(), chosen, strict=True)}
    state = model.state_dict(keep_vars=True)
    return {name: _widened(masters.get(id(value), value).detach()) for name, value in state.items()}


def restore_masters(
    model: nn.Module, optimizer: MasterOptimizer, state: Mapping[str, Tensor]
) -> None:
    """Fills the masters from a state dict of `full_state`; the model's own weights are loaded
    separately."""
    names = {id(p): name for name, p in model.named_parameters()}
    for parameter, master in zip(optimizer.parameters(), optimizer.masters(), strict=True):
        master.detach().copy_(state[names[id(parameter)]])


def _widened(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def write_weights(state: Mapping[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Writes a safetensors file atomically, each tensor contiguous (NCHW)."""
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}
    write_atomically(path, save(tensors, metadata={"format": "pt", **metadata}))


@torch.no_grad()
def finish_module(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Leaves a module that the user gave with the weights and buffers of `state`, in memory of its own,
    and without gradients in the memory of the exchange."""
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        value.data = state[name].detach().to(value.device, copy=True)
        value.grad = None


def preprocessing(config: RunConfig, classes: Sequence[str], step: int) -> dict[str, Any]:
    """What turns an image into the model's input and its scores into classes, for programs that use
    exported weights."""
    data = config.data
    found: dict[str, Any] = {
        "model": config.model.name,
        "step": step,
        "classes": list(classes),
        "image_size": data.image_size,
        "eval_resize": data.eval_resize,
        "interpolation": data.interpolation,
        "channels": data.channels,
        "mean": list(data.mean),
        "std": list(data.std),
    }
    if config.run.loss == "bce":
        found["scores"] = "sigmoid"  # one question for each class
    if config.run.average_epochs:
        found["average_epochs"] = config.run.average_epochs
    return found


def as_metadata(values: Mapping[str, Any]) -> dict[str, str]:
    """Texts as they are, anything else as JSON."""
    return {k: v if isinstance(v, str) else json.dumps(v) for k, v in values.items()}


def checkpoint_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The state dict of a checkpoint, with averaged weights if it has any, and batch-norm statistics
    averaged over the ranks."""
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
    """SHA-256 of all parameters in order; equal if and only if the weights are bit-identical."""
    named = weights.named_parameters() if isinstance(weights, nn.Module) else weights.items()
    digest = hashlib.sha256()
    for name, parameter in named:
        digest.update(name.encode())
        flat = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(flat.numpy().tobytes())
    return digest.hexdigest()
