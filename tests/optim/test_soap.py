"""SOAP: the equation, its basis, device switches, checkpoints, and decompositions shared by ranks."""

from __future__ import annotations

import copy
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from optim.reference import (
    DECAY,
    ETA,
    KINDS,
    assert_near,
    bits_equal,
    check_bad_gradient,
    check_switches,
    everything,
    fill_gradients,
    grad_of,
    run,
)
from paceline.comm import CommSettings, Group
from paceline.core.errors import ConfigError
from paceline.core.topology import Topology
from paceline.optim import SOAP, OptimSettings, SharedProducts
from ranks import run_ranks
from small_runs import run_small
from train.runs import stop_after

SHAPES = [(6, 4, 3, 3), (24, 2, 1, 1), (6, 4, 3, 3), (5, 5)]


class Reference:
    """One filter in NumPy's float64."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.detach().double().numpy().copy()
        side = min(len(self.weight), self.weight[0].size)
        self.m, self.v = np.zeros_like(self.weight), 0.0
        self.covariance, self.basis, self.steps = np.zeros((side, side)), np.eye(side), 0

    def step(self, gradient: Tensor, lr: float, m: float, nesterov: bool, every: int) -> None:
        g = gradient.detach().double().numpy()
        self.m = m * self.m + (1 - m) * g
        average = (1 - m) * g + m * self.m if nesterov else self.m
        wide, mean = (x.reshape(len(x), -1) for x in (g, average))
        turned = wide.shape[0] > wide.shape[1]
        wide, mean = (wide.T, mean.T) if turned else (wide, mean)
        self.v = 0.95 * self.v + 0.05 * (self.basis.T @ wide) ** 2
        u = self.basis @ ((self.basis.T @ mean) / np.sqrt(self.v))
        u *= np.linalg.norm(mean) / np.linalg.norm(u)
        self.covariance = 0.95 * self.covariance + 0.05 * wide @ wide.T
        if self.steps < 10 or self.steps % every == 0:
            self.basis = np.linalg.qr(self.covariance @ self.basis)[0]
        self.steps += 1
        u = (u.T if turned else u).reshape(g.shape)
        w = self.weight
        norm = np.linalg.norm(w)
        ratio = ETA * norm / (np.linalg.norm(u) + DECAY * norm)
        self.weight = w - lr * ratio * (u + DECAY * w)


def filters(kind: torch.dtype = torch.float32) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=draw) for shape in SHAPES]
    made[2] = made[2].contiguous(memory_format=torch.channels_last)
    return [nn.Parameter(w.to(kind)) for w in made]


def create(ps: list[nn.Parameter], **options: Any) -> SOAP:
    options = {"weight_decay": DECAY, "trust_coefficient": ETA, "fused": False} | options
    return SOAP([{"params": ps, "orthogonal": True}], 0.1, **options)


@pytest.mark.parametrize("nesterov", [True, False])
def test_every_filter_follows_the_equation(nesterov: bool) -> None:
    ps = filters()
    optimizer = create(ps, interval=4, nesterov=nesterov)
    references = [Reference(p) for p in ps]
    for step in range(18):
        fill_gradients(ps, step)
        for p, reference in zip(ps, references, strict=True):
            reference.step(grad_of(p), 0.1, 0.9, nesterov, 4)
        optimizer.step()
    for p, reference in zip(ps, references, strict=True):
        assert_near(p, torch.from_numpy(reference.weight), 2e-4)
        assert_near(optimizer.state[p]["covariance"], torch.from_numpy(reference.covariance), 1e-4)


def test_the_basis_is_that_of_the_gradients_and_removes_their_scales() -> None:
    """Gradients D·z in a rotated frame, with z white: in the basis all rows have equal steps."""
    draw = torch.Generator().manual_seed(2)
    frame = torch.linalg.qr(torch.randn(5, 5, generator=draw)).Q
    scales = torch.tensor([16.0, 8.0, 4.0, 2.0, 1.0])
    weight = nn.Parameter(torch.randn(5, 40, generator=draw))
    optimizer = create([weight], interval=1, momentum=0.0, nesterov=False, weight_decay=0.0)
    for _ in range(60):
        weight.grad = frame @ (scales[:, None] * torch.randn(5, 40, generator=draw))
        before = weight.detach().clone()
        optimizer.step()
    overlap = (frame.T @ optimizer.state[weight]["basis"]).abs()
    assert overlap.diagonal().min() > 0.95
    moves = (frame.T @ (weight.detach() - before)).norm(dim=1)
    assert moves.max() / moves.min() < 2.5, "the gradients' rows differ by 16"


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_bad_gradient_changes_no_bit(kind: torch.dtype, poison: float) -> None:
    ps = filters(kind)
    optimizer = create(ps)
    run(optimizer, ps, range(3))
    check_bad_gradient(ps, optimizer, 1, poison)


@pytest.mark.parametrize("size", [3e38, 1e25, 5e19])
def test_squares_that_overflow_skip_the_step(size: float) -> None:
    ps = filters()
    optimizer = create(ps)
    run(optimizer, ps, range(3))
    before = everything(optimizer)
    fill_gradients(ps, 3)
    grad_of(ps[0]).view(-1)[0] = size
    optimizer.step()
    assert optimizer.overflow == 1
    assert bits_equal(everything(optimizer), before)


def test_switches_scale_and_zero_gradients() -> None:
    ps = filters()
    optimizer = create(ps)
    run(optimizer, ps, range(3))
    check_switches(optimizer)
    plain, scaled = filters(), filters()
    pairs = [(create(plain), plain, 1.0), (create(scaled), scaled, 1024.0)]
    for optimizer, params, scale in pairs:
        optimizer.grad_scale = torch.tensor(scale)
        for step in range(3):
            fill_gradients(params, step, scale)
            optimizer.step()
    assert bits_equal([p.detach() for p in plain], [p.detach() for p in scaled])
    for p in plain:
        p.grad = torch.zeros_like(p)
    before = [p.detach().clone() for p in plain]
    pairs[0][0].step()
    for p, was in zip(plain, before, strict=True):
        assert_near(p, was * (1 - 0.1 * DECAY))


def test_a_state_dict_continues_to_the_bit() -> None:
    ps = filters(torch.float16)
    optimizer = create(ps, interval=3)
    run(optimizer, ps, range(12))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    others = [nn.Parameter(p.detach().clone()) for p in ps]
    other = create(others, interval=3)
    other.load_state_dict(torch.load(file))
    copied = copy.deepcopy(optimizer)
    run(optimizer, ps, range(12, 17))
    run(other, others, range(12, 17))
    assert bits_equal(everything(optimizer), everything(other))
    assert copied.state[copied.param_groups[0]["params"][0]]["steps"] == 12


def _steps(rank: int, shares: bool) -> list[Tensor]:
    ps = filters()
    optimizer = create(ps, interval=2)
    with Group(Topology.from_env(os.environ), CommSettings(), torch.device("cpu")) as group:
        if shares:
            optimizer.shared = SharedProducts(rank, group.world_size, group.gather_rows)
        run(optimizer, ps, range(14))
    return everything(optimizer)


def test_ranks_that_share_decompositions_take_the_same_steps() -> None:
    alone, (first, second) = run_ranks(2, _steps, False)[0], run_ranks(2, _steps, True)
    assert bits_equal(alone, first)
    assert bits_equal(alone, second)


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    values: dict[str, Any] = {"optim__name": "soap", "optim__trust_coefficient": 0.01}
    values |= {"precision__amp_dtype": "bf16", "optim__soap_interval": 5, "run__epochs": 5}
    whole = run_small(tmp_path / "whole", **values).summary
    assert whole["chosen"]["optimizer"].startswith("soap, foreach, basis every 5 steps")
    # Past the first steps, of which each moves the basis.
    stop_after(11, tmp_path / "cut", **values)
    again = run_small(tmp_path / "cut", run__resume="auto", **values).summary
    assert again["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.parametrize("values", [{"interval": 0}, {"beta2": 1.0}])
def test_arguments_are_checked(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        create(filters(), **values)


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"optim\.soap_interval"):
        OptimSettings(name="soap", soap_interval=0)
    with pytest.raises(ConfigError, match=r"optim\.clip"):
        OptimSettings(name="soap", clip=True)
    assert OptimSettings(name="soap", orthogonal="all", share_products="on").orthogonal == "all"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_take_the_steps_of_foreach_on_a_gpu() -> None:
    found = []
    for fused in (True, False):
        ps = [nn.Parameter(p.detach().cuda()) for p in filters()]
        optimizer = create(ps, fused=fused)
        for step in range(12):
            draw = torch.Generator().manual_seed(step)
            for p in ps:
                p.grad = (
                    torch.randn(p.shape, generator=draw)
                    .to(p.device)
                    .as_strided(p.shape, p.stride())
                )
            optimizer.step()
        found.append([p.detach() for p in ps])
    for a, b in zip(*found, strict=True):
        assert_near(a, b, 1e-3)
