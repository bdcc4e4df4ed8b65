"""Estimates the memory of a training step on one GPU, and the largest batch that fits.

The estimate adds up bytes by purpose at the peak of a step, without fitted constants. The purposes are
weights, fp32 master weights, momentum, gradients (the flat buffers of the all-reduce and the tensors of
the backward pass), activations, images, cuBLAS buffers, and the private memory of the CUDA graph.
Workspaces that cuDNN tries before the first step are left out, because they use free memory only.
docs/planner.md compares the result with measured peaks.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import asdict, dataclass

from paceline.core.errors import ConfigError
from paceline.planner.accelerators import TRITON_CAPABILITY, Accelerator
from paceline.planner.layers import Network
from paceline.planner.workload import LARGEST_BATCH

_CHANNELS = 3
# Our fused kernels take normalized images with a fourth channel of zeros, which GPUs convolve faster.
_PADDED_CHANNELS = 4
# Batches of uint8 images on the device: the current batch and the prefetched batches.
_RESIDENT_BATCHES = 4
# torch gives cuBLAS a buffer for each thread and stream (32 MiB on Hopper, 8 MiB before). Forward and
# backward use one thread each, and a CUDA graph is captured on a separate stream.
_LIBRARY_BYTES = 2.0 * 2**25
# CUDA context and libraries need about 2 GB, and an allocator cannot use the rest to the last byte.
_USABLE = 0.95
_CONTEXT_BYTES = 2e9


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one GPU at the peak of a step, by purpose."""

    weights: float
    gradients: float
    masters: float
    momentum: float
    activations: float
    images: float
    libraries: float
    graph: float

    @property
    def total(self) -> float:
        return float(sum(asdict(self).values()))


def step_memory(
    net: Network, batch: int, half: bool = True, graphs: bool = True, fused: bool = True,
    on_gpu: bool = True,
) -> MemoryEstimate:  # fmt: skip
    """Estimates the GPU memory that a training step needs.

    Args:
        net: The layers of the model.
        batch: The batch of one rank.
        half: True for fp16 or bf16 with fp32 master weights; False for fp32, without master weights.
        graphs: True if the step is captured as a CUDA graph.
        fused: True if Paceline's fused kernels run for models that have them.
        on_gpu: False for a CPU, which has neither graphs nor cuBLAS buffers.
    """
    width = 2 if half else 4
    pixels = batch * net.image_size**2
    fused = fused and net.has_fused_kernels
    channels = _PADDED_CHANNELS if fused and net.pads_images else _CHANNELS
    images = float(pixels * channels * width)
    windows = batch * net.layers[0].windows * width if fused else 0.0
    # If there are windows, the backward pass needs them and not the images, which live until the end of
    # the forward pass.
    activations, parameter_gradients = _peak(net, batch, half, fused, images if windows else 0.0)
    flat = net.elements * width
    return MemoryEstimate(
        weights=float(net.elements * width),
        gradients=flat + parameter_gradients,
        masters=4.0 * net.elements if half else 0.0,
        momentum=4.0 * net.elements,
        activations=activations,
        images=pixels * _RESIDENT_BATCHES * _CHANNELS + (windows or images),
        libraries=_LIBRARY_BYTES if on_gpu else 0.0,
        # The graph reads a copy of the batch.
        graph=_LIBRARY_BYTES + pixels * _CHANNELS if graphs and on_gpu else 0.0,
    )


def memory_on(
    gpu: Accelerator, net: Network, batch: int, half: bool | None = None, fused: bool = True
) -> MemoryEstimate:
    """Estimates the memory that a training step needs on an accelerator.

    Args:
        gpu: The accelerator. Fused kernels run only if it supports Triton.
        net: The layers of the model.
        batch: The batch of one rank.
        half: True for half precision; None for the default of the accelerator.
        fused: False if fused kernels are switched off.
    """
    half = gpu.in_half if half is None else half
    fused = fused and gpu.compute_capability >= TRITON_CAPABILITY
    return step_memory(net, batch, half, fused=fused, on_gpu=gpu.is_gpu)


def _peak(net: Network, batch: int, half: bool, fused: bool, forward: float) -> tuple[float, float]:
    """Returns the bytes of activations and of parameter gradients at the time of their largest sum.

    The forward pass ends with all activations in memory. In addition, it holds `forward` bytes that
    the backward pass does not need. The backward pass of a layer frees the layer's activations and
    allocates the gradients of its parameters. It also needs memory for the gradients of the layer's
    input and output and for recomputed activations. After the last layer, all parameter gradients
    are copied to flat buffers.
    """
    width = 2 if half else 4
    kept = sum(layer.kept_bytes(width, fused) for layer in net.layers)
    gradients, peak = 0.0, (batch * kept + forward, 0.0)
    for number, layer in reversed(list(enumerate(net.layers))):
        gradients += sum(t.elements * (width if t.half else 4) for t in layer.tensors)
        remade = max(
            layer.recomputed_elements, net.layers[number - 1].recomputed_elements if number else 0.0
        )
        activations = batch * (kept + width * (layer.moved + remade))
        peak = max(peak, (activations, gradients), key=sum)
        kept -= layer.kept_bytes(width, fused)
    return peak


def usable_bytes(gpu: Accelerator) -> float:
    """Returns how much of an accelerator's memory a training can use, in bytes."""
    return _USABLE * gpu.memory_bytes - _CONTEXT_BYTES


def largest_batch(
    net: Network, gpu: Accelerator, half: bool | None = None, fused: bool = True
) -> int:
    """Returns the largest batch size that fits into memory, or 0 if none fits.

    The arguments are those of `memory_on`.
    """
    sizes = range(1, LARGEST_BATCH + 1)
    return bisect_right(
        sizes, usable_bytes(gpu), key=lambda batch: memory_on(gpu, net, batch, half, fused).total
    )


def check_memory(
    net: Network, gpu: Accelerator, batch: int, half: bool | None = None, fused: bool = True
) -> MemoryEstimate:
    """Estimates the memory of a step and checks that it fits; arguments as in `memory_on`.

    Raises:
        ConfigError: If the batch does not fit. The remedy names the largest batches that fit with and
            without recomputed norms.
    """
    needed = memory_on(gpu, net, batch, half, fused)
    if needed.total > usable_bytes(gpu):
        most = largest_batch(net, gpu, half, fused)
        recomputing = largest_batch(net.recomputing_norms(), gpu, half, fused)
        remedy = f"at most {most:,} fit" if most else "choose a GPU with more memory"
        if recomputing > most:
            remedy += f"; with run.accel.recompute_norms, {recomputing:,}"
        raise ConfigError(
            "--batch-size", batch,
            f"{net.name} needs {needed.total / 1e9:,.0f} GB on one GPU; {gpu.name} has "
            f"{gpu.memory_bytes / 1e9:,.0f} GB, of which {usable_bytes(gpu) / 1e9:,.0f} are usable",
            remedy,
        )  # fmt: skip
    return needed
