"""The planner's count of memory against the peak of a real step; needs a GPU."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from paceline.planner.layers import network
from paceline.planner.memory import step_memory
from paceline.tune.step import StepRow, measure_ours

pytestmark = pytest.mark.gpu


def peak_of(model: str, batch: int, **switches: object) -> int:
    # Buffers of earlier tests, which this step would reuse, or free while it is measured.
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    accel = {f"run.accel.{name}": it for name, it in switches.items()}
    values = {"precision.amp_dtype": "fp16", **accel}
    row = StepRow("memory", "ours", model, batch, 224, 1000, "cuda", 3, 2, values)
    measure_ours(row, lambda: None)
    return torch.cuda.max_memory_allocated() - held


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        ("resnet18", 128),
        ("resnet50", 64),
        ("resnet50", 128),
        ("alexnet_bn", 128),
        ("alexnet_bn", 1024),
    ],
)
def test_the_peak_of_a_step(model: str, batch: int) -> None:
    peak = peak_of(model, batch)
    assert step_memory(network(model), batch).total == pytest.approx(peak, rel=0.10)


def test_recomputed_norms_take_a_fifth_less() -> None:
    stored, again = peak_of("resnet50", 128), peak_of("resnet50", 128, recompute_norms=True)
    assert again < 0.8 * stored
    counted = step_memory(network("resnet50").recomputing_norms(), 128).total
    assert counted == pytest.approx(again, rel=0.10)


@pytest.mark.parametrize("mode", ["auto", "cudnn"])
def test_recomputed_norms_take_a_fifth_less_with_fused_convolutions(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks do not keep every second output."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    stored, fused = peak_of("resnet50", 128), peak_of("resnet50", 128, fused_convolutions=mode)
    # The first run times forms, and the second one takes what was chosen.
    _, again = (
        peak_of("resnet50", 128, fused_convolutions=mode, recompute_norms=True) for _ in range(2)
    )
    assert again < 0.8 * stored
    assert again < 0.9 * fused
    counted = step_memory(network("resnet50").recomputing_norms(), 128).total
    assert counted == pytest.approx(again, rel=0.10)
