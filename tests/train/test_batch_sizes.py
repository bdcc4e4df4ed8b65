from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.train.inputs import LARGEST_AUTOMATIC_MICRO_BATCH, BatchSizes, resolve_batch_sizes


@pytest.mark.parametrize(
    ("wanted", "ranks", "sizes"),
    [
        ((None, 32), 4, BatchSizes(128, 32, 1, False)),
        ((65536, 256), 1, BatchSizes(65536, 256, 256, False)),
        ((1024, 64), 4, BatchSizes(1024, 64, 4, False)),
        ((None, None), 2, BatchSizes(256, 128, 1, True)),
        ((65536, None), 1, BatchSizes(65536, 256, 256, True)),
        ((300, None), 1, BatchSizes(300, 150, 2, True)),
    ],
)
def test_sizes(wanted: tuple[int | None, int | None], ranks: int, sizes: BatchSizes) -> None:
    assert resolve_batch_sizes(*wanted, ranks) == sizes


@given(share=st.integers(1, 5000), ranks=st.integers(1, 64))
def test_automatic_sizes_always_multiply_out(share: int, ranks: int) -> None:
    sizes = resolve_batch_sizes(share * ranks, None, ranks)
    assert sizes.micro_batch * ranks * sizes.accumulation == share * ranks
    assert sizes.micro_batch <= LARGEST_AUTOMATIC_MICRO_BATCH


@pytest.mark.parametrize(
    ("wanted", "ranks", "words"),
    [
        ((1000, 64), 2, "use 896 or 1024, or --batch-size 50 or 100"),
        ((100, 64), 2, "use 128, or --batch-size 25 or 50"),
        ((1001, None), 2, "use 1000 or 1002"),
        ((101, 10), 2, "with a number of ranks that divides 101"),
    ],
)
def test_what_does_not_divide_names_what_would(
    wanted: tuple[int, int | None], ranks: int, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_batch_sizes(*wanted, ranks)
    assert "run.global_batch_size" in str(caught.value)
    assert words in str(caught.value)
