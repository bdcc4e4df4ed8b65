"""Every schedule against torch.distributed.all_reduce, on real processes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from typer.testing import CliRunner

from comm.clusters import made_groups, run_cluster
from paceline.cli.app import app
from paceline.cli.measure import parse_algorithms
from paceline.comm.executor import Executor, check_buffer, schedule_peers
from paceline.comm.process_groups import ProcessGroups
from paceline.comm.settings import CommSettings
from paceline.core.errors import CommError, ConfigError
from paceline.core.topology import Topology
from paceline.plan import SizeTable
from paceline.plan.cluster import Cluster, Link
from paceline.plan.cost import all_reduce_s
from paceline.plan.schedules import REGISTRY, algorithm, algorithm_names, register, tuned_names
from paceline.plan.steps import PAUSE, Groups, Receive, Segment, Send, Steps

SIZES = (0, 1, 3, 7, 1000, 4097)
FEW_SIZES = (0, 3, 4097, 30_000)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _numbers(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Returns numbers that are whole at even places.

    Sums of nine of them stay within ±144, where bf16 holds every even number.
    """
    generator = torch.Generator().manual_seed(100 * size + rank)
    numbers = torch.randn(size, generator=generator)
    numbers[::2] = 2.0 * torch.randint(-7, 8, (len(numbers[::2]),), generator=generator)
    return numbers.to(dtype)


