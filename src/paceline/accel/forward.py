"""The forward pass of a residual net or AlexNet, layer by layer, with torch's operators.

`Forward` takes the layers from a `Network`. It can recompute the outputs of norms in the backward
pass instead of storing them (`recompute`). `fused_forward.FusedForward` uses Triton kernels. Both
use the parameters and buffers of the model and do not change the model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.accel.networks import Block, ConvNorm, Network
from paceline.accel.recompute import (
    BlockInput,
    RecomputedActivation,
    branch_and_shortcut,
    computed,
    not_stored,
    recomputed_norm,
)


class Forward:
    """Computes the output of a model from the layers and blocks of its `Network`.

    If `recompute` is True, outputs of norms are recomputed in the backward pass, not stored.
    """

    def __init__(self, network: Network, *, recompute: bool = False) -> None:
        self.network = network
        self.recompute = recompute

    @property
    def recomputes(self) -> bool:
        """True if the current pass recomputes activations in its backward pass."""
        return self.recompute and torch.is_grad_enabled()

    def __call__(self, images: Tensor) -> Tensor:
        x: BlockInput = images
        for part in self.network.parts:
            x = self.block(part, x) if isinstance(part, Block) else self.conv_norm(part, x)
        if self.network.norm is not None:
            x = self.normalized(branch_and_shortcut(x)[0], self.network.norm)
        maps, _ = branch_and_shortcut(x)
        with not_stored(x):
            return self.network.head(maps)

    def convolve(self, convolution: nn.Module, x: BlockInput, *, shortcut: bool = False) -> Tensor:
        """Applies a convolution to the branch's input or, if `shortcut` is True, to the shortcut's."""
        maps = branch_and_shortcut(x)[int(shortcut)]
        with not_stored(x):
            out: Tensor = convolution(maps)
            return out

    def conv_norm(self, part: ConvNorm, x: BlockInput) -> BlockInput:
        maps = self.convolve(part.convolution, x)
        if part.pool is None:
            return self.norm_relu(maps, part.norm, twice=True)
        pooled: Tensor = part.pool(F.relu(part.norm(maps), inplace=True))
        return pooled

    def block(self, block: Block, x: BlockInput) -> BlockInput:
        maps = x = computed(x)
        *inner, (last, last_norm) = block.branch
        for convolution, norm in inner:
            maps = self.norm_relu(self.convolve(convolution, maps), norm)
        out = self.convolve(last, maps)
        stored = block.downsample is None and not isinstance(x, RecomputedActivation)
        return self.norm_relu(out, last_norm, self.shortcut(block, x), stored=stored, twice=True)

    def shortcut(self, block: Block, x: BlockInput) -> Tensor:
        if block.downsample is None:
            return branch_and_shortcut(x)[1]
        convolution, norm = block.downsample
        return self.normalized(self.convolve(convolution, x, shortcut=True), norm)

    def normalized(self, x: Tensor, norm: nn.BatchNorm2d) -> Tensor:
        out: Tensor = norm(x)
        return out

    def norm_relu(
        self, x: Tensor, norm: nn.BatchNorm2d, shortcut: Tensor | None = None, *, stored: bool = True,
        twice: bool = False,
    ) -> BlockInput:  # fmt: skip
        """Computes relu(norm(x) + shortcut).

        Args:
            x: The output of a convolution.
            norm: The norm that follows the convolution.
            shortcut: The activation to add at the end of a residual block.
            stored: True if `shortcut` stays in memory. Only then can the output be recomputed.
            twice: True if a residual block reads the output twice, for the branch and the shortcut.
        """
        if self.recomputes and stored:
            return recomputed_norm(x, norm, shortcut)
        out = self.normalized(x, norm)
        return F.relu(out if shortcut is None else out + shortcut, inplace=True)
