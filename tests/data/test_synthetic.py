from __future__ import annotations

import numpy as np

from paceline.data.sources.synthetic import SyntheticImages


def test_shape_labels_and_determinism() -> None:
    source = SyntheticImages(count=25, classes=10, image_size=16, channels=3)
    again = SyntheticImages(count=25, classes=10, image_size=16, channels=3)
    assert len(source) == 25
    assert source.labels.tolist() == [i % 10 for i in range(25)]
    assert len(source.classes) == 10
    for i in (0, 7, 24):
        image = source.read(i)
        assert image.shape == (16, 16, 3)
        assert image.dtype == np.uint8
        np.testing.assert_array_equal(image, again.read(i))


def test_reading_does_not_change_what_is_read_later() -> None:
    source = SyntheticImages(count=5, classes=2, image_size=8, channels=1)
    first = source.read(3).copy()
    source.read(3)[...] = 0
    np.testing.assert_array_equal(source.read(3), first)


def test_images_of_a_class_differ_and_splits_differ() -> None:
    train = SyntheticImages(count=40, classes=4, image_size=16, channels=1)
    val = SyntheticImages(count=40, classes=4, image_size=16, channels=1, salt=1)
    assert (train.read(0) != train.read(4)).mean() > 0.5
    assert (train.read(0) != val.read(0)).mean() > 0.5


def test_the_classes_can_be_learned() -> None:
    """The nearest class mean of the training images names the class of nearly all others."""
    train = SyntheticImages(count=400, classes=20, image_size=16, channels=3)
    val = SyntheticImages(count=200, classes=20, image_size=16, channels=3, salt=1)
    pixels = np.stack([train.read(i) for i in range(400)]).reshape(400, -1).astype(np.float32)
    means = np.stack([pixels[train.labels == label].mean(0) for label in range(20)])
    other = np.stack([val.read(i) for i in range(200)]).reshape(200, -1).astype(np.float32)
    distance = ((other[:, None, :] - means[None]) ** 2).sum(2)
    assert (distance.argmin(1) == val.labels).mean() > 0.95


def test_pixels_do_not_wrap() -> None:
    """Light stripes plus noise stay light: no sum runs over 255 into black."""
    source = SyntheticImages(count=50, classes=50, image_size=32, channels=3)
    for i in range(50):
        stripes = source._across[i][:, None, :].astype(int) + source._along[i][None, :, :]
        assert (source.read(i).astype(int) >= stripes).all()
