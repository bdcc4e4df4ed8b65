from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from paceline.data.augmentation.augment import random_box
from paceline.data.augmentation.augment_numbers import AugmentNumbers, random_boxes
from paceline.data.randomness import uniform
from paceline.data.settings import DataSettings

Make = Callable[..., DataSettings]


def rows(count: int, draws: int) -> np.ndarray:
    indices = np.arange(count)
    return uniform(1, np.zeros_like(indices), indices, draws)


@pytest.mark.parametrize(
    ("width", "height", "scale", "ratio"),
    [
        (64, 64, (0.08, 1.0), (3 / 4, 4 / 3)),
        (500, 375, (0.08, 1.0), (3 / 4, 4 / 3)),
        (1, 1, (0.5, 1.0), (3 / 4, 4 / 3)),
        (90, 10, (0.9, 1.0), (3 / 4, 4 / 3)),  # nearly always the central box
        (10, 90, (0.9, 1.0), (3 / 4, 4 / 3)),
        (30, 30, (0.8, 1.0), (0.2, 5.0)),  # now a try, now the centre
    ],
)
def test_boxes_are_those_of_one_image_at_a_time(
    width: int, height: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> None:
    drawn = rows(3000, 23)
    want = [random_box(width, height, row, scale, ratio) for row in drawn.tolist()]
    got = random_boxes(width, height, drawn, scale, ratio)
    assert got.T.tolist() == [list(box) for box in want]


def test_shifts_and_flips_cover_their_range(small_settings: Make) -> None:
    numbers = AugmentNumbers(small_settings(augment="pad_crop", flip=True), 8, 8)
    out = np.empty((numbers.count, 4000), dtype=np.int64)
    numbers.fill(rows(4000, numbers.draws), out)
    assert 0.45 < out[0].mean() < 0.55
    for shift in out[1:]:
        assert sorted(set(shift.tolist())) == [-2, -1, 0, 1, 2]


def test_without_augmentation_nothing_moves(small_settings: Make) -> None:
    numbers = AugmentNumbers(small_settings(), 8, 8)
    out = np.full((numbers.count, 50), 9, dtype=np.int64)
    numbers.fill(rows(50, numbers.draws), out)
    assert not out.any()
