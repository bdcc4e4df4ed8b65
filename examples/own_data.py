"""Trains on data of your own: python examples/own_data.py [EPOCHS]

`Shapes` draws bright squares and disks, as a torch Dataset and as a `pl.Source`. A Dataset returns
(image, label); a Source returns encoded images or pixels by index and is read by several threads.
"""

import sys

import numpy as np
from torch.utils.data import Dataset

import paceline as pl

CLASSES = ("square", "disk")


def draw(index: int) -> np.ndarray:
    chance = np.random.default_rng(index)
    rows, columns = np.mgrid[:32, :32] - chance.integers(10, 22, 2)[:, None, None]
    radius = chance.integers(4, 9)
    square = np.maximum(abs(rows), abs(columns)) < radius
    disk = rows**2 + columns**2 < radius**2 * 4 / np.pi
    pixels = chance.integers(0, 80, (32, 32, 3)) + 150 * (disk if index % 2 else square)[..., None]
    return pixels.astype(np.uint8)


class Shapes(Dataset):
    """A map-style dataset."""

    classes = CLASSES

    def __init__(self, first: int, count: int) -> None:
        self.first = first
        self.targets = [(first + i) % 2 for i in range(count)]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return draw(self.first + index), self.targets[index]


class ShapesSource(pl.Source):
    """The same as a source."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.classes = first, CLASSES
        self.labels = np.arange(first, first + count) % 2

    def read(self, i: int) -> np.ndarray:
        return draw(self.first + i)

    def name(self, i: int) -> str:
        return f"shape {self.first + i}"


def main(epochs: int) -> list[float | None]:
    found = []
    for train, val in (
        (Shapes(0, 1024), Shapes(10_000, 256)),
        (ShapesSource(0, 1024), ShapesSource(10_000, 256)),
    ):
        trainer = pl.Trainer(
            "resnet_tiny", train, val_data=val, image_size=32, epochs=epochs, batch_size=64, lr=0.1
        )
        found.append(trainer.fit().top1)
    return found


if __name__ == "__main__":
    print(
        "top-1 of the dataset and of the source:",
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 3),
    )
