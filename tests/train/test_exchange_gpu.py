"""The exchange on a GPU: recordings that hold NCCL's collectives, and staging over Gloo."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import torch

from paceline.comm.group import Group
from paceline.comm.settings import CommSettings
from paceline.core.topology import Topology
from train.steps import Made, make_step, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# Asked for by name, because a group of one otherwise has a single buffer.
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
    step.exchange.carrier.close()
    return weights(step)


@pytest.mark.parametrize("micro", [12, 4])
@pytest.mark.parametrize("wire", ["auto", "float16"])
def test_recorded_and_eager_overlap_train_as_the_flat_exchange(
    group: Group, micro: int, wire: str
) -> None:
    """With micro-batches of 4 there are two recordings: plain, and armed with its collectives."""
    on = CommSettings(algorithm="native", fusion_mib=0.0, overlap="on", wire=wire)
    flat = train(group, None, graphs=False, micro=micro)
    tolerance = 1e-4 if wire == "auto" else 2e-2
    ours = train(group, on, graphs=True, micro=micro)
    torch.testing.assert_close(ours, flat, rtol=tolerance, atol=tolerance)


def test_overlap_by_itself_never_costs_a_recording(group: Group) -> None:
    step = make_step(group, made=Made(graphs=True, comm=NATIVE))
    assert step.exchange.overlaps == (group.backend == "nccl")
    step.exchange.carrier.close()
