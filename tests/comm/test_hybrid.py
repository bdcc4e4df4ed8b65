"""The hybrid by itself and as a hook of plain DDP."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from comm.clusters import run_cluster, topology
from paceline.comm import HybridAllReduce, SizeTable
from paceline.comm.process_groups import ProcessGroups
from paceline.core.errors import CommError, ConfigError
from paceline.core.topology import Topology
from paceline.plan.size_table import SizeRow

TABLE = SizeTable((SizeRow("hierarchical", 1000), SizeRow("torus2d", 20000), SizeRow("ring")))


def _hybrid(
    rank: int, nodes: tuple[int, ...], wire: str = "float32", timeout_s: float = 100
) -> Any:
    return HybridAllReduce(ProcessGroups(topology(rank, nodes), timeout_s=timeout_s), TABLE, wire)


def _sums(rank: int, nodes: tuple[int, ...], wire: str) -> list[Any]:
    hybrid = _hybrid(rank, nodes, wire)
    found = []
    try:
        # Enqueued at once; they must run in order.
        buffers = [torch.full((size,), float(rank + 1)) for size in (3, 2000, 9000)]
        chosen = [hybrid.choose(buffer) for buffer in buffers]
        futures = [hybrid.submit(buffer) for buffer in buffers]
        found += [future.wait().unique().tolist() for future in futures]
        means = torch.full((5,), float(rank + 1))
        hybrid.all_reduce(means, mean=True)
        half = torch.full((5,), 40000.0, dtype=torch.float16)
        hybrid.all_reduce(half, mean=True)
        return [chosen, found, means.tolist(), half.tolist()]
    finally:
        hybrid.close()


@pytest.mark.parametrize("wire", ["float32", "float16", "bfloat16"])
def test_each_buffer_goes_by_its_size(wire: str) -> None:
    large = "ring" if wire == "float32" else "torus2d"
    for chosen, sums, means, half in run_cluster((2, 1), _sums, wire):
        assert chosen == ["hierarchical", "torus2d", large]
        assert sums == [[6.0]] * 3
        assert means == [2.0] * 5
        # The sum, 120000, is more than fp16 holds; the mean is not.
        assert half == pytest.approx([40000.0] * 5, rel=1e-3)


def _net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)
    )


def _train(rank: int, hybrid: HybridAllReduce | None) -> Tensor:
    model = DistributedDataParallel(_net(), bucket_cap_mb=0.01)
    if hybrid is not None:
        model.register_comm_hook(hybrid, HybridAllReduce.ddp_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(5):
        optimizer.zero_grad()
        inputs = torch.randn(8, 20, generator=generator)
        model(inputs).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _plain_and_hooked(rank: int, nodes: tuple[int, ...], wire: str) -> tuple[Tensor, Tensor]:
    hybrid = _hybrid(rank, nodes, wire)
    try:
        return _train(rank, None), _train(rank, hybrid)
    finally:
        hybrid.close()


@pytest.mark.parametrize(
    ("nodes", "wire", "rtol"),
    [((2,), "float32", 1e-5), ((2, 1), "float32", 1e-5), ((2, 2), "float16", 3e-3)],
)
def test_ddp_with_the_hook_trains_as_without(
    nodes: tuple[int, ...], wire: str, rtol: float
) -> None:
    results = run_cluster(nodes, _plain_and_hooked, wire)
    for plain, hooked in results:
        assert torch.equal(hooked, results[0][1])
        assert torch.allclose(hooked, plain, rtol=rtol, atol=rtol)
        assert not torch.equal(
            plain, torch.cat([p.detach().flatten() for p in _net().parameters()])
        )


def _from_env(rank: int, nodes: tuple[int, ...]) -> list[float]:
    world = str(sum(nodes))
    os.environ.update(RANK=str(rank), WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    hybrid = HybridAllReduce.from_env(SizeTable.two_way(64), timeout_s=100)
    try:
        buffer = torch.ones(30)
        hybrid.all_reduce(buffer)
        return [*buffer.unique().tolist(), len(hybrid.groups.layout.groups)]
    finally:
        hybrid.close()


def test_from_env_reads_the_launchers_topology() -> None:
    assert run_cluster((3,), _from_env) == [[3.0, 1]] * 3


def _absent_peer(rank: int, nodes: tuple[int, ...]) -> str:
    """Rank 1 does not come; the backward pass of rank 0 must fail within the timeout."""
    hybrid = _hybrid(rank, nodes, timeout_s=4)
    try:
        if rank == 1:
            return ""
        submitted, exchange = threading.Event(), hybrid.all_reduce

        def held(*given: Any, **options: Any) -> Any:
            """Does not begin before `submit` has returned."""
            assert submitted.wait(100), "submit waits for the exchange"
            return exchange(*given, **options)

        hybrid.all_reduce = held
        future = hybrid.submit(torch.ones(10))
        submitted.set()
        with pytest.raises(Exception, match="broke on rank 0") as caught:
            future.wait()
        with pytest.raises(Exception, match="broke on rank 0"):
            hybrid.submit(torch.ones(10)).wait()
        return str(caught.value)
    finally:
        dist.barrier()
        hybrid.close()


def test_a_peer_that_stays_away_fails_the_future_within_the_timeout() -> None:
    text, _ = run_cluster((1, 1), _absent_peer)
    assert "hierarchical all-reduce of 40 bytes broke on rank 0" in text
    assert "4 s late" in text


def _other_table(rank: int, nodes: tuple[int, ...]) -> str:
    groups = ProcessGroups(topology(rank, nodes), timeout_s=100)
    with pytest.raises(CommError) as caught:
        HybridAllReduce(groups, SizeTable.two_way(64 + rank))
    groups.close()
    return str(caught.value)


def test_ranks_with_different_tables_are_told() -> None:
    said = run_cluster((2,), _other_table)
    assert said[0] == said[1]
    assert "ranks differ in comm.hybrid.sizes" in said[0]


def test_a_process_alone() -> None:
    hybrid = HybridAllReduce(ProcessGroups(Topology()), TABLE, "float16")
    buffer = torch.tensor([1.5, -2.0])
    assert hybrid.submit(buffer, mean=True).wait().tolist() == [1.5, -2.0]
    with pytest.raises(CommError, match="must be 1-D and contiguous"):
        hybrid.submit(torch.ones(4)[::2])
    hybrid.close()
    with pytest.raises(ConfigError, match="comm.wire"):
        HybridAllReduce(ProcessGroups(Topology()), TABLE, "fp8")
