"""`PixelForm`: in which form the images of a resident set lie on the device.

In: the settings. Out: as stored, where a random box is yet to be cut from them, or fitted to the
square that the model takes. Equal forms hold equal pixels, so one set serves all who ask for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

from paceline.data.augmentation.augment import FitTransform, Pixels, Transform, pixels_of
from paceline.data.decoding.decode import CorruptImage, decode
from paceline.data.settings import DataSettings
from paceline.data.sources.source import ArraySource, Source

Shape = tuple[int, int, int]


class UnequalSizesError(Exception):
    """Images that must be equal in size are not; `str()` says which two."""


@dataclass(frozen=True)
class PixelForm:
    """`size` 0 keeps images as they are stored; `short_side` and `interpolation` then mean nothing."""

    channels: int
    size: int = 0
    short_side: int = 0
    interpolation: str = ""

    @classmethod
    def for_training(cls, settings: DataSettings) -> PixelForm:
        if settings.augment == "random_resized_crop":
            return cls(settings.channels)
        size = settings.image_size
        return cls(settings.channels, size, size, settings.interpolation)

    @classmethod
    def for_evaluation(cls, settings: DataSettings) -> PixelForm:
        size = settings.image_size
        return cls(settings.channels, size, settings.eval_resize or size, settings.interpolation)

    def shape(self, source: Source) -> Shape | None:
        """Height, width and channels; None where they follow from the images and none is good."""
        if self.size:
            return self.size, self.size, self.channels
        if isinstance(source, ArraySource):
            height, width = source.pixels.shape[1:3]
            return height, width, self.channels
        for index in range(len(source)):
            try:
                image = decode(source.read(index), self.channels)
            except CorruptImage:
                continue
            return image.height, image.width, self.channels
        return None

    def ready(self, source: Source) -> Pixels | None:
        """The pixels of all samples, where the source has them in this very form."""
        if not isinstance(source, ArraySource) or source.pixels.shape[3] != self.channels:
            return None
        fits = source.pixels.shape[1] == source.pixels.shape[2] == self.size == self.short_side
        return source.pixels if fits or not self.size else None

    def transform(self, shape: Shape) -> Transform:
        if self.size:
            return FitTransform(self.size, self.short_side, self.interpolation)
        return _AsStored(shape)


class _AsStored:
    draws = 0

    def __init__(self, shape: Shape) -> None:
        self._shape = shape

    def __call__(self, image: Image.Image, row: Sequence[float], out: Pixels) -> None:
        pixels = pixels_of(image)
        if pixels.shape != self._shape:
            height, width, _ = self._shape
            raise UnequalSizesError(
                f"images of {width} × {height} and of {image.width} × {image.height}"
            )
        out[...] = pixels
