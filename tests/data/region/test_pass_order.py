from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from paceline.data.region import pass_order
from paceline.data.region.pass_order import down_first

BILINEAR = Image.Resampling.BILINEAR


def pillow_orders(width: int, height: int, size: int) -> set[bool]:
    """The orders whose pixels are Pillow's: both, where rounding between them does not show."""
    noise = np.random.default_rng(0).integers(0, 256, (height, width), dtype=np.uint8)
    image = Image.fromarray(noise)
    whole = image.resize((size, size), BILINEAR).tobytes()
    down = image.resize((width, size), BILINEAR).resize((size, size), BILINEAR).tobytes()
    across = image.resize((size, height), BILINEAR).resize((size, size), BILINEAR).tobytes()
    return {order for order, found in ((True, down), (False, across)) if found == whole}


@pytest.mark.parametrize("size", [16, 40, 64, 100])
def test_the_rule_is_pillow_s(size: int) -> None:
    told = 0
    for width in (20, 37, 60, 90):
        # Around the turning points too: rows first above both `size` and 2 × width − size.
        edge = 2 * width - size
        for height in {20, 63, 64, 90, 150, 250, size + 1, edge - 1, edge, edge + 1} - {size}:
            if height < 1 or width == size:
                continue
            orders = pillow_orders(width, height, size)
            assert down_first(width, height, size) in orders, (width, height)
            told += len(orders) == 1
    assert told > 10


def test_a_pillow_that_always_takes_columns_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_order, "_pillow_looks_at_the_size", lambda: False)
    assert not down_first(20, 2000, 10)
