"""`SyntheticImages`: generated images, `data.source = synthetic`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.data.order import SYNTHETIC_STREAM, hash64, to_unit
from paceline.data.settings import DataSettings
from paceline.data.sources.base import Source, Split
from paceline.data.sources.classes import numbered_classes
from paceline.data.sources.registry import SourceKind

# Maximum value of a stripe. The sum of two stripes and the noise is at most 255.
_STRIPE_LEVELS = 80
_NOISE_LEVELS = 95
_NOISE_STARTS = 65_536


class SyntheticImages(Source):
    """Generated images with balanced labels, for measurements and tests.

    Pixels are a function of the index: stripes whose widths and phases depend on the class, plus
    noise that depends on the index. A model can learn the classes, but cannot memorize the images.
    """

    is_in_memory = True

    def __init__(
        self, count: int, classes: int, image_size: int, channels: int, salt: int = 0
    ) -> None:
        """Creates a split of `count` images. `salt` is the seed of the noise."""
        self.classes = numbered_classes(classes)
        self.labels = np.arange(count, dtype=np.int64) % classes
        self._shape = (image_size, image_size, channels)
        # Horizontal stripes are gray; vertical stripes differ between channels. So each addition works on
        # whole rows of bytes, ten times as fast as on pixels of three bytes.
        self._across = _stripes(classes, 0, image_size, 1)
        self._along = _stripes(classes, 1, image_size, channels)
        # Hashing every pixel would cost more than decoding a JPEG, so each image has its own window into
        # one long strip of noise.
        length = image_size * image_size * channels + _NOISE_STARTS
        strip = hash64(salt, SYNTHETIC_STREAM, 0, np.arange(length))
        self._noise = (to_unit(strip) * _NOISE_LEVELS).astype(np.uint8)
        # Hashes all indices at once, because a single hash costs more than the rest of a small image.
        starts = hash64(salt, SYNTHETIC_STREAM, 1, np.arange(count))
        self._starts = (starts % np.uint64(_NOISE_STARTS)).astype(np.int64)

    def read(self, i: int) -> npt.NDArray[np.uint8]:
        rows, columns, channels = self._shape
        start = self._starts[i]
        noise = self._noise[start : start + rows * columns * channels].reshape(rows, -1)
        image: npt.NDArray[np.uint8] = noise + self._along[self.labels[i]].reshape(1, -1)
        image += self._across[self.labels[i]]
        return image.reshape(self._shape)

    def name(self, i: int) -> str:
        return f"synthetic:{i}"


def _stripes(classes: int, side: int, length: int, channels: int) -> npt.NDArray[np.uint8]:
    """Returns the stripes of all classes: waves of one to six periods, as classes × length × channels."""
    label = np.arange(classes)[:, None, None]
    channel = np.arange(channels)[None, None, :]
    periods = 1 + 5 * to_unit(hash64(0, SYNTHETIC_STREAM, 2, side, label, channel))
    phases = to_unit(hash64(0, SYNTHETIC_STREAM, 3, side, label, channel))
    turns = np.arange(length)[None, :, None] / length * periods + phases
    return ((np.sin(2 * np.pi * turns) + 1) / 2 * _STRIPE_LEVELS).astype(np.uint8)


def open_split(
    settings: DataSettings, split: Split, classes: Sequence[str] | None, keep_index: bool
) -> Source:
    """Opens a split. Validation has a tenth as many images as training, at least one."""
    training = split == "train"
    return SyntheticImages(
        count=settings.synthetic_samples if training else max(1, settings.synthetic_samples // 10),
        classes=settings.synthetic_classes,
        image_size=settings.image_size,
        channels=settings.channels,
        salt=0 if training else 1,
    )


KIND = SourceKind(open_split)
