"""Whether kernels can run is found out by running one."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.train import triton_probe
from paceline.train.triton_probe import triton_problem

GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are kept for a process; and tensors of the probe lie on the CPU here."""
    triton_problem.cache_clear()
    ones = torch.ones
    monkeypatch.setattr(
        triton_probe.torch, "ones", lambda *shape, device=None, **how: ones(*shape, **how)
    )


def kernel(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    stand_in = SimpleNamespace(normalized=run)
    monkeypatch.setitem(sys.modules, "paceline.data.normalize_kernel", stand_in)  # type: ignore[arg-type]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


def test_a_cpu_is_asked_nothing() -> None:
    assert triton_problem(torch.device("cpu")) == "needs a GPU"


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert triton_problem(GPU) == "the package triton is not installed"


def test_a_kernel_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel(monkeypatch, lambda pixel, scale, shift, dtype, extra: pixel.to(dtype) * scale + shift)
    assert triton_problem(GPU) == ""


def test_a_kernel_that_cannot_be_built_or_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify")

    kernel(monkeypatch, fail)
    assert triton_problem(GPU) == "no kernel can be built: Failed to find C compiler."
    triton_problem.cache_clear()
    kernel(monkeypatch, lambda *given: torch.zeros(1))
    assert triton_problem(GPU) == "a kernel gave a wrong result"
