"""What a training step keeps in the memory of one GPU, and the largest batch that fits.

In: the layers of a network (`paceline.plan.layers`), a batch, the number format. Out: bytes by purpose.
The model is a count, not a fit: weights and gradients in the format of training, fp32 masters and
momentum, the activations that each layer keeps for the backward pass, the images on the device, the
pool of the CUDA graph. Peaks that were measured on an H200 are met within 10 % (docs/planner.md,
Accuracy).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from paceline.core.errors import ConfigError
from paceline.plan.cluster import Accelerator
from paceline.plan.layers import Network

_CHANNELS = 3
# Batches of uint8 images on the device: the one in use and those that are prefetched.
_RESIDENT_BATCHES = 4
# fp32: on an H200, ResNet-50 at batch 256 took 1.29 times the activations that its layers keep, with both
# strict fp32 and TF32 products; the rest is workspace of convolutions.
_FULL_WORKSPACE = 1.29
# The pool of a CUDA graph, over what the same step takes without one; on an H200, ResNet-50 at batch 256.
_GRAPH_POOL = 0.01
# Of the memory that the maker states: context and libraries' buffers take about 2 GB, and an allocator
# cannot fill the rest to the last byte.
_USABLE = 0.95
_CONTEXT_BYTES = 2e9
LARGEST_BATCH = 1 << 20


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one GPU at the peak of a step."""

    weights: float
    gradients: float
    masters: float
    momentum: float
    activations: float
    images: float
    graph_pool: float

    @property
    def total(self) -> float:
        return float(sum(asdict(self).values()))


def step_memory(net: Network, batch: int, half: bool = True, graphs: bool = True) -> MemoryEstimate:
    """`half`: fp16 or bf16 with fp32 masters; otherwise fp32, whose weights are the masters."""
    width = 2 if half else 4
    kept = sum(layer.kept for layer in net.layers) * (1.0 if half else _FULL_WORKSPACE)
    pixels = _CHANNELS * net.image_size**2
    activations = batch * kept * width
    return MemoryEstimate(
        weights=float(net.elements * width),
        gradients=float(net.elements * width),
        masters=4.0 * net.elements if half else 0.0,
        momentum=4.0 * net.elements,
        activations=activations,
        images=float(batch * pixels * (width + _RESIDENT_BATCHES)),
        graph_pool=_GRAPH_POOL * activations if graphs else 0.0,
    )


def usable_bytes(gpu: Accelerator) -> float:
    return _USABLE * gpu.memory_bytes - _CONTEXT_BYTES


def largest_batch(net: Network, gpu: Accelerator, half: bool | None = None) -> int:
    """0 where not even one image fits; `half` is as usual on the chip."""
    half = gpu.in_half if half is None else half
    room = usable_bytes(gpu)
    low, high = 0, LARGEST_BATCH
    while low < high:
        middle = (low + high + 1) // 2
        if step_memory(net, middle, half).total <= room:
            low = middle
        else:
            high = middle - 1
    return low


def check_memory(
    net: Network, gpu: Accelerator, batch: int, half: bool | None = None
) -> MemoryEstimate:
    """ConfigError, with the largest batch that fits, for one that does not; `half` as above."""
    half = gpu.in_half if half is None else half
    needed = step_memory(net, batch, half)
    if needed.total > usable_bytes(gpu):
        most = largest_batch(net, gpu, half)
        remedy = f"at most {most:,} fit" if most else "choose a GPU with more memory"
        raise ConfigError(
            "--batch-size", batch,
            f"{net.name} needs {needed.total / 1e9:,.0f} GB on one GPU; {gpu.name} has "
            f"{gpu.memory_bytes / 1e9:,.0f} GB, of which {usable_bytes(gpu) / 1e9:,.0f} are usable",
            remedy,
        )  # fmt: skip
    return needed
