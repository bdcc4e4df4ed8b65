"""AlexNets as the planner sees them: torchvision's, and the one with batch norm after pool5."""

from __future__ import annotations

from functools import partial

from paceline.plan.network import Build, Layer, Tracer

# Number in `features`, channels, kernel, stride, padding, and whether a pool follows.
_CONVOLUTIONS = (
    (0, 64, 11, 4, 2, True),
    (3, 192, 5, 1, 2, True),
    (6, 384, 3, 1, 1, False),
    (8, 256, 3, 1, 1, False),
    (10, 256, 3, 1, 1, True),
)
_HIDDEN, _POOLED = 4096, 6


def _layers(norms: bool, image_size: int, num_classes: int) -> list[Layer]:
    trace = Tracer(3, image_size)
    for number, channels, kernel, stride, padding, pooled in _CONVOLUTIONS:
        trace.conv(f"features.{number}", channels, kernel, stride, padding, bias=True)
        if norms:
            trace.norm(f"features.bn{number}")
        else:
            trace.spread(f"features.{number + 1}", 2.0)
        if pooled:
            trace.pool(f"features.{number + 2}", 3, 2, 0)
    if norms:
        trace.norm("features.bn_pool5")
    trace.average("avgpool", _POOLED)
    trace.linear("classifier.1", _HIDDEN)
    trace.linear("classifier.4", _HIDDEN)
    trace.linear("classifier.6", num_classes)
    return trace.layers


ALEXNETS: dict[str, Build] = {
    "alexnet": partial(_layers, False),
    "alexnet_bn": partial(_layers, True),
}
