"""The table of sizes, and its choice by measured times."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ConfigError, RunError
from paceline.plan.size_choice import (
    careful_table,
    check_noise,
    choose_algorithms,
    choose_bucket_bytes,
    measured_size,
    noise,
    table_of,
)
from paceline.plan.size_table import MeasuredSize, SizeRow, SizeTable

THREE = SizeTable((SizeRow("hierarchical", 4096), SizeRow("torus2d", 1 << 20), SizeRow("native")))
NAMES = ("native", "ring", "hierarchical")


def test_far_above_the_measured_sizes_is_native() -> None:
    rows = [MeasuredSize(16384, {"native": 3.0, "tree": 1.0, "ring": 4.0})]
    assert [careful_table(rows, 0.05).choose(n) for n in (0, 16384, 32 * 16384, 1 << 20)] == [
        "tree", "tree", "tree", "native",
    ]  # fmt: skip
    assert careful_table(rows, 2.0) == SizeTable.single("native")


# Ten gradients of 4 MiB.
GRADIENTS = [(str(number), 4 << 20) for number in range(10)]


@pytest.mark.parametrize(
    ("start_s", "algorithm", "expected_mib"),
    [
        (0.0, "ring", 4),  # small buckets cost nothing
        (2e-3, "ring", 8),  # 10, 5 and 3 buckets cost 20, 10 and 6 of 400 ms
        (2e-2, "ring", 16),
        (0.0, "native", 16),  # as without a measurement
    ],
)
def test_the_smallest_bucket_that_costs_little(
    start_s: float, algorithm: str, expected_mib: int
) -> None:
    measured = [
        MeasuredSize(size, {"native": 1.0, algorithm: start_s + size * 0.4 / (40 << 20)})
        for size in (4 << 20, 16 << 20)
    ]
    table = SizeTable.single(algorithm)
    assert choose_bucket_bytes(GRADIENTS, table, measured) == expected_mib << 20
    assert choose_bucket_bytes(GRADIENTS[:4], table, measured) == 16 << 20, "fits one bucket"
    assert choose_bucket_bytes(GRADIENTS, table, measured[:1]) == 16 << 20, "not measured"


def test_the_papers_switch() -> None:
    table = SizeTable.two_way(1 << 20)
    assert table.choose((1 << 20) - 1) == "hierarchical"
    assert table.choose(1 << 20) == "ring"
    assert SizeTable.two_way(0).algorithms == ("ring",)
    assert [THREE.choose(size) for size in (0, 4096, 4097, 1 << 20, 1 << 30)] == [
        "hierarchical", "hierarchical", "torus2d", "torus2d", "native",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({}, "is not a size table"),
        ({"sizes": []}, "has no row"),
        ({"sizes": [{"algorithm": "rign"}]}, "did you mean 'ring'"),
        ({"sizes": [{"algorithm": "ring", "up_to": 3}]}, "is not a row of a size table"),
        ({"sizes": [{"algorithm": "ring", "up_to_bytes": 3}]}, "leave it out in the last row"),
        ({"sizes": [{"algorithm": "ring"}, {"algorithm": "tree"}]}, "every row but the last"),
        (
            {
                "sizes": [
                    {"algorithm": "ring", "up_to_bytes": 9},
                    {"algorithm": "tree", "up_to_bytes": 9},
                    {"algorithm": "ring"},
                ]
            },
            "above 9; sort the rows",
        ),
        ({"sizes": [{"algorithm": "ring", "up_to_bytes": "9"}, {"algorithm": "ring"}]}, "whole"),
    ],
)
def test_bad_tables_are_told(table: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SizeTable.from_table(table)


@st.composite
def measurements(draw: st.DrawFn) -> list[MeasuredSize]:
    sizes = sorted(draw(st.sets(st.integers(1, 1 << 30), min_size=1, max_size=8)))
    times = st.fixed_dictionaries({name: st.floats(1e-6, 10) for name in NAMES})
    return [MeasuredSize(size, draw(times)) for size in sizes]


@given(measurements(), st.floats(0, 0.5))
def test_the_chosen_is_as_good_as_the_best_within_the_margin(
    measured: list[MeasuredSize], margin: float
) -> None:
    for row, name in zip(measured, choose_algorithms(measured, margin), strict=True):
        best = min(row.medians_s.values())
        assert row.medians_s[name] <= (1 + margin) * best
        # Another must beat native by the margin.
        assert name == "native" or row.medians_s["native"] > (1 + margin) * best


@given(measurements())
def test_the_table_gives_every_measured_size_its_choice(measured: list[MeasuredSize]) -> None:
    chosen = choose_algorithms(measured)
    table = table_of(measured, chosen)
    assert [table.choose(row.size_bytes) for row in measured] == chosen
    changes = sum(a != b for a, b in itertools.pairwise(chosen))
    assert len(table.rows) == changes + 1


def test_noise_within_the_margin_does_not_make_the_table_flicker() -> None:
    times = [(1.00, 0.80, 0.81), (1.00, 0.81, 0.80), (1.00, 0.80, 0.81), (1.00, 0.98, 0.99)]
    measured = [
        MeasuredSize(4**at, dict(zip(NAMES, row, strict=True))) for at, row in enumerate(times, 5)
    ]
    assert choose_algorithms(measured, 0.05) == ["ring", "ring", "ring", "native"]
    table = table_of(measured, choose_algorithms(measured, 0.05))
    assert [(row.algorithm, row.up_to_bytes) for row in table.rows] == [
        ("ring", 2 * 4**7),
        ("native", None),
    ]


def test_a_noisy_host_writes_no_table() -> None:
    quiet = [measured_size(size, {"native": [1.0, 1.1, 1.2, 1.05]}) for size in (1, 2, 3)]
    noisy = [measured_size(size, {"native": [1.0, 3.0, 1.2, 4.0]}) for size in (1, 2)]
    assert noise(quiet) < 0.2
    assert check_noise(quiet, accept=False) == ""
    assert check_noise([*quiet, noisy[0]], accept=False) == "", "one disturbed size does not count"
    with pytest.raises(RunError, match="--accept-noise") as caught:
        check_noise(noisy, accept=False)
    assert "stop other work" in caught.value.remedy
    assert "--accept-noise" in check_noise(noisy, accept=True)
