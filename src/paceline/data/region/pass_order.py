"""In which order Pillow resamples: columns first, or rows first.

In: an image's size and the result's. Out: whether rows go first. Levels are rounded between the passes,
so the order shows in the pixels. Until version 12 columns go first; from 13 on rows do where the height
shrinks by more than twice what the width shrinks by. Pillow itself is asked, not its version.
"""

from __future__ import annotations

import functools

import numpy as np
from PIL import Image


def down_first(width: int, height: int, size: int) -> bool:
    """For a result of `size` × `size`."""
    return height > size and height - size > 2 * (width - size) and _pillow_looks_at_the_size()


@functools.cache
def _pillow_looks_at_the_size() -> bool:
    noise = np.random.default_rng(0).integers(0, 256, (96, 17), dtype=np.uint8)
    image, bilinear = Image.fromarray(noise), Image.Resampling.BILINEAR
    # One side at a time there is no order.
    rows_first = image.resize((17, 16), bilinear).resize((16, 16), bilinear)
    return rows_first.tobytes() == image.resize((16, 16), bilinear).tobytes()
