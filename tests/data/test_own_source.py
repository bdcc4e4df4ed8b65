"""Sources of the user's own class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_sets import png
from paceline.core.errors import ConfigError, DataError
from paceline.data import DataSettings, Source, as_source, open_data, register_source
from small_runs import run_small


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


def test_a_registered_source_is_opened_by_name(tmp_path: Path) -> None:
    """One file outside of the package; the name is checked as those of the package are."""
    opened = []

    def open_letters(settings: DataSettings, split: str, classes: Any) -> Source:
        opened.append((split, classes and list(classes)))
        return Small()

    register_source("letters", open_letters)
    run_small(tmp_path / "run", data__source="letters", model__num_classes=2)
    assert opened == [("train", None), ("val", ["a", "b"])]
    with pytest.raises(ConfigError) as caught:
        DataSettings(source="numbers")
    assert caught.value.field == "data.source"
    register_source("letters", lambda *_: Small(labels=[0.5]))
    with pytest.raises(DataError):
        open_data(DataSettings(source="letters"))


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (Small(labels=[0, 2]), "Small: label 2 of image 1 is outside the 2 classes"),
        (Small(labels=[0.5]), r"Small: labels are \[0.5\]"),
        (Small(labels=[]), r"Small: labels are \[\]"),
        (Small(lambda i: {}[i]), r"Small: read\(0\) raised KeyError"),
        (Small(lambda i: "text"), r"Small: read\(0\) returned a str; return the bytes"),
        (Small(lambda i: np.zeros((4, 4), np.uint8)), r"ndarray of shape \(4, 4\), uint8"),
    ],
)
def test_mistakes_are_one_line(source: Source, line: str) -> None:
    with pytest.raises(DataError, match=line):
        as_source(source).read(0)
