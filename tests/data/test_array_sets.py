"""Sets with pixels in memory: CIFAR-10, idx files, synthetic images; and the embedded set."""

from __future__ import annotations

import gzip
import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.small import encode
from paceline.core.errors import DataError
from paceline.data import DataSettings, SyntheticImages, open_source
from paceline.data.sources.array_sets import (
    Cifar10,
    IdxFiles,
    find_layout,
    read_binary,
    read_idx,
    read_labels,
    read_sheet,
)
from paceline.data.sources.shards import EMBEDDED

FORMS = ["bin", "png"]
PIXELS = np.random.default_rng(0).integers(0, 256, (6, 5, 4), dtype=np.uint8)
LABELS = np.array([0, 2, 1, 2, 0, 1], dtype=np.uint8)


@pytest.mark.parametrize("form", FORMS)
def test_both_splits_in_canonical_order(tmp_path: Path, small_cifar: Any, form: str) -> None:
    small_cifar.write(tmp_path, form)
    settings = DataSettings(dir=str(tmp_path))
    train, val = open_source(settings, "train"), open_source(settings, "val")
    assert isinstance(train, Cifar10)
    assert (len(train), len(val)) == (20, 4)
    assert np.array_equal(train.pixels, small_cifar.pixels[:5].reshape(-1, 32, 32, 3))
    assert train.labels.tolist() == small_cifar.labels[:5].reshape(-1).tolist()
    assert val.labels.tolist() == small_cifar.labels[5].tolist()
    assert np.array_equal(val.read(3), small_cifar.pixels[5, 3])
    assert len(train.classes) == 10
    assert (train.classes[0], train.classes[9]) == ("airplane", "truck")
    assert Path(train.name(9)).name.startswith("data_batch_3")
    assert train.name(9).endswith(":1")
    train.close()


def test_the_folder_of_the_archive_may_be_between(tmp_path: Path, small_cifar: Any) -> None:
    small_cifar.write(tmp_path / "cifar-10-batches-bin", "bin")
    source = open_source(DataSettings(dir=str(tmp_path), source="cifar10"), "train")
    assert np.array_equal(source.read(19), small_cifar.pixels[4, 3])


@pytest.mark.parametrize("form", FORMS)
def test_a_missing_file_is_named(tmp_path: Path, small_cifar: Any, form: str) -> None:
    small_cifar.write(tmp_path, form)
    next(tmp_path.glob("data_batch_4*")).unlink()
    with pytest.raises(DataError, match=r"data_batch_4\S*: is missing"):
        Cifar10(tmp_path, "train")
    assert len(Cifar10(tmp_path, "val")) == 4


def test_a_label_too_few(tmp_path: Path, small_cifar: Any) -> None:
    (small_cifar.write(tmp_path, "png") / "test_lables.json").write_text(json.dumps([1, 2, 3]))
    with pytest.raises(DataError, match=r"test_lables.json: 3 labels for 4 images"):
        Cifar10(tmp_path, "val")


def test_a_file_cut_off_between_images(tmp_path: Path, small_cifar: Any) -> None:
    path = small_cifar.write(tmp_path, "bin") / "data_batch_5.bin"
    path.write_bytes(path.read_bytes()[: 3 * 3073])
    with pytest.raises(DataError, match=r"data_batch_5.bin: 3 images, data_batch_1.bin has 4"):
        Cifar10(tmp_path, "train")


def test_no_cifar(tmp_path: Path) -> None:
    assert find_layout(tmp_path, "train") is None
    with pytest.raises(
        DataError, match="no train split of CIFAR-10 in it; CIFAR-10 is data_batch_1"
    ):
        Cifar10(tmp_path, "train")


def test_beside_another_set_the_user_decides(tmp_path: Path, small_cifar: Any) -> None:
    small_cifar.write(tmp_path, "bin")
    (tmp_path / "train" / "a").mkdir(parents=True)
    with pytest.raises(
        DataError, match="of several kinds: train/ and CIFAR-10; set data.source = 'folder' or"
    ):
        open_source(DataSettings(dir=str(tmp_path)), "train")
    assert len(open_source(DataSettings(dir=str(tmp_path), source="cifar10"), "train")) == 20


