"""What a peer's worker does to an image, written with Pillow and torch as people write it.

In: encoded bytes. Out: a normalised float tensor, channels × height × width. Decode to RGB, crop, then
resize, flip, to float, normalise in place: the steps of torchvision's transforms, at their least cost.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image

from paceline.data.augmentation.augment import draws, random_box
from paceline.data.settings import DataSettings

PeerTransform = Callable[[bytes], torch.Tensor]


class TrainPeer:
    """Random resized crop and flip."""

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
    """Short side to `eval_resize`, then the centre."""

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
