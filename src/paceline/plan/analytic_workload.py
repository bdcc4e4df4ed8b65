"""A `Workload` for hardware that is not here.

In: a network and an accelerator of the catalogue. Out: times by the roofline: a layer takes as long as
the slower of its products and its memory traffic, twice that in the backward pass, and a latency that no
batch hides. One measured training of ResNet-50 on the accelerator says how far from its peaks a real
step stays; other networks are taken to stay as far.
"""

from __future__ import annotations

from paceline.core.errors import ConfigError
from paceline.plan.accelerator import Accelerator, Measured, accelerator
from paceline.plan.network import Layer, Network, network
from paceline.plan.straggler import slowest_of
from paceline.plan.workload import Affine, Gradient, Workload

# ResNet-50 on one H200, batches 64 to 512 (three recipes, one intercept): 4.42 ms of a step
# do not shrink with the batch. Divided by the layers of the planner's ResNet-50, and taken to be the same
# on every GPU: it is launches, latencies and part-filled waves, not arithmetic.
FIXED_STEP_S = 4.42e-3
_HALF_BYTES = 2
# Per weight: half gradient, fp32 master and momentum read and written, half weight written.
_UPDATE_BYTES = 20
# A share of the peaks, where nothing was measured on the chip or a sister.
_USUAL_SHARE = 0.4
# Standard errors of the times: measured on the chip, on a sister, or from peaks alone.
_SPREAD = {"measured": 0.05, "like": 0.10, "peaks": 0.30}


def analytic_workload(net: Network, gpu: Accelerator) -> Workload:
    """Compute only: input is taken to keep up."""
    fixed = FIXED_STEP_S / len(network("resnet50").layers)
    scale, basis = _scale(gpu, fixed)
    forward = [scale * _roofline(layer, gpu) for layer in net.layers]
    # The first layer's input needs no gradient.
    backward = [t * (2 if number else 1) for number, t in enumerate(forward)]
    per_image, total = list(reversed(backward)), sum(backward)
    gradients, done = [], 0.0
    for layer, seconds in zip(reversed(net.layers), per_image, strict=True):
        done += seconds
        for tensor in reversed(layer.tensors):
            share = min(1.0, done / total)
            gradients.append(Gradient(tensor.name, tensor.elements, tensor.half, share))
    latency = fixed * len(net.layers)
    return Workload(
        model=net.name,
        gradients=tuple(gradients),
        forward=Affine(latency / 3, sum(forward)),
        backward=Affine(latency * 2 / 3, total),
        update_s=_update_s(net, gpu),
        spread=_SPREAD[basis],
        source=f"roofline of {gpu.name}, {_words(gpu, basis)}",
    )


def _roofline(layer: Layer, gpu: Accelerator) -> float:
    """Seconds for one image, forward."""
    return max(layer.flops / gpu.flops_per_s, layer.moved * _HALF_BYTES / gpu.memory_bytes_per_s)


def _update_s(net: Network, gpu: Accelerator) -> float:
    return net.elements * _UPDATE_BYTES / gpu.memory_bytes_per_s


def _scale(gpu: Accelerator, fixed: float) -> tuple[float, str]:
    """How many times as long as the roofline a real step takes."""
    if gpu.measured is not None:
        return _measured_scale(gpu, gpu.measured, fixed), "measured"
    if gpu.like:
        sister = accelerator(gpu.like)
        if sister.measured is None:
            raise ConfigError("accelerators.toml", gpu.like, "has no measured training")
        return _measured_scale(sister, sister.measured, fixed), "like"
    return 1 / _USUAL_SHARE, "peaks"


def _measured_scale(gpu: Accelerator, seen: Measured, fixed: float) -> float:
    net = network("resnet50")
    roofline = [_roofline(layer, gpu) for layer in net.layers]
    per_image = 3 * sum(roofline) - roofline[0]
    # The step was as long as that of the slowest rank.
    step = seen.batch / seen.images_per_s / slowest_of(seen.ranks)
    return (step - fixed * len(net.layers) - _update_s(net, gpu)) / (seen.batch * per_image)


def _words(gpu: Accelerator, basis: str) -> str:
    if basis == "measured" and gpu.measured is not None:
        return f"scaled to {gpu.measured.images_per_s:,.0f} images/s ({gpu.measured.source})"
    if basis == "like":
        return f"scaled as {gpu.like}"
    return f"at {_USUAL_SHARE:.0%} of its peaks: profile it for a better answer"
