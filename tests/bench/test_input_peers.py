"""`benchmarks.input_pipelines`: peers and ours do the same work; ratios, memory and seek."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.input_pipelines import OPENERS, ratios
from data_sets import write_shards
from paceline.bench.input_rows import (
    InputRow,
    RowRates,
    one_torch_thread,
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
