"""Small data sets on disk, as shards or class folders: 28 × 28 PNGs of four classes that a model can
learn, with corrupt samples on demand."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
from PIL import Image


def write_shards(
    folder: Path,
    train: int = 40,
    val: int = 8,
    corrupt: Collection[int] = (),
    labels: Callable[[int], int] = lambda i: i % 4,
) -> Path:
    """Two training shards and one for validation, with four classes; `corrupt` are training samples."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "classes.json").write_text(json.dumps(["ant", "bee", "cat", "dog"]))
    half = train // 2
    _write_tar(folder / "train-0.tar", range(half), corrupt, labels)
    _write_tar(folder / "train-1.tar", range(half, train), corrupt, labels)
    _write_tar(folder / "val-0.tar", range(1000, 1000 + val), corrupt, labels)
    return folder


def write_folders(folder: Path, train: int = 40, val: int = 8) -> Path:
    """The same images as class folders."""
    for split, numbers in (("train", range(train)), ("val", range(1000, 1000 + val))):
        for i in numbers:
            place = folder / split / "abcd"[i % 4]
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{i:04d}.png").write_bytes(png(i))
    return folder


def png(number: int) -> bytes:
    """Returns 28 × 28 pixels of noise with a level that depends on the class."""
    noise = np.random.default_rng(number).integers(0, 120, (28, 28), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noise + np.uint8(40 * (number % 4))).save(stream, "PNG")
    return stream.getvalue()


def _write_tar(
    path: Path, numbers: range, corrupt: Collection[int], labels: Callable[[int], int]
) -> None:
    with tarfile.open(path, "w") as archive:
        for i in numbers:
            image = png(i)
            # The picture breaks off in the middle: its head is still that of an image.
            content = image[: len(image) // 2] if i in corrupt else image
            for name, data in ((f"{i:04d}.png", content), (f"{i:04d}.cls", b"%d" % labels(i))):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
