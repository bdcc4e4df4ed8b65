"""Memory that ResNets keep for the backward pass at batch 256, and the peak of a step.

Activations, statistics and gradients are counted on the meta device, with the implementations of a GPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from accel.forms import store_outputs, use_forms
from accel.live_bytes import LiveBytes
from interpreter_run import needs_triton
from paceline.accel import stem
from paceline.accel.implementation_choice import CUDNN, Choices
from paceline.models.registry import create_model
from paceline.models.settings import ModelSettings
from paceline.planner.layers import network
from paceline.planner.memory import step_memory

pytestmark = needs_triton

BATCH = 256
GIB = 2**30


def replace_kernels(monkeypatch: pytest.MonkeyPatch, made: Callable[[str], object]) -> None:
    """Replaces all kernels by what `made` returns for their names."""
    from paceline.accel import kernels, product_kernels, stem_kernels

    monkeypatch.setenv("TRITON_INTERPRET", "1")  # for `can_launch`; the kernels are imported
    for module in (kernels, product_kernels, stem_kernels):
        for name in vars(module):
            if name.endswith("_kernel"):
                monkeypatch.setattr(module, name, made(name))


def in_half(net: nn.Module) -> nn.Module:
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.half()
    return net


class OnGpu(LiveBytes):
    """Convolutions of the meta device answer in NCHW memory, those of a GPU in that of their input."""

    def computed(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        out = super().computed(func, args, kwargs)
        if func is torch.ops.aten.convolution.default:
            return torch.empty_like(out, memory_format=torch.channels_last)
        return out


@pytest.fixture(params=["fused", "both", "separate"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of one form, without kernels."""

    def choose(_: Choices, key: str, forms: dict[str, Callable[[], object]], *rest: object) -> str:
        wanted = [name for name in forms if name.split()[0] == request.param]
        return [*wanted, *(name for name in forms if name != "separate"), *forms][0]

    monkeypatch.setattr(Choices, "choose", choose)
    unlaunched = defaultdict[object, Callable[..., None]](lambda: lambda *given, **options: None)
    replace_kernels(monkeypatch, lambda name: unlaunched)


def counted(
    fused: bool, recompute: bool, name: str = "resnet50", size: int = 224
) -> tuple[float, float]:
    """GiB behind the forward pass, and the most of backward, without the images."""
    with torch.device("meta"):
        net = in_half(create_model(ModelSettings(name), num_classes=1000, image_size=size))
        images = torch.empty(BATCH, 4, size, size, dtype=torch.float16)
        labels = torch.zeros(BATCH, dtype=torch.int64)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    use_forms(net, fused=True, recompute=recompute, choices=Choices(CUDNN) if fused else None)
    with OnGpu() as live:
        x = images.contiguous(memory_format=torch.channels_last)
        loss = F.cross_entropy(net(x).float(), labels)
        kept = live.now - x.nbytes
        live.most = live.now
        loss.backward()  # type: ignore[no-untyped-call]
        return kept / GIB, (live.most - x.nbytes) / GIB


@pytest.mark.usefixtures("form")
def test_fused_blocks_with_recomputed_norms_keep_what_others_keep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The planner counts the same."""
    kept, most = counted(fused=True, recompute=True)
    separate, separate_most = counted(fused=False, recompute=True)
    plain, plain_most = counted(fused=False, recompute=False)
    assert kept == pytest.approx(separate, rel=1e-4)
    assert most <= separate_most
    assert most < 0.74 * plain_most

    net = network("resnet50")
    again = net.recomputing_norms()
    remade = 2 * BATCH * sum(layer.recomputed_elements for layer in again.layers) / GIB
    assert plain - kept == pytest.approx(remade, rel=1e-4)
    for planned, found in ((net, plain_most), (again, most)):
        assert step_memory(planned, BATCH).activations / GIB == pytest.approx(found, rel=0.02)

    store_outputs(monkeypatch)
    all_kept, all_most = counted(fused=True, recompute=True)
    # Of the stages' 3, 4, 6 and 3 outputs, 1, 2, 3 and 1.
    left_out = sum(
        count * 256 * width * side**2 * 2 * BATCH / GIB
        for count, width, side in ((1, 1, 56), (2, 2, 28), (3, 4, 14), (1, 8, 7))
    )
    assert all_kept - kept == pytest.approx(left_out, rel=1e-4)
    assert all_most - most == pytest.approx(left_out, rel=1e-2)


@pytest.mark.parametrize("form", ["separate"], indirect=True)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("name", "left_out"), [("resnet18", True), ("resnet34", False)])
def test_fused_basic_blocks_keep_what_others_keep(
    name: str, left_out: bool, recompute: bool, form: None
) -> None:
    """They also keep the output of the last block, because no fused block reads it."""
    kept, _ = counted(True, recompute, name)
    separate, _ = counted(False, recompute, name)
    last = BATCH * 512 * 7**2 * 2 / GIB if recompute and left_out else 0
    # Statistics for cuDNN have a fifth row.
    assert kept - last == pytest.approx(separate, rel=3e-5)


@pytest.mark.parametrize("form", ["separate"], indirect=True)
@pytest.mark.parametrize(
    ("name", "size"),
    [("alexnet_bn", 224), ("alexnet_bn", 99), ("resnet18", 32), ("resnet_fast", 32)],
)
def test_windows_of_images_are_kept(
    name: str, size: int, form: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner counts the same."""
    kept, _ = counted(False, False, name, size)
    monkeypatch.setattr(stem, "_MEASURED", {})
    without, _ = counted(False, False, name, size)
    windows = 2 * BATCH * network(name, size).layers[0].windows / GIB
    assert windows > 0
    assert kept - without == pytest.approx(windows, rel=0.01)
