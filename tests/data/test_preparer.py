from __future__ import annotations

import numpy as np
import pytest

from paceline.data.augmentation.augment import EvalTransform, TrainTransform
from paceline.data.decoding.decode import CorruptImage
from paceline.data.decoding.preparer import PillowPreparer
from paceline.data.settings import DataSettings

SETTINGS = DataSettings(image_size=8, eval_resize=0, augment="none", flip=False)


class Causes:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, cause: str, seconds: float) -> None:
        self.seconds[cause] = self.seconds.get(cause, 0.0) + seconds


def test_decodes_and_augments() -> None:
    pixels = np.arange(192, dtype=np.uint8).reshape(8, 8, 3)
    out, clock = np.zeros((8, 8, 3), np.uint8), Causes()
    PillowPreparer(EvalTransform(SETTINGS), 3)(pixels, (), out, clock)
    np.testing.assert_array_equal(out, pixels)
    assert set(clock.seconds) == {"decode", "augment"}
    assert all(seconds > 0 for seconds in clock.seconds.values())


def test_draws_are_the_transform_s() -> None:
    assert PillowPreparer(EvalTransform(SETTINGS), 3).draws == 0
    transform = TrainTransform(DataSettings())
    assert PillowPreparer(transform, 3).draws == transform.draws > 0


def test_no_image() -> None:
    out = np.zeros((8, 8, 3), np.uint8)
    with pytest.raises(CorruptImage, match="empty file"):
        PillowPreparer(EvalTransform(SETTINGS), 3)(b"", (), out)


def test_says_what_it_was_told_to() -> None:
    assert PillowPreparer(EvalTransform(SETTINGS), 3, "because").describe() == "because"
    assert PillowPreparer(EvalTransform(SETTINGS), 3).describe() == ""
