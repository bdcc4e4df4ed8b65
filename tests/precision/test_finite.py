from __future__ import annotations

import pytest
import torch

from paceline.precision.finite import all_finite


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 511, 1023])
def test_one_bad_element_anywhere_is_found(bad: float, place: int) -> None:
    buffer = torch.ones(1024)
    buffer[place] = bad
    assert not all_finite([torch.ones(3), buffer])


def test_finite_buffers_pass_even_where_their_sum_would_overflow() -> None:
    assert all_finite([torch.full((64,), torch.finfo(torch.float32).max), torch.zeros(0)])
    assert all_finite([torch.full((64,), 60000.0, dtype=torch.float16)])
    assert all_finite([])
