"""Fixtures of the input pipeline."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from data.small import encode

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
