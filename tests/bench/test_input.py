"""`paceline bench input` and `benchmarks.input_pipelines`: the order of measurements, and equal work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.input_pipelines import OPENERS, ratios
from benchmarks.input_training import median_stall
from data_sets import write_shards
from paceline.bench.input_rows import (
    InputRow,
    InputStream,
    RowRates,
    measure_rows,
    one_torch_thread,
    open_repeated,
)
from paceline.data import DataSettings


@pytest.fixture
def shards(tmp_path: Path) -> DataSettings:
    return DataSettings(dir=str(write_shards(tmp_path / "data")), image_size=8, eval_resize=9)


def test_a_ratio_is_the_median_of_the_rounds_against_the_fastest_peer_of_a_kind() -> None:
    one = InputRow("dataloader", 1, DataSettings(), "train", 4, "cpu")
    many = replace(one, workers=4)
    ours = InputRow("ours", 1, DataSettings(), "train", 4, "cpu")
    results = [
        RowRates(ours, [300.0, 330.0, 90.0]),
        RowRates(one, [100.0, 100.0, 100.0]),
        RowRates(many, [150.0, 110.0, 30.0]),
    ]
    assert ratios(results) == {"ours × 1 / dataloader × 4": 3.0}
    assert ratios(results[1:]) == {}


@pytest.mark.parametrize("kind", ["ours", "processes", "dataloader"])
@pytest.mark.parametrize("split", ["train", "val"])
def test_all_deliver_normalised_images_of_the_same_kind(
    shards: DataSettings, kind: str, split: Any
) -> None:
    row = InputRow(kind, 1, shards, split, 4, "cpu")
    result = RowRates(row)
    result.measure(OPENERS[kind], 0.0)
    assert result.rates[0] > 0
    words = {
        "ours": "1 thread",
        "processes": "each no threads",
        "dataloader": "DataLoader of torch",
    }
    assert words[kind] in result.described[0]
    with one_torch_thread(), OPENERS[kind](row) as stream:
        images = next(stream)
    assert images.shape == (4, 3, 8, 8)
    assert images.dtype == torch.float32
    assert 0.1 < float(images.abs().mean()) < 3


def test_peers_and_ours_centre_crop_the_same_pixels(shards: DataSettings) -> None:
    """Decoding and filter are Pillow's in both; only where Pillow rounds between passes differs."""
    found = []
    for kind in ("ours", "dataloader"):
        row = InputRow(kind, 1, shards, "val", 8, "cpu")
        with one_torch_thread(), OPENERS[kind](row) as stream:
            found.append(next(stream))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0.05)


def rows_of(settings: DataSettings, *kinds: str) -> list[InputRow]:
    return [InputRow(kind, 1, settings, "train", 4, "cpu") for kind in kinds]


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