# --- one file of CIFAR-10 --------------------------------------------------------------------------


def test_planes_become_pixels(tmp_path: Path) -> None:
    """The bytes have the published layout."""
    record = np.zeros(3073, dtype=np.uint8)
    record[0] = 7
    record[1 + 0 * 1024 + 5 * 32 + 9] = 10  # red of line 5, column 9
    record[1 + 1 * 1024 + 5 * 32 + 9] = 20
    record[1 + 2 * 1024 + 31 * 32 + 31] = 30
    (tmp_path / "x.bin").write_bytes(record.tobytes())
    pixels, labels = read_binary(tmp_path / "x.bin")
    assert labels.tolist() == [7]
    assert pixels[0, 5, 9].tolist() == [10, 20, 0]
    assert pixels[0, 31, 31].tolist() == [0, 0, 30]
    assert int(pixels.sum()) == 60


def changed(path: Path, change: Callable[[bytes], bytes]) -> Path:
    path.write_bytes(change(path.read_bytes()))
    return path


@pytest.mark.parametrize(
    ("form", "name", "read", "change", "said"),
    [
        ("bin", "test_batch.bin", read_binary, lambda c: c[:-1], "12291 bytes, which is not a mul"),
        ("bin", "test_batch.bin", read_binary, lambda c: b"\x0a" + c[1:], "label 10 at position 0"),
        ("png", "test_batch.png", read_sheet, lambda c: c[:-900], "cannot be decoded"),
        ("png", "test_lables.json", read_labels, lambda c: b"\xff[]", "is not JSON"),
        ("png", "test_lables.json", read_labels, lambda c: b"{}", "is not a JSON list"),
        ("png", "test_lables.json", read_labels, lambda c: b"[1, 10]", "label 10 at position 1"),
        ("png", "test_lables.json", read_labels, lambda c: b'["3"]', "label '3' at position 0"),
    ],
)
def test_bad_files_say_so_in_one_line(
    tmp_path: Path,
    small_cifar: Any,
    form: str,
    name: str,
    read: Callable[[Path], object],
    change: Callable[[bytes], bytes],
    said: str,
) -> None:
    path = changed(small_cifar.write(tmp_path, form) / name, change)
    with pytest.raises(DataError, match=said) as caught:
        read(path)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_sheet_of_another_width(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(encode(np.zeros((4, 768, 3), dtype=np.uint8)))
    with pytest.raises(DataError, match="768 pixels wide, but a sheet of CIFAR-10 is 1024"):
        read_sheet(tmp_path / "x.png")


# --- idx files -------------------------------------------------------------------------------------


def idx(array: np.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


GOOD = idx(PIXELS)


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
    with pytest.raises(DataError, match=r"does not contain train-labels-idx1-ubyte"):
        IdxFiles(tmp_path, "train")
    with pytest.raises(DataError, match=r"does not contain t10k-images-idx3-ubyte"):
        IdxFiles(tmp_path, "val")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "is not an idx file of unsigned bytes in 3 dimensions"),
        (GOOD[:10], "is not an idx file"),
        (GOOD[:-1], "has 119 bytes, but its header gives 120"),
        (GOOD + b"x", "has more bytes, but its header gives 120"),
        (b"\0\0\x0d\x03" + GOOD[4:], r"is not an idx file .*begins with 00 00 0d 03"),
        (b"\0\0\x08\x01" + GOOD[4:], "is not an idx file"),
        (GOOD[:4] + b"\xff" * 12 + GOOD[16:], "too large, 79,228,162,458,924,105,385,300,197,375"),
        (GOOD[:4] + b"\0\0\0\x07" + GOOD[8:], "has 120 bytes, but its header gives 140"),
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


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each read of a packed file asks for."""
    sizes: list[int] = []
    real = gzip.GzipFile.read

    def watched(file: gzip.GzipFile, size: int | None = -1) -> bytes:
        sizes.append(-1 if size is None else size)
        return real(file, size)

    monkeypatch.setattr(gzip.GzipFile, "read", watched)
    return sizes


def test_a_bomb_is_not_unpacked(tmp_path: Path, asked: list[int]) -> None:
    """A small file that would fill the memory: no more is unpacked than the header says."""
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(GOOD + bytes(50_000_000), compresslevel=1))
    with pytest.raises(DataError, match="has more bytes"):
        read_idx(path, 3)
    assert asked == [16, 121]


def test_a_header_that_claims_gigabytes_gets_no_such_buffer(
    tmp_path: Path, asked: list[int]
) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(struct.pack(">4B3I", 0, 0, 8, 3, 7, 1 << 15, 1 << 15)))
    with pytest.raises(DataError, match="has 0 bytes"):
        read_idx(path, 3)
    assert max(asked) <= 1 << 25


def test_labels_for_other_images(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(LABELS[:4]))
    with pytest.raises(DataError, match="4 labels for 6 images"):
        IdxFiles(tmp_path, "train")
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(LABELS[:0]))
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(PIXELS[:0]))
    with pytest.raises(DataError, match="no image in it"):
        IdxFiles(tmp_path, "train")


# --- synthetic images ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("channels", "salt", "digest"), [(3, 0, "87eff4a1d19733fc"), (1, 1, "879928d28bb96071")]
)
def test_synthetic_images_stay_as_they_are(channels: int, salt: int, digest: str) -> None:
    """Records and checkpoints name them by their settings alone."""
    source = SyntheticImages(5, 3, 8, channels, salt)
    pixels = b"".join(source.read(i).tobytes() for i in range(5))
    assert hashlib.sha256(pixels).hexdigest().startswith(digest)


def test_the_classes_can_be_learned() -> None:
    """The nearest class mean of the training images names the class of nearly all others."""
    train = SyntheticImages(count=400, classes=20, image_size=16, channels=3)
    val = SyntheticImages(count=200, classes=20, image_size=16, channels=3, salt=1)
    pixels = np.stack([train.read(i) for i in range(400)]).reshape(400, -1).astype(np.float32)
    means = np.stack([pixels[train.labels == label].mean(0) for label in range(20)])
    other = np.stack([val.read(i) for i in range(200)]).reshape(200, -1).astype(np.float32)
    distance = ((other[:, None, :] - means[None]) ** 2).sum(2)
    assert (distance.argmin(1) == val.labels).mean() > 0.95


# --- the embedded set ------------------------------------------------------------------------------


@pytest.mark.parametrize(("split", "per_class"), [("train", 1200), ("val", 200)])
def test_counts_and_balance(split: str, per_class: int) -> None:
    source = open_source(DataSettings(source="embedded"), split)
    assert len(source) == 10 * per_class
    assert np.bincount(source.labels).tolist() == [per_class] * 10
    assert list(source.classes)[::9] == ["T-shirt/top", "Ankle boot"]
    assert source.name(17) == f"{split}-0000.tar.gz:000017.png"
    # Mixed, not sorted: the first samples already hold every class.
    assert set(source.labels[:100].tolist()) == set(range(10))


def test_small_enough_and_licensed() -> None:
    names = sorted(path.name for path in EMBEDDED.iterdir())
    assert names == [
        "LICENSE-fashion-mnist",
        "classes.json",
        *(f"train-{i:04d}.tar.gz" for i in range(4)),
        "val-0000.tar.gz",
    ]
    assert sum(path.stat().st_size for path in EMBEDDED.iterdir()) < 8_000_000
    classes = json.loads((EMBEDDED / "classes.json").read_text(encoding="utf-8"))
    assert [entry["cls"] for entry in classes] == list(range(10))


def test_no_image_is_in_both_splits() -> None:
    train, val = (open_source(DataSettings(source="embedded"), split) for split in ("train", "val"))
    known = {train.read(i) for i in range(len(train))}
    assert sum(val.read(i) in known for i in range(len(val))) == 0
