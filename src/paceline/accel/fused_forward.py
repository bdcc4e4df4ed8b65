"""The forward pass of a model with fused kernels, in training mode on a GPU.

Norms are fused with the ReLU, residual sum and pool that follow (`fused`). The first convolution
takes images with a fourth channel (`stem`). With `choices`, the convolutions of residual blocks are
fused, too (`fused_blocks`). Layers that the kernels do not support use torch's operators, for
example a norm in evaluation mode.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.accel.forward import Forward
from paceline.accel.fused import (
    can_fuse,
    channels_last,
    norm_act,
    norm_act_pool,
    norm_act_recomputed,
    norm_act_twice,
    norm_can_fuse,
)
from paceline.accel.fused_blocks import can_fuse_block, fused_block
from paceline.accel.implementation_choice import CUDNN, Choices
from paceline.accel.networks import Block, ConvNorm, Network
from paceline.accel.recompute import BlockInput, branch_and_shortcut, not_stored
from paceline.accel.stem import can_launch, convolve_images, is_plain, pads_images


class FusedForward(Forward):
    """Computes a model's forward pass with fused norms and, if `choices` is given, fused convolutions."""

    def __init__(
        self, network: Network, *, recompute: bool = False, choices: Choices | None = None
    ) -> None:
        super().__init__(network, recompute=recompute)
        self.choices = choices
        self._plain = Forward(network, recompute=recompute)

    def conv_norm(self, part: ConvNorm, x: BlockInput) -> BlockInput:
        if not part.fusible:
            return self._plain.conv_norm(part, x)
        given, _ = branch_and_shortcut(x)
        convolution, norm, pool = part.convolution, part.norm, part.pool
        # The fused norm gets the bias separately, because the bias does not affect the output of a
        # norm.
        bias = None
        if is_plain(convolution) and norm_can_fuse(norm) and can_launch(given):
            bias = convolution.bias
        if convolution is self.network.first and isinstance(convolution, nn.Conv2d):
            maps = convolve_images(
                convolution, given, padded=pads_images(convolution), biased=bias is None
            )
        elif bias is None:
            maps = self.convolve(convolution, x)
        else:
            assert isinstance(convolution, nn.Conv2d)
            with not_stored(x):
                maps = F.conv2d(
                    given, convolution.weight, None, convolution.stride, convolution.padding
                )
        if bias is not None:
            maps = channels_last(maps)
        if pool is None:
            return self.norm_relu(maps, norm, twice=True, bias=bias)
        if can_fuse(maps, norm):
            assert isinstance(pool.padding, int)
            return norm_act_pool(maps, norm, padding=pool.padding, bias=bias)
        pooled: Tensor = pool(F.relu(norm(maps), inplace=True))
        return pooled

    def block(self, block: Block, x: BlockInput) -> BlockInput:
        choices = self.choices
        # Without cuDNN, only bottlenecks (blocks of three convolutions) are supported.
        if (
            choices is not None
            and (choices.mode == CUDNN or len(block.branch) == 3)
            and can_fuse_block(block, x)
        ):
            return fused_block(block, x, self, choices)
        return super().block(block, x)

    def normalized(self, x: Tensor, norm: nn.BatchNorm2d) -> Tensor:
        return norm_act(x, norm, relu=False) if can_fuse(x, norm) else super().normalized(x, norm)

    def norm_relu(
        self, x: Tensor, norm: nn.BatchNorm2d, shortcut: Tensor | None = None, *, stored: bool = True,
        twice: bool = False, bias: Tensor | None = None,
    ) -> BlockInput:  # fmt: skip
        if not can_fuse(x, norm):
            return super().norm_relu(x, norm, shortcut, stored=stored, twice=twice)
        if self.recomputes and stored:
            return norm_act_recomputed(x, norm, shortcut, bias=bias)
        return (norm_act_twice if twice else norm_act)(x, norm, shortcut, bias=bias)
