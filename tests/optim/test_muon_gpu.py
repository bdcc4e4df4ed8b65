from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from no_waiting import no_waiting
from optim.lars_reference import assert_near, bits_equal, everything
from optim.recorded import recorded
from optim.test_lars_gpu import fill
from paceline.optim import Muon
from paceline.optim.muon import orthogonalize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WEIGHTS = [(64, 3, 7, 7), (256, 64, 1, 1), (512, 512, 3, 3), (64, 64, 3, 3), (64, 64, 3, 3)]
OTHERS = [(1000, 2048), (64,), (17,)]


def create(kind: torch.dtype, **options: Any) -> tuple[Muon, list[nn.Parameter]]:
    draw = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=draw).mul_(0.1) for shape in (*WEIGHTS, *OTHERS)]
    nhwc = [w.to(memory_format=torch.channels_last) if w.dim() == 4 else w for w in made]
    ps = [nn.Parameter(w.to("cuda", kind)) for w in nhwc]
    groups = [
        {"params": ps[: len(WEIGHTS)], "weight_decay": 0.1},
        {"params": ps[len(WEIGHTS) :], "orthogonal": False, "adapt": False},
    ]
    return Muon(groups, 0.9, trust_coefficient=0.1, **options), ps


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_kernels_equal_foreach(kind: torch.dtype) -> None:
    made = [create(kind, fused=fused) for fused in (True, False)]
    assert [optimizer.path for optimizer, _ in made] == ["triton", "foreach"]
    for optimizer, ps in made:
        optimizer.grad_scale = torch.tensor(128.0, device="cuda")
        for step in range(3):
            fill(ps, step, scale=128.0)
            optimizer.step()
    (kernel, ps), (foreach, qs) = made
    for ours, theirs in zip(kernel.masters(), foreach.masters(), strict=True):
        assert_near(ours, theirs.detach().double(), 1e-5)
    for p, q in zip(ps, qs, strict=True):
        momentum = kernel.state[p]["momentum_buffer"]
        assert_near(momentum, foreach.state[q]["momentum_buffer"].double(), 1e-5)


def test_half_products_come_near_those_of_the_cpu() -> None:
    tensors = [torch.randn(shape) for shape in WEIGHTS]
    found = orthogonalize([tensor.cuda() for tensor in tensors])
    for ours, theirs in zip(found, orthogonalize(tensors), strict=True):
        assert float((ours.cpu() - theirs).norm() / theirs.norm()) < 0.05


def test_it_repeats_its_bits() -> None:
    def run() -> list[Tensor]:
        optimizer, ps = create(torch.float16)
        for step in range(3):
            fill(ps, step)
            optimizer.step()
        return everything(optimizer)

    assert bits_equal(run(), run())


@pytest.mark.parametrize("fused", [True, False], ids=["triton", "foreach"])
def test_a_bad_gradient_changes_no_bit(fused: bool) -> None:
    optimizer, ps = create(torch.float16, fused=fused)
    fill(ps, 0)
    optimizer.step()
    before = everything(optimizer)
    fill(ps, 1)
    assert ps[2].grad is not None
    ps[2].grad[-1, -1, -1, -1] = float("inf")
    optimizer.step()
    assert optimizer.nonfinite() == [2]
    assert bits_equal(everything(optimizer), before)


@pytest.mark.parametrize("fused", [True, False], ids=["triton", "foreach"])
def test_a_step_does_not_wait_for_the_device(fused: bool) -> None:
    optimizer, ps = create(torch.float16, fused=fused)
    optimizer.active = torch.ones(len(ps), device="cuda")
    optimizer.grad_scale = torch.tensor(128.0, device="cuda")
    fill(ps, 0)
    optimizer.step()
    torch.cuda.synchronize()
    with no_waiting():
        for lr in (0.9, 0.1, 0.4):
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()


def test_a_captured_graph_replays_what_eager_steps_do() -> None:
    """Rate, momentum and switches of the day, a bad step in between."""
    eager, ps = create(torch.float16)
    graphed, qs = create(torch.float16)
    hold = torch.zeros((), device="cuda")
    graphed.hold = hold
    fill(qs, 0)
    graph = recorded(graphed)
    for step, (lr, momentum) in enumerate([(0.9, 0.9), (0.1, 0.9), (0.4, 0.5), (0.3, 0.5)]):
        for optimizer, own in ((eager, ps), (graphed, qs)):
            optimizer.param_groups[0] |= {"lr": lr, "momentum": momentum}
            fill(own, step)
        if step == 2:
            for own in (ps, qs):
                assert own[0].grad is not None
                own[0].grad[0, 0, 0, 0] = float("nan")
        eager.step()
        graphed.upload()
        graph.replay()
        assert int(graphed.overflow) == int(eager.overflow) == (step == 2)
    for ours, theirs in zip(everything(graphed), everything(eager), strict=True):
        assert_near(ours, theirs.double(), 1e-3 if ours.dtype == torch.float16 else 1e-5)
    hold.fill_(1.0)
    before = everything(graphed)
    graph.replay()
    assert bits_equal(everything(graphed), before)
