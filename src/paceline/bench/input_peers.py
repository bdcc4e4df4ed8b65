"""Peers of `paceline bench input`: torch's DataLoader with Pillow, and the webdataset library.

Workers are processes that live through the whole measurement, with one torch thread each; they
decode, augment, normalize and collate. Epochs never end, so that no peer pays for starting one.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from paceline.bench.input_rows import InputRow, InputStream
from paceline.core.errors import DataError
from paceline.data import DataSettings, Source, open_source, random_box
from paceline.data.augment import draws

_PREFETCH = 2
_SHUFFLE_BUFFER = 1000
# From encoded bytes to a normalized float tensor, channels × height × width.
PeerTransform = Callable[[bytes], torch.Tensor]


class Delivered:
    """Batches of the loader of `library`, moved to the device in the format of models."""

    def __init__(self, batches: Iterator[Any], row: InputRow, library: str) -> None:
        self.stored = _PREFETCH * row.workers
        self._batches = batches
        self._row = row
        self._library = library

    def describe(self) -> str:
        return f"{self._library}, Pillow {PIL.__version__}, in processes"

    def remark(self) -> str:
        return ""

    def __next__(self) -> torch.Tensor:
        images: torch.Tensor = next(self._batches)[0]
        if self._row.device == "cpu":
            return images
        images = images.to(self._row.device, non_blocking=True)
        return images.to(self._row.dtype, memory_format=torch.channels_last)


class PillowImages(Dataset[tuple[torch.Tensor, int]]):
    """Like torchvision's ImageFolder, but reads from our source without opening files."""

    def __init__(self, source: Source, row: InputRow) -> None:
        self._source = source
        self._transform = peer_transform(row.settings, row.split)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        data = self._source.read(index)
        assert isinstance(data, bytes)
        return self._transform(data), int(self._source.labels[index])


class EndlessOrder(Sampler[int]):
    """Endless epochs, shuffled for training."""

    def __init__(self, count: int, shuffle: bool, seed: int) -> None:
        self._count, self._shuffle = count, shuffle
        self._random = random.Random(seed)

    def __iter__(self) -> Iterator[int]:
        order = list(range(self._count))
        while True:
            if self._shuffle:
                self._random.shuffle(order)
            yield from order


@contextmanager
def open_dataloader(row: InputRow) -> Iterator[InputStream]:
    source = open_source(row.settings, row.split)
    try:
        if not isinstance(source.read(0), bytes):
            raise DataError(
                f"{row.settings.dir}: holds pixels, not encoded images",
                "measure JPEGs: tar shards or class folders",
            )
        loader = DataLoader(
            PillowImages(source, row), batch_size=row.batch_size,
            sampler=EndlessOrder(len(source), row.split == "train", row.seed),
            num_workers=row.workers, prefetch_factor=_PREFETCH, persistent_workers=True,
            pin_memory=row.device == "cuda", multiprocessing_context="fork",
        )  # fmt: skip
        yield Delivered(iter(loader), row, f"DataLoader of torch {torch.__version__}")
    finally:
        source.close()


def no_webdataset(directory: str, split: str) -> str | None:
    """Why webdataset cannot be measured; None if it can."""
    if importlib.util.find_spec("webdataset") is None:
        return "the library is not installed (pip install webdataset, or paceline[bench])"
    if not list(Path(directory).glob(f"{split}-*.tar")):
        return f"no {split}-*.tar in {directory}"
    return None


@contextmanager
def open_webdataset(row: InputRow) -> Iterator[InputStream]:
    """Shards are drawn with replacement, so that there may be more workers than shards."""
    import webdataset

    shards = sorted(str(path) for path in Path(row.settings.dir).glob(f"{row.split}-*.tar"))
    images = webdataset.WebDataset(shards, resampled=True, shardshuffle=False)
    if row.split == "train":
        images = images.shuffle(_SHUFFLE_BUFFER)
    images = (
        images.to_tuple("jpg;jpeg;png;webp", "cls")
        .map_tuple(peer_transform(row.settings, row.split), int)
        .batched(row.batch_size, collation_fn=default_collate, partial=False)
    )
    loader = webdataset.WebLoader(
        images, batch_size=None, num_workers=row.workers, prefetch_factor=_PREFETCH,
        persistent_workers=True, pin_memory=row.device == "cuda", multiprocessing_context="fork",
    )  # fmt: skip
    version = importlib.metadata.version("webdataset")
    yield Delivered(iter(loader), row, f"webdataset {version}")


class TrainPeer:
    """Decode, random resized crop, flip and normalize: the steps of torchvision's transforms at least
    cost."""

    def __init__(self, settings: DataSettings) -> None:
        self._settings = settings
        self._finish = _ToNormalized(settings)
        self._draws = draws(settings)

    def __call__(self, data: bytes) -> torch.Tensor:
        s = self._settings
        image = _opened(data)
        row = [random.random() for _ in range(self._draws)]
        box = random_box(image.width, image.height, row, s.crop_scale, s.crop_ratio)
        image = image.crop(box)
        image = image.resize((s.image_size, s.image_size), Image.Resampling.BILINEAR)
        if s.flip and random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return self._finish(image)


class EvalPeer:
    """Decode, resize the short side to `eval_resize`, center crop and normalize."""

    def __init__(self, settings: DataSettings) -> None:
        self._settings = settings
        self._finish = _ToNormalized(settings)

    def __call__(self, data: bytes) -> torch.Tensor:
        size = self._settings.image_size
        short = self._settings.eval_resize or size
        image = _opened(data)
        shorter = min(image.size)
        scaled = (short * image.width // shorter, short * image.height // shorter)
        image = image.resize(scaled, Image.Resampling.BILINEAR)
        left, top = (round((side - size) / 2) for side in image.size)
        return self._finish(image.crop((left, top, left + size, top + size)))


def peer_transform(settings: DataSettings, split: str) -> PeerTransform:
    return TrainPeer(settings) if split == "train" else EvalPeer(settings)


def _opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


class _ToNormalized:
    def __init__(self, settings: DataSettings) -> None:
        self._mean = torch.tensor(settings.mean).view(-1, 1, 1)
        self._std = torch.tensor(settings.std).view(-1, 1, 1)

    def __call__(self, image: Image.Image) -> torch.Tensor:
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
        return pixels.to(torch.float32).div_(255).sub_(self._mean).div_(self._std)
