"""Batch sizes, input stalls, and the report of corrupt samples."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import RunError
from paceline.core.events import CorruptEvent, Event, NoteEvent
from paceline.data import CorruptSample
from paceline.train import Progress, resolve_batch_sizes
from paceline.train.batch_sizes import LARGEST_AUTOMATIC_MICRO_BATCH
from paceline.train.observers import InputReport, InputWait
from ranks import run_ranks
from refusals import refused
from train.steps import alone, joined


@pytest.mark.parametrize(
    ("global_batch", "micro", "ranks", "sizes"),
    [
        (None, 32, 4, (128, 32, 1, False)),
        (65536, 256, 1, (65536, 256, 256, False)),
        (1024, 64, 4, (1024, 64, 4, False)),
        (None, None, 2, (256, 128, 1, True)),
        (65536, None, 1, (65536, 256, 256, True)),
        (300, None, 1, (300, 150, 2, True)),
    ],
)
def test_batch_sizes(
    global_batch: int | None, micro: int | None, ranks: int, sizes: tuple[Any, ...]
) -> None:
    found = resolve_batch_sizes(global_batch, micro, ranks)
    assert tuple(asdict(found).values()) == sizes


@given(share=st.integers(1, 5000), ranks=st.integers(1, 64))
def test_automatic_sizes_always_multiply_out(share: int, ranks: int) -> None:
    sizes = resolve_batch_sizes(share * ranks, None, ranks)
    assert sizes.micro_batch * ranks * sizes.accumulation == share * ranks
    assert sizes.micro_batch <= LARGEST_AUTOMATIC_MICRO_BATCH


@pytest.mark.parametrize(
    ("global_batch", "micro", "valid"),
    [
        (1000, 64, "use 960 or 1024, or --batch-size 40 or 50"),
        (100, 64, "use 64 or 128, or --batch-size 50 or 100"),
        (101, 10, "use 100 or 110, or --batch-size 1 or 101"),
    ],
)
def test_sizes_that_do_not_divide_name_valid_ones(
    global_batch: int, micro: int | None, valid: str
) -> None:
    with refused("run.global_batch_size") as caught:
        resolve_batch_sizes(global_batch, micro, 2)
    assert valid in caught.value.remedy


class Clocked:
    """A device event at a known millisecond."""

    def __init__(self, ms: float) -> None:
        self.ms = ms

    def elapsed_time(self, later: Clocked) -> float:
        return later.ms - self.ms


def test_on_a_cpu_the_wait_is_the_stall() -> None:
    wait = InputWait(torch.device("cpu"))
    assert wait.stall() == {}
    for spent in ({"decode": 3.0, "read": 1.0}, {"copy": 1.0}):
        with wait:
            time.sleep(0.02)
        wait.attribute(spent)
    stall = wait.stall()
    assert set(stall) == {"decode", "read", "copy"}
    assert stall["decode"] == pytest.approx(3 * stall["read"])
    assert sum(stall.values()) >= 0.04


@pytest.mark.parametrize(
    ("idle_ms", "begun_ms", "expected"),
    [
        (0.0, None, {}),  # the device was busy while the host waited
        (1.0, None, {"decode": 0.001}),
        (9.0, 1.0, {"decode": 0.001}),  # its own work on the batch is no wait
        (50.0, None, {"decode": 0.02, "copy": 0.03}),
    ],
)
def test_on_a_gpu_only_idle_time_counts(
    monkeypatch: pytest.MonkeyPatch,
    idle_ms: float,
    begun_ms: float | None,
    expected: dict[str, float],
) -> None:
    """The host waits for 20 ms."""
    marks, clock = iter((Clocked(0.0), Clocked(idle_ms))), iter((0.0, 0.02))
    monkeypatch.setattr("paceline.train.observers.mark_stream", lambda device: next(marks))
    monkeypatch.setattr("paceline.train.observers.time.perf_counter", lambda: next(clock))
    wait = InputWait(torch.device("cuda"))
    with wait:
        pass
    wait.attribute({"decode": 1.0}, None if begun_ms is None else Clocked(begun_ms))
    assert wait.stall() == pytest.approx(expected)


def sample(index: int) -> CorruptSample:
    return CorruptSample(index, f"shard:{index}", "cut short")


def report(progress: Progress, share: float = 0.5) -> tuple[InputReport, list[Event]]:
    events: list[Event] = []
    return InputReport(progress, 10, share, alone(), events.append), events


def test_a_sample_is_new_once_also_after_a_resume() -> None:
    progress = Progress()
    first, events = report(progress)
    first.training([sample(7), sample(2)], 2)
    first.training([sample(7), sample(3)], 3)
    assert (progress.corrupt, progress.corrupt_samples) == ([2, 3, 7], 3)
    names = [event.name for event in events if isinstance(event, CorruptEvent)]
    assert names == ["shard:7", "shard:2", "shard:3"]
    assert [event.text.split()[0] for event in events if isinstance(event, NoteEvent)] == ["1"]
    resumed = Progress(**asdict(progress))
    again, events = report(resumed)
    again.training([sample(2)], 1)
    assert events == []
    assert resumed.corrupt_samples == 3


@pytest.mark.parametrize(("share", "allowed"), [(0.0, 0), (0.01, 1), (0.29, 2)])
def test_more_than_the_share_is_an_error(share: float, allowed: int) -> None:
    found, _ = report(Progress(step=4), share)
    for index in range(allowed):
        found.training([sample(index)], 1)
    with pytest.raises(RunError, match=f"{allowed + 1} corrupt of 10 samples by step 4"):
        found.training([sample(9)], 1)


def _two(rank: int) -> tuple[list[int], list[str]]:
    events: list[Event] = []
    with joined() as group:
        progress = Progress()
        shared = InputReport(progress, 10, 0.5, group, events.append)
        shared.training([sample(1)] if rank == 0 else [], 1)
        shared.training([sample(1), sample(8)] if rank == 1 else [sample(8)], 3)
        return progress.corrupt, [e.name for e in events if isinstance(e, CorruptEvent)]


def test_ranks_hold_the_union_and_each_names_its_own() -> None:
    assert run_ranks(2, _two) == [([1, 8], ["shard:1", "shard:8"]), ([1, 8], ["shard:8"])]


@pytest.mark.parametrize(
    ("samples", "ranks", "found"),
    [(10, 1, 8), (50, 1, 16), (300, 2, 32), (2500, 1, 256), (12_000, 4, 256)],
)
def test_an_automatic_batch_leaves_several_steps_an_epoch(
    samples: int, ranks: int, found: int
) -> None:
    assert resolve_batch_sizes(None, None, ranks, samples=samples).global_batch == found
    assert resolve_batch_sizes(512, None, ranks, samples=samples).global_batch == 512
