from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from paceline.data.on_device.pixel_form import PixelForm, UnequalSizesError
from paceline.data.settings import DataSettings
from paceline.data.sources.cifar10 import Cifar10

Make = Callable[..., DataSettings]


def test_evaluation_shares_what_training_fitted(small_settings: Make) -> None:
    chosen = small_settings(augment="pad_crop")
    assert PixelForm.for_training(chosen) == PixelForm.for_evaluation(chosen)
    assert PixelForm.for_training(chosen) == PixelForm.for_training(small_settings())
    other = small_settings(eval_resize=9)
    assert PixelForm.for_training(other) != PixelForm.for_evaluation(other)


def test_boxes_are_cut_from_stored_images(memory_source: Any, small_settings: Make) -> None:
    form = PixelForm.for_training(small_settings(augment="random_resized_crop"))
    assert form.shape(memory_source(5, corrupt={0, 1}, size=11)) == (11, 11, 1)
    assert form.shape(memory_source(2, corrupt={0, 1})) is None


def test_pixels_that_lie_ready(tmp_path: Path, small_cifar: Any) -> None:
    source = Cifar10(small_cifar.write(tmp_path, "bin"), "val")
    assert PixelForm(3, 32, 32, "bilinear").ready(source) is source.pixels
    assert PixelForm(3).ready(source) is source.pixels
    assert PixelForm(3).shape(source) == (32, 32, 3)
    for other in (PixelForm(1), PixelForm(3, 28, 28, "bilinear"), PixelForm(3, 32, 36, "bilinear")):
        assert other.ready(source) is None


def test_other_sizes_are_refused_where_they_must_be_equal() -> None:
    transform = PixelForm(1).transform((4, 6, 1))
    out = np.zeros((4, 6, 1), dtype=np.uint8)
    transform(Image.new("L", (6, 4), 7), (), out)
    assert (out == 7).all()
    with pytest.raises(UnequalSizesError, match="images of 6 × 4 and of 4 × 6"):
        transform(Image.new("L", (4, 6)), (), out)
