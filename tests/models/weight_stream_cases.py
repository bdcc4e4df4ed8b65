"""Fused convolutions and AlexNet with weight gradients on a second stream, in Triton's interpreter, which
`test_weight_stream.py` runs in its own process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import interpreted  # noqa: F401  (before any kernel)
from models.late_stream import LateStream
from models.product_cases import (
    Make,
    basic,
    bottlenecks,
    images,
    made,
    prefer,
    run,
    small_tiles,  # noqa: F401  (a fixture)
)
from paceline.models.alexnet import NORM_NAMES, AlexNet
from paceline.models.product_choice import SEPARATE, choices
from paceline.models.recompute import recompute_norms
from paceline.models.resnet import fuse_norms
from paceline.models.weight_stream import use_weight_stream


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize(
    ("make", "form", "launched"),
    [
        (bottlenecks, SEPARATE, 7),
        (bottlenecks, "fused", 7),
        # 1 × 1 convolutions of stride 1 have both gradients from one kernel; the others are 3 × 3 ones
        # and a shortcut of stride 2.
        (bottlenecks, "both", 3),
        (basic, SEPARATE, 8),
    ],
)
def test_blocks_have_the_same_bits(
    make: Make, form: str, launched: int, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer(form, 0, monkeypatch)
    theirs = made(True, make=make)
    recompute_norms(theirs, recompute)
    ours, stream = copy.deepcopy(theirs), LateStream()
    use_weight_stream(ours, stream)
    with stream.backward():
        found = run(ours, images(torch.float32))
    for name, value in run(theirs, images(torch.float32)).items():
        assert found[name].equal(value), name
    assert stream.noted.marks == launched


def test_forms_that_are_timed_use_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(SEPARATE, 0, monkeypatch)
    monkeypatch.setattr(choices, "timing", True)
    net, stream = made(True, make=basic), LateStream()
    use_weight_stream(net, stream)
    with stream.backward():
        run(net, images(torch.float32))
    assert stream.noted.log == []


@pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])
def test_the_fused_features_of_alexnet_have_the_same_gradients(recompute: bool) -> None:
    torch.manual_seed(0)
    theirs = AlexNet(num_classes=5, norms=NORM_NAMES)
    theirs.classifier = nn.Identity()  # 59 million weights that are not used
    theirs = theirs.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert fuse_norms(theirs) == 1
    ours, stream = copy.deepcopy(theirs), LateStream()
    assert use_weight_stream(ours, stream) == 1
    recompute_norms(ours, recompute)
    x = torch.randn(2, 3, 63, 63).contiguous(memory_format=torch.channels_last)

    def loss(net: AlexNet) -> Tensor:
        maps = net.fused_features(x)
        return (maps * torch.linspace(-1, 1, maps.numel()).view_as(maps)).sum()

    with stream.backward():
        loss(ours).backward()  # type: ignore[no-untyped-call]
    loss(theirs).backward()  # type: ignore[no-untyped-call]
    for name, parameter in theirs.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(ours.get_parameter(name).grad, parameter.grad)
    assert stream.noted.marks == 4, "all but the first convolution"
