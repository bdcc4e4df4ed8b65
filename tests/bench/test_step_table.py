"""Which rows are measured, and what is said about rows that cannot be."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from paceline.bench.step import StepRow
from paceline.bench.step_table import RowProcess, choose_rows, measure_rows, ratios
from paceline.core.errors import ConfigError

COMMON: dict[str, Any] = {
    "model": "resnet_tiny", "batch_size": 4, "image_size": 28, "classes": 5, "device": "cpu",
    "steps": 2, "warm_up": 1,
}  # fmt: skip


def test_all_rows_by_default_on_a_gpu_and_those_without_a_compiler_on_a_cpu() -> None:
    on_gpu = [row.name for row in choose_rows([], {**COMMON, "device": "cuda"})]
    assert {"ours", "ours N>1", "plain bf16 max-autotune", "plain fp16 reduce-overhead"} < set(
        on_gpu
    )
    assert [row.name for row in choose_rows([], COMMON)] == ["ours", "plain fp32"]


def test_an_unknown_row_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'plain fp16 default'"):
        choose_rows(["plain fp16 defualt"], COMMON)


def test_a_row_survives_the_way_to_its_process() -> None:
    row = choose_rows(["ours N>1"], COMMON)[0]
    assert StepRow.from_json(row.to_json()) == row
    assert row.group


def test_the_row_of_many_ranks_sends_several_buffers_while_backward_goes_on() -> None:
    """Not the single buffer that a lone rank has."""
    row = choose_rows(["ours N>1"], COMMON)[0]
    small = replace(row, switches={**row.switches, "comm.fusion_mib": 0.02})
    (result,) = measure_rows([small], 100, 1, lambda result: None)
    assert re.search(r"\d+ buckets of .*, native, overlapped, backend gloo", result["what"]), result


def test_rows_are_measured_in_processes_and_a_broken_one_says_why() -> None:
    rows = choose_rows(["ours", "ours muon", "plain fp32"], COMMON)
    broken = StepRow(**{**COMMON, "name": "broken", "kind": "ours", "switches": {"run.nothing": 1}})
    told: list[str] = []
    results = measure_rows([*rows, broken], 100, 4, lambda result: told.append(result["name"]))
    assert told == ["ours", "ours muon", "plain fp32", "broken"]
    for result in results[:3]:
        assert result["steps"] == 2
        assert result["images_per_s"] == pytest.approx(4 / result["step_s"])
    assert ["lars" in results[0]["what"], "muon" in results[1]["what"]] == [True, True]
    assert "run.nothing" in results[3]["error"]
    assert set(ratios(results)) == {"ours / plain fp32", "ours muon / ours"}


def test_a_row_that_never_gets_warm_is_given_up() -> None:
    row = choose_rows(["ours"], COMMON)[0]
    process = RowProcess(row, 0.2)  # importing torch alone takes longer
    process.await_ready()
    assert process.measure() == {"name": "ours", "error": "took longer than 0 s to start"}


def test_ratios_are_against_the_fastest_peer() -> None:
    speeds = {"ours": 100.0, "ours N>1": 98.0, "plain bf16 default": 50.0,
              "plain fp16 max-autotune": 80.0, "plain tf32 default": 20.0}  # fmt: skip
    found = ratios([{"name": n, "images_per_s": v} for n, v in speeds.items()])
    assert found["ours / fastest of 2 plain recipes, plain fp16 max-autotune"] == pytest.approx(
        1.25
    )
    assert found["ours N>1 / ours"] == pytest.approx(0.98)
    assert found["ours / plain tf32 default"] == pytest.approx(5.0)
