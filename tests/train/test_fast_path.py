"""What a device gets: an acceleration, CUDA graphs; and whether Triton's kernels run."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from paceline.comm import Group
from paceline.config import RunSettings
from paceline.models.resnet import SmallResNet
from paceline.models.synced_norm import TorchNorm, use_torch_norms
from paceline.train import fast_path
from paceline.train.fast_path import (
    FastPath,
    ModelLimits,
    choose_fast_path,
    triton_problem,
)
from refusals import refused

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda model, **how: model)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)


def choose(
    device: torch.device, model: nn.Module | None = None, problem: str = "", **settings: object
) -> FastPath:
    """As where kernels run on GPUs, unless there is a `problem`; choosing runs none."""
    chosen = RunSettings(**settings)  # type: ignore[arg-type]
    problem = problem or ("" if device == GPU else "needs a GPU")
    return choose_fast_path(chosen, model or SmallResNet(), device, problem)


def test_no_batch_norm_by_cudnn_where_ranks_share_a_gpu() -> None:
    for device, shared, expected in ((GPU, True, True), (GPU, False, False), (CPU, True, False)):
        model = SmallResNet()
        keys = list(model.state_dict())
        path = choose_fast_path(RunSettings(), model, device, "", shared_gpu=shared)
        norms = {type(m) for m in model.modules() if isinstance(m, nn.BatchNorm2d)}
        assert norms == {TorchNorm if expected else nn.BatchNorm2d}
        assert ("shared GPU" in path.describe()) == expected
        assert list(model.state_dict()) == keys


def test_a_norm_without_cudnn_computes_the_same_and_leaves_the_switch_as_it_was() -> None:
    plain_norm, norm = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
    assert use_torch_norms(norm) == 1
    x = torch.randn(3, 4, 5, 5)
    assert norm(x).equal(plain_norm(x))
    assert norm.running_var.equal(plain_norm.running_var)
    assert torch.backends.cudnn.enabled


def test_a_cpu_gets_the_plain_model_and_a_gpu_graphs() -> None:
    model = SmallResNet()
    path = choose(CPU, model)
    assert path.forward is model
    assert (path.applied, path.graphs, path.image_channels) == (None, False, None)
    path = choose(GPU, model)
    assert path.graphs
    assert path.forward is path.applied.forward
    assert torch.backends.cudnn.benchmark
    assert not choose(GPU, cuda_graphs="off").graphs
    with refused("run.cuda_graphs"):
        choose(CPU, cuda_graphs="on")
    with refused("run.cuda_graphs"):
        RunSettings(cuda_graphs="onn")


def test_norms_over_several_ranks_are_not_captured() -> None:
    limits = ModelLimits.of(RunSettings(), cast(Group, SimpleNamespace()), eager=True, varies=False)
    path = choose_fast_path(RunSettings(), SmallResNet(), GPU, "", limits=limits)
    assert not path.graphs
    assert path.applied is None
    assert not choose_fast_path(
        RunSettings(), SmallResNet(), GPU, "", limits=ModelLimits(varies=True)
    ).graphs


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], str]:
    """What the probe finds where `run` is the kernel; its tensors lie on the CPU here."""
    ones = torch.ones
    monkeypatch.setattr(
        fast_path.torch, "ones", lambda *shape, device=None, **how: ones(*shape, **how)
    )

    def probe(run: Any) -> str:
        triton_problem.cache_clear()  # answers are kept for a process
        stand_in: Any = SimpleNamespace(normalized=run)
        monkeypatch.setitem(sys.modules, "paceline.data.device.kernels", stand_in)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if run else None)
        return triton_problem(GPU)

    return probe


def test_whether_kernels_can_run_is_found_out_by_running_one(probed: Callable[[Any], str]) -> None:
    def fail(*given: object) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify")

    assert triton_problem(CPU) == "needs a GPU"
    assert probed(None) == "the package triton is not installed"
    assert probed(lambda pixel, scale, shift, dtype, extra: pixel.to(dtype) * scale + shift) == ""
    assert probed(fail) == "no kernel can be built: Failed to find C compiler."
    assert probed(lambda *given: torch.zeros(1)) == "a kernel gave a wrong result"
    triton_problem.cache_clear()
