"""Sources of the user's own class."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from data_sets import png
from paceline.core.errors import DataError
from paceline.data import DataSettings, Source, as_source, open_data


class Small(Source):
    def __init__(self, read: Any = lambda i: png(i), labels: Any = (0, 1) * 4) -> None:
        self.classes = ("a", "b")
        self.labels = labels
        self.make = read

    def read(self, i: int) -> Any:
        return self.make(i)


def test_six_lines_suffice() -> None:
    train, val = open_data(DataSettings(val_split=0.25), Small())
    assert (len(train), len(val), list(train.classes)) == (6, 2, ["a", "b"])
    assert train.labels.dtype == np.int64
    assert sorted(s.name(i) for s in (train, val) for i in range(len(s))) == [
        f"Small[{i}]" for i in range(8)
    ]
    assert train.read(0) == png(int(train.name(0)[6]))
    assert train.kind == "Small"


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (Small(labels=[0, 2]), "Small: label 2 of image 1 is outside the 2 classes"),
        (Small(labels=[0.5]), r"Small: labels are \[0.5\]"),
        (Small(labels=[]), r"Small: labels are \[\]"),
        (Small(lambda i: {}[i]), r"Small: read\(0\) raised KeyError"),
        (Small(lambda i: "text"), r"Small: read\(0\) returned a str; read\(i\) returns the bytes"),
        (Small(lambda i: np.zeros((4, 4), np.uint8)), r"ndarray of shape \(4, 4\), uint8"),
    ],
)
def test_mistakes_are_one_line(source: Source, line: str) -> None:
    with pytest.raises(DataError, match=line):
        as_source(source).read(0)
