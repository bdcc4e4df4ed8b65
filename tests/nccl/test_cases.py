"""The covering list itself; the suite over it needs a GPU (`test_suite_gpu.py`)."""

from __future__ import annotations

from nccl.cases import FACTORS, all_pairs, covering_cases, pairs_of


def test_every_pair_of_factors_is_covered_by_few_cases() -> None:
    cases = covering_cases()
    assert {pair for case in cases for pair in pairs_of(case)} == all_pairs()
    assert all(case.keys() == FACTORS.keys() for case in cases)
    largest = sorted((len(values) for values in FACTORS.values()), reverse=True)
    assert len(cases) <= 2 * largest[0] * largest[1]
