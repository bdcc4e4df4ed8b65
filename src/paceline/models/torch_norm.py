"""Batch norm by torch's own kernels instead of cuDNN's, for ranks that share a GPU.

cuDNN's training kernels for channels_last maps (`batchnorm_fwtr_nhwc_semiPersist` and its backward) need
all of their blocks on the GPU at the same time: two on every multiprocessor. A collective of another rank
on the same GPU that waits for this rank holds the place of some, so both wait forever. A rank with a GPU
of its own is not affected: there the collective ends.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TorchNorm(nn.BatchNorm2d):
    """The same parameters, statistics and keys; forward and backward without cuDNN."""

    def forward(self, images: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # the compiler generates kernels of its own
            return super().forward(images)
        enabled = torch.backends.cudnn.enabled
        torch.backends.cudnn.enabled = False
        try:
            return super().forward(images)
        finally:
            torch.backends.cudnn.enabled = enabled


def use_torch_norms(model: nn.Module) -> int:
    """Turns every batch norm of the model into a `TorchNorm`, in place; how many there are."""
    norms = [module for module in model.modules() if type(module) is nn.BatchNorm2d]
    for norm in norms:
        norm.__class__ = TorchNorm
    return len(norms)
