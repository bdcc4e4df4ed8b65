"""Windows of images with torch's own operators."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.accel.stem import WindowForm, window_form

# Kernel, stride, padding of first convolutions that have a form.
FORMS = {"alexnet": (11, 4, 2), "small": (3, 1, 1), "bare": (3, 1, 0), "shifted": (11, 4, 5)}
# Odd and not square; the last block of windows is partial in some.
SIZES = {
    "alexnet": [(63, 63), (19, 26), (11, 40), (12, 21)],
    "small": [(8, 8), (5, 9), (1, 1), (1, 4)],
    "bare": [(3, 3), (6, 5)],
    "shifted": [(17, 14), (6, 23)],
}
CASES = [(name, size) for name, sizes in SIZES.items() for size in sizes]


def convolution(name: str, filters: int = 6, *, bias: bool = True) -> nn.Conv2d:
    kernel, stride, padding = FORMS[name]
    return nn.Conv2d(3, filters, kernel, stride, padding, bias=bias)


def form_of(layer: nn.Conv2d) -> WindowForm:
    form = window_form(layer)
    assert form is not None
    return form


def windows_of(images: Tensor, form: WindowForm) -> Tensor:
    """Returns the windows of images with as many channels as a pixel has in a window."""
    samples, channels = images.shape[:2]
    down, across = (form.windows(pixels) for pixels in images.shape[2:])
    before, after = form.padding, 2 * form.side + form.padding
    padded = F.pad(images, (before, after, before, after))
    rows = (down - 1) * form.stride + form.side
    cols = (across - 1) * form.stride + form.side
    taken = F.unfold(padded[:, :, :rows, :cols], form.side, stride=form.stride)
    values = taken.view(samples, channels, form.side**2, down, across).transpose(1, 2)
    values = values.reshape(samples, -1, down, across)
    return F.pad(values, (0, 0, 0, 0, 0, form.width - values.shape[1]))
