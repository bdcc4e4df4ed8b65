"""Rows of `paceline bench input`: the order of measurements, and their figures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import repeat
from pathlib import Path

import pytest
import torch

from benchmarks.input_training import median_stall
from data_sets import write_shards
from paceline.bench.input_rows import InputRow, InputStream, measure_rows, open_repeated
from paceline.data import DataSettings


def rows_of(settings: DataSettings, *kinds: str) -> list[InputRow]:
    return [InputRow(kind, 1, settings, "train", 4, "cpu") for kind in kinds]


@pytest.fixture
def shards(tmp_path: Path) -> DataSettings:
    return DataSettings(dir=str(write_shards(tmp_path / "data")), image_size=8, eval_resize=9)


def test_every_round_measures_every_row_and_begins_with_another() -> None:
    rows, opened = rows_of(DataSettings(), "ours", "dataloader", "processes"), []

    @contextmanager
    def open_stream(row: InputRow) -> Iterator[InputStream]:
        opened.append(row.kind)
        remark = "odd" if len(opened) == 1 else ""
        yield InputStream(repeat(torch.zeros(4)), 1, f"described {row.kind}", lambda: remark)

    results = measure_rows(
        rows, rounds=3, seconds=0.0, on_progress=lambda text: None, open_stream=open_stream
    )
    assert opened[::3] == ["ours", "dataloader", "processes"]
    assert sorted(opened) == sorted(3 * ["ours", "dataloader", "processes"])
    assert all(len(result.rates) == 3 and min(result.rates) > 0 for result in results)
    first = results[0].to_dict()
    assert (first["input"], first["remarks"]) == ("described ours", ["odd"])
    assert results[1].to_dict()["remarks"] == []


def test_few_images_are_repeated_with_their_labels(shards: DataSettings) -> None:
    source = open_repeated(shards, "val")
    assert len(source) >= 20_000
    assert source.read(0) == source.read(8) != source.read(1)  # there are eight
    assert source.labels[1] == source.labels[9]
    extent = source.extent
    assert extent(8) == extent(0) != extent(1)
    source.close()
    kept = open_repeated(replace(shards, cache="memory"), "val")
    assert not kept.has_extents  # nor has a cache
    kept.close()


def test_a_stall_is_the_median_of_all_rounds() -> None:
    rounds = [{"read": 0.1}, {"read": 0.3, "decode": 0.2}, {"read": 9.0, "decode": 0.4}]
    assert median_stall(rounds) == {"read": 0.3, "decode": 0.2}
    assert median_stall([{}, {"read": 5.0}, {}]) == {"read": 0.0}
