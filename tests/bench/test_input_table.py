"""Rows of `paceline bench input`: who is measured when, and what the figures mean."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_sets import write_shards
from paceline.bench.input_rows import (
    InputRow,
    RowSample,
    measure_rows,
    open_repeated,
    open_threads,
)
from paceline.bench.input_training import median_stall
from paceline.data import DataSettings


def rows_of(settings: DataSettings, *kinds: str) -> list[InputRow]:
    return [InputRow(kind, 1, settings, "train", 4, "cpu") for kind in kinds]


@pytest.fixture
def shards(tmp_path: Path) -> DataSettings:
    return DataSettings(dir=str(write_shards(tmp_path / "data")), image_size=8, eval_resize=9)


def test_every_round_measures_every_row_and_begins_with_another() -> None:
    rows, asked = rows_of(DataSettings(), "ours", "dataloader", "processes"), []

    def measure(row: InputRow, opened: Any, seconds: float) -> RowSample:
        asked.append(row.kind)
        rate = {"ours": 300.0, "dataloader": 200.0, "processes": 100.0}[row.kind]
        return RowSample(rate, f"described {row.kind}", "odd" if len(asked) == 1 else "")

    openers = dict.fromkeys(("ours", "dataloader", "processes"), open_threads)
    found = measure_rows(
        rows, openers, rounds=3, seconds=0.1, on_progress=lambda text: None, measure=measure
    )
    assert asked[::3] == ["ours", "dataloader", "processes"]
    assert sorted(asked) == sorted(3 * ["ours", "dataloader", "processes"])
    assert [result.rates for result in found] == [(300.0,) * 3, (200.0,) * 3, (100.0,) * 3]
    said = found[0].to_dict()
    assert (said["input"], said["remarks"]) == ("described ours", ["odd"])
    assert found[1].to_dict()["remarks"] == []


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
