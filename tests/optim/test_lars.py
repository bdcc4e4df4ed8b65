"""LARS and SGD: the equation, formats, norms, device switches, torch's protocols, refused values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from optim.reference import (
    ETA,
    KINDS,
    OPTIONS,
    RATES,
    LarsReference,
    assert_near,
    bits_equal,
    check_bad_gradient,
    check_switches,
    everything,
    fill_gradients,
    grad_of,
    parameters,
    run,
)
from paceline.core.errors import PacelineError, RunError
from paceline.optim import LARS, SGD, rule

PLAIN = {"lr_in_momentum": True, "nesterov": False, "clip": False, "adapt": True,
         "weight_decay": 0.0, "eps": 0.0}  # fmt: skip


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_three_steps_follow_the_equation(kind: torch.dtype) -> None:
    for options in OPTIONS:
        ps = parameters(kind, kind, kind)
        references = [LarsReference(p) for p in ps]
        optimizer = LARS(ps, 1.0, trust_coefficient=ETA, **options)
        for step, lr in enumerate(RATES):
            optimizer.param_groups[0]["lr"] = lr
            run(optimizer, ps, [step])
            for p, reference in zip(ps, references, strict=True):
                reference.step(grad_of(p), lr, options)
        ratios = [reference.ratio for reference in references]
        assert optimizer.trust_ratios() == pytest.approx(ratios, rel=1e-6), options
        for p, master, reference in zip(ps, optimizer.masters(), references, strict=True):
            assert_near(master, reference.weight)
            assert_near(optimizer.state[p]["momentum_buffer"], reference.momentum)
            assert torch.equal(p, master.to(kind))


def test_groups_keep_their_own_values() -> None:
    ps = parameters(torch.float32, torch.float32)
    own = {"lr_in_momentum": False, "nesterov": True, "weight_decay": 0.2, "eps": 0.5}
    own |= {"adapt": False, "clip": True}
    groups = [{"params": ps[:1]}, {"params": ps[1:], "lr": 0.3, "momentum": 0.5, **own}]
    optimizer = LARS(groups, 0.7, trust_coefficient=ETA)
    references = [LarsReference(p) for p in ps]
    for step in range(2):
        run(optimizer, ps, [step])
        references[0].step(grad_of(ps[0]), 0.7, PLAIN)
        references[1].step(grad_of(ps[1]), 0.3, PLAIN | own, m=0.5)
    for p, reference in zip(ps, references, strict=True):
        assert_near(p, reference.weight)


def test_zero_norms_and_a_zero_rate() -> None:
    zeros, still = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.full((5,), 2.0))
    optimizer = LARS([zeros, still], 0.5, momentum=0.0, weight_decay=0.1)
    zeros.grad, still.grad = torch.ones(5), torch.zeros(5)
    optimizer.step()
    assert optimizer.trust_ratios() == [1.0, 1.0]
    assert torch.equal(zeros.detach(), torch.full((5,), -0.5))
    torch.testing.assert_close(still.detach(), torch.full((5,), 2.0 - 0.5 * 0.1 * 2.0))
    (p,) = parameters(torch.float32)
    before = p.detach().clone()
    run(LARS([p], 0.0, clip=True), [p], [0])
    assert torch.equal(p.detach(), before)


@pytest.mark.parametrize("size", [1, 512, 513, 70_001, 2_000_003])
@pytest.mark.parametrize("fill", ["normal", "equal"])
def test_norms_on_the_cpu_are_those_of_fp64(fill: str, size: int) -> None:
    torch.manual_seed(size)
    weight, gradient = torch.randn(size) * 3e-2, torch.randn(size) * 1e-3
    if fill == "equal":  # all rounding errors have the same sign
        weight, gradient = torch.full((size,), 0.37), torch.full((size,), 1e-3)
    p = nn.Parameter(weight.clone())
    optimizer = LARS([p], 1.0, trust_coefficient=1.0)
    p.grad = gradient
    optimizer.step()
    wanted = float(weight.double().norm() / gradient.double().norm())
    assert optimizer.trust_ratios() == pytest.approx([wanted], rel=1.5e-6)  # two norms, one ratio


def test_norms_are_accurate_at_the_largest_sizes_and_in_any_memory_order() -> None:
    large = torch.full((40_000_000,), 0.37)
    nhwc = torch.randn(96, 33, 5, 7).to(memory_format=torch.channels_last)
    gaps = torch.randn(300, 40)[:, ::2]
    found = rule.accurate_norms([large, nhwc, gaps])
    wanted = [0.37 * 40_000_000**0.5, float(nhwc.double().norm()), float(gaps.double().norm())]
    assert [float(norm) for norm in found] == pytest.approx(wanted, rel=1e-6)
    inf, nan = torch.full((2000,), 1e30), torch.full((2000,), float("nan"))
    assert not any(torch.isfinite(norm) for norm in rule.accurate_norms([inf, nan]))


def test_parameters_without_gradient_or_elements_stay_unchanged() -> None:
    idle, empty, moved = (nn.Parameter(torch.ones(shape)) for shape in ((3,), (0, 4), (2,)))
    groups = [{"params": [idle, empty]}, {"params": []}, {"params": [moved]}]
    optimizer = LARS(groups, 1.0, weight_decay=0.5, adapt=False)
    optimizer.step()
    assert optimizer.overflow == 0
    empty.grad, moved.grad = torch.empty(0, 4), torch.ones(2)
    optimizer.step()
    assert torch.equal(idle.detach(), torch.ones(3))
    assert torch.equal(moved.detach(), torch.full((2,), -0.5))
    assert len(optimizer.trust_ratios()) == len(optimizer.masters()) == 3


# --- device switches and torch's protocols -----------------------------------------------------


def stepped() -> tuple[list[nn.Parameter], LARS]:
    """An optimizer during a run: momentum is not zero, and gradients are set."""
    ps = parameters(*KINDS)
    optimizer = LARS(
        [{"params": ps[:2]}, {"params": ps[2:], "adapt": False}], 0.5, weight_decay=0.01
    )
    run(optimizer, ps, [0])
    fill_gradients(ps, 1)
    return ps, optimizer


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_one_bad_gradient_changes_no_bit(which: int, poison: float) -> None:
    check_bad_gradient(*stepped(), which, poison)


@pytest.mark.usefixtures("both_ways")
def test_switches() -> None:
    check_switches(stepped()[1])
    (ps, optimizer), (_, other) = stepped(), stepped()
    before = everything(optimizer)
    optimizer.active = torch.tensor([1.0, 0.0, 1.0])
    grad_of(ps[1])[0] = float("nan")  # inactive: not checked
    optimizer.step()
    other.step()
    after, expected = everything(optimizer), everything(other)
    assert optimizer.overflow == 0
    # Two tensors for the fp32 parameter, three for each half one.
    assert bits_equal(after[2:5], before[2:5])
    assert bits_equal(after[:2] + after[5:], expected[:2] + expected[5:])


@pytest.mark.parametrize(
    ("switch", "value", "line"),
    [
        ("active", torch.ones(2), "active"),
        ("hold", torch.zeros(2), "hold"),
        ("hold", torch.zeros((), device="meta"), "hold"),
    ],
)
def test_a_switch_of_the_wrong_shape_or_device_is_refused(
    switch: str, value: torch.Tensor, line: str
) -> None:
    _, optimizer = stepped()
    setattr(optimizer, switch, value)
    with pytest.raises(RunError, match=line):
        optimizer.step()


@pytest.mark.usefixtures("both_ways")
def test_grad_scale_divides_inside_the_step() -> None:
    (ps, optimizer), (_, plain) = stepped(), stepped()
    for p in ps:
        grad_of(p).mul_(64.0)
    kept = [grad_of(p).clone() for p in ps]
    optimizer.grad_scale = torch.tensor(64.0)
    optimizer.step()
    plain.step()
    assert bits_equal(everything(optimizer), everything(plain))
    assert bits_equal([grad_of(p) for p in ps], kept)


def test_torch_grad_scaler_works() -> None:
    def trained(scaled: bool) -> tuple[list[torch.Tensor], list[float]]:
        ps = parameters(torch.float32, torch.float32)
        optimizer = LARS(ps, 0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        scales = []
        for step in range(3):
            if step == 1 and not scaled:
                continue
            optimizer.zero_grad()
            factor = float("inf") if step == 1 else 1.0
            scaler.scale(torch.stack([(p * p * factor).sum() for p in ps]).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return everything(optimizer), scales

    scaled, scales = trained(scaled=True)
    assert scales == [1024.0, 512.0, 512.0]
    assert bits_equal(scaled, trained(scaled=False)[0])
    (p,), (q,) = parameters(torch.float32), parameters(torch.float32)
    for parameter, unscale_first in ((p, True), (q, False)):
        optimizer = LARS([parameter], 0.5, adapt=False)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale((parameter * parameter).sum()).backward()
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
    assert torch.equal(p, q), "divided once"


def test_closures_schedulers_and_tensor_rates() -> None:
    (p,) = parameters(torch.float32)
    optimizer = LARS([p], 0.5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    first, second = optimizer.step(closure), optimizer.step(closure)  # type: ignore[arg-type]
    assert second < first
    one = nn.Parameter(torch.ones(1))
    rate: Any = torch.tensor(1.0)
    optimizer = LARS([one], rate, momentum=0.0, adapt=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    for _ in range(2):
        one.grad = torch.ones(1)
        optimizer.step()
        scheduler.step()
    torch.testing.assert_close(one.detach(), torch.tensor([1 - 1.0 - 0.1]))


# --- SGD ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_sgd_equals_torch_sgd(nesterov: bool, weight_decay: float) -> None:
    kinds = (torch.float32,) * 5
    ps, qs = parameters(*kinds), parameters(*kinds)
    ours = SGD(ps, 0.3, 0.9, weight_decay, nesterov)
    theirs = torch.optim.SGD(qs, 0.3, momentum=0.9, weight_decay=weight_decay, nesterov=nesterov)
    for step, lr in enumerate((0.3, 0.1, 0.5, 0.2)):
        for optimizer, own in ((ours, ps), (theirs, qs)):
            optimizer.param_groups[0]["lr"] = lr
            fill_gradients(own, step)
            optimizer.step()
    for p, q in zip(ps, qs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
    assert ours.trust_ratios() == [1.0] * 5


def test_half_parameters_follow_full_ones_through_their_masters() -> None:
    halves = parameters(torch.float16)
    full = [halves[0].detach().float().requires_grad_()]
    ours = SGD(halves, 0.01, weight_decay=0.1)
    theirs = torch.optim.SGD(full, 0.01, momentum=0.9, weight_decay=0.1)
    for step in range(20):
        fill_gradients(halves, step)
        full[0].grad = grad_of(halves[0]).float()
        ours.step()
        theirs.step()
    torch.testing.assert_close(ours.masters()[0], full[0].detach(), rtol=1e-6, atol=1e-6)
    assert torch.equal(halves[0].detach(), ours.masters()[0].half())


# --- refused values ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", -1.0), ("lr", float("nan")), ("momentum", 1.0), ("weight_decay", -0.1),
     ("trust_coefficient", float("inf")), ("eps", -1.0)],
)  # fmt: skip
def test_values_that_cannot_be_used_are_named(name: str, value: float) -> None:
    (p,) = parameters(torch.float32)
    with pytest.raises(ValueError, match=rf"^{name} = "):
        LARS([p], **{"lr": 0.1, name: value})
    with pytest.raises(ValueError, match=rf"^{name} = "):
        LARS([{"params": [p], name: value}], 0.1)


def test_combinations_and_tensors_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    (p,) = parameters(torch.float32)
    with pytest.raises(ValueError, match=r"nesterov = True: needs momentum"):
        LARS([p], 0.1, momentum=0.0, nesterov=True)
    with pytest.raises(PacelineError, match=r"torch.float64.*use dense float32"):
        LARS([nn.Parameter(torch.zeros(3, dtype=torch.float64))], 0.1)
    gaps = torch.zeros(4, 4)[:, ::2].detach().requires_grad_()
    with pytest.raises(PacelineError, match="gaps or overlaps"):
        LARS([gaps], 0.1).prepare()
    table = nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(
        PacelineError, match=r"sparse gradient .* \(5, 3\) in group 0; make it dense"
    ):
        LARS(table.parameters(), 0.1).step()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert LARS([p], 0.1).path == "foreach"
    with pytest.raises(PacelineError, match=r"(TRITON_INTERPRET|not installed)"):
        LARS([p], 0.1, fused=True).prepare()
