"""An entry of the disk cache is what was written, or nothing."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.data.caching import cache_entry
from paceline.data.caching.cache_entry import from_entry, to_entry


@pytest.mark.parametrize("shape", [(4, 5, 1), (0, 5, 3), (2**31, 2**31, 2**31)])
def test_a_shape_that_does_not_fit_under_a_right_checksum(shape: tuple[int, int, int]) -> None:
    pixels = np.arange(60, dtype=np.uint8)
    fields = (7, 60, *shape)
    checksum = cache_entry._checksum(fields, pixels.tobytes())
    entry = cache_entry._HEADER.pack(b"plc1", checksum, *fields) + pixels.tobytes()
    assert from_entry(7, entry) is None
    assert from_entry(7, to_entry(7, b"bytes")) == b"bytes"
