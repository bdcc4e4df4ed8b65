from __future__ import annotations

import pytest
import torch

from paceline.comm.algorithms.names import ALGORITHMS
from paceline.comm.wire import WIRES, WireFormat
from paceline.comm.wire_error import count_roundings, measure_error, simulate_sum


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_error_against_fp64_keeps_its_bound_as_ranks_grow(algorithm: str, wire: str) -> None:
    for ranks in (1, 2, 3, 8, 31, 256, 1024):
        found = measure_error(algorithm, ranks, WireFormat.named(wire, ranks), length=64)
        assert found.finite
        assert found.worst <= found.bound, found


def test_few_roundings_lose_less() -> None:
    wire = WireFormat.named("float16", 1024)
    worst = {a: measure_error(a, 1024, wire).worst for a in ("ring", "hierarchical", "central")}
    assert worst["central"] < worst["hierarchical"] < worst["ring"]
    # At 1,024 ranks in fp16 the ring is off by less than a thousandth of Σ|x|.
    assert worst["ring"] < 1e-3
    assert count_roundings("ring", 1024) == 1024
    assert count_roundings("halving_doubling", 1024) == 12


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_unscaled_fp16_overflows_where_the_scaled_does_not(algorithm: str) -> None:
    shares = torch.full((64, 3), 2048.0)
    assert torch.isinf(simulate_sum(algorithm, shares, WireFormat("float16"))).all()
    scaled = simulate_sum(algorithm, shares, WireFormat.named("float16", 64))
    assert scaled.tolist() == [131072.0] * 3
