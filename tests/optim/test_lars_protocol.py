from __future__ import annotations

import pytest
import torch
from torch import nn

from optim.lars_reference import bits_equal, everything, fill_gradients, parameters
from optim.protocol_checks import check_bad_gradient, check_switch
from paceline.core.errors import RunError
from paceline.optim import LARS, lars_foreach

MIXED = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True, params=["in place", "by select"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of the list operations: the CPU's, and the GPU's, which never reads a flag."""
    if request.param == "by select":
        monkeypatch.setattr(lars_foreach, "on_host", lambda device: False)


def stepped() -> tuple[list[nn.Parameter], LARS]:
    """An optimizer in the midst of a run: momentum is not zero, gradients are there."""
    ps = parameters(*MIXED)
    groups = [{"params": ps[:2]}, {"params": ps[2:], "adapt": False}]
    optimizer = LARS(groups, 0.5, weight_decay=0.01)
    fill_gradients(ps, 0)
    optimizer.step()
    fill_gradients(ps, 1)
    return ps, optimizer


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_one_bad_gradient_changes_no_bit(which: int, poison: float) -> None:
    ps, optimizer = stepped()
    check_bad_gradient(ps, optimizer, which, poison)


@pytest.mark.parametrize("switch", ["hold", "found_inf"])
def test_hold_and_found_inf_change_no_bit(switch: str) -> None:
    _, optimizer = stepped()
    check_switch(optimizer, switch)


def test_an_inactive_parameter_is_untouched_and_unchecked() -> None:
    ps, optimizer = stepped()
    _, other = stepped()
    before = everything(optimizer)
    optimizer.active = torch.tensor([1.0, 0.0, 1.0])
    assert ps[1].grad is not None
    ps[1].grad[0] = float("nan")
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
        ("active", torch.ones(2), r"active has shape \(2,\); give it 3 contiguous values"),
        ("hold", torch.zeros(2), r"hold has shape \(2,\); give it 1 contiguous value"),
        ("hold", torch.zeros((), device="meta"), "hold lies on meta"),
    ],
)
def test_a_switch_of_the_wrong_make_is_refused(switch: str, value: torch.Tensor, line: str) -> None:
    _, optimizer = stepped()
    setattr(optimizer, switch, value)
    with pytest.raises(RunError, match=line):
        optimizer.step()


def test_grad_scale_divides_inside_the_step() -> None:
    ps, optimizer = stepped()
    _, plain = stepped()
    for p in ps:
        assert p.grad is not None
        p.grad.mul_(64.0)
    kept = [p.grad.clone() for p in ps if p.grad is not None]
    optimizer.grad_scale = torch.tensor(64.0)
    optimizer.step()
    plain.step()
    assert bits_equal(everything(optimizer), everything(plain))
    assert bits_equal([p.grad for p in ps if p.grad is not None], kept)


def test_torch_grad_scaler_drops_in() -> None:
    def run(scaled: bool) -> tuple[list[torch.Tensor], list[float]]:
        ps = parameters(torch.float32, torch.float32)
        optimizer = LARS(ps, 0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        scales = []
        for step in range(3):
            optimizer.zero_grad()
            factor = float("inf") if scaled and step == 1 else 1.0
            loss = torch.stack([(p * p * factor).sum() for p in ps]).sum()
            if step == 1 and not scaled:
                continue
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return everything(optimizer), scales

    scaled, scales = run(scaled=True)
    plain, _ = run(scaled=False)
    assert scales == [1024.0, 512.0, 512.0]
    assert bits_equal(scaled, plain)


def test_grad_scaler_after_unscale_divides_once() -> None:
    (p,), (q,) = parameters(torch.float32), parameters(torch.float32)
    for parameter, unscale_first in ((p, True), (q, False)):
        optimizer = LARS([parameter], 0.5, adapt=False)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale((parameter * parameter).sum()).backward()
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
    assert torch.equal(p, q)


def test_a_closure_is_run_with_gradients_and_its_loss_returned() -> None:
    (p,) = parameters(torch.float32)
    optimizer = LARS([p], 0.5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    first, second = optimizer.step(closure), optimizer.step(closure)  # type: ignore[arg-type]
    assert first is not None
    assert second is not None
    assert second < first


def test_torch_schedulers_set_the_rate() -> None:
    p = nn.Parameter(torch.ones(1))
    optimizer = LARS([p], 1.0, momentum=0.0, adapt=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    for _ in range(2):
        p.grad = torch.ones(1)
        optimizer.step()
        scheduler.step()
    torch.testing.assert_close(p.detach(), torch.tensor([1 - 1.0 - 0.1]))


def test_the_rate_may_be_a_tensor() -> None:
    p = nn.Parameter(torch.ones(1))
    optimizer = LARS([p], torch.tensor(0.5), momentum=0.0, adapt=False)  # type: ignore[arg-type]
    p.grad = torch.ones(1)
    optimizer.step()
    assert torch.equal(p.detach(), torch.tensor([0.5]))
