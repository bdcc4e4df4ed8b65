from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from paceline.comm.group import Group
from paceline.comm.settings import CommSettings
from paceline.core.topology import Topology
from paceline.train.batch_norm import BatchNormState, pool
from ranks import run_ranks

CPU = torch.device("cpu")


def _net() -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm2d(3, momentum=1.0), nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5))


def _alone() -> Group:
    return Group(Topology(), CommSettings(), CPU)


def _average(rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    group = Group(Topology.from_env(os.environ), CommSettings(), CPU)
    try:
        torch.manual_seed(0)
        net = _net()
        state = BatchNormState(net)
        torch.manual_seed(100 + rank)
        net(torch.randn(4, 3, 2, 2) * (1 + rank) + rank)
        own = state.flat.clone()
        with state.averaged(group):
            inside = state.flat.clone()
        assert torch.equal(state.flat, own)
        return own, inside, state.average(group), state.rows(group)
    finally:
        group.close()


def test_the_average_is_that_of_the_whole_population() -> None:
    results = run_ranks(2, _average)
    owns = torch.stack([own for own, _, _, _ in results])
    for _, inside, average, _ in results:
        assert torch.equal(inside, average)
        assert torch.equal(average, results[0][2])
        torch.testing.assert_close(average, pool(owns))
    rows = results[0][3]
    assert rows is not None
    assert torch.equal(rows, owns)
    assert results[1][3] is None
    # Layer 0 has momentum 1, so its statistics are those of the batch: equal batches on both ranks
    # make one population of twice the size, whose (biased) moments are known.
    samples = []
    for rank in range(2):
        torch.manual_seed(100 + rank)
        samples.append(torch.randn(4, 3, 2, 2) * (1 + rank) + rank)
    union = torch.cat(samples).transpose(0, 1).flatten(1)
    torch.testing.assert_close(results[0][2][0, :3], union.mean(1))
    biased = torch.stack(
        [own[1, :3] * 15 / 16 for own, _, _, _ in results]
    )  # running_var is unbiased over 16 values
    means = torch.stack([own[0, :3] for own, _, _, _ in results])
    torch.testing.assert_close(
        pool(torch.stack([means, biased], dim=1))[1], union.var(1, unbiased=False)
    )


def test_the_model_reads_and_writes_the_flat_buffer() -> None:
    net = _net()
    reference = _net()
    reference.load_state_dict(net.state_dict())
    state = BatchNormState(net)
    images = torch.randn(4, 3, 6, 6)
    assert torch.equal(net(images), reference(images))
    for name, value in reference.state_dict().items():
        assert torch.equal(net.state_dict()[name], value), name
    assert state.flat.shape == (2, 8)
    assert state.tracked.tolist() == [1, 1]


def test_a_step_is_undone_where_the_flag_says_so_even_one_of_nan() -> None:
    net = _net()
    state = BatchNormState(net)
    net(torch.randn(4, 3, 6, 6))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state.remember()
    net(torch.full((4, 3, 6, 6), float("nan")))
    state.settle(torch.tensor(0.0))
    assert state.flat.isnan().any()
    state.settle(torch.tensor(1.0))
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_restoring_on_another_number_of_ranks_takes_the_average() -> None:
    rows = torch.rand(3, 2, 8)
    state = BatchNormState(_net())
    state.restore(rows[:1], torch.tensor([7, 7]), _alone())
    assert torch.equal(state.flat, rows[0])
    state.restore(rows, torch.tensor([9, 9]), _alone())
    assert torch.equal(state.flat, pool(rows))
    assert state.tracked.tolist() == [9, 9]


def test_a_model_without_batch_norm_is_fine() -> None:
    state = BatchNormState(nn.Linear(2, 2))
    state.remember()
    state.settle(torch.tensor(1.0))
    with state.averaged(_alone()):
        assert state.flat.numel() == 0
