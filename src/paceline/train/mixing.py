"""`Mixing`: each image of a micro-batch mixed with another of it, and its label too.

In: how strongly, and which micro-batch of which step. Out: for each image a share and a box. Mixup (Zhang
et al. 2018) adds two images up, CutMix (Yun et al. 2019) puts a box of one into the other; with both on,
each image takes one of the two, by chance. The other image is the one at the same place from the end.
Shares are drawn image by image: one for a whole batch would make the steps of large batches differ.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.train.machine import derive_seed

# What a row of the table has: the image's share outside of the box, and the box, where its share is 0.
_COLUMNS = 5


class Mixing:
    """`mixup` and `cutmix` are the parameters of their Beta distributions; 0 is off."""

    def __init__(self, mixup: float, cutmix: float, size: int, seed: int) -> None:
        """`size`: images are so many pixels wide and high."""
        self._mixup, self._cutmix = mixup, cutmix
        self._size = size
        self._seed = seed

    def table(self, step: int, number: int, samples: int) -> Tensor:
        """For `samples` images of micro-batch `number` of `step`, whichever rank computes it."""
        key = derive_seed(self._seed, step, number, "mixing")
        chance = np.random.Generator(np.random.Philox(key))
        table = np.zeros((samples, _COLUMNS), dtype=np.float32)
        table[:, 0] = chance.beta(self._mixup, self._mixup, samples) if self._mixup else 1
        if self._cutmix:
            boxes = self._boxes(chance, samples)
            boxed = np.zeros_like(table)
            boxed[:, 0], boxed[:, 1:] = 1, boxes
            takes = chance.random(samples) < (0.5 if self._mixup else 1)
            table[takes] = boxed[takes]
        return torch.from_numpy(table)

    def _boxes(self, chance: np.random.Generator, samples: int) -> npt.NDArray[np.int64]:
        """Top, bottom, left and right, cut off at the edges of the image."""
        side = self._size * np.sqrt(1 - chance.beta(self._cutmix, self._cutmix, samples))
        centre = chance.integers(0, self._size, (2, samples))
        first, last = centre - side.astype(int) // 2, centre + side.astype(int) // 2
        rows_and_columns = np.stack((first, last), axis=1).clip(0, self._size)
        return rows_and_columns.reshape(4, samples).T


def mixed(images: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """The images, and what share of each is still its own."""
    height, width = images.shape[2:]
    own, top, bottom, left, right = (column.view(-1, 1, 1, 1) for column in table.unbind(1))
    rows = torch.arange(height, device=images.device).view(1, 1, -1, 1)
    columns = torch.arange(width, device=images.device).view(1, 1, 1, -1)
    inside = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
    share = torch.where(inside, torch.zeros_like(own), own).to(images.dtype)
    kept = own * (1 - (bottom - top) * (right - left) / (height * width))
    return torch.lerp(images.flip(0), images, share), kept.flatten()


def other_labels(labels: Tensor) -> Tensor:
    """Of the images that were mixed in."""
    return labels.flip(0)
