"""`benchmarks.step`: rows, rows that cannot be measured, and what is timed."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.step import choose_rows, measure_in_process, measure_rounds, ratios
from paceline.cli.bench import measure_step
from paceline.tune.step import StepRow
from paceline.tune.timing import Times, steady_times
from ranks import run_ranks

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
    # A repeated row would have more rates than the others.
    assert [row.name for row in choose_rows(["ours", "ours"], COMMON)] == ["ours"]


def test_a_row_with_a_group_has_its_buckets() -> None:
    (row,) = choose_rows(["ours N>1"], COMMON)
    # Not the single bucket that a lone rank has.
    row = replace(row, switches={**row.switches, "comm.fusion_mib": 0.02})
    (result,) = run_ranks(1, _measure, row)
    assert result["steps"] == 2
    assert result["images_per_s"] == pytest.approx(4 / result["step_s"])
    assert re.search(r"\d+ buckets of .*, native, overlapped, backend gloo", result["what"])


def _measure(rank: int, row: StepRow) -> dict[str, Any]:
    return measure_step(row)


def test_a_failing_row_has_the_last_line_of_its_process_as_error() -> None:
    broken = StepRow(**{**COMMON, "name": "broken", "kind": "ours", "switches": {"run.nothing": 1}})
    assert "run.nothing" in measure_in_process(broken, 100)["error"]


def test_a_row_that_takes_too_long_is_killed() -> None:
    row = choose_rows(["ours"], COMMON)[0]  # importing torch alone takes longer
    assert measure_in_process(row, 0.2) == {"name": "ours", "error": "took longer than 0 s"}


def test_rounds_measure_rows_in_turn_and_drop_a_row_that_fails() -> None:
    rows, measured = choose_rows(["ours", "plain fp32"], COMMON), []

    def measure(row: StepRow) -> dict[str, Any]:
        measured.append(row.name)
        if row.name != "ours":
            return {"name": row.name, "error": "out of memory"}
        return {"name": row.name, "images_per_s": float(len(measured))}

    ours, plain = measure_rounds(rows, 3, measure)
    assert measured == ["ours", "plain fp32", "ours", "ours"]
    assert (ours["images_per_s"], ours["rounds"]) == (3.0, [1.0, 3.0, 4.0])
    assert plain["error"] == "out of memory"


def test_a_fused_row_that_is_not_fused_has_no_ratio() -> None:
    rows = [
        {"name": "ours", "rounds": [4.0]},
        {"name": "plain fp16 default", "rounds": [2.0]},
        {"name": "ours fused convolutions", "rounds": [8.0], "what": "convolutions: 2 of 3"},
        {"name": "ours fused by cudnn", "rounds": [4.1],
         "what": "fp16, convolutions: off (this model has no bottlenecks)"},
        {"name": "ours no graphs", "error": "out of memory"},
    ]  # fmt: skip
    found = ratios(rows)
    assert found["ours fused convolutions / ours"] == 2.0
    assert not any("cudnn" in name for name in found)


def test_models_without_fused_norms_have_no_row_for_what_needs_them() -> None:
    common = {"batch_size": 8, "image_size": 64, "classes": 10, "steps": 1, "warm_up": 1,
              "device": "cuda"}  # fmt: skip
    found = {
        model: {row.name for row in choose_rows([], {**common, "model": model})}
        for model in ("resnet18", "alexnet")
    }
    assert found["resnet18"] - found["alexnet"] == {"ours recompute"}


def test_ratios_are_against_the_fastest_peer() -> None:
    speeds = {"ours": 100.0, "ours N>1": 98.0, "ours muon": 90.0, "plain bf16 default": 50.0,
              "plain fp16 max-autotune": 80.0, "plain tf32 default": 20.0,
              "ours fused by cudnn": 120.0}  # fmt: skip
    found = ratios([{"name": n, "rounds": [v / 2, v, v]} for n, v in speeds.items()])
    fastest = "fastest of 2 plain recipes, plain fp16 max-autotune"
    assert found[f"ours / {fastest}"] == pytest.approx(1.25)
    assert found[f"ours fused by cudnn / {fastest}"] == pytest.approx(1.5)
    assert f"ours fused convolutions / {fastest}" not in found
    assert found["ours fused by cudnn / ours"] == pytest.approx(1.2)
    assert found["ours N>1 / ours"] == pytest.approx(0.98)
    assert found["ours muon / ours"] == pytest.approx(0.9)
    assert found["ours / plain tf32 default"] == pytest.approx(5.0)


def test_median_and_spread_ignore_a_straggler() -> None:
    times = Times(tuple([1.0] * 19 + [50.0]))
    assert times.median == 1.0
    assert times.spread == (1.0, 1.0)


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_steps_under_way_never_exceed_the_lag_and_all_are_waited_for(lag: int) -> None:
    under_way, most, order = 0, 0, []

    def launch(number: int) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        order.append(number)

    def wait() -> None:
        nonlocal under_way
        assert under_way > 0
        under_way -= 1

    turns: list[int] = []
    times = steady_times(
        launch, wait, lag=lag, repeats=5, warm_up=4, ready=lambda: turns.append(under_way)
    )
    assert len(times.seconds) == 5
    assert most == lag + 1
    assert under_way == 0
    assert turns == [0]  # nothing is under way while another row measures
    assert order == list(range(len(order)))
