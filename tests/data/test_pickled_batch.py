from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.data.sources.pickled_batch import read_pickled_batch


def test_a_batch_of_python_2(small_cifar: Any, tmp_path: Path) -> None:
    content = (small_cifar.write(tmp_path, "py") / "data_batch_2").read_bytes()
    shape, data, labels = read_pickled_batch(content)
    assert shape == (4, 3072)
    assert data == small_cifar.pixels[1].transpose(0, 3, 1, 2).tobytes()
    assert labels == small_cifar.labels[1].tolist()


def test_a_batch_of_todays_numpy() -> None:
    table = {b"data": np.arange(12, dtype=np.uint8).reshape(3, 4), b"labels": [1, 2, 3]}
    assert read_pickled_batch(pickle.dumps(table, 4)) == ((3, 4), bytes(range(12)), [1, 2, 3])


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_nothing_that_a_pickle_names_is_run(tmp_path: Path) -> None:
    content = pickle.dumps({b"data": Malicious(tmp_path / "run"), b"labels": []})
    with pytest.raises(ValueError, match="is not a pickled batch: it names pathlib"):
        read_pickled_batch(content)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x89PNG",
        pickle.dumps([1, 2]),
        pickle.dumps({b"data": b"12", b"labels": [1]}),
        pickle.dumps({b"labels": [1]}),
        pickle.dumps({b"data": np.zeros((2, 2)), b"labels": [1, 2]}, 4),
        pickle.dumps({b"data": np.zeros((2, 2), np.uint8, order="F"), b"labels": [1]}, 4),
        pickle.dumps({b"data": np.zeros((2, 2), np.uint8), b"labels": [1]}, 4)[:-9],
    ],
)
def test_anything_else_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="is not a pickled batch"):
        read_pickled_batch(content)


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02}r\xff\xff\xff\x7f.",  # a place in the memo that would need 16 GiB
        b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little") + b"x.",  # bytes beyond the end
    ],
)
def test_claimed_memory_is_not_allocated(content: bytes) -> None:
    with pytest.raises(ValueError, match="not a pickled batch"):
        read_pickled_batch(content)
