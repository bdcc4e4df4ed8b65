"""Whether a batch norm is of the form that the fused kernels compute. Needs no Triton to tell."""

from __future__ import annotations

from torch import nn


def norm_can_fuse(module: nn.Module) -> bool:
    """Training mode with running averages of fixed momentum, and γ and β; other modules do not matter."""
    if not isinstance(module, nn.BatchNorm2d):
        return True
    return (
        module.training
        and module.momentum is not None
        and module.track_running_stats
        and module.affine
    )
