"""Cases that `test_fused.py` runs in its own process, where Triton interprets its kernels."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import interpreted  # noqa: F401  (before any kernel)
from optim.reference import (
    ETA,
    OPTIONS,
    RATES,
    assert_near,
    bits_equal,
    check_bad_gradient,
    check_switches,
    everything,
    fill_gradients,
    grad_of,
    parameters,
)
from paceline.core.errors import PacelineError
from paceline.optim import LAMB, LARS, AdamW
from paceline.optim import fused as fused_steps

MIXED = (torch.float16, torch.float32, torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks so small that the tensors have several, with a partial last one; the interpreter is
    slow."""
    monkeypatch.setattr(fused_steps, "CHUNK", 128)
    monkeypatch.setattr(fused_steps, "BLOCK", 64)
    monkeypatch.setattr(fused_steps, "WIDTH", 4)


def pair(**options: Any) -> tuple[LARS, LARS, list[nn.Parameter], list[nn.Parameter]]:
    """Kernels and foreach from the same start: two groups, three formats, five shapes."""
    made = []
    for fused in (True, False):
        ps = parameters(*MIXED)
        groups = [{"params": ps[:3]}, {"params": ps[3:], "lr": 0.2, "adapt": False}]
        optimizer = LARS(groups, 0.9, trust_coefficient=ETA, fused=fused, **options)
        made.append((optimizer, ps))
    (kernel, ps), (foreach, qs) = made
    assert (kernel.path, foreach.path) == ("triton", "foreach")
    return kernel, foreach, ps, qs


def assert_alike(kernel: LARS, foreach: LARS) -> None:
    assert kernel.trust_ratios() == pytest.approx(foreach.trust_ratios(), rel=1e-6)
    for ours, theirs in zip(kernel.masters(), foreach.masters(), strict=True):
        assert_near(ours, theirs)
    for ours, theirs in zip(kernel.state.values(), foreach.state.values(), strict=True):
        assert_near(ours["momentum_buffer"], theirs["momentum_buffer"])


# An eighth of the combinations: the first three options with each other, the others as products of them,
# so that each pair of values occurs. `test_lars.py` has all of them, in foreach.
FEWER = [
    o
    for o in OPTIONS
    if o["adapt"] == (o["lr_in_momentum"] == o["nesterov"])
    and (o["weight_decay"] > 0) == (o["lr_in_momentum"] == o["clip"])
    and (o["eps"] > 0) == (o["nesterov"] == o["clip"])
]


@pytest.mark.parametrize("options", FEWER, ids=lambda o: ",".join(k for k, v in o.items() if v))
def test_kernels_equal_foreach(options: dict[str, Any]) -> None:
    kernel, foreach, ps, qs = pair(**{k: v for k, v in options.items() if k != "adapt"})
    for optimizer in (kernel, foreach):
        optimizer.param_groups[0]["adapt"] = options["adapt"]
    for step, lr in enumerate(RATES):
        for optimizer, own in ((kernel, ps), (foreach, qs)):
            optimizer.param_groups[0]["lr"] = lr
            fill_gradients(own, step)
            optimizer.step()
    assert_alike(kernel, foreach)
    for p, master in zip(ps, kernel.masters(), strict=True):
        if p.dtype == torch.bfloat16:  # the interpreter truncates where the compiled kernel rounds
            assert_near(p, master, 2**-7)
        else:
            assert torch.equal(p, master.to(p.dtype))


@pytest.mark.parametrize(
    ("which", "poison"), [(0, float("nan")), (2, float("inf")), (4, float("nan"))]
)
def test_a_bad_gradient_changes_no_bit(which: int, poison: float) -> None:
    kernel, _, ps, _ = pair()
    fill_gradients(ps, 0)
    kernel.step()
    check_bad_gradient(ps, kernel, which, poison)


def test_switches_act_as_in_foreach() -> None:
    kernel, foreach, ps, qs = pair(weight_decay=0.1)
    for optimizer, own in ((kernel, ps), (foreach, qs)):
        optimizer.grad_scale = torch.tensor(3.0)
        optimizer.active = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0])
        for step in range(2):
            fill_gradients(own, step)
            grad_of(own[1])[0] = float("nan")  # inactive: not checked
            optimizer.step()
        assert optimizer.overflow == 0
    assert_alike(kernel, foreach)
    check_switches(kernel)


def test_tables_follow_gradients_that_come_go_and_move() -> None:
    kernel, foreach, ps, qs = pair()
    for missing in ((), (0, 3), (1,), ()):
        for optimizer, own in ((kernel, ps), (foreach, qs)):
            fill_gradients(own, len(missing))
            for index in missing:
                own[index].grad = None
            optimizer.step()
        assert_alike(kernel, foreach)
    for own in (ps, qs):
        for p in own:
            p.grad = None
    kernel.step()
    foreach.step()
    assert_alike(kernel, foreach)


def test_unaligned_gradients_and_other_strides() -> None:
    draw = torch.Generator().manual_seed(0)
    base = torch.randn(6, 5, 3, 3, generator=draw)
    p = nn.Parameter(base.clone(memory_format=torch.channels_last))
    q = nn.Parameter(base.clone(memory_format=torch.channels_last))
    flat = torch.randn(base.numel() + 1, generator=draw)
    gradient = flat[1:].view_as(base)  # NCHW, 4 bytes after an aligned address
    odd, even = nn.Parameter(torch.ones(100)), nn.Parameter(torch.ones(100))
    odd.grad, even.grad = flat[1:101], flat[1:101].clone()
    p.grad, q.grad = gradient, gradient.clone()
    kernel, foreach = LARS([p, odd], 0.9, fused=True), LARS([q, even], 0.9)
    for optimizer in (kernel, foreach):
        optimizer.step()
    assert odd.grad.data_ptr() % 16 == 4
    assert_alike(kernel, foreach)


