"""Bytes of optimizer state for each parameter, as the comparison of optimizers shows them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.optim import OptimSettings, create_optimizer

SIZE = 4096


@pytest.mark.parametrize(
    ("values", "dtype", "wanted"),
    [
        ({"name": "sgd"}, torch.float32, 4),
        ({"name": "sgd"}, torch.bfloat16, 8),  # and a master
        ({"name": "lars"}, torch.float32, 4),
        ({"name": "adamw"}, torch.float32, 8),
        ({"name": "adamw"}, torch.float16, 12),
        ({"name": "lamb"}, torch.float32, 8),
        ({"name": "rmsprop_warmup"}, torch.float32, 8),
        ({"name": "svrg", "momentum": 0.0}, torch.float32, 8),
        ({"name": "halp", "momentum": 0.0, "bits": 8}, torch.float32, 9),
        ({"name": "halp", "momentum": 0.0, "bits": 16}, torch.float32, 10),
        ({"name": "torch.optim:RAdam", "lr": 0.1}, torch.float32, 8),
        ({"name": "torch.optim:RAdam", "lr": 0.1}, torch.bfloat16, 12),
    ],
)
def test_bytes_per_parameter(values: dict[str, Any], dtype: torch.dtype, wanted: int) -> None:
    weight = nn.Parameter(torch.ones(SIZE, dtype=dtype))
    optimizer = create_optimizer(OptimSettings.gather(**values), [{"params": [weight]}], 0.1)
    weight.grad = torch.ones(SIZE, dtype=dtype)
    optimizer.step()
    # Counters and steps of a tensor are a few bytes.
    assert optimizer.state_bytes() / SIZE == pytest.approx(wanted, abs=0.01)
