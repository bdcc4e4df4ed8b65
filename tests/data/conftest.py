"""Small data sets for the tests of the input pipeline."""

from __future__ import annotations

import io
import json
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.data import DataSettings, Source

Member = tuple[str, bytes]
SHARED_DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"


def encode(pixels: np.ndarray, kind: str = "PNG", **options: object) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind, **options)
    return stream.getvalue()


def numbered_image(number: int, size: int = 8) -> bytes:
    """Returns a gray PNG with all pixels equal to `number` modulo 256."""
    return encode(np.full((size, size), number % 256, dtype=np.uint8))


class MemorySource(Source):
    """A source with distinct samples, some of which may be corrupt or fail to be read."""

    def __init__(self, count: int, corrupt: set[int] | None = None, size: int = 8) -> None:
        self.classes = [str(i) for i in range(count)]
        self.labels = np.arange(count, dtype=np.int64)
        self.corrupt = corrupt or set()
        self.reads: list[int] = []
        self.failure: Exception | None = None
        self.gate: threading.Event | None = None
        self._images = [numbered_image(i, size) for i in range(count)]

    def read(self, i: int) -> bytes:
        self.reads.append(i)
        if self.gate is not None:
            self.gate.wait(100)
        if self.failure is not None:
            raise self.failure
        return b"no image" if i in self.corrupt else self._images[i]

    def name(self, i: int) -> str:
        return f"memory:{i}"


@pytest.fixture
def memory_source() -> type[MemorySource]:
    return MemorySource


@pytest.fixture
def png() -> Callable[..., bytes]:
    return encode


@pytest.fixture
def small_settings() -> Callable[..., DataSettings]:
    """Returns settings for 8 × 8 gray images."""

    def make(**changes: object) -> DataSettings:
        values: dict[str, object] = {
            "image_size": 8,
            "channels": 1,
            "augment": "none",
            "flip": False,
            "crop_padding": 2,
            "eval_resize": 0,
            "mean": (0.5,),
            "std": (0.5,),
            "workers": 0,
        }
        return DataSettings(**{**values, **changes})

    return make


@pytest.fixture
def write_tar() -> Callable[[Path, list[Member]], Path]:
    def write(path: Path, members: list[Member]) -> Path:
        with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w") as archive:
            for name, content in members:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        return path

    return write


@pytest.fixture
def samples() -> Callable[..., list[Member]]:
    """Members of `count` good samples with keys from `first` on and labels modulo `classes`."""

    def make(count: int, first: int = 0, classes: int = 3) -> list[Member]:
        members = []
        for i in range(first, first + count):
            members.append((f"{i:06d}.png", numbered_image(i)))
            members.append((f"{i:06d}.cls", str(i % classes).encode()))
        return members

    return make


@pytest.fixture
def tiny_imagenet() -> Path:
    directory = SHARED_DATA / "tinyimagenet25"
    if not directory.is_dir():
        pytest.skip("tinyimagenet25 is not here: ../shared/data is absent")
    return directory


CIFAR_STEMS = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


class SmallCifar:
    """Six files of `count` random images, written in any of the published forms."""

    def __init__(self, count: int = 4) -> None:
        random = np.random.default_rng(3)
        self.pixels = random.integers(0, 256, (6, count, 32, 32, 3), dtype=np.uint8)
        self.labels = random.integers(0, 10, (6, count))

    def write(self, directory: Path, form: str) -> Path:
        directory.mkdir(exist_ok=True)
        for stem, pixels, labels in zip(
            CIFAR_STEMS, self.pixels, self.labels.tolist(), strict=True
        ):
            if form == "png":
                content = encode(pixels.reshape(len(pixels), 1024, 3))
            else:
                planes = pixels.transpose(0, 3, 1, 2).reshape(len(pixels), -1)
                rows = np.concatenate([np.array(labels, np.uint8)[:, None], planes], axis=1)
                content = rows.tobytes()
            (directory / f"{stem}.{form}").write_bytes(content)
        if form == "png":
            train = self.labels[:5].reshape(-1).tolist()
            (directory / "train_lables.json").write_text(json.dumps(train))
            (directory / "test_lables.json").write_text(json.dumps(self.labels[5].tolist()))
        return directory


@pytest.fixture
def small_cifar() -> SmallCifar:
    return SmallCifar()


@pytest.fixture
def no_leaked_threads() -> Iterator[None]:
    """Fails the test if a loader's thread outlives it."""
    yield
    made = [t for t in threading.enumerate() if t.name.startswith("paceline-data")]
    for thread in made:
        thread.join(100)  # asked to end, it may still be on its way
    assert [t.name for t in made if t.is_alive()] == []
