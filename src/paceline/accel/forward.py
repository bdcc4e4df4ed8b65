"""The forward pass over the parts of a network, with torch's operators.

`Forward` can leave out norms that backward computes again (`recompute`), and `CompiledBlocks` calls each
residual block as compiled by torch.compile. `fused_forward` has the form with kernels. All share the
parameters and buffers of the model, which stays as it is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.accel.networks import Block, ConvNorm, Network
from paceline.accel.recompute import (
    RecomputedMap,
    Uses,
    computed,
    not_stored,
    recomputed_norm,
    split_uses,
)


class Forward:
    """Computes what the model does; with `recompute`, without maps that backward can compute again."""

    def __init__(self, network: Network, *, recompute: bool = False) -> None:
        self.network = network
        self.recompute = recompute

    @property
    def recomputes(self) -> bool:
        """Returns True if this pass is to leave maps to backward."""
        return self.recompute and torch.is_grad_enabled()

    def __call__(self, images: Tensor) -> Tensor:
        x: Uses = images
        for part in self.network.parts:
            x = self.block(part, x) if isinstance(part, Block) else self.conv_norm(part, x)
        if self.network.norm is not None:
            x = self.normalized(split_uses(x)[0], self.network.norm)
        maps, _ = split_uses(x)
        with not_stored(x):
            return self.network.head(maps)

    def convolve(self, convolution: nn.Module, x: Uses, *, shortcut: bool = False) -> Tensor:
        """The convolution of the branch, or that of the shortcut."""
        maps = split_uses(x)[int(shortcut)]
        with not_stored(x):
            out: Tensor = convolution(maps)
            return out

    def conv_norm(self, part: ConvNorm, x: Uses) -> Uses:
        maps = self.convolve(part.convolution, x)
        if part.pool is None:
            return self.norm_relu(maps, part.norm, twice=True)
        pooled: Tensor = part.pool(F.relu(part.norm(maps), inplace=True))
        return pooled

    def block(self, block: Block, x: Uses) -> Uses:
        maps = x = computed(x)
        *inner, (last, last_norm) = block.branch
        for convolution, norm in inner:
            maps = self.norm_relu(self.convolve(convolution, maps), norm)
        out = self.convolve(last, maps)
        stored = block.downsample is None and not isinstance(x, RecomputedMap)
        return self.norm_relu(out, last_norm, self.shortcut(block, x), stored=stored, twice=True)

    def shortcut(self, block: Block, x: Uses) -> Tensor:
        if block.downsample is None:
            return split_uses(x)[1]
        convolution, norm = block.downsample
        return self.normalized(self.convolve(convolution, x, shortcut=True), norm)

    def normalized(self, x: Tensor, norm: nn.BatchNorm2d) -> Tensor:
        out: Tensor = norm(x)
        return out

    def norm_relu(
        self, x: Tensor, norm: nn.BatchNorm2d, shortcut: Tensor | None = None, *, stored: bool = True,
        twice: bool = False,
    ) -> Uses:  # fmt: skip
        """relu(norm(x) + shortcut). `stored`: so is the shortcut, as it has to be if the output is not.
        `twice`: for branch and shortcut of a block."""
        if self.recomputes and stored:
            return recomputed_norm(x, norm, shortcut)
        out = self.normalized(x, norm)
        return F.relu(out if shortcut is None else out + shortcut, inplace=True)


class CompiledBlocks(Forward):
    """Each residual block under torch.compile, in a version for its own shapes."""

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        blocks = network.blocks()
        # One code object serves blocks of many shapes; each gets a version.
        torch._dynamo.config.recompile_limit = max(64, 4 * len(blocks))
        self._compiled = {block: torch.compile(block.module, dynamic=False) for block in blocks}

    def block(self, block: Block, x: Uses) -> Uses:
        out: Tensor = self._compiled[block](split_uses(x)[0])
        return out