@functools.lru_cache(maxsize=32)
def _shares(world: int, size: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
    """Every rank's buffer, their exact sum, and how far from it a result may be; all algorithms sum the
    same."""
    shares = [_numbers(rank, size, dtype) for rank in range(world)]
    exact = torch.stack(shares).double()
    # At most one rounding a rank, and one of the result.
    bound = 1.01 * (world + 1) * torch.finfo(dtype).eps / 2 * exact.abs().sum(0)
    return shares, exact.sum(0), bound


def _bits(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()


def _try(
    executor: Executor, name: str, rank: int, world: int, dtype: torch.dtype, sizes: tuple[int, ...]
) -> list[str]:
    """Checks all sizes, and returns the bits of each result."""
    bits = []
    for size in sizes:
        shares, exact, bound = _shares(world, size, dtype)
        ours, theirs = shares[rank].clone(), shares[rank].to(torch.float32, copy=True)
        executor.all_reduce(ours, name)
        dist.all_reduce(theirs)
        assert torch.equal(ours[::2].float(), theirs[::2]), (name, size, dtype)
        assert bool(((ours - exact).abs() <= bound).all()), (name, size, dtype)
        bits.append(_bits(ours))
    return bits


def _all(rank: int, nodes: tuple[int, ...], k: int | None, how: str) -> dict[str, list[str]]:
    """Sums by every algorithm.

    `how` is `gloo`; `segments`, cut into many small ones; `batched` or `nested`, as over NCCL.
    """
    found = {}
    with made_groups(rank, nodes, k, subgroups=how == "nested" or None) as groups:
        executor = Executor(groups, batched=how == "batched" or None)
        for name in algorithm_names():
            if how == "segments" and name != "native":
                # Whatever was registered is replaced in this process alone.
                cut = vars(REGISTRY[name]) | {"most_bytes": 2048, "depth": 3}
                REGISTRY[name] = type(REGISTRY[name])(**cut)
            for dtype in DTYPES if how == "gloo" else DTYPES[1:2]:
                sizes = SIZES if how == "gloo" else FEW_SIZES
                found[f"{name} {dtype}"] = _try(executor, name, rank, sum(nodes), dtype, sizes)
    return found


@pytest.mark.parametrize(
    ("nodes", "k", "how"),
    [
        ((1,), None, "gloo"), ((1, 1), None, "gloo"), ((3,), None, "gloo"), ((2, 1, 2), None, "gloo"),
        ((3, 2, 1), None, "gloo"), ((8,), 3, "gloo"), ((2, 2), None, "segments"),
        ((3, 2, 1), None, "segments"), ((3, 2, 1), None, "batched"), ((2, 2, 1), 3, "batched"),
        ((2, 2), None, "nested"), ((2, 1), None, "nested"), ((1,), None, "nested"),
    ],
    ids=str,
)  # fmt: skip
def test_every_algorithm_sums_like_the_backend_and_ranks_end_bit_identical(
    nodes: tuple[int, ...], k: int | None, how: str
) -> None:
    kept = dict(REGISTRY)
    results = run_cluster(nodes, _isolated, k, how)
    assert kept == REGISTRY
    assert len(results[0]) == (3 if how == "gloo" else 1) * len(algorithm_names())
    for rank, result in enumerate(results):
        assert result == results[0], rank


def _isolated(rank: int, nodes: tuple[int, ...], k: int | None, how: str) -> dict[str, list[str]]:
    kept = dict(REGISTRY)
    try:
        return _all(rank, nodes, k, how)
    finally:
        REGISTRY.update(kept)


def _large(rank: int, nodes: tuple[int, ...]) -> list[str]:
    """Sums buffers that every algorithm cuts into segments."""
    with made_groups(rank, nodes) as groups, contextlib.ExitStack() as stack:
        stack.callback(_shares.cache_clear)
        executor = Executor(groups)
        with pytest.raises(CommError, match="cannot send memory of meta; use HybridAllReduce"):
            executor.all_reduce(torch.empty(3, device="meta"), "ring")
        return [
            bits
            for name in algorithm_names()
            for bits in _try(executor, name, rank, 4, torch.float32, (2_300_001,))
        ]


def test_large_buffers_in_segments() -> None:
    assert len({tuple(result) for result in run_cluster((3, 1), _large)}) == 1


def _fp32_inside(rank: int, nodes: tuple[int, ...]) -> dict[str, float]:
    """Sums 2048 + 1 + 1 + …: fp16 has steps of 2 there, so each 1 is lost unless they add up in fp32."""
    found = {}
    with made_groups(rank, nodes) as groups:
        for name in ("hierarchical", "torus2d", "central"):
            buffer = torch.full((9,), 2048.0 if rank == 0 else 1.0, dtype=torch.float16)
            Executor(groups).all_reduce(buffer, name)
            found[name] = float(buffer[0])
    return found


def test_16_bit_messages_are_summed_in_fp32() -> None:
    for result in run_cluster((8,), _fp32_inside):
        assert set(result.values()) == {2056.0}  # 2055, rounded once, to even


@pytest.mark.parametrize("name", algorithm_names())
def test_a_process_alone_and_what_is_no_buffer(name: str) -> None:
    executor, buffer = Executor(ProcessGroups(Topology())), torch.arange(5.0)
    executor.all_reduce(buffer, name)
    assert buffer.tolist() == [0, 1, 2, 3, 4]
    for tensor in (torch.zeros(4, 4), torch.zeros(8)[::2], torch.zeros(4, dtype=torch.int32)):
        with pytest.raises(CommError):
            check_buffer(tensor)
        with pytest.raises(CommError):
            executor.all_reduce(tensor, name)
    with pytest.raises(ConfigError, match="did you mean 'ring'"):
        executor.all_reduce(buffer, "rign")


@pytest.mark.parametrize("name", algorithm_names()[1:])
@pytest.mark.parametrize("nodes", [(2,), (1, 1), (3, 1), (3, 2), (1,) * 12, (4,) * 4], ids=str)
def test_peers_are_mutual_and_join_all_ranks(name: str, nodes: tuple[int, ...]) -> None:
    """NCCL's connections are opened for them beforehand."""
    groups = Groups.of_nodes(nodes)
    found = [schedule_peers(algorithm(name), rank, groups) for rank in groups.order]
    reached, new = {0}, {0}
    for rank, peers in enumerate(found):
        assert rank not in peers
        assert all(rank in found[peer] for peer in peers)
    while new:
        new = {peer for rank in new for peer in found[rank]} - reached
        reached |= new
    assert reached == set(groups.order)


def gossip(rank: int, groups: Groups, segment: Segment) -> Steps:
    """A toy: all to the first rank, and back."""
    first, *others = groups.order
    span = (0, segment.length)
    if rank != first:
        yield Send(first, span)
    yield PAUSE
    if rank == first:
        yield Receive(tuple(others), span, add=True)
        for other in others:
            yield Send(other, span)
    yield PAUSE
    if rank != first:
        yield Receive((first,), span)


@pytest.fixture
def toy() -> Iterator[str]:
    # Two messages into one port, two out of it.
    register(cost=lambda c, m: 4 * (c.slowest.alpha_s + m * c.slowest.beta_s))(gossip)
    yield "gossip"
    del REGISTRY["gossip"]


def _gossip(rank: int, nodes: tuple[int, ...]) -> list[str]:
    register()(gossip)
    try:
        with made_groups(rank, nodes) as groups:
            return [
                *_try(Executor(groups), "gossip", rank, sum(nodes), torch.float16, SIZES),
                *_try(Executor(groups, batched=True), "gossip", rank, 3, torch.float32, SIZES),
            ]
    finally:
        del REGISTRY["gossip"]


def test_a_new_algorithm_is_one_function(toy: str) -> None:
    """It is executed, priced and offered by every command, by its registration alone."""
    results = run_cluster((2, 1), _gossip)
    assert results == [results[0]] * 3
    cluster = Cluster(3, 1, Link(0, 0), Link(1e-5, 1e-9))
    assert all_reduce_s(toy, cluster, 4e6) == pytest.approx(4 * (1e-5 + 4e-3))
    assert toy in tuned_names()  # tune
    assert toy in parse_algorithms("all")  # bench allreduce
    assert CommSettings(algorithm=toy).algorithm == toy  # train, bench exchange
    assert SizeTable.single(toy).choose(8) == toy
    flags = ["plan", "--gpu", "V100", "--nodes", "2", "--gpus-per-node", "2", "--algorithm", toy]
    done = CliRunner().invoke(app, flags, catch_exceptions=False)
    assert done.exit_code == 0
    assert toy in done.output
