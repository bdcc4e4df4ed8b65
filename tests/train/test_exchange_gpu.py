"""The exchange on a GPU: CUDA graphs that hold NCCL's collectives, and staging over Gloo."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence

import pytest
import torch

from paceline.alternatives.eight_bit.wires import ALL_TO_ALL, EIGHT_BIT
from paceline.comm import CommSettings, Group, ProcessGroups
from paceline.comm.planned_transport import PlannedAllReduce
from paceline.comm.transport import Notify, Piece, Wait
from paceline.core.topology import Topology
from paceline.plan.schedules import algorithm_names
from ranks import run_ranks
from train.steps import Made, alone, make_step, weights

pytestmark = pytest.mark.gpu
# Asked for by name, because a group of one otherwise has a single bucket.
NATIVE = CommSettings(algorithm="native", fusion_mib=0.0)


@pytest.fixture(params=["nccl", "gloo"])
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    """A launcher's group of one rank, whose collectives really are called."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    device = torch.device("cuda", torch.cuda.current_device())
    place = Topology(master_port=port, launcher="environment")
    with Group(place, CommSettings(backend=request.param), device) as made:
        yield made


def train(group: Group, comm: CommSettings | None, *, graphs: bool, micro: int) -> torch.Tensor:
    made = Made(micro, epochs=5, graphs=graphs, comm=comm)
    step = make_step(group, made=made, norm=True)
    for number in range(step.plan.total_steps):
        outcome = step.run(number, 0.05)
        assert outcome.exposed_comm_s >= 0
    step.exchange.close()
    return weights(step)


@pytest.mark.parametrize("micro", [12, 4])
@pytest.mark.parametrize("wire", ["auto", "float16"])
def test_captured_and_eager_overlap_train_as_the_flat_exchange(
    group: Group, micro: int, wire: str
) -> None:
    """With micro-batches of 4 there are two graphs: without and with collectives."""
    on = CommSettings(algorithm="native", fusion_mib=0.0, overlap="on", wire=wire)
    flat = train(group, None, graphs=False, micro=micro)
    tolerance = 1e-4 if wire == "auto" else 2e-2
    ours = train(group, on, graphs=True, micro=micro)
    torch.testing.assert_close(ours, flat, rtol=tolerance, atol=tolerance)


class Doubling:
    """Doubles what it carries, on a stream of its own that is late: whoever reads before the join, or
    sends before backward has filled the bucket, sees other numbers."""

    overlaps, capturable, memory = True, True, None

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def send(self, pieces: Sequence[Piece], begun: Notify, ended: Notify) -> Wait:
        main = torch.cuda.current_stream()
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
            for piece in pieces:
                piece.tensor.mul_(2)

        def wait() -> None:
            torch.cuda.current_stream().wait_stream(self._stream)

        return wait

    def close(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize("graphs", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("micro", [12, 4])
def test_nothing_is_sent_too_early_or_read_too_early(graphs: bool, micro: int) -> None:
    """Twice the gradient at half the rate is the same step, but only if each is doubled just once."""
    found = []
    for transport, rate in ((Doubling(), 0.05), (None, 0.1)):
        made = Made(micro, epochs=5, graphs=graphs, transport=transport)
        step = make_step(alone(torch.device("cuda")), made=made)
        assert step.exchange.overlaps == (transport is not None)
        for number in range(step.plan.total_steps):
            step.run(number, rate)
        found.append(weights(step))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_the_gpu_over_gloo(ranks: int) -> None:
    """Every algorithm, staged through pinned memory, on tensors of the one GPU."""
    assert run_ranks(ranks, _gloo_sums, timeout_s=120) == [True] * ranks


def _gloo_sums(rank: int) -> bool:
    topology = Topology.from_env(os.environ)
    with Group(topology, CommSettings(backend="gloo"), torch.device("cuda", 0)) as group:
        groups = ProcessGroups(topology, timeout_s=60)
        planned = PlannedAllReduce(groups)
        good = True
        for name in algorithm_names():
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                buffer = torch.arange(1000, device="cuda").remainder(7).add(rank).to(dtype)
                wanted = sum(torch.arange(1000).remainder(7) + r for r in range(group.world_size))
                planned.carry(buffer, name, "auto")
                good &= torch.equal(buffer.cpu().float(), torch.as_tensor(wanted).float())
        planned.close()
    return good


def _eight_bit_sums(rank: int) -> bool:
    """The same bits from GPU memory as from the host's, but for fused products and sums."""
    topology = Topology.from_env(os.environ)
    with Group(topology, CommSettings(backend="gloo"), torch.device("cuda", 0)):
        good = True
        for wire in EIGHT_BIT:
            sums = []
            for device in ("cuda", "cpu"):
                groups, settings = ProcessGroups(topology, timeout_s=60), CommSettings(wire=wire)
                planned = PlannedAllReduce(groups, [wire], settings)
                residuals = planned.memory
                residuals.scale = torch.tensor(8.0, device=device)
                buffer = torch.zeros(5000, device=device)
                for step in range(3):
                    draw = torch.Generator().manual_seed(10 * step + rank)
                    buffer.copy_(torch.randn(5000, generator=draw))
                    planned.carry(buffer, ALL_TO_ALL, wire)
                    residuals.commit(torch.zeros((), device=device))
                sums.append(buffer.cpu())
                planned.close()
            good &= float(torch.isclose(*sums, rtol=1e-5, atol=1e-7).float().mean()) > 0.99
    return good


def test_eight_bit_wires_on_a_gpu() -> None:
    assert run_ranks(2, _eight_bit_sums, timeout_s=120) == [True] * 2


@pytest.mark.parametrize("name", algorithm_names())
def test_every_algorithm_alone_over_nccl(group: Group, name: str) -> None:
    groups = ProcessGroups(group.topology, timeout_s=60)
    planned = PlannedAllReduce(groups)
    buffer = torch.arange(1000, device="cuda", dtype=torch.float32)
    planned.carry(buffer, name, "auto")
    assert torch.equal(buffer.cpu(), torch.arange(1000, dtype=torch.float32))
    planned.close()


def test_overlap_by_itself_never_costs_a_graph(group: Group) -> None:
    step = make_step(group, made=Made(graphs=True, comm=NATIVE))
    assert step.exchange.overlaps == (group.backend == "nccl")
    step.exchange.close()
