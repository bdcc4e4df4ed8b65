"""The planner's count of memory against the peak of a real step; needs a GPU."""

from __future__ import annotations

import pytest
import torch

from paceline.bench.step import StepRow, measure_ours
from paceline.plan.layers import network, step_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize(
    ("model", "batch"), [("resnet18", 128), ("resnet50", 64), ("resnet50", 128)]
)
def test_the_peak_of_a_step(model: str, batch: int) -> None:
    # Buffers of earlier tests, which this step would reuse.
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    row = StepRow(
        "memory", "ours", model, batch, 224, 1000, "cuda", 3, 2, {"precision.amp_dtype": "fp16"}
    )
    measure_ours(row, lambda: None)
    peak = torch.cuda.max_memory_allocated() - held
    assert step_memory(network(model), batch).total == pytest.approx(peak, rel=0.10)
