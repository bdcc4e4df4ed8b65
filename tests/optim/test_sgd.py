from __future__ import annotations

import pytest
import torch

from optim.lars_reference import fill_gradients, parameters
from paceline.optim import LARS, SGD


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_fp32_equals_torch_sgd(nesterov: bool, weight_decay: float) -> None:
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


def test_half_parameters_follow_a_full_one_through_their_masters() -> None:
    halves = parameters(torch.float16)
    full = [halves[0].detach().float().requires_grad_()]
    ours, theirs = (
        SGD(halves, 0.01, weight_decay=0.1),
        torch.optim.SGD(full, 0.01, momentum=0.9, weight_decay=0.1),
    )
    for step in range(20):
        fill_gradients(halves, step)
        assert halves[0].grad is not None
        full[0].grad = halves[0].grad.float()
        ours.step()
        theirs.step()
    torch.testing.assert_close(ours.masters()[0], full[0].detach(), rtol=1e-6, atol=1e-6)
    assert torch.equal(halves[0].detach(), ours.masters()[0].half())


def test_sgd_is_lars_without_ratios() -> None:
    ps = parameters(torch.float32)
    optimizer = SGD(ps, 0.1)
    assert isinstance(optimizer, LARS)
    fill_gradients(ps, 0)
    optimizer.step()
    assert optimizer.trust_ratios() == [1.0]
    assert optimizer.param_groups[0]["lr_in_momentum"] is False
