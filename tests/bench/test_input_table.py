"""Rows of `paceline bench input`: who is measured when, and what the figures mean."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data_sets import write_shards
from paceline.bench import input_pipelines
from paceline.bench.input_pipelines import median_stall
from paceline.bench.input_rows import (
    InputRow,
    RowRates,
    RowSample,
    measure_memory,
    measure_row,
    measure_rows,
    one_torch_thread,
    open_repeated,
    open_stream,
    ratios,
)
from paceline.data import DataSettings


def rows_of(settings: DataSettings, *kinds: str) -> list[InputRow]:
    return [InputRow(kind, 1, settings, "train", 4, "cpu") for kind in kinds]  # type: ignore[arg-type]


@pytest.fixture
def shards(tmp_path: Path) -> DataSettings:
    return DataSettings(dir=str(write_shards(tmp_path / "data")), image_size=8, eval_resize=9)


def test_every_round_measures_every_row_and_begins_with_another() -> None:
    rows, asked = rows_of(DataSettings(), "ours", "dataloader", "processes"), []

    def measure(row: InputRow, seconds: float) -> RowSample:
        asked.append(row.kind)
        rate = {"ours": 300.0, "dataloader": 200.0, "processes": 100.0}[row.kind]
        return RowSample(rate, f"described {row.kind}", "odd" if len(asked) == 1 else "")

    found = measure_rows(
        rows, rounds=3, seconds=0.1, on_progress=lambda text: None, measure=measure
    )
    assert asked[::3] == ["ours", "dataloader", "processes"]
    assert sorted(asked) == sorted(3 * ["ours", "dataloader", "processes"])
    assert [result.rates for result in found] == [(300.0,) * 3, (200.0,) * 3, (100.0,) * 3]
    said = found[0].to_dict()
    assert (said["input"], said["remarks"]) == ("described ours", ["odd"])
    assert found[1].to_dict()["remarks"] == []


def test_a_ratio_is_the_median_of_the_rounds_against_the_fastest_peer_of_a_kind() -> None:
    one, many = rows_of(DataSettings(), "dataloader")[0], rows_of(DataSettings(), "dataloader")[0]
    many = replace(many, workers=4)
    ours = rows_of(DataSettings(), "ours")[0]
    results = [
        RowRates(ours, (300.0, 330.0, 90.0)),
        RowRates(one, (100.0, 100.0, 100.0)),
        RowRates(many, (150.0, 110.0, 30.0)),
    ]
    assert ratios(results) == {"ours × 1 / dataloader × 4": 3.0}
    assert ratios(results[1:]) == {}


@pytest.mark.parametrize("kind", ["ours", "processes", "dataloader"])
@pytest.mark.parametrize("split", ["train", "val"])
def test_all_deliver_normalised_images_of_the_same_kind(
    shards: DataSettings, kind: Any, split: Any
) -> None:
    row = InputRow(kind, 1, shards, split, 4, "cpu")
    sample = measure_row(row, 0.0)
    assert sample.rate > 0
    words = {
        "ours": "1 thread",
        "processes": "each no threads",
        "dataloader": "DataLoader of torch",
    }
    assert words[kind] in sample.described
    with one_torch_thread(), open_stream(row) as stream:
        images = next(stream)
    assert images.shape == (4, 3, 8, 8)
    assert images.dtype == torch.float32
    assert 0.1 < float(images.abs().mean()) < 3


def test_peers_and_ours_centre_crop_the_same_pixels(shards: DataSettings) -> None:
    """Decoding and filter are Pillow's in both; only where Pillow rounds between passes differs."""
    found = []
    for kind in ("ours", "dataloader"):
        row = InputRow(kind, 1, shards, "val", 8, "cpu")  # type: ignore[arg-type]
        with one_torch_thread(), open_stream(row) as stream:
            found.append(next(stream))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0.05)


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


def test_no_row_of_webdataset_where_it_cannot_be(
    shards: DataSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_pipelines.importlib.util, "find_spec", lambda name: None)
    assert "not installed" in (input_pipelines.no_webdataset(shards.dir, "train") or "")
    monkeypatch.setattr(input_pipelines.importlib.util, "find_spec", lambda name: object())
    assert "no train-*.tar" in (input_pipelines.no_webdataset("/nowhere", "train") or "")
    assert input_pipelines.no_webdataset(shards.dir, "train") is None


def test_memory_and_seek_of_a_long_index() -> None:
    lines: list[str] = []
    found = measure_memory(4000, batch_size=100, image_size=8, workers=1, on_progress=lines.append)
    assert len(found["resident_mib"]) == 20
    assert found["most_mib"] == max(found["resident_mib"])
    assert found["seek_s"] > 0
    assert lines[0].startswith("seek to step 20:")


def test_a_stall_is_the_median_of_all_rounds() -> None:
    rounds = [{"read": 0.1}, {"read": 0.3, "decode": 0.2}, {"read": 9.0, "decode": 0.4}]
    assert median_stall(rounds) == {"read": 0.3, "decode": 0.2}
    assert median_stall([{}, {"read": 5.0}, {}]) == {"read": 0.0}


def test_steps_before_the_clock_runs_are_no_stall() -> None:
    """The step numbers themselves are the stalls: only those of the steps timed may be in the mean."""
    step = _CountingStep()
    turns = input_pipelines._Turns(step, 4)  # type: ignore[arg-type]
    _, stall = turns.measure(3, warm_up=5)
    # Two before, then 5 + 3 + 1 within, of which the last three are timed, and one to empty the queue.
    assert step.launched == 12
    assert stall == {"read": 9.0}


class _CountingStep:
    lag = 1

    def __init__(self) -> None:
        self.launched = self.collected = 0

    def launch(self, number: int, rate: float) -> None:
        self.launched += 1

    def collect(self) -> SimpleNamespace:
        self.collected += 1
        return SimpleNamespace(loss=0.0, number=0, stall={"read": float(self.collected - 1)})


def test_processes_give_the_batches_of_the_threads(shards: DataSettings) -> None:
    one = InputRow("ours", 1, shards, "train", 4, "cpu")
    other = replace(one, kind="processes", workers=2)
    with one_torch_thread(), open_stream(one) as threads, open_stream(other) as two:
        for _ in range(3):
            assert torch.equal(next(threads), next(two))
