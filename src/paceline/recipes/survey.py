"""What `recipe = auto` knows about the data: numbers of images and classes, sizes and colors."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import numpy as np

from paceline.core.errors import DataError
from paceline.core.units import plural
from paceline.data import Source, image_facts
from paceline.train.choices import Situation

# Number of images whose headers are read.
_SAMPLE = 64
# With more classes than this, a class needs several images on average.
_MANY_CLASSES = 1000
_FEWEST_PER_CLASS = 5


@dataclass(frozen=True)
class Survey:
    """Facts about the training data.

    Attributes:
        images: Number of images, including those that are held out for validation.
        classes: Number of classes.
        sides: Shortest, median and longest short side of the sampled images, in pixels.
        longest: Longest side of a sampled image, in pixels.
        channels: 1 if all sampled images are grayscale, else 3.
        square: True if all sampled images are square.
    """

    images: int
    classes: int
    sides: tuple[int, int, int]
    longest: int
    channels: int
    square: bool

    @property
    def sizes(self) -> str:
        """The sizes as text."""
        low, _, high = self.sides
        return f"{low} pixels" if low == high else f"{low} to {high} pixels on the short side"


def survey(situation: Situation) -> Survey:
    """Looks at the labels and at the headers of a sample of the images.

    Raises:
        DataError: If the data cannot be trained. The message has the remedy.
    """
    source = situation.source
    _check_labels(source, situation.validation, situation.config.data.dir)
    shares = np.linspace(0, len(source) - 1, min(_SAMPLE, len(source)))
    facts = [image_facts(source.read(int(i))) for i in shares]
    known = [fact for fact in facts if fact.width > 0 and fact.height > 0]
    if not known:
        raise DataError(
            f"none of {len(facts)} sampled images can be read, such as {source.name(0)}",
            "convert them to JPEG or PNG",
        )
    short = sorted(min(fact.width, fact.height) for fact in known)
    return Survey(
        images=len(source), classes=len(source.classes),
        sides=(short[0], int(median(short)), short[-1]),
        longest=max(max(fact.width, fact.height) for fact in known),
        channels=max(fact.channels for fact in known),
        square=all(fact.width == fact.height for fact in known),
    )  # fmt: skip


def _check_labels(source: Source, validation: str, folder: str) -> None:
    """Raises DataError for data from which nothing can be learned."""
    place, classes = folder or source.kind, len(source.classes)
    if classes < 2:
        raise DataError(
            f"only one class ({source.classes[0]}) in {place}",
            "training needs images of two classes",
        )
    counts = np.bincount(source.labels, minlength=classes)
    if not validation and counts.max() < 2:
        raise DataError(
            f"{plural(len(source), 'image')} of {classes:,} classes in {place}, one of each class",
            "add images: training and validation need different ones, some dozens per class are useful",
        )
    if classes > _MANY_CLASSES and len(source) < _FEWEST_PER_CLASS * classes:
        raise DataError(
            f"{classes:,} classes with {len(source) / classes:.1f} images each on average in {place}",
            f"merge classes until each has {_FEWEST_PER_CLASS} images, or name a recipe or its file to "
            "train anyway",
        )
