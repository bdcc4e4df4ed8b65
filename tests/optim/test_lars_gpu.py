from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from no_waiting import no_waiting
from optim.lars_reference import ETA, RATES, Reference, assert_near, bits_equal, everything
from optim.recorded import recorded
from paceline.core.errors import RunError
from paceline.optim import LARS, lars_fused

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Of ResNet-50: stem, 1 × 1 and 3 × 3 convolutions, batch norm, head. The last two are of odd sizes.
WEIGHTS = [(64, 3, 7, 7), (256, 64, 1, 1), (512, 512, 3, 3), (1000, 2048), (333, 77), (1,)]
NORMS = [(64,), (2048,), (1000,), (17,)]
PLAIN = {"lr_in_momentum": True, "nesterov": False, "clip": False, "eps": 0.0}
VARIANTS = [
    PLAIN,
    PLAIN | {"lr_in_momentum": False, "nesterov": True},
    PLAIN | {"clip": True, "eps": 0.5},
]


def network(kind: torch.dtype, seed: int = 0) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Weights in `kind` and NHWC, normalisation in fp32."""
    draw = torch.Generator().manual_seed(seed)
    weights = [torch.randn(shape, generator=draw).mul_(0.1) for shape in WEIGHTS]
    norms = [torch.randn(shape, generator=draw) for shape in NORMS]
    nhwc = [w.to(memory_format=torch.channels_last) if w.dim() == 4 else w for w in weights]
    return (
        [nn.Parameter(w.to("cuda", kind)) for w in nhwc],
        [nn.Parameter(n.cuda()) for n in norms],
    )


def create(kind: torch.dtype, **options: Any) -> tuple[LARS, list[nn.Parameter]]:
    weights, norms = network(kind)
    groups = [
        {"params": weights, "weight_decay": 0.1},
        {"params": norms, "adapt": False, "lr": 0.2},
    ]
    return LARS(groups, 0.9, trust_coefficient=ETA, **options), weights + norms


def fill(ps: list[nn.Parameter], step: int, scale: float = 1.0) -> None:
    """Into the memory that the gradients have, as a captured graph needs it."""
    draw = torch.Generator(device="cuda").manual_seed(step)
    for p in ps:
        values = torch.randn(p.shape, generator=draw, device="cuda").mul_(0.01 * scale)
        if p.grad is None:
            p.grad = torch.empty_like(p)
        p.grad.copy_(values)


@pytest.mark.parametrize("options", VARIANTS, ids=["plain", "outside-nesterov", "clip-eps"])
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fused", [True, False], ids=["triton", "foreach"])
def test_both_paths_follow_the_equation(
    fused: bool, kind: torch.dtype, options: dict[str, Any]
) -> None:
    optimizer, ps = create(kind, fused=fused, **options)
    assert optimizer.path == ("triton" if fused else "foreach")
    optimizer.grad_scale = torch.tensor(128.0, device="cuda")
    references = [Reference(p.cpu()) for p in ps]
    for step, lr in enumerate(RATES):
        optimizer.param_groups[0]["lr"] = lr
        fill(ps, step, scale=128.0)
        optimizer.step()
        for index, (p, reference) in enumerate(zip(ps, references, strict=True)):
            assert p.grad is not None
            weight = index < len(WEIGHTS)
            own = options | {"adapt": weight, "weight_decay": 0.1 if weight else 0.0}
            reference.step(p.grad.cpu().double() / 128.0, lr if weight else 0.2, own)
    assert optimizer.overflow == 0
    assert optimizer.trust_ratios() == pytest.approx([r.ratio for r in references], rel=2e-5)
    for p, master, reference in zip(ps, optimizer.masters(), references, strict=True):
        assert_near(master, reference.weight, 1e-5)
        assert_near(optimizer.state[p]["momentum_buffer"], reference.momentum, 1e-5)
        assert torch.equal(p, master.to(p.dtype))


def test_fused_is_the_default_and_repeats_its_bits() -> None:
    def run() -> list[Tensor]:
        optimizer, ps = create(torch.float16)
        assert optimizer.path == "triton"
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
    ps[2].grad[-1, -1, -1, -1] = float("inf") if fused else float("nan")
    optimizer.step()
    assert optimizer.overflow == 1
    assert optimizer.nonfinite() == [2]
    assert bits_equal(everything(optimizer), before)


@pytest.mark.parametrize("fused", [True, False], ids=["triton", "foreach"])
def test_a_step_does_not_wait_for_the_device(fused: bool) -> None:
    optimizer, ps = create(torch.float16, fused=fused)
    optimizer.active = torch.ones(len(ps), device="cuda")
    fill(ps, 0)
    optimizer.step()
    torch.cuda.synchronize()
    with no_waiting():
        for lr in RATES:
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()


def test_a_captured_graph_replays_what_eager_steps_do() -> None:
    eager, ps = create(torch.float16)
    graphed, qs = create(torch.float16)
    hold = torch.zeros((), device="cuda")
    graphed.hold = hold
    fill(qs, 0)
    graph = recorded(graphed)
    for step, lr in enumerate((*RATES, 0.3)):
        for optimizer, own in ((eager, ps), (graphed, qs)):
            optimizer.param_groups[0]["lr"] = lr
            fill(own, step)
        if step == 2:  # one bad step in between: both leave everything alone
            for own in (ps, qs):
                assert own[0].grad is not None
                own[0].grad[0, 0, 0, 0] = float("nan")
        eager.step()
        graphed.upload()
        graph.replay()
        assert int(graphed.overflow) == int(eager.overflow) == (step == 2)
    assert bits_equal(everything(graphed), everything(eager))
    hold.fill_(1.0)
    before = everything(graphed)
    graph.replay()
    assert bits_equal(everything(graphed), before)


def test_moved_gradients_are_refused_in_a_capture() -> None:
    optimizer, ps = create(torch.float16)
    fill(ps, 0)
    optimizer.step()
    for p in ps:
        old = p.grad  # lives on, so that its address cannot come back
        p.grad = torch.zeros_like(p)
        assert old is not None
        assert p.grad.data_ptr() != old.data_ptr()
    counter, graph = torch.zeros((), device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter.add_(1)  # a graph with nothing in it would warn
        with pytest.raises(RunError, match="addresses changed"):
            optimizer.step()


def test_unaligned_tensors_share_no_launch_with_aligned_ones() -> None:
    flat = torch.randn(4097 * 5 + 1, device="cuda")
    odd = nn.Parameter(torch.ones(4097 * 5, device="cuda"))
    odd.grad = flat[1:]
    even = nn.Parameter(torch.ones(4097 * 5, device="cuda"))
    even.grad = flat[1:].clone()
    optimizer = LARS([odd, even], 0.5)
    optimizer.step()
    engine = optimizer._engine
    assert engine is not None
    assert engine._tables is not None
    assert sorted(b.align for b in engine._tables.layout.buckets) == [4, lars_fused.ALIGN]
    assert torch.equal(odd, even)
