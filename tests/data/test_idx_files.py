from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path

import numpy as np
import pytest

from paceline.core.errors import DataError
from paceline.data.settings import DataSettings
from paceline.data.sources.idx_files import IdxFiles, read_idx
from paceline.data.sources.source import open_source

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 5, 4), dtype=np.uint8)
LABELS = np.array([0, 2, 1, 2, 0, 1], dtype=np.uint8)


def idx(array: np.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


def write(directory: Path, stem: str = "train", suffix: str = "", dot: bool = False) -> Path:
    for part, array in (("images-idx3", PIXELS), ("labels-idx1", LABELS)):
        name = f"{stem}-{part}-ubyte{suffix}"
        content = idx(array)
        path = directory / (name.replace("-idx", ".idx") if dot else name)
        path.write_bytes(gzip.compress(content) if suffix else content)
    return directory


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("dot", [False, True])
def test_found_and_read(tmp_path: Path, suffix: str, dot: bool) -> None:
    write(tmp_path, "train", suffix, dot)
    write(tmp_path, "t10k", suffix, dot)
    settings = DataSettings(dir=str(tmp_path))
    train = open_source(settings, "train")
    val = open_source(settings, "val", train.classes)
    assert isinstance(train, IdxFiles)
    assert train.classes == val.classes == ["0", "1", "2"]
    assert train.labels.tolist() == LABELS.tolist()
    for i in range(6):
        assert np.array_equal(train.read(i), PIXELS[i, :, :, None])
    assert open_source(DataSettings(dir=str(tmp_path), source="idx"), "val").labels.sum() == 6


def test_names_of_the_classes(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "classes.json").write_text(json.dumps(["shirt", "bag", "boot"]))
    assert list(IdxFiles(tmp_path, "train").classes) == ["shirt", "bag", "boot"]
    (tmp_path / "classes.json").write_text(json.dumps(["shirt", "bag"]))
    with pytest.raises(DataError, match="label 2 is outside the 2 classes"):
        IdxFiles(tmp_path, "train")


def test_a_part_that_is_missing(tmp_path: Path) -> None:
    (write(tmp_path) / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match=r"no train-labels-idx1-ubyte\[.gz\] in it"):
        IdxFiles(tmp_path, "train")
    with pytest.raises(DataError, match=r"no t10k-images-idx3-ubyte"):
        IdxFiles(tmp_path, "val")


GOOD = idx(PIXELS)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "no idx file of unsigned bytes in 3 dimensions"),
        (GOOD[:10], "no idx file"),
        (GOOD[:-1], "119 bytes after the header, which says 120"),
        (GOOD + b"x", "more bytes after the header, which says 120"),
        (b"\0\0\x0d\x03" + GOOD[4:], r"no idx file .*begins with 00 00 0d 03"),
        (b"\0\0\x08\x01" + GOOD[4:], "no idx file"),
        (GOOD[:4] + b"\xff" * 12 + GOOD[16:], "claims 79,228,162,458,924,105,385,300,197,375 byt"),
        (GOOD[:4] + b"\0\0\0\x07" + GOOD[8:], "120 bytes after the header, which says 140"),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_wrong_headers_and_cuts(tmp_path: Path, content: bytes, line: str, suffix: str) -> None:
    path = tmp_path / f"train-images-idx3-ubyte{suffix}"
    path.write_bytes(gzip.compress(content) if suffix else content)
    with pytest.raises(DataError, match=line):
        read_idx(path, 3)


def test_a_packed_file_that_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    for content in (gzip.compress(GOOD)[:-20], b"no gzip at all", b""):
        path.write_bytes(content)
        with pytest.raises(DataError):
            read_idx(path, 3)


def test_a_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file that would fill the memory: no more is unpacked than the header says."""
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(GOOD + bytes(50_000_000), compresslevel=1))
    asked: list[int] = []
    real = gzip.GzipFile.read

    def watched(file: gzip.GzipFile, size: int | None = -1) -> bytes:
        asked.append(-1 if size is None else size)
        return real(file, size)

    monkeypatch.setattr(gzip.GzipFile, "read", watched)
    with pytest.raises(DataError, match="more bytes after the header"):
        read_idx(path, 3)
    assert asked == [16, 121]


def test_labels_for_other_images(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(LABELS[:4]))
    with pytest.raises(DataError, match="4 labels for 6 images"):
        IdxFiles(tmp_path, "train")
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(LABELS[:0]))
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(PIXELS[:0]))
    with pytest.raises(DataError, match="holds no image"):
        IdxFiles(tmp_path, "train")


def test_a_header_that_claims_gigabytes_gets_no_such_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked = tmp_path / "x.gz", []
    path.write_bytes(gzip.compress(struct.pack(">4B3I", 0, 0, 8, 3, 7, 1 << 15, 1 << 15)))
    real = gzip.GzipFile.read

    def watched(file: gzip.GzipFile, size: int | None = -1) -> bytes:
        asked.append(size)
        return real(file, size)

    monkeypatch.setattr(gzip.GzipFile, "read", watched)
    with pytest.raises(DataError, match="0 bytes after the header"):
        read_idx(path, 3)
    assert max(size or 0 for size in asked) <= 1 << 25
