"""SVRG and HALP: against NumPy, on a strongly convex problem, and in checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

from paceline.alternatives.svrg.optimizer import SVRG, quantize
from paceline.core.errors import PacelineError
from paceline.optim import OptimSettings
from refusals import refused

Float = npt.NDArray[np.float64]


def generator(seed: int, draw: int) -> torch.Generator:
    """The numbers that the optimizer draws in one step."""
    key = (seed * 0x9E3779B97F4A7C15 + draw * 0xBF58476D1CE4E5B9 + 1) % 2**63
    return torch.Generator().manual_seed(key)


def rounded(values: Float, step: float, bits: int, noise: Float) -> Float:
    """Rounds as Q of the paper: up with the probability of the remainder, then saturated."""
    below = np.floor(values / step)
    up = noise >= 1 - (values / step - below)
    return np.clip(below + up, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


@pytest.mark.parametrize("bits", [8, 16])
def test_rounding_is_unbiased_and_saturates(bits: int) -> None:
    step = torch.tensor(0.25, dtype=torch.float64)
    values = torch.tensor([0.1, -0.1, 0.25, -0.33, 1e9, -1e9], dtype=torch.float64)
    many = values.repeat(40_000, 1)
    found = quantize(many, step, bits, torch.Generator().manual_seed(0))
    assert found.dtype == {8: torch.int8, 16: torch.int16}[bits]
    mean = found.double().mean(0) * step
    assert mean[:4].numpy() == pytest.approx(values[:4].numpy(), abs=0.25 * 4 / math.sqrt(40_000))
    assert set(found[:, 0].tolist()) == {0, 1}
    assert set(found[:, 2].tolist()) == {1}, "a multiple of the step stays"
    limit = 2 ** (bits - 1)
    assert set(found[:, 4].tolist()) == {limit - 1}
    assert set(found[:, 5].tolist()) == {-limit}
    assert quantize(values, torch.zeros(()), bits, torch.Generator()).tolist() == [0] * 6


class Logistic:
    """ℓ2-regularized logistic regression in fp64 whose condition number is known."""

    def __init__(self, d: int = 10, n: int = 200, decay: float = 0.05, seed: int = 0) -> None:
        chance = np.random.default_rng(seed)
        self.x = chance.standard_normal((n, d)) * np.linspace(0.6, 1.0, d)
        self.y = np.sign(self.x @ chance.standard_normal(d) + 0.3 * chance.standard_normal(n))
        self.decay = decay
        smooth = np.linalg.eigvalsh(self.x.T @ self.x / n).max() / 4
        self.condition = (smooth + decay) / decay

    def gradient(self, w: Float, rows: slice | npt.NDArray[np.int64] = slice(None)) -> Float:
        """Returns the gradient without the decay."""
        x, y = self.x[rows], self.y[rows]
        return -(x * (y / (1 + np.exp(y * (x @ w))))[:, None]).mean(0)

    def norm(self, w: Float) -> float:
        return float(np.linalg.norm(self.gradient(w) + self.decay * w))


def trained(problem: Logistic, bits: int | None, centers: int = 9) -> list[float]:
    """Norms of the full gradient, relative to the first, at each centering."""
    d = problem.x.shape[1]
    weight = nn.Parameter(torch.zeros(d, dtype=torch.float64))
    optimizer = SVRG([weight], lr=0.5, weight_decay=problem.decay, bits=bits, mu=problem.decay)
    chance = np.random.default_rng(1)

    def at() -> Float:
        return weight.detach().numpy().copy()

    norms = [problem.norm(at())]
    for _ in range(centers):
        weight.grad = torch.tensor(problem.gradient(at()))
        optimizer.center()
        for _ in range(200):
            rows = chance.integers(0, len(problem.x), 10)
            with optimizer.at_anchor():
                there = problem.gradient(at(), rows)
            weight.grad = torch.tensor(problem.gradient(at(), rows) - there)
            optimizer.step()
        norms.append(problem.norm(at()))
    return [norm / norms[0] for norm in norms]


def test_svrg_and_halp_converge_linearly() -> None:
    problem = Logistic()
    assert 4 < problem.condition < 20
    found = {bits: trained(problem, bits) for bits in (None, 8, 16)}
    for norms in found.values():
        assert norms[-1] < 1e-6
    # Linear: the same factor, on average, in the first and in the last centerings.
    logs = np.log10(found[8])
    assert (logs[4] - logs[0]) / 4 == pytest.approx((logs[8] - logs[4]) / 4, rel=0.8)


@pytest.mark.parametrize("bits", [None, 8, 16])
def test_steps_follow_the_equations(bits: int | None) -> None:
    problem, lr, seed = Logistic(d=6, n=40), 0.4, 7
    weight = nn.Parameter(torch.linspace(-0.5, 0.5, 6, dtype=torch.float64))
    optimizer = SVRG([weight], lr=lr, weight_decay=problem.decay, bits=bits, mu=0.3, seed=seed)
    limit = 2 ** ((bits or 8) - 1) - 1
    w = np.linspace(-0.5, 0.5, 6)
    draw = 0
    for _ in range(3):
        anchor, full = w.copy(), problem.gradient(w) + problem.decay * w
        scale, z = np.linalg.norm(full) / (0.3 * limit), np.zeros(6)
        weight.grad = torch.tensor(problem.gradient(w))
        optimizer.center()
        for step in range(5):
            rows = np.arange(8 * step, 8 * step + 8)
            at_w = problem.gradient(w, rows) + problem.decay * w
            at_anchor = problem.gradient(anchor, rows) + problem.decay * anchor
            noise = torch.rand(6, dtype=torch.float64, generator=generator(seed, draw)).numpy()
            if bits is None:
                w = w - lr * (at_w - at_anchor + full)
            else:
                z = scale * rounded(z - lr * (at_w - at_anchor + full), scale, bits, noise)
                w = anchor + z
            with optimizer.at_anchor():
                there = problem.gradient(weight.detach().numpy(), rows)
            weight.grad = torch.tensor(problem.gradient(weight.detach().numpy(), rows) - there)
            optimizer.step()
            draw += 1
            assert weight.detach().numpy() == pytest.approx(w, rel=1e-9, abs=1e-12)
    if bits:
        dtype = optimizer.state[weight]["offset"].dtype
        assert dtype == {8: torch.int8, 16: torch.int16}[bits]


@pytest.mark.parametrize("start", [None, 0.0])
def test_a_tensor_without_gradient_at_the_anchor_moves_before_the_next_one(
    start: float | None,
) -> None:
    """½·xᵀHx − x₀ at 0: only the first tensor has a gradient there, the minimum is in both."""
    curvature = torch.tensor([[1.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    linear = torch.tensor([1.0, 0.0], dtype=torch.float64)
    mu = 0.5  # the smallest eigenvalue
    tensors = [nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2)]
    optimizer = SVRG(tensors, lr=0.5, bits=8, mu=mu)

    def gradient() -> Tensor:
        return curvature @ torch.cat([p.detach() for p in tensors]) - linear

    def put(values: Tensor) -> None:
        for p, value in zip(tensors, values, strict=True):
            p.grad = value.reshape(1)

    for center in range(6):
        full = gradient()
        put(full)
        if center == 0:
            tensors[1].grad = None if start is None else torch.full_like(tensors[1], start)
        optimizer.center()
        step = float(full.norm()) / (mu * 127)
        for p in tensors:
            assert float(optimizer.state[p]["step_size"]) == pytest.approx(step, rel=1e-12)
        for _ in range(50):
            put(gradient() - full)
            optimizer.step()
        if center == 0:
            assert float(tensors[1].detach()) == pytest.approx(-2 / 3, abs=0.2)
    assert float(gradient().norm()) < 1e-8


def test_groups_with_different_mu_share_the_norm() -> None:
    tensors = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": tensors[:1], "mu": 1.0}, {"params": tensors[1:], "mu": 2.0}]
    optimizer = SVRG(groups, lr=0.1, bits=8)
    tensors[0].grad, tensors[1].grad = torch.tensor([3.0]), torch.tensor([4.0])
    optimizer.center()
    found = [float(optimizer.state[p]["step_size"]) * 127 for p in tensors]
    assert found == pytest.approx([5.0, 2.5])


def test_state_survives_a_checkpoint() -> None:
    def made() -> tuple[nn.Parameter, SVRG]:
        weight = nn.Parameter(torch.linspace(-1, 1, 8))
        return weight, SVRG([weight], lr=0.1, bits=16, mu=1.0)

    def step(weight: nn.Parameter, optimizer: SVRG, number: int) -> None:
        weight.grad = torch.sin(torch.arange(8.0) + number) * 0.1
        optimizer.param_groups[0]["draw"] = number
        optimizer.step()

    one, first = made()
    one.grad = torch.ones(8)
    first.center()
    for number in range(3):
        step(one, first, number)
    two, second = made()
    second.load_state_dict(first.state_dict())
    assert second.state[two]["offset"].dtype == torch.int16
    with torch.no_grad():
        two.copy_(one)
    for number in range(3, 6):
        step(one, first, number)
        step(two, second, number)
    assert torch.equal(one, two)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = SVRG([weight], lr=0.1, bits=8, mu=1.0)
    weight.grad = torch.ones(3)
    optimizer.center()
    before: list[Tensor] = [t.clone() for t in (weight, *optimizer.state[weight].values())]
    weight.grad = torch.tensor([1.0, math.inf, 0.0])
    optimizer.step()
    assert float(optimizer.overflow) == 1
    after = [weight, *optimizer.state[weight].values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("bits", [None, 8])
def test_a_full_gradient_that_is_not_finite_skips_steps_until_the_next(bits: int | None) -> None:
    weight = nn.Parameter(torch.linspace(-1, 1, 3))
    optimizer = SVRG([weight], lr=0.1, bits=bits, mu=1.0)
    weight.grad = torch.tensor([1.0, math.inf, 0.0])
    optimizer.center()
    before = weight.detach().clone()
    for _ in range(2):
        weight.grad = torch.ones(3)
        optimizer.step()
        assert float(optimizer.overflow) == 1
        assert torch.equal(weight.detach(), before)
    weight.grad = torch.ones(3)
    optimizer.center()
    optimizer.step()
    assert float(optimizer.overflow) == 0
    assert not torch.equal(weight.detach(), before)


def test_one_tensor_that_is_not_finite_stops_the_others() -> None:
    """This includes a step without the tensor."""
    bad, good = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = SVRG([bad, good], lr=0.1, bits=8, mu=1.0)
    bad.grad, good.grad = torch.tensor([math.inf]), torch.ones(1)
    optimizer.center()
    bad.grad, good.grad = None, torch.ones(1)
    optimizer.step()
    assert float(optimizer.overflow) == 1
    assert float(good.detach()) == 1


@pytest.mark.parametrize("bits", [None, 8])
def test_a_scale_divides_the_full_gradient_too(bits: int | None) -> None:
    found = []
    for scale in (1.0, 128.0):
        weight = nn.Parameter(torch.linspace(-1, 1, 3))
        optimizer = SVRG([weight], lr=0.1, bits=bits, mu=1.0)
        optimizer.grad_scale = torch.tensor(scale)
        weight.grad = torch.tensor([0.5, -1.0, 2.0]) * scale
        optimizer.center()
        weight.grad = torch.tensor([0.1, 0.2, -0.3]) * scale
        optimizer.step()
        found.append([weight.detach(), *optimizer.state[weight].values()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"momentum": 0.9}, "optim.momentum"),
        ({"bits": 4}, "optim.svrg.bits"),
        ({"mu": 0.0}, "optim.svrg.mu"),
        ({"center_epochs": 0.0}, "optim.svrg.center_epochs"),
        ({"clip_norm": 1.0}, "optim.clip_norm"),
        ({"batch_schedule": "0:8,1:16"}, "optim.batch_schedule"),
        ({"schedule": "one_cycle"}, "optim.cycle.momentum"),
        ({"fused": "triton"}, "optim.fused"),
    ],
)
def test_refused_settings(values: dict[str, Any], field: str) -> None:
    with refused(field):
        OptimSettings.gather(**{"name": "halp", "momentum": 0.0, **values})


@pytest.mark.parametrize(
    "make",
    [
        lambda p: SVRG([p], lr=0.1, bits=4),
        lambda p: SVRG([p], lr=-0.1),
        lambda p: SVRG([p], lr=0.1, mu=0.0),
    ],
)
def test_refused_arguments(make: Callable[[nn.Parameter], SVRG]) -> None:
    with pytest.raises(ValueError, match="must be"):
        make(nn.Parameter(torch.ones(2)))


def test_half_precision_parameters_are_refused() -> None:
    with pytest.raises(PacelineError, match="float16"):
        SVRG([nn.Parameter(torch.ones(2, dtype=torch.float16))], lr=0.1)
