from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from optim.lars_reference import (
    ETA,
    OPTIONS,
    RATES,
    Reference,
    assert_near,
    bits_equal,
    everything,
    fill_gradients,
    option_id,
    parameters,
)
from paceline.core.errors import PacelineError
from paceline.optim import LARS, lars_foreach

KINDS = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(params=["in place", "by select"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of the list operations: the CPU's, and the GPU's, which never reads a flag."""
    if request.param == "by select":
        monkeypatch.setattr(lars_foreach, "on_host", lambda device: False)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=option_id)
def test_three_steps_follow_the_equation(options: dict[str, Any], kind: torch.dtype) -> None:
    ps = parameters(kind, kind, kind)
    references = [Reference(p) for p in ps]
    optimizer = LARS(ps, 1.0, trust_coefficient=ETA, **options)
    for step, lr in enumerate(RATES):
        optimizer.param_groups[0]["lr"] = lr
        fill_gradients(ps, step)
        optimizer.step()
        for p, reference in zip(ps, references, strict=True):
            assert p.grad is not None
            reference.step(p.grad, lr, options)
    ratios = [reference.ratio for reference in references]
    assert optimizer.trust_ratios() == pytest.approx(ratios, rel=1e-6)
    for p, master, reference in zip(ps, optimizer.masters(), references, strict=True):
        assert_near(master, reference.weight)
        assert_near(optimizer.state[p]["momentum_buffer"], reference.momentum)
        assert torch.equal(p, master.to(kind))


def test_groups_keep_their_own_values() -> None:
    ps = parameters(torch.float32, torch.float32)
    own = {"lr_in_momentum": False, "nesterov": True, "weight_decay": 0.2, "eps": 0.5}
    options = [
        {"lr_in_momentum": True, "nesterov": False, "weight_decay": 0.0, "eps": 0.0},
        own,
    ]
    optimizer = LARS(
        [
            {"params": ps[:1]},
            {"params": ps[1:], "lr": 0.3, "momentum": 0.5, "adapt": False, "clip": True, **own},
        ],
        0.7,
        trust_coefficient=ETA,
    )
    references = [Reference(p) for p in ps]
    for step in range(2):
        fill_gradients(ps, step)
        optimizer.step()
        assert ps[0].grad is not None
        assert ps[1].grad is not None
        references[0].step(ps[0].grad, 0.7, options[0] | {"adapt": True, "clip": False})
        references[1].step(ps[1].grad, 0.3, options[1] | {"adapt": False, "clip": True}, m=0.5)
    for p, reference in zip(ps, references, strict=True):
        assert_near(p, reference.weight)


def test_a_half_parameter_moves_by_less_than_its_own_resolution() -> None:
    p = nn.Parameter(torch.ones(4, dtype=torch.float16))
    optimizer = LARS([p], 1e-4, momentum=0.0, adapt=False)
    for _ in range(10):
        p.grad = torch.ones_like(p)
        optimizer.step()
    # 1 - 1e-4 rounds to 1 in fp16, so ten such steps would be lost without the master.
    torch.testing.assert_close(optimizer.masters()[0], torch.full((4,), 0.999))
    assert torch.equal(p.detach(), torch.full((4,), 0.999).half())


def test_gradients_of_another_format_than_the_parameter() -> None:
    for kind, gradient_kind in ((torch.float16, torch.float32), (torch.float32, torch.bfloat16)):
        (p,) = parameters(kind)
        reference = Reference(p)
        p.grad_dtype = gradient_kind
        p.grad = torch.randn(p.shape).to(gradient_kind)
        optimizer = LARS([p], 0.5, trust_coefficient=ETA)
        optimizer.step()
        options = dict.fromkeys(("nesterov", "clip", "weight_decay", "eps"), 0)
        reference.step(p.grad, 0.5, {**options, "adapt": True, "lr_in_momentum": True})
        assert_near(optimizer.masters()[0], reference.weight)


def test_a_zero_norm_makes_the_ratio_one() -> None:
    zeros = nn.Parameter(torch.zeros(5))
    still = nn.Parameter(torch.full((5,), 2.0))
    optimizer = LARS([zeros, still], 0.5, momentum=0.0, weight_decay=0.1)
    zeros.grad, still.grad = torch.ones(5), torch.zeros(5)
    optimizer.step()
    assert optimizer.trust_ratios() == [1.0, 1.0]
    assert torch.equal(zeros.detach(), torch.full((5,), -0.5))
    torch.testing.assert_close(still.detach(), torch.full((5,), 2.0 - 0.5 * 0.1 * 2.0))


@pytest.mark.parametrize("size", [1, 512, 513, 70_001, 2_000_003])
@pytest.mark.parametrize("fill", ["normal", "equal"])
def test_norms_on_the_cpu_are_those_of_fp64(fill: str, size: int) -> None:
    torch.manual_seed(size)
    weight, gradient = torch.randn(size) * 3e-2, torch.randn(size) * 1e-3
    if fill == "equal":  # rounding errors all go one way
        weight, gradient = torch.full((size,), 0.37), torch.full((size,), 1e-3)
    p = nn.Parameter(weight.clone())
    optimizer = LARS([p], 1.0, trust_coefficient=1.0)
    p.grad = gradient
    optimizer.step()
    wanted = float(weight.double().norm() / gradient.double().norm())
    assert optimizer.trust_ratios() == pytest.approx([wanted], rel=1.5e-6)  # two norms, one ratio


def test_norms_are_as_accurate_at_the_largest_sizes_and_in_any_memory_order() -> None:
    large = torch.full((40_000_000,), 0.37)
    wanted = 0.37 * 40_000_000**0.5
    kernel = torch.randn(96, 33, 5, 7).to(memory_format=torch.channels_last)
    gaps = torch.randn(300, 40)[:, ::2]
    found = lars_foreach.accurate_norms([large, kernel, gaps])
    assert float(found[0]) == pytest.approx(wanted, rel=1e-6)
    for norm, tensor in zip(found[1:], (kernel, gaps), strict=True):
        assert float(norm) == pytest.approx(float(tensor.double().norm()), rel=1e-6)
    inf, nan = torch.full((2000,), 1e30), torch.full((2000,), float("nan"))
    assert [torch.isfinite(n).item() for n in lars_foreach.accurate_norms([inf, nan])] == [
        False
    ] * 2


def test_a_rate_of_zero_with_clip_moves_nothing() -> None:
    (p,) = parameters(torch.float32)
    before = p.detach().clone()
    optimizer = LARS([p], 0.0, clip=True)
    fill_gradients([p], 0)
    optimizer.step()
    assert torch.equal(p.detach(), before)
    assert optimizer.trust_ratios() == [1.0]


def test_parameters_without_gradient_or_elements_are_left_alone() -> None:
    idle, empty, moved = (
        nn.Parameter(torch.ones(3)),
        nn.Parameter(torch.empty(0, 4)),
        nn.Parameter(torch.ones(2)),
    )
    groups = [{"params": [idle, empty]}, {"params": []}, {"params": [moved]}]
    optimizer = LARS(groups, 1.0, weight_decay=0.5, adapt=False)
    optimizer.step()
    assert optimizer.overflow == 0
    empty.grad, moved.grad = torch.empty(0, 4), torch.ones(2)
    optimizer.step()
    assert torch.equal(idle.detach(), torch.ones(3))
    assert torch.equal(moved.detach(), torch.full((2,), -0.5))
    assert len(optimizer.trust_ratios()) == len(optimizer.masters()) == 3


def test_repetition_gives_the_same_bits() -> None:
    def run() -> list[torch.Tensor]:
        draw = torch.Generator().manual_seed(0)
        p = nn.Parameter(torch.randn(300_000, generator=draw).half())
        optimizer = LARS([p], 5.0, weight_decay=1e-4)
        for step in range(3):
            fill_gradients([p], step)
            optimizer.step()
        return everything(optimizer)

    assert bits_equal(run(), run())


def test_in_half_has_no_masters_and_loses_small_gradients() -> None:
    halves = [nn.Parameter(torch.ones(64, dtype=torch.float16)) for _ in range(2)]
    ablated, whole = LARS([halves[0]], 1.0, in_half=True), LARS([halves[1]], 1.0)
    for p, optimizer in zip(halves, (ablated, whole), strict=True):
        p.grad = torch.full_like(p, 1e-4)  # its square, 1e-8, is below half of fp16's least number
        optimizer.step()
    assert set(ablated.state[halves[0]]) == {"momentum_buffer"}
    assert ablated.state[halves[0]]["momentum_buffer"].dtype == torch.float16
    assert ablated.masters()[0] is halves[0]
    assert ablated.trust_ratios() == [1.0]  # the norm fell to 0
    assert whole.trust_ratios() == pytest.approx([10.0], rel=1e-3)
    assert torch.equal(halves[0].detach(), torch.ones(64).half())
    assert not torch.equal(halves[1].detach(), torch.ones(64).half())


def test_in_half_overflows_where_fp32_does_not() -> None:
    ps = [nn.Parameter(torch.ones(64, dtype=torch.float16)) for _ in range(2)]
    optimizers = [LARS([ps[0]], 1.0, in_half=True), LARS([ps[1]], 1.0)]
    for p, optimizer in zip(ps, optimizers, strict=True):
        p.grad = torch.full_like(p, 300.0)  # 9e4 is beyond fp16's 65504
        optimizer.step()
    assert [int(optimizer.overflow) for optimizer in optimizers] == [1, 0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -1.0),
        ("lr", float("nan")),
        ("momentum", 1.0),
        ("weight_decay", -0.1),
        ("trust_coefficient", float("inf")),
        ("eps", -1.0),
    ],
)
def test_values_that_cannot_be_used_are_named(name: str, value: float) -> None:
    (p,) = parameters(torch.float32)
    with pytest.raises(ValueError, match=rf"^{name} = "):
        LARS([p], **{"lr": 0.1, name: value})
    with pytest.raises(ValueError, match=rf"^{name} = "):
        LARS([{"params": [p], name: value}], 0.1)


def test_nesterov_without_momentum_and_fused_in_half_are_refused() -> None:
    (p,) = parameters(torch.float32)
    with pytest.raises(ValueError, match="nesterov = True: needs momentum"):
        LARS([p], 0.1, momentum=0.0, nesterov=True)
    with pytest.raises(ValueError, match="in_half = True"):
        LARS([p], 0.1, in_half=True, fused=True)


def test_tensors_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(PacelineError, match=r"shape \(3,\) is torch.float64.*use dense float32"):
        LARS([nn.Parameter(torch.zeros(3, dtype=torch.float64))], 0.1)
    gaps = torch.zeros(4, 4)[:, ::2].requires_grad_()
    with pytest.raises(PacelineError, match="gaps or overlaps"):
        LARS([gaps.detach().requires_grad_()], 0.1).prepare()


def test_a_sparse_gradient_is_refused_with_a_remedy() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = LARS(table.parameters(), 0.1)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(
        PacelineError, match=r"sparse gradient .* \(5, 3\) in group 0; make it dense"
    ):
        optimizer.step()


def test_fused_on_the_cpu_without_the_interpreter_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    (p,) = parameters(torch.float32)
    assert LARS([p], 0.1).path == "foreach"
    with pytest.raises(PacelineError, match=r"fused = True: .*(TRITON_INTERPRET|not installed)"):
        LARS([p], 0.1, fused=True).prepare()
