"""Small sources, settings, shards and loaders for the tests of the input pipeline."""

from __future__ import annotations

import io
import tarfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from paceline.data import (
    Batch,
    BatchPlan,
    DataSettings,
    EvalLoader,
    Source,
    TrainLoader,
    create_eval_loader,
    create_train_loader,
)

Member = tuple[str, bytes]
CPU = torch.device("cpu")


def encode(image: np.ndarray | Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    image.save(stream, kind, **options)
    return stream.getvalue()


def noise(width: int, height: int, seed: int = 0, bands: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, bands), dtype=np.uint8)


def numbered_image(number: int, size: int = 8) -> bytes:
    """Returns a gray PNG with all pixels equal to `number` modulo 256."""
    return encode(np.full((size, size), number % 256, dtype=np.uint8))


class FileSource(Source):
    """A source of the given files; labels are their numbers."""

    def __init__(self, files: list[bytes]) -> None:
        self.classes = [str(i) for i in range(len(files))]
        self.labels = np.arange(len(files), dtype=np.int64)
        self.files = files
        self.reads: list[int] = []

    def read(self, i: int) -> bytes:
        self.reads.append(i)
        return self.files[i]

    def name(self, i: int) -> str:
        return f"{i}.jpg"


class MemorySource(FileSource):
    """A source with distinct samples, some of which may be corrupt or fail to be read."""

    def __init__(self, count: int, corrupt: set[int] | None = None, size: int = 8) -> None:
        super().__init__([numbered_image(i, size) for i in range(count)])
        self.corrupt = corrupt or set()
        self.failure: Exception | None = None
        self.gate: threading.Event | None = None

    def read(self, i: int) -> bytes:
        self.reads.append(i)
        if self.gate is not None:
            self.gate.wait(100)
        if self.failure is not None:
            raise self.failure
        return b"no image" if i in self.corrupt else self.files[i]

    def name(self, i: int) -> str:
        return f"memory:{i}"


def small_settings(**changes: Any) -> DataSettings:
    """Returns settings for 8 × 8 gray images."""
    values: dict[str, Any] = {
        "image_size": 8, "channels": 1, "augment": "none", "flip": False, "crop_padding": 2,
        "eval_resize": 0, "mean": (0.5,), "std": (0.5,), "workers": 0,
    }  # fmt: skip
    return DataSettings(**{**values, **changes})


def train_loader(source: Any, plan: BatchPlan, settings: DataSettings, **more: Any) -> TrainLoader:
    values = {"seed": 4, "rank": 0, "first_step": 0, "device": CPU, **more}
    return create_train_loader(source, plan, settings, **values)


def eval_loader(source: Any, settings: DataSettings, **more: Any) -> EvalLoader:
    values = {"rank": 0, "world_size": 1, "batch_size": 8, "device": CPU, **more}
    return create_eval_loader(source, settings, **values)


def assert_equal(got: Sequence[Batch], want: Sequence[Batch], corrupt: bool = True) -> None:
    """Compares pixels, labels and reports of corrupt samples, on any device."""
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.images.cpu(), b.images.cpu())
        assert torch.equal(a.labels.cpu(), b.labels.cpu())
        assert not corrupt or a.corrupt == b.corrupt


def in_threads(*work: Callable[[], object]) -> None:
    """Runs functions at the same time, each in a thread."""
    threads = [threading.Thread(target=each) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def write_tar(path: Path, members: list[Member]) -> Path:
    with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def samples(count: int, first: int = 0, classes: int = 3) -> list[Member]:
    """Members of `count` good samples with keys from `first` on and labels modulo `classes`."""
    return [
        member
        for i in range(first, first + count)
        for member in (
            (f"{i:06d}.png", numbered_image(i)), (f"{i:06d}.cls", str(i % classes).encode())
        )
    ]  # fmt: skip