def assert_goes_back(kernel: LARS | AdamW, ps: list[nn.Parameter]) -> None:
    """Checks that a step from a checkpoint repeats the bits."""
    saved, weights = copy.deepcopy(kernel.state_dict()), [p.detach().clone() for p in ps]
    kernel.step()
    after = everything(kernel)
    kernel.load_state_dict(saved)
    with torch.no_grad():
        for p, weight in zip(ps, weights, strict=True):
            p.copy_(weight)
    kernel.step()
    assert bits_equal(everything(kernel), after)


def test_the_same_bits_every_time_and_after_a_checkpoint() -> None:
    kernel, _, ps, _ = pair()
    twin, _, qs, _ = pair()
    for step in range(2):
        for optimizer, own in ((kernel, ps), (twin, qs)):
            fill_gradients(own, step)
            optimizer.step()
    assert bits_equal(everything(kernel), everything(twin))
    assert_goes_back(kernel, ps)


def test_a_group_joins_and_prepare_changes_nothing() -> None:
    kernel, foreach, ps, qs = pair()
    fill_gradients(ps, 0)
    before = [p.detach().clone() for p in ps]
    kernel.prepare()
    assert bits_equal([p.detach() for p in ps], before)
    assert not any(kernel.state[p]["momentum_buffer"].any() for p in ps)
    for optimizer, own in ((kernel, ps), (foreach, qs)):
        fill_gradients(own, 0)
        optimizer.step()
        late = nn.Parameter(torch.ones(70))
        late.grad = torch.ones(70)
        optimizer.add_param_group({"params": [late], "weight_decay": 0.3})
        optimizer.step()
    assert_alike(kernel, foreach)


def test_a_parameter_that_changed_its_strides_is_refused() -> None:
    p = nn.Parameter(torch.randn(4, 6, 3, 3))
    optimizer = LARS([p], 0.1, fused=True)
    p.grad = torch.ones_like(p)
    optimizer.step()
    p.data = p.data.to(memory_format=torch.channels_last)
    p.grad = torch.ones_like(p)
    with pytest.raises(PacelineError, match="have different strides"):
        optimizer.step()


def adam_pair(of: type[AdamW], **options: Any) -> list[tuple[AdamW, list[nn.Parameter]]]:
    made = []
    for use_kernels in (True, False):
        ps = parameters(*MIXED)
        rest = {"weight_decay": 0.0, "lr": 0.2} | ({"adapt": False} if of is LAMB else {})
        groups = [{"params": ps[:3]}, {"params": ps[3:], **rest}]
        optimizer = of(groups, 0.1, (0.9, 0.999), 1e-8, 0.1, fused=use_kernels, **options)
        made.append((optimizer, ps))
    assert [optimizer.path for optimizer, _ in made] == ["triton", "foreach"]
    return made


@pytest.mark.parametrize(
    ("of", "options"),
    [(AdamW, {}), (LAMB, {"trust_eps": 5.0}), (LAMB, {"clip": True})],
    ids=["adamw", "lamb", "lamb-clip"],
)
def test_adam_kernels_equal_foreach(of: type[AdamW], options: dict[str, Any]) -> None:
    made = adam_pair(of, **options)
    for optimizer, ps in made:
        optimizer.grad_scale = torch.tensor(4.0)
        optimizer.active = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0])
        for step, lr in enumerate((0.1, 0.02)):
            optimizer.param_groups[0]["lr"] = lr
            fill_gradients(ps, step, 4.0)
            grad_of(ps[3]).fill_(float("nan"))  # inactive: not checked
            if step == 0:
                before = everything(optimizer)
                optimizer.prepare()
                assert bits_equal([p.detach() for p in ps], before)
            optimizer.step()
    (kernel, ps), (foreach, qs) = made
    assert kernel.trust_ratios() == pytest.approx(foreach.trust_ratios(), rel=2e-6)
    adapted = any(ratio != 1.0 for ratio in kernel.trust_ratios())
    assert adapted == (of is LAMB and "clip" not in options), "here λ is above 1"
    for p, q in zip(ps, qs, strict=True):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert_near(kernel.state[p][key], foreach.state[q][key])
    for ours, theirs in zip(kernel.masters(), foreach.masters(), strict=True):
        assert_near(ours, theirs)
    for p, master in zip(ps, kernel.masters(), strict=True):
        assert_near(p, master, 2**-7 if p.dtype == torch.bfloat16 else 2**-10)
    for p in (ps[3], ps[4]):
        grad_of(p).fill_(0.5)
    check_bad_gradient(ps, kernel, 2, float("nan"))
    check_switches(kernel)


def test_adam_kernels_continue_after_a_checkpoint() -> None:
    (kernel, ps), _ = adam_pair(LAMB)
    for step in range(2):
        fill_gradients(ps, step)
        kernel.step()
    assert_goes_back(kernel, ps)
    late = nn.Parameter(torch.ones(70))
    late.grad = torch.ones(70)
    kernel.add_param_group({"params": [late]})
    kernel.step()
    assert [int(kernel.state[p]["step"]) for p in (*ps, late)] == [4] * 5 + [1]
