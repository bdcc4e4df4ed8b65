"""Fixed subsets of three data sets: 10,000 training images of at most 32 pixels each."""

from __future__ import annotations

import functools
import hashlib
import json
import lzma
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from paceline.data import DataSettings, Source, open_source

Pixels = npt.NDArray[np.uint8]
TRAIN_IMAGES, VAL_IMAGES, SIDE = 10_000, 2_000, 32
EMBEDDED = "fashion"
# Mean and standard deviation of the training pixels, as for all methods.
STATISTICS = {
    "fashion": ((0.286,), (0.353,)),
    "cifar10": ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
    "tiny25": ((0.480, 0.448, 0.398), (0.272, 0.264, 0.275)),
}


class Subset(Source):
    """Images and labels in memory."""

    is_in_memory = True

    def __init__(self, pixels: Pixels, labels: Sequence[int], classes: Sequence[str]) -> None:
        self.pixels, self.labels, self.classes = pixels, labels, classes

    def read(self, i: int) -> Pixels:
        assert self.pixels is not None
        image: Pixels = self.pixels[i]
        return image


def _pick(source: Source, images: int) -> tuple[Pixels, list[int]]:
    """Returns a fixed choice of `images` samples of a source, as pixels and labels."""
    order = np.random.default_rng(0).permutation(len(source))[:images]
    chosen = sorted(order.tolist())
    pixels = np.stack([_square(source.read(i)) for i in chosen])
    return pixels, [int(source.labels[i]) for i in chosen]


def _square(stored: bytes | Pixels) -> Pixels:
    """Returns an image as pixels; reduces images of more than 32 pixels to 32."""
    if not isinstance(stored, bytes):
        return stored
    from io import BytesIO

    with Image.open(BytesIO(stored)) as image:
        mode = image.mode if image.mode == "L" and max(image.size) <= SIDE else "RGB"
        opened = image.convert(mode)
        if max(opened.size) > SIDE:
            opened = opened.resize((SIDE, SIDE), Image.Resampling.BOX)
    pixels = np.asarray(opened, np.uint8)
    return pixels[..., None] if pixels.ndim == 2 else pixels


def _settings(name: str, directory: Path | None) -> DataSettings:
    if name == EMBEDDED:
        return DataSettings(source="embedded", channels=1)
    return DataSettings(dir=str(directory))


def prepare(name: str, directory: Path | None, folder: Path) -> None:
    """Writes a subset to `folder`, compressed without loss.

    Args:
        name: Name of the data set.
        directory: The whole data set as `--data-dir` takes it; None for the embedded images.
        folder: The folder of the subsets.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = _settings(name, directory)
    facts: dict[str, Any] = {}
    for split, images in (("train", TRAIN_IMAGES), ("val", VAL_IMAGES)):
        source = open_source(settings, "train" if split == "train" else "val")
        pixels, labels = _pick(source, images)
        channels = pixels.astype(np.uint8)
        if channels.shape[-1] == 3:  # differences to green, then to the left neighbour
            green = channels[..., 1:2]
            channels = np.concatenate(
                [channels[..., :1] - green, green, channels[..., 2:] - green], -1
            )
        left = np.diff(channels, axis=2, prepend=np.uint8(0))
        planes = np.ascontiguousarray(left.transpose(3, 0, 1, 2))
        (folder / f"{name}-{split}.xz").write_bytes(lzma.compress(planes.tobytes()))
        facts[split] = {
            "shape": list(planes.shape), "labels": labels,
            "sha256": hashlib.sha256(pixels.tobytes()).hexdigest(),
        }  # fmt: skip
        facts["classes"] = list(source.classes)
    (folder / f"{name}.json").write_text(json.dumps(facts) + "\n", encoding="utf-8")


@functools.cache
def load(name: str, folder: Path, split: str) -> Subset:
    """Reads a subset that `prepare` has written."""
    facts = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    own = facts[split]
    content = lzma.decompress((folder / f"{name}-{split}.xz").read_bytes())
    planes = np.frombuffer(content, np.uint8).reshape(own["shape"])
    pixels = np.cumsum(planes.transpose(1, 2, 3, 0), axis=2, dtype=np.uint8)
    if pixels.shape[-1] == 3:
        green = pixels[..., 1:2]
        pixels = np.concatenate([pixels[..., :1] + green, green, pixels[..., 2:] + green], -1)
    if hashlib.sha256(pixels.tobytes()).hexdigest() != own["sha256"]:
        raise ValueError(f"{folder}/{name}-{split}.xz is damaged: run prepare again")
    return Subset(np.ascontiguousarray(pixels), own["labels"], facts["classes"])
