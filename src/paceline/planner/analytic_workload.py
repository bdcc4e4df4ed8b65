"""`analytic_workload`: predicts the step time of a network from its layers and a chip's data sheet.

The time of a layer is the larger of the times of its matrix products and its memory traffic, plus a
fixed latency. Products are computed in tiles, so a batch too small to give each multiprocessor a
tile takes as long as a batch that does. `tools/fit_planner.py` fits the latency and the fractions
of the peaks that are reached to measured systems (`step_constants.toml`). These constants hold for
all chips with tensor cores. For other chips, the times are scaled to one measured training of
ResNet-50.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from paceline.core.errors import ConfigError, nearest
from paceline.plan.cluster import slowest_of
from paceline.plan.optimizer import Gradient
from paceline.planner.accelerators import (
    Accelerator,
    Measured,
    StepConstants,
    accelerator,
    step_constants,
)
from paceline.planner.layers import Layer, Network, network
from paceline.planner.workload import Affine, Workload

# The outputs in one tile of a matrix product. A multiprocessor computes one tile at a time.
_TILE = 128 * 128
# Bytes per weight of an update: half-precision gradient and weight, fp32 master and momentum read and
# written. In fp32, the gradient has twice the bytes, and there is no half-precision weight.
_UPDATE_BYTES = 20
# Each step reads a weight in the forward and the backward pass, and writes its gradient.
_WEIGHT_PASSES = 3
# The batch at which the exponential term for small batches is fitted.
_FILL_AT = 16
# Relative standard errors of a prediction by basis: scaled to a training on the chip or on a similar
# chip, from the peaks of a user's chip (9 % too fast for the H200, the only comparison), and from rough
# peaks.
_SPREAD = {"measured": 0.05, "like": 0.20, "own": 0.10, "rough": 0.30}
# If a measured training differs from the prediction by a factor outside this range, it is a mistake.
_SCALES = (0.2, 20.0)


def analytic_workload(
    net: Network, gpu: Accelerator, software: str = "", constants: StepConstants | None = None
) -> Workload:
    """Predicts the compute time of a step, if the step never waits for input.

    Args:
        net: The layers of the model.
        gpu: The accelerator.
        software: A round of MLPerf Training, such as `v0.7`, whose libraries are used; the newest by
            default.
        constants: The fitted constants; `step_constants()` by default.

    Raises:
        ConfigError: If `software` is unknown, or the accelerator's measured training cannot be right.
    """
    law = constants or step_constants()
    scale, basis = _scale(gpu, law)
    scale *= _software(gpu, law, software)
    forward = [_forward(layer, gpu, law) for layer in net.layers]
    # The gradients of the input and of the weights each cost as much as the forward pass; the first layer
    # needs no gradient of its input.
    memory = gpu.memory_bytes_per_s * law.memory_share
    backward = [
        t * (2 if number else 1) + layer.recompute_traffic * _width(gpu) / memory
        for number, (t, layer) in enumerate(zip(forward, net.layers, strict=True))
    ]
    total = sum(backward)
    gradients, done = [], 0.0
    for layer, seconds in zip(reversed(net.layers), reversed(backward), strict=True):
        done += seconds
        for tensor in reversed(layer.tensors):
            share = min(1.0, done / total)
            half = tensor.half and gpu.in_half
            gradients.append(Gradient(tensor.name, tensor.elements, half, share))
    latency = law.layer_cycles / (gpu.clock_ghz * 1e9) * len(net.layers)
    weights = _width(gpu) * net.elements / memory
    fill_s, fill_batch = _filling(net.layers, gpu, law)
    # The gradient of a weight is a sum over the batch, which can be split across the chip. So only the
    # gradient of the input leaves a part of the chip idle.
    fill = {"fill_s": scale * fill_s, "fill_batch": fill_batch}
    return Workload(
        model=net.name,
        gradients=tuple(gradients),
        forward=Affine(latency + weights, scale * sum(forward), **fill),
        backward=Affine(2 * latency + (_WEIGHT_PASSES - 1) * weights, scale * total, **fill),
        update_s=net.elements * _UPDATE_BYTES / memory,
        spread=law.residual if basis == "law" else _SPREAD[basis],
        source=_source(net, gpu, law, basis, software),
        image_size=net.image_size,
    )


def _matrix_rate(gpu: Accelerator, law: StepConstants) -> float:
    clock: float = (gpu.watts / gpu.reference_watts) ** law.power_exponent
    return gpu.tflops * 1e12 * law.matrix_share * clock


def _width(gpu: Accelerator) -> int:
    """Returns the bytes of one element of an activation or a weight."""
    return 2 if gpu.in_half else 4


def _forward(layer: Layer, gpu: Accelerator, law: StepConstants) -> float:
    """Returns the forward seconds per image of a layer, for a batch that fills the chip."""
    memory = layer.moved * _width(gpu) / (gpu.memory_bytes_per_s * law.memory_share)
    return max(layer.flops / _matrix_rate(gpu, law) if layer.depth else 0.0, memory)


def _filling(layers: Sequence[Layer], gpu: Accelerator, law: StepConstants) -> tuple[float, float]:
    """Returns `fill_s` and `fill_batch` of `Affine`: the extra time of batches that do not fill the chip.

    A layer with a batch below `full` takes up to `floor` seconds longer: floor · max(0, 1 − batch /
    full). Over a network, the sum is close to an exponential.
    """
    floors = []
    for layer in layers:
        if layer.depth and layer.flops:
            floor = 2 * _TILE * layer.depth * gpu.processors / _matrix_rate(gpu, law)
            floors.append((floor, floor / _forward(layer, gpu, law)))
    # A product with few outputs, as in a classifier, is not limited: its sums are split across the chip.
    floors = [(floor, full) for floor, full in floors if full <= 8 * _FILL_AT]
    start = sum(floor for floor, _ in floors)
    left = sum(floor * max(0.0, 1 - _FILL_AT / full) for floor, full in floors)
    if not 0 < left < start:
        return 0.0, 1.0
    return start, _FILL_AT / math.log(start / left)


def _software(gpu: Accelerator, law: StepConstants, software: str) -> float:
    if not software:
        return 1.0
    known = {
        f"v{number}" for number in ("0.6", "0.7", "1.0", "1.1", "2.0", "2.1", "3.0", "3.1", "4.0")
    }
    if software not in known:
        raise ConfigError(
            "--software", software, "is not a round of MLPerf Training with ResNet-50",
            nearest(software, known),
        )  # fmt: skip
    return law.software.get(gpu.family, {}).get(software, 1.0)


def _scale(gpu: Accelerator, law: StepConstants) -> tuple[float, str]:
    """Returns the factor by which computed step times are multiplied, and a text that explains it."""
    if gpu.measured is not None:
        return _measured_scale(gpu, gpu.measured, law), "measured"
    if gpu.like:
        similar = accelerator(gpu.like)
        assert similar.measured is not None
        return _measured_scale(similar, similar.measured, law), "like"
    if not gpu.is_gpu:
        return 1.0, "rough"
    return 1.0, "own" if gpu.is_own else "law"


def _measured_scale(gpu: Accelerator, seen: Measured, law: StepConstants) -> float:
    plain = analytic_workload(network("resnet50"), replace(gpu, measured=None, like=""), "", law)
    # The measured step is the step of the slowest rank.
    step = seen.batch / seen.images_per_s / slowest_of(seen.ranks)
    fixed = plain.forward.fixed_s + plain.backward.fixed_s + plain.update_s
    scale = (step - fixed) / (plain.compute_s(seen.batch) - fixed)
    if not _SCALES[0] <= scale <= _SCALES[1]:
        raise ConfigError(
            f"{gpu.name}.measured", seen.images_per_s,
            f"means {1e3 * step:.3g} ms for a step of {seen.batch:,} images, but peaks and clock rate "
            f"predict {1e3 * plain.compute_s(seen.batch):.3g} ms",
            "check the peaks, images_per_s (of one accelerator) and batch (of one accelerator)",
        )  # fmt: skip
    return scale


def _source(net: Network, gpu: Accelerator, law: StepConstants, basis: str, software: str) -> str:
    source = f"layers of the network{', counted from a trace,' if net.traced else ''} on {gpu.name}"
    if basis == "measured" and gpu.measured is not None:
        source += f", scaled to {gpu.measured.images_per_s:,.0f} images/s ({gpu.measured.source})"
    elif basis == "like":
        source += f", scaled as {gpu.like}"
    elif basis == "own":
        source += ", from its peaks as given: profile it for a better answer"
    elif basis == "rough":
        source += ", from rough peaks: profile it for a better answer"
    if not software:
        return source
    slower = _software(gpu, law, software) > 1
    return source + f", software of {software}" + ("" if slower else " (not known to be slower)")
