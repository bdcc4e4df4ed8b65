"""Sums of virtual ranks against the sums of real ones, bit by bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from comm.clusters import made_groups, run_cluster
from paceline.comm.exchange import Signals
from paceline.comm.executor import Executor
from paceline.comm.group import Group
from paceline.comm.settings import CommSettings
from paceline.core.topology import Topology
from paceline.plan.fusion_plan import FusionPlan
from paceline.plan.schedules import algorithm_names
from paceline.plan.steps import Groups
from paceline.rehearsal.exchange import (
    RehearsedExchange,
    VirtualAllReduce,
    cluster_groups,
    rank_order,
)
from paceline.rehearsal.reduction import compile_reduction

LENGTHS = (1, 100, 300_001)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def numbers(rank: int, length: int, dtype: torch.dtype) -> Tensor:
    """Returns numbers of many magnitudes, so that the order of additions shows in the last bits."""
    generator = torch.Generator().manual_seed(1000 * rank + length)
    spread = torch.exp(2 * torch.randn(length, generator=generator))
    return (spread * torch.randn(length, generator=generator)).to(dtype)


def _real(rank: int, nodes: tuple[int, ...]) -> list[Tensor]:
    found = []
    with made_groups(rank, nodes) as groups:
        executor = Executor(groups)
        for name in algorithm_names():
            for length in LENGTHS:
                for dtype in DTYPES:
                    buffer = numbers(rank, length, dtype)
                    executor.all_reduce(buffer, name)
                    found.append(buffer)
    return found if rank == 0 else []


def virtual(name: str, groups: Groups, length: int, dtype: torch.dtype, order: range) -> Tensor:
    made = compile_reduction(name, groups, length, dtype.itemsize, order=order)
    reduce, found = (
        VirtualAllReduce(made, dtype, torch.device("cpu")),
        torch.empty(length, dtype=dtype),
    )
    for turn in range(2):  # the second time in memory that has been used
        reduce.begin()
        for rank in order:
            reduce.add(numbers(rank, length, dtype) * (1 if turn else 3))
    reduce.result(found)
    return found


@pytest.mark.parametrize("nodes", [(2,), (2, 2), (5,)])
def test_virtual_ranks_sum_to_the_bits_of_real_ones_over_gloo(nodes: tuple[int, ...]) -> None:
    real = iter(run_cluster(nodes, _real)[0])
    groups, ranks = Groups.of_nodes(nodes), sum(nodes)
    for name in algorithm_names():
        for length in LENGTHS:
            for dtype in DTYPES:
                found = virtual(name, groups, length, dtype, range(ranks))
                assert torch.equal(found, next(real)), (name, length, dtype)


def test_the_order_in_which_ranks_come_changes_no_bit() -> None:
    groups = Groups.of_nodes([3, 3])
    for name in algorithm_names():
        up, down = (virtual(name, groups, 1000, torch.float16, order)
                    for order in (range(6), range(5, -1, -1)))  # fmt: skip
        assert torch.equal(up, down), name


def test_groups_are_those_of_the_nodes_or_of_the_group_size() -> None:
    assert cluster_groups(2, 4).groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert cluster_groups(2, 4, 2).groups == ((0, 1), (2, 3), (4, 5), (6, 7))


def exchange(plan: FusionPlan | None = None) -> tuple[nn.Linear, RehearsedExchange]:
    net = nn.Linear(3, 2)
    group = Group(Topology(), CommSettings(), torch.device("cpu"))
    plan = plan or FusionPlan.single(("weight", "bias"))
    return net, RehearsedExchange(net.named_parameters(), group, plan, Groups.of_nodes([4]))


def test_the_exchange_sums_gradients_losses_and_uses() -> None:
    net, made = exchange()
    for _ in range(2):  # a second step begins from nothing
        made.begin()
        for rank in made.order:
            if rank != 2:  # has no samples in a short step
                (net.weight.sum() * (rank + 1)).backward()
                made.gather()
            made.end_rank(torch.tensor(float(rank)))
        made.reduce(torch.tensor(99.0), Signals(corrupt=3.0))
    assert torch.equal(net.weight.grad, torch.full((2, 3), 1.0 + 2.0 + 4.0))
    assert torch.equal(net.bias.grad, torch.zeros(2))
    assert made.tail[0] == 6.0, "the loss of the ranks, not that of the process"
    assert made.tail[1] == 3.0
    assert dict(zip(made.names, made.uses.tolist(), strict=True)) == {"weight": 3.0, "bias": 0.0}


def test_a_step_that_was_given_up_sums_nothing_and_says_so() -> None:
    net, made = exchange()
    made.begin()
    net.weight.sum().backward()
    made.gather()
    made.end_rank(torch.tensor(1.0))
    made.reduce(torch.tensor(1.0), Signals(abandon=1.0))
    assert torch.equal(net.weight.grad, torch.zeros(2, 3))
    assert made.tail[3] == 1.0


def test_ranks_come_in_the_order_that_keeps_least() -> None:
    native = FusionPlan.single(("weight", "bias"))
    assert list(rank_order(3, native)) == [2, 1, 0]


@pytest.mark.gpu
def test_virtual_sums_on_a_gpu_equal_those_on_the_cpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    groups = Groups.of_nodes([4, 4])
    for name in algorithm_names():
        for dtype in DTYPES:
            made = compile_reduction(name, groups, 4097, dtype.itemsize, order=range(8))
            found = []
            for device in (torch.device("cpu"), torch.device("cuda")):
                reduce, into = VirtualAllReduce(made, dtype, device), torch.empty(4097, dtype=dtype)
                for rank in range(8):
                    reduce.add(numbers(rank, 4097, dtype).to(device))
                into = into.to(device)
                reduce.result(into)
                found.append(into.cpu())
            assert torch.equal(*found), (name, dtype)
