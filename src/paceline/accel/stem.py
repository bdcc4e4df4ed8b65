"""Computes the first convolution of a network faster, on tensor cores.

The input is normalized images, with a fourth channel of zeros if norms are fused. Tensor cores are
mostly idle in convolutions of few channels. So `convolve_images` makes the pixels of a small window
into channels and convolves the windows with a rearranged weight. The products are the same, but are
summed in a different order. The weight in the state dict does not change.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypeGuard

import torch.nn.functional as F
from torch import Tensor, nn

# Channels of images if norms are fused, because GPUs convolve four channels faster than three.
PADDED_CHANNELS = 4


def can_launch(x: Tensor) -> bool:
    """Returns True if Triton kernels can run on `x`: on a GPU, or in Triton's interpreter."""
    return x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def is_plain(module: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Returns True for an unmodified `nn.Conv2d` with one group, no dilation and zero padding."""
    return (
        type(module) is nn.Conv2d
        and "forward" not in vars(module)
        # If the weight is not a parameter, a hook computes it, as with torch's `spectral_norm`.
        and "weight" in module._parameters
        and not isinstance(module.padding, str)
        and module.padding_mode == "zeros"
        and module.dilation == (1, 1)
        and module.groups == 1
    )


def pads_images(first: nn.Module) -> bool:
    """Returns True if this convolution takes images with a fourth channel when norms are fused."""
    return is_plain(first) and first.in_channels == 3


@dataclass(frozen=True)
class WindowForm:
    """Sizes of a convolution of pixel windows, which replaces the first convolution of a network.

    Windows of `side` × `side` pixels begin every `stride` pixels. The values of a window become
    channels: `channels` values of each pixel, then zeros up to `width`. A convolution with a kernel
    of `kernel` × `kernel` pixels becomes one of `taps` × `taps` windows with stride 1 and without
    padding.
    """

    kernel: int
    stride: int
    padding: int
    side: int
    channels: int
    width: int

    @property
    def taps(self) -> int:
        return -(-self.kernel // self.side)

    def windows(self, pixels: int) -> int:
        """Returns the number of windows along an image side of `pixels` pixels.

        There are fewer than `taps` if the kernel does not fit into the image.
        """
        return (pixels + 2 * self.padding - self.kernel) // self.stride + self.taps

    def weight(self, weight: Tensor) -> Tensor:
        """Rearranges the weight of the first convolution for windows as input; differentiable.

        The result is in channels-last memory.
        """
        filters, channels = weight.shape[:2]
        taps, side = self.taps, self.side
        more = taps * side - self.kernel
        weight = F.pad(weight, (0, more, 0, more, 0, self.channels - channels))
        blocks = weight.reshape(filters, self.channels, taps, side, taps, side)
        blocks = blocks.permute(0, 2, 4, 3, 5, 1).reshape(filters, taps, taps, -1)
        return F.pad(blocks, (0, self.width - blocks.shape[3])).permute(0, 3, 1, 2)


# `side`, `channels` and `width` of `WindowForm` by kernel size and stride, where windows were
# faster on an H200. For the 7 × 7 convolution of stride 2 they were not.
_MEASURED = {(11, 4): (4, 4, 64), (3, 1): (3, 3, 32)}


def describe_stem(first: nn.Module) -> str:
    """Describes how the first convolution is computed if norms are fused, or returns "" if by torch."""
    form = window_form(first) if pads_images(first) else None
    return "" if form is None else f"first convolution on windows of {form.width} channels"


def window_form(convolution: nn.Module) -> WindowForm | None:
    """Returns the sizes for convolving windows instead of pixels, or None if that is not supported."""
    if not is_plain(convolution):
        return None
    (kernel, *kernels), (stride, *strides) = convolution.kernel_size, convolution.stride
    padding = convolution.padding
    measured = _MEASURED.get((kernel, stride))
    if (
        measured is None
        or isinstance(padding, str)
        or (kernels, strides, padding[1]) != ([kernel], [stride], padding[0])
        or convolution.in_channels != 3
    ):
        return None
    return WindowForm(kernel, stride, padding[0], *measured)


def convolve_images(
    convolution: nn.Conv2d, x: Tensor, *, padded: bool, biased: bool = True
) -> Tensor:
    """Computes the first convolution, on windows of pixels if possible.

    Args:
        convolution: The first convolution of a network.
        x: Normalized images.
        padded: True if images may have a fourth channel of zeros. Only such images are convolved as
            windows.
        biased: False to leave out the bias.
    """
    if not padded or x.shape[1] != PADDED_CHANNELS:
        if biased or convolution.bias is None:
            maps: Tensor = convolution(x)
            return maps
        return F.conv2d(x, convolution.weight, None, convolution.stride, convolution.padding)
    bias = convolution.bias if biased else None
    form = window_form(convolution)
    # The kernel that makes windows has no backward pass, so images must not require a gradient.
    if form is not None and can_launch(x) and not x.requires_grad and len(x):
        down, across = form.windows(x.shape[2]), form.windows(x.shape[3])
        if min(down, across) >= form.taps:
            from paceline.accel.stem_kernels import image_windows

            return F.conv2d(
                image_windows(x, form, down, across), form.weight(convolution.weight), bias
            )
    weight = F.pad(convolution.weight, (0, 0, 0, 0, 0, 1))
    return F.conv2d(x, weight, bias, convolution.stride, convolution.padding)
