"""Every algorithm against torch.distributed.all_reduce, on real processes."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from comm.algorithms.clusters import made_groups, run_cluster
from paceline.comm.algorithms.all_reduce import AllReduce
from paceline.comm.algorithms.catalogue import create_algorithm
from paceline.comm.algorithms.central import Central
from paceline.comm.algorithms.explicit import Explicit
from paceline.comm.algorithms.hierarchical import Hierarchical
from paceline.comm.algorithms.member_sum import KINDS
from paceline.comm.algorithms.names import ALGORITHMS
from paceline.comm.algorithms.nested_collectives import NestedHierarchical, NestedTorus2d
from paceline.comm.algorithms.staging import Staging
from paceline.comm.algorithms.torus2d import Torus2d
from paceline.comm.process_groups import ProcessGroups
from paceline.comm.wire import WireFormat
from paceline.comm.wire_error import simulate_sum
from paceline.core.errors import CommError

SIZES = (0, 1, 3, 7, 1000, 4097)
FEW_SIZES = (0, 3, 4097)
CLUSTERS = [(1,), (1, 1), (3,), (2, 2), (2, 1, 2), (3, 2, 1), (4, 4)]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _numbers(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Whole numbers at the even places: sums of eight stay within ±128, which bf16 holds exactly."""
    generator = torch.Generator().manual_seed(100 * size + rank)
    numbers = torch.randn(size, generator=generator)
    numbers[::2] = torch.randint(-16, 17, (len(numbers[::2]),), generator=generator).float()
    return numbers.to(dtype)


