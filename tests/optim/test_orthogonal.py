"""Matrix products divided among ranks: balance of the work, and equal bits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.comm import CommSettings, Group
from paceline.core.errors import ConfigError
from paceline.core.topology import Topology
from paceline.optim import OptimSettings, SharedProducts, orthogonalize, share_out
from paceline.optim.orthogonal import product_cost
from ranks import run_ranks
from small_runs import run_small

RESNET = [(64, 27), *[(64, 576)] * 4, (128, 576), *[(128, 1152)] * 3, (256, 1152), (512, 4608)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 16])
def test_work_is_divided_evenly_and_always_alike(ranks: int) -> None:
    owners = share_out(RESNET, ranks)
    assert owners == share_out(list(RESNET), ranks)
    assert set(owners) == set(range(min(ranks, len(RESNET))))
    costs = [product_cost(*shape) for shape in RESNET]
    loads = [sum(c for c, o in zip(costs, owners, strict=True) if o == r) for r in range(ranks)]
    # No division can be better than the costliest matrix alone, or than equal parts.
    assert max(loads) <= 4 / 3 * max(max(costs), sum(costs) / ranks)


def drawn(seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = [(16, 8, 3, 3), (10, 48), (16, 8, 3, 3), (48, 10), (7, 7), (16, 8, 3, 3), (48, 10)]
    made = [torch.randn(shape, generator=draw) for shape in shapes]
    made[2] = made[2].contiguous(memory_format=torch.channels_last)
    made[4] = made[4].half()
    made[5][0, 0] = float("nan")
    return made


def _joined() -> Group:
    return Group(Topology.from_env(os.environ), CommSettings(), torch.device("cpu"))


def _share(rank: int) -> tuple[list[Tensor], int]:
    calls: list[list[int]] = []
    with _joined() as group:

        def gather(rows: Tensor, lengths: list[int]) -> None:
            calls.append(list(lengths))
            rows[:rank].fill_(float("nan"))  # what is not gathered would show
            rows[rank + 1 :].fill_(float("nan"))
            group.gather_rows(rows, lengths)

        shared = SharedProducts(rank, group.world_size, gather)
        tensors = drawn()
        still = [torch.tensor(place == 1) for place in range(len(tensors))]
        found = orthogonalize(tensors, still, shared)
        again = orthogonalize(tensors, still, shared)
    for a, b in zip(found, again, strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    return [tensor.clone() for tensor in found], calls[0][rank]


@pytest.mark.parametrize("ranks", [2, 4])
def test_shared_products_have_the_bits_of_unshared_ones(ranks: int) -> None:
    tensors = drawn()
    still = [torch.tensor(place == 1) for place in range(len(tensors))]
    expected = orthogonalize(tensors, still)
    by_rank = run_ranks(ranks, _share)
    for found, _ in by_rank:
        for wanted, made in zip(expected, found, strict=True):
            assert made.stride() == wanted.stride()
            assert torch.equal(made.nan_to_num(7.0), wanted.nan_to_num(7.0))
    # Each rank computed a part, and no matrix twice.
    parts = [length for _, length in by_rank]
    assert sum(parts) == sum(tensor.numel() for tensor in tensors)
    assert all(parts)


def _run(rank: int, output: str, share: str) -> dict[str, Any]:
    values = {"optim__name": "muon", "optim__muon__share_products": share, "run__epochs": 1}
    return run_small(output, **values).summary


def test_runs_share_by_default_and_keep_their_bits(tmp_path: Path) -> None:
    off = run_ranks(2, _run, str(tmp_path / "off"), "off")[0]
    auto = run_ranks(2, _run, str(tmp_path / "auto"), "auto")[0]
    assert "shared by 2 ranks" in auto["chosen"]["optimizer"]
    assert "shared" not in off["chosen"]["optimizer"]
    assert auto["weights_sha256"] == off["weights_sha256"]


@pytest.mark.parametrize(("name", "share"), [("muon", "yes"), ("lars", "on")])
def test_what_cannot_be_shared_is_said(name: str, share: str) -> None:
    with pytest.raises(ConfigError, match=r"optim\..*share_products"):
        OptimSettings.gather(name=name, share_products=share)
