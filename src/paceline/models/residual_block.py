"""`ResidualBlock`: what the blocks of all residual nets share, in plain and in fused form.

In: a map, or the same map under a name for each of its two uses. Out: the same. Plain form is torch's
own operators, on any device and under torch.compile; `fused` takes our kernels in training mode.
"""

from __future__ import annotations

from torch import Tensor, nn

# One map, or one map under two names: for the branch and for the shortcut.
Uses = Tensor | tuple[Tensor, Tensor]


def split_uses(x: Uses) -> tuple[Tensor, Tensor]:
    return x if isinstance(x, tuple) else (x, x)


def projection(in_channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    """The shortcut of a block that changes size; None where the input passes as it is."""
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
    )


class ResidualBlock(nn.Module):
    """`fused` is set by `fuse_norms`, on every block of a model or on none."""

    fused = False
    relu: nn.ReLU
    downsample: nn.Sequential | None

    def norm_relu(self, x: Tensor, norm: nn.BatchNorm2d) -> Tensor:
        if self.fused:
            from paceline.models.fused_norm import can_fuse, norm_act

            if can_fuse(x, norm):
                return norm_act(x, norm)
        out: Tensor = self.relu(norm(x))
        return out

    def shortcut(self, x: Tensor) -> Tensor:
        if self.downsample is None:
            return x
        convolution, norm = self.downsample
        x = convolution(x)
        if self.fused:
            from paceline.models.fused_norm import can_fuse, norm_act

            assert isinstance(norm, nn.BatchNorm2d)
            if can_fuse(x, norm):
                return norm_act(x, norm, relu=False)
        out: Tensor = norm(x)
        return out

    def join(self, x: Tensor, norm: nn.BatchNorm2d, shortcut: Tensor) -> Uses:
        """The branch's last norm, the sum and the last ReLU."""
        if self.fused:
            from paceline.models.fused_norm import can_fuse, norm_act_twice

            if can_fuse(x, norm):
                return norm_act_twice(x, norm, shortcut)
        out: Tensor = self.relu(norm(x) + shortcut)
        return out


def fused_stem(x: Tensor, norm: nn.BatchNorm2d, *, pooled: bool) -> Uses:
    """Norm, ReLU and, if `pooled`, the 3 × 3 max-pool behind the first convolution."""
    from paceline.models.fused_norm import can_fuse, norm_act_twice

    if not can_fuse(x, norm):
        maps = nn.functional.relu(norm(x))
        return nn.functional.max_pool2d(maps, 3, 2, 1) if pooled else maps
    if not pooled:
        return norm_act_twice(x, norm)
    from paceline.models.fused_pool import norm_act_pool

    return norm_act_pool(x, norm)


def fuse_norms(model: nn.Module, fused: bool = True) -> int:
    """Switches every part of `model` that has a fused form; returns how many there are."""
    parts = [module for module in model.modules() if hasattr(module, "fused")]
    for module in parts:
        setattr(module, "fused", fused)  # noqa: B010  (mypy takes any attribute for a tensor)
    return len(parts)