def _bits(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()


def _try(
    algorithm: AllReduce,
    rank: int,
    world: int,
    dtype: torch.dtype,
    label: str,
    sizes: tuple[int, ...] = SIZES,
) -> list[str]:
    """Checks all sizes, and returns the bits of each result."""
    bits = []
    for size in sizes:
        shares = [_numbers(other, size, dtype) for other in range(world)]
        ours = shares[rank].clone()
        theirs = shares[rank].to(torch.float32, copy=True)
        algorithm.all_reduce(ours)
        dist.all_reduce(theirs)
        assert torch.equal(ours[::2].float(), theirs[::2]), (label, size, dtype)
        # At most one rounding a rank, and one of the result.
        total = torch.stack(shares).double()
        bound = 1.01 * (world + 1) * torch.finfo(dtype).eps / 2 * total.abs().sum(0)
        assert bool(((ours - total.sum(0)).abs() <= bound).all()), (label, size, dtype)
        bits.append(_bits(ours))
    return bits


def _algorithms(groups: ProcessGroups) -> dict[str, AllReduce]:
    """All by name, as they come, and cut into many small segments; they share their memory."""
    staging = Staging()
    made: dict[str, AllReduce] = {n: create_algorithm(n, groups, staging) for n in ALGORITHMS}
    for name in ALGORITHMS[1:]:
        cut = create_algorithm(name, groups, staging)
        assert isinstance(cut, Explicit)
        cut.segment_bytes, cut.depth = 2048, 3
        made[f"{name}, segments"] = cut
    return made


def _all_algorithms(rank: int, nodes: tuple[int, ...]) -> dict[str, list[str]]:
    world = sum(nodes)
    found = {}
    with made_groups(rank, nodes) as groups:
        for label, algorithm in _algorithms(groups).items():
            assert algorithm.name == label.partition(",")[0]
            cut = algorithm.name != label
            for dtype in DTYPES[:2] if cut else DTYPES:
                sizes = FEW_SIZES if cut else SIZES
                found[f"{label} {dtype}"] = _try(algorithm, rank, world, dtype, label, sizes)
    return found


@pytest.mark.parametrize("nodes", CLUSTERS, ids=str)
def test_every_algorithm_sums_like_the_backend_and_ranks_end_bit_identical(
    nodes: tuple[int, ...],
) -> None:
    results = run_cluster(nodes, _all_algorithms)
    assert len(results[0]) == 3 * len(ALGORITHMS) + 2 * (len(ALGORITHMS) - 1)
    for rank, result in enumerate(results):
        assert result == results[0], rank


def _variants(rank: int, nodes: tuple[int, ...], k: int | None) -> dict[str, list[str]]:
    made: dict[str, Any] = {}
    found = {}
    with made_groups(rank, nodes, k) as groups:
        for kind in KINDS:
            made[f"masters by {kind}"] = Hierarchical(groups, masters=kind)
            made[f"columns by {kind}"] = Torus2d(groups, columns=kind)
            made[f"batched columns by {kind}"] = Torus2d(groups, columns=kind, batched=True)
        for servers in (1, 2, sum(nodes)):
            made[f"{servers} servers"] = Central(groups, servers=servers)
        for name in ALGORITHMS[1:]:
            made[f"batched {name}"] = type(create_algorithm(name, groups))(groups, batched=True)  # type: ignore[call-arg]
        for label, algorithm in made.items():
            found[label] = _try(algorithm, rank, sum(nodes), torch.float16, label, FEW_SIZES)
    return found


@pytest.mark.parametrize(
    ("nodes", "k"), [((3, 2, 1), None), ((2, 2, 1), 3), ((4, 4), 2), ((8,), 3)], ids=str
)
def test_variants(nodes: tuple[int, ...], k: int | None) -> None:
    """How masters sum, how many serve, groups of k, and messages in batches, as over NCCL."""
    results = run_cluster(nodes, _variants, k)
    for result in results:
        assert result == results[0]


def _nested(rank: int, nodes: tuple[int, ...]) -> list[list[str]]:
    with made_groups(rank, nodes, subgroups=True) as groups:
        made: list[AllReduce] = [NestedHierarchical(groups)]
        by_name = create_algorithm("torus2d", groups)
        assert isinstance(create_algorithm("hierarchical", groups), NestedHierarchical)
        assert isinstance(by_name, NestedTorus2d) is groups.layout.is_uniform
        made.append(by_name)
        return [_try(a, rank, sum(nodes), d, a.name) for a in made for d in DTYPES]


@pytest.mark.parametrize("nodes", [(1,), (2, 2), (2, 1)], ids=str)
def test_the_form_for_nccl_sums_alike(nodes: tuple[int, ...]) -> None:
    results = run_cluster(nodes, _nested)
    for result in results:
        assert result == results[0]


def _large(rank: int, nodes: tuple[int, ...]) -> list[str]:
    """Long enough that every algorithm cuts it by itself."""
    with made_groups(rank, nodes) as groups:
        with pytest.raises(CommError, match="cannot send memory of meta; use HybridAllReduce"):
            create_algorithm("ring", groups).all_reduce(torch.empty(3, device="meta"))
        return [
            bits
            for name in ALGORITHMS
            for bits in _try(
                create_algorithm(name, groups), rank, 4, torch.float32, name, (2_300_001,)
            )
        ]


def test_large_buffers_in_segments() -> None:
    results = run_cluster((3, 1), _large)
    assert len({tuple(result) for result in results}) == 1


def _turns(rank: int, nodes: tuple[int, ...]) -> bool:
    """More segments than can be under way, and more than a group has ranks to lead them."""
    with made_groups(rank, nodes) as groups:
        algorithm = create_algorithm("hierarchical", groups)
        assert isinstance(algorithm, Hierarchical)
        algorithm.depth, algorithm.segment_bytes = 3, 4096
        buffer = (torch.arange(11_003) % 7 + rank).float()
        algorithm.all_reduce(buffer)
        ranks = sum(nodes)
        expected = (torch.arange(11_003) % 7).float() * ranks + sum(range(ranks))
        return torch.equal(buffer, expected)


@pytest.mark.parametrize("nodes", [(3, 1, 2), (4,), (1, 1, 1)])
def test_masters_take_turns(nodes: tuple[int, ...]) -> None:
    assert run_cluster(nodes, _turns) == [True] * sum(nodes)


def _fp32_inside(rank: int, nodes: tuple[int, ...]) -> dict[str, float]:
    """2048 + 1 + 1 + …: fp16 has steps of 2 there, so each 1 is lost unless they add up in fp32."""
    found = {}
    with made_groups(rank, nodes) as groups:
        for name in ("hierarchical", "torus2d", "central"):
            buffer = torch.full((9,), 2048.0 if rank == 0 else 1.0, dtype=torch.float16)
            create_algorithm(name, groups).all_reduce(buffer)
            found[name] = float(buffer[0])
    return found


def test_16_bit_messages_are_summed_in_fp32() -> None:
    for result in run_cluster((8,), _fp32_inside):
        assert set(result.values()) == {2056.0}  # 2055, rounded once, to even


def _tree(rank: int, nodes: tuple[int, ...]) -> list[float]:
    with made_groups(rank, nodes) as groups:
        buffer = _numbers(rank, 200, torch.float16)
        create_algorithm("tree", groups).all_reduce(buffer)
        return list(buffer.tolist())


def test_the_simulated_order_is_the_true_one() -> None:
    shares = torch.stack([_numbers(r, 200, torch.float16).float() for r in range(6)])
    expected = simulate_sum("tree", shares, WireFormat("float16"))
    for result in run_cluster((3, 2, 1), _tree):
        assert result == expected.tolist()
