"""ResNets of version 1.5 as the planner sees them, with the ImageNet stem."""

from __future__ import annotations

from functools import partial

from paceline.plan.network import Build, Layer, Tracer

_DEPTHS = {
    "resnet18": (2, 2, 2, 2),
    "resnet34": (3, 4, 6, 3),
    "resnet50": (3, 4, 6, 3),
    "resnet101": (3, 4, 23, 3),
    "resnet152": (3, 8, 36, 3),
}
_WIDE = ("resnet50", "resnet101", "resnet152")


def _layers(name: str, image_size: int, num_classes: int) -> list[Layer]:
    trace = Tracer(3, image_size)
    trace.conv("conv1", 64, 7, 2, 3)
    trace.norm("bn1")
    trace.pool("maxpool", 3, 2, 1)
    for number, depth in enumerate(_DEPTHS[name]):
        for block in range(depth):
            stride = 2 if number > 0 and block == 0 else 1
            _block(trace, f"layer{number + 1}.{block}", 64 << number, stride, name in _WIDE)
    trace.average("avgpool")
    trace.linear("fc", num_classes)
    return trace.layers


def _block(trace: Tracer, name: str, channels: int, stride: int, wide: bool) -> None:
    entry = trace.channels, trace.size
    kernels = ((1, 1), (3, stride), (1, 1)) if wide else ((3, stride), (3, 1))
    for number, (kernel, step) in enumerate(kernels, 1):
        out = channels * 4 if wide and number == 3 else channels
        trace.conv(f"{name}.conv{number}", out, kernel, step)
        trace.norm(f"{name}.bn{number}")
    leaving = trace.channels, trace.size
    if entry != leaving:
        trace.channels, trace.size = entry
        trace.conv(f"{name}.downsample.0", leaving[0], 1, stride, 0)
        trace.norm(f"{name}.downsample.1")
    trace.channels, trace.size = leaving
    trace.spread(f"{name}.sum", 3.0)


RESNETS: dict[str, Build] = {name: partial(_layers, name) for name in _DEPTHS}
