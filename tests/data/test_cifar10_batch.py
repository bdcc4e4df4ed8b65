from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import DataError
from paceline.data.sources.cifar10_batch import read_binary, read_labels, read_pickle, read_sheet


def test_planes_become_pixels(tmp_path: Path) -> None:
    """Byte by byte, as the published description has it."""
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


def test_all_forms_hold_the_same(tmp_path: Path, small_cifar: Any) -> None:
    for form in ("bin", "png", "py"):
        small_cifar.write(tmp_path, form)
    want = small_cifar.pixels[2]
    for got, labels in (
        read_binary(tmp_path / "data_batch_3.bin"),
        read_pickle(tmp_path / "data_batch_3"),
    ):
        assert np.array_equal(got, want)
        assert labels.tolist() == small_cifar.labels[2].tolist()
    assert np.array_equal(read_sheet(tmp_path / "data_batch_3.png"), want)
    assert read_labels(tmp_path / "test_lables.json").tolist() == small_cifar.labels[5].tolist()


def changed(path: Path, change: Callable[[bytes], bytes]) -> Path:
    path.write_bytes(change(path.read_bytes()))
    return path


@pytest.mark.parametrize(
    ("form", "name", "read", "change", "said"),
    [
        ("bin", "test_batch.bin", read_binary, lambda c: c[:-1], "12291 bytes, not a whole number"),
        ("bin", "test_batch.bin", read_binary, lambda c: b"", "0 bytes, not a whole number"),
        ("bin", "test_batch.bin", read_binary, lambda c: b"\x0a" + c[1:], "label 10 at position 0"),
        ("png", "test_batch.png", read_sheet, lambda c: c[:-900], "cannot be decoded"),
        ("png", "test_batch.png", read_sheet, lambda c: b"<html>", "cannot be decoded"),
        ("png", "test_lables.json", read_labels, lambda c: b"[1, 2", "is not JSON"),
        ("png", "test_lables.json", read_labels, lambda c: b"\xff[]", "is not JSON"),
        ("png", "test_lables.json", read_labels, lambda c: b"{}", "is not a list"),
        ("png", "test_lables.json", read_labels, lambda c: b"[1, 10]", "label 10 at position 1"),
        ("png", "test_lables.json", read_labels, lambda c: b"[true]", "label True at position 0"),
        ("png", "test_lables.json", read_labels, lambda c: b'["3"]', "label '3' at position 0"),
        ("py", "test_batch", read_pickle, lambda c: c[:-5], "is not a pickled batch"),
        (
            "py",
            "test_batch",
            read_pickle,
            lambda c: c.replace(b"\0\x0c\x86", b"\0\x0b\x86"),
            "shape",
        ),
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


def test_a_sheet_of_another_width(tmp_path: Path, png: Callable[..., bytes]) -> None:
    (tmp_path / "x.png").write_bytes(png(np.zeros((4, 768, 3), dtype=np.uint8)))
    with pytest.raises(DataError, match="768 pixels wide, a sheet of CIFAR-10 is 1024"):
        read_sheet(tmp_path / "x.png")


@pytest.mark.parametrize("read", [read_sheet, read_labels, read_binary, read_pickle])
def test_a_missing_file_is_named(tmp_path: Path, read: Callable[[Path], object]) -> None:
    with pytest.raises(DataError, match="gone: is missing"):
        read(tmp_path / "gone")
    with pytest.raises(DataError, match="cannot be read"):
        read(tmp_path)
