"""Torch's hooks in the exchange: PowerSGD and post-local SGD against their equations in plain NumPy."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from comm.exchanges import joined
from paceline.comm.exchange import GradientExchange, Signals
from paceline.comm.memory import Weights
from paceline.comm.settings import CommSettings
from paceline.comm.torch_hooks import GradientBucket, PowerSgd
from paceline.comm.transport import create_transport
from paceline.config import RunConfig
from paceline.core.errors import ConfigError
from paceline.optim.lars import SGD
from paceline.plan import FusionPlan
from ranks import run_ranks

RANKS, STEPS, START = 2, 5, 2
ROWS, COLUMNS = 12, 20


def gradient(rank: int, step: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(100 * step + rank).standard_normal(shape).astype(np.float32)


def net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(COLUMNS, ROWS)


def exchange_of(group: Any, model: nn.Module, settings: CommSettings) -> GradientExchange:
    plan = FusionPlan.single([name for name, _ in reversed(list(model.named_parameters()))])
    transport = create_transport(group, settings, plan)
    return GradientExchange(model.named_parameters(), group, plan, transport=transport)


def give(model: nn.Linear, rank: int, step: int, scale: float = 1.0) -> None:
    """A rank's share of the mean, times the loss scale."""
    for parameter in model.parameters():
        share = torch.from_numpy(gradient(rank, step, tuple(parameter.shape))) * scale / RANKS
        parameter.grad = share.to(parameter.dtype)


# PowerSGD (Vogels et al. 2019).


def orthogonal(matrix: np.ndarray) -> np.ndarray:
    found = np.linalg.qr(matrix.astype(np.float64))[0]
    return found * np.sign((found * matrix).sum(axis=0))


def power_sgd_reference(rank_of_matrices: int, draws: int) -> list[np.ndarray]:
    """The mean gradient of each step. `shares` of a mean are compressed, and p times their mean is it.
    `draws`: the message that holds the matrix draws its first Q as the n-th."""
    errors = [np.zeros((ROWS, COLUMNS)) for _ in range(RANKS)]
    torch.manual_seed(np.random.RandomState(0).randint(1_000_000_000, size=draws)[-1])
    q = torch.randn(1, COLUMNS, rank_of_matrices)[0].numpy()
    found = []
    for step in range(STEPS):
        shares = [gradient(r, step, (ROWS, COLUMNS)) / RANKS for r in range(RANKS)]
        if step < START:
            found.append(np.sum(shares, axis=0))
            continue
        corrected = [share + error for share, error in zip(shares, errors, strict=True)]
        q = orthogonal(q)
        p = orthogonal(np.sum([m @ q for m in corrected], axis=0))
        q = np.mean([m.T @ p for m in corrected], axis=0)
        approximation = p @ q.T
        errors = [m - approximation for m in corrected]
        found.append(approximation * RANKS)
    return found


def _power_sgd(rank: int, scales: tuple[float, ...], half: bool) -> list[np.ndarray]:
    with joined() as group:
        model = net()
        if half:
            model.weight.data = model.weight.data.half()
        settings = CommSettings(hook="powersgd", powersgd_rank=2, powersgd_start_step=START)
        exchange = exchange_of(group, model, settings)
        assert exchange.memory is not None
        found, step, spoiled = [], 0, False
        scale = exchange.memory.scale = torch.ones(())
        while step < STEPS:
            scale.fill_(scales[step])
            exchange.begin(step)
            give(model, rank, step, scales[step])
            # A step whose gradients overflow on one rank is repeated, and must leave no trace.
            spoils = step == START + 1 and not spoiled
            if spoils and rank == 1:
                model.weight.grad[0, 0] = torch.inf
            exchange.gather()
            exchange.reduce(torch.tensor(1.0), Signals())
            assert float(exchange.tail[0]) == RANKS
            assert model.weight.grad is not None
            exchange.memory.settle(torch.tensor(float(spoils)))
            if spoils:
                assert not torch.isfinite(model.weight.grad).all()
                spoiled = True
                continue
            found.append(model.weight.grad.float().numpy().copy() / scales[step])
            expected = sum(gradient(r, step, (ROWS,)) for r in range(RANKS)) / RANKS
            np.testing.assert_allclose(model.bias.grad / scales[step], expected, rtol=1e-5)
            step += 1
    return found


