from __future__ import annotations

import torch
from torch import nn

from paceline.optim.build import create_optimizer, set_rate
from paceline.optim.settings import OptimSettings


def test_one_step_is_momentum_sgd_with_decay_by_group() -> None:
    weight, bias = nn.Parameter(torch.tensor([2.0])), nn.Parameter(torch.tensor([2.0]))
    groups = [
        {"params": [weight], "weight_decay": 0.5, "role": "weight"},
        {"params": [bias], "weight_decay": 0.0, "role": "bias_norm"},
    ]
    optimizer = create_optimizer(OptimSettings(momentum=0.9), groups, lr=1.0)
    set_rate(optimizer, 0.1)
    for parameter in (weight, bias):
        parameter.grad = torch.tensor([1.0])
    optimizer.step()
    optimizer.step()
    # w: v = 2, w = 1.8; v = 0.9*2 + 1 + 0.9 = 3.7, w = 1.43.  b: v = 1, 1.9; b = 1.9, 1.71
    torch.testing.assert_close(weight.detach(), torch.tensor([1.43]))
    torch.testing.assert_close(bias.detach(), torch.tensor([1.71]))