@pytest.mark.parametrize("half", [False, True])
def test_power_sgd_is_that_of_its_equations(half: bool) -> None:
    scales = (1.0, 1.0, 4.0, 16.0, 2.0)
    first, second = run_ranks(RANKS, _power_sgd, scales, half)
    tolerance = 3e-3 if half else 2e-5
    # Biases in fp32 are a message of their own, the first one.
    expectations = power_sgd_reference(2, draws=2 if half else 1)
    for ours, theirs, expected in zip(first, second, expectations, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_allclose(ours, expected, atol=tolerance)
    # Compressed, so not the mean itself.
    exact = sum(gradient(r, STEPS - 1, (ROWS, COLUMNS)) for r in range(RANKS)) / RANKS
    assert np.abs(first[-1] - exact).max() > 0.1


def _references(rank: int, times: int) -> int:
    """In how many calls of the hook a reference to the process group outlives the call."""
    with joined():
        hook = PowerSgd(CommSettings(hook="powersgd", powersgd_rank=2, powersgd_start_step=2))
        places = [(0, ROWS * COLUMNS, ROWS)]
        hook.end_step()
        hook.end_step()
        kept = 0
        for _ in range(times):
            held = sys.getrefcount(dist.group.WORLD)
            hook.run(GradientBucket(0, torch.ones(ROWS * COLUMNS), places))
            kept += sys.getrefcount(dist.group.WORLD) > held
    return kept


def test_power_sgd_keeps_no_reference_to_its_group() -> None:
    """A thread of Gloo that drops the last one aborts the process at the end of a run."""
    assert run_ranks(RANKS, _references, 100) == [0, 0]


# Post-local SGD (Lin et al. 2020).

RATE, PERIOD = 0.1, 3


def local_sgd_reference() -> list[list[np.ndarray]]:
    """The weights of each rank after each step."""
    start = net().weight.detach().numpy().copy()
    weights = [start.copy() for _ in range(RANKS)]
    found = []
    for step in range(STEPS + 3):
        own = [gradient(r, step, (ROWS, COLUMNS)) for r in range(RANKS)]
        if step < START:
            own = [np.mean(own, axis=0)] * RANKS
        weights = [w - np.float32(RATE) * g for w, g in zip(weights, own, strict=True)]
        if step >= START and (step - START) % PERIOD == 0:
            weights = [np.mean(weights, axis=0)] * RANKS
        found.append(weights)
    return found


def _local_sgd(rank: int) -> tuple[list[np.ndarray], np.ndarray, np.ndarray, bool]:
    with joined() as group:
        model = net()
        settings = CommSettings(hook="post_local_sgd", local_start_step=START, local_steps=PERIOD)
        exchange = exchange_of(group, model, settings)
        optimizer = SGD(model.parameters(), lr=RATE, momentum=0.0)
        memory = exchange.memory
        assert memory is not None
        memory.bind(Weights(optimizer))
        found, step, spoiled = [], 0, False
        while step < STEPS + 3:
            exchange.begin(step)
            give(model, rank, step)
            spoils = step == START + 2 and not spoiled
            if spoils and rank == 1:
                model.bias.grad[0] = torch.nan
            exchange.gather()
            exchange.reduce(torch.tensor(1.0), Signals())
            optimizer.step()
            memory.settle(optimizer.overflow)
            if spoils:
                spoiled = bool(optimizer.overflow > 0)
                assert spoiled, "a gradient that is not finite on one rank stops all"
                continue
            found.append(model.weight.detach().numpy().copy())
            step += 1
        with memory.shared():
            shared = model.weight.detach().numpy().copy()
        assert np.array_equal(model.weight.detach().numpy(), found[-1])
        memory.conclude()
        return found, shared, model.weight.detach().numpy().copy(), spoiled


def test_post_local_sgd_is_that_of_its_equations() -> None:
    results = run_ranks(RANKS, _local_sgd)
    for rank, (found, shared, final, spoiled) in enumerate(results):
        assert spoiled
        for ours, expected in zip(found, local_sgd_reference(), strict=True):
            np.testing.assert_allclose(ours, expected[rank], atol=2e-6)
        mean = np.mean(local_sgd_reference()[-1], axis=0)
        np.testing.assert_allclose(shared, mean, atol=2e-6)
        np.testing.assert_array_equal(final, results[0][2])
    assert not np.array_equal(results[0][0][-1], results[1][0][-1]), "they end between two averages"


def _overflows_on_one_rank(rank: int) -> list[float]:
    """Weights and overflow after a step in which p times one rank's share exceeds fp16."""
    with joined() as group:
        model = net()
        model.weight.data = model.weight.data.half()
        settings = CommSettings(hook="post_local_sgd", local_start_step=0, local_steps=PERIOD)
        exchange = exchange_of(group, model, settings)
        optimizer = SGD(model.parameters(), lr=RATE, momentum=0.0)
        assert exchange.memory is not None
        exchange.memory.bind(Weights(optimizer))
        exchange.begin(0)
        give(model, rank, 0)
        if rank == 1:
            model.weight.grad[0, 0] = 40_000.0
        exchange.gather()
        exchange.reduce(torch.tensor(1.0), Signals())
        optimizer.step()
        return [float(optimizer.overflow), float(model.weight.detach().float().sum())]


def test_a_gradient_that_overflows_its_format_on_one_rank_stops_all() -> None:
    start = float(net().weight.detach().half().float().sum())
    assert run_ranks(RANKS, _overflows_on_one_rank) == [[1.0, start]] * RANKS


# What excludes one another.


@pytest.mark.parametrize("hook", ["powersgd", "post_local_sgd"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("algorithm", "ring"),
        ("wire", "int8"),
        ("wire", "float16"),
        ("plan", "p"),
        ("overlap", "on"),
    ],
)
def test_a_hook_excludes_other_ways_to_travel(hook: str, name: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CommSettings(**{"hook": hook, name: value})
    assert caught.value.field == f"comm.{name}"


@pytest.mark.parametrize(
    ("name", "value"),
    [("hook", "other"), ("powersgd_rank", 0), ("powersgd_start_step", 1), ("local_steps", 1)],
)
def test_values_out_of_range_are_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        CommSettings(**{name: value})  # type: ignore[arg-type]
    assert caught.value.field == f"comm.{name}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("powersgd_rank", 2), ("powersgd_start_step", 9), ("local_steps", 8), ("local_start_step", 0),
        ("local_group_size", 2), ("staleness", 1), ("servers", 1),
    ],
)  # fmt: skip
def test_settings_of_a_hook_or_mode_are_refused_without_it(name: str, value: int) -> None:
    with pytest.raises(ConfigError) as caught:
        CommSettings(**{name: value})  # type: ignore[arg-type]
    assert caught.value.field == f"comm.{name}"


@pytest.mark.parametrize(("name", "value"), [("run.average_epochs", 1.0), ("run.shares", "3:1")])
def test_what_excludes_post_local_sgd(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig().with_values({"comm.hook": "post_local_sgd", name: value})
    assert caught.value.field == name
