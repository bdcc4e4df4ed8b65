"""What a training step keeps in the memory of one GPU, and the largest batch that fits.

In: the layers of a network (`paceline.planner.layers`), a batch, the number format. Out: bytes by
purpose, at the moment of a step that needs most. The model is a count, not a fit: weights in the
format of training, fp32 masters and momentum, the exchange's flat gradients and those that backward has
made so far, the activations that are still kept, the gradients of the maps at hand, the images on the
device, buffers of the matrix library and what the CUDA graph has of its own. Workspaces that cuDNN tries
before the first step are no part of it: they take what is free. `memory_on` takes from the
catalog which of them a chip has, and whether our fused kernels run there, which keep less. A network says
itself whether it computes norms again. How far it is from measured peaks is in docs/planner.md, Accuracy.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import asdict, dataclass

from paceline.core.errors import ConfigError
from paceline.planner.accelerators import Accelerator
from paceline.planner.layers import Network
from paceline.planner.workload import LARGEST_BATCH

_CHANNELS = 3
# Of normalized images where our fused kernels run: a channel of zeros, which GPUs convolve faster.
_PADDED_CHANNELS = 4
# Batches of uint8 images on the device: the one in use and those that are prefetched.
_RESIDENT_BATCHES = 4
# torch gives cuBLAS a buffer for each thread and stream (32 MiB on Hopper, 8 MiB before): forward and
# backward have a thread each, and a CUDA graph is captured on a stream of its own.
_LIBRARY_BYTES = 2.0 * 2**25
# Of the memory that the maker states: context and libraries' buffers take about 2 GB, and an allocator
# cannot fill the rest to the last byte.
_USABLE = 0.95
_CONTEXT_BYTES = 2e9


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one GPU at the peak of a step."""

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
    """`half`: fp16 or bf16 with fp32 masters; otherwise fp32, whose weights are the masters. `fused`: our
    fused kernels run, where the model has them. A CPU has neither graphs nor buffers of cuBLAS."""
    width = 2 if half else 4
    pixels = batch * net.image_size**2
    fused = fused and net.has_fused_form
    channels = _PADDED_CHANNELS if fused and net.pads_images else _CHANNELS
    images = float(pixels * channels * width)
    windows = batch * net.layers[0].windows * width if fused else 0.0
    # The images exist until the end of forward; backward has their windows in their place.
    activations, made = _peak(net, batch, half, fused, images if windows else 0.0)
    flat = net.elements * width
    return MemoryEstimate(
        weights=float(net.elements * width),
        gradients=flat + made,
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
    """Of a step on this chip: `half` is as usual there by default, and `fused` only where Triton runs."""
    half = gpu.in_half if half is None else half
    return step_memory(net, batch, half, fused=fused and gpu.runs_triton, on_gpu=gpu.is_gpu)


def _peak(net: Network, batch: int, half: bool, fused: bool, forward: float) -> tuple[float, float]:
    """Bytes of activations and of parameters' gradients where both together are most. At the end of
    forward all activations are kept, and there are `forward` bytes that backward does not need. Backward
    frees what a layer has kept and makes its gradients, which are gathered into the flat ones when all
    are there; meanwhile the gradients of the layer's input and output exist, and the input or output
    itself where it is computed again."""
    width = 2 if half else 4
    kept = sum(layer.kept_bytes(width, fused) for layer in net.layers)
    made, most = 0.0, (batch * kept + forward, 0.0)
    for number, layer in reversed(list(enumerate(net.layers))):
        made += sum(t.elements * (width if t.half else 4) for t in layer.tensors)
        remade = max(layer.remade, net.layers[number - 1].remade if number else 0.0)
        here = batch * (kept + width * (layer.moved + remade))
        most = max(most, (here, made), key=sum)
        kept -= layer.kept_bytes(width, fused)
    return most


def usable_bytes(gpu: Accelerator) -> float:
    return _USABLE * gpu.memory_bytes - _CONTEXT_BYTES


def largest_batch(
    net: Network, gpu: Accelerator, half: bool | None = None, fused: bool = True
) -> int:
    """0 where not even one image fits; `half` and `fused` as in `memory_on`."""
    sizes = range(1, LARGEST_BATCH + 1)
    return bisect_right(
        sizes, usable_bytes(gpu), key=lambda batch: memory_on(gpu, net, batch, half, fused).total
    )


def check_memory(
    net: Network, gpu: Accelerator, batch: int, half: bool | None = None, fused: bool = True
) -> MemoryEstimate:
    """ConfigError, with the largest batch that fits, and with recomputed norms where these let more fit,
    for one that does not; arguments as `memory_on`."""
    needed = memory_on(gpu, net, batch, half, fused)
    if needed.total > usable_bytes(gpu):
        most = largest_batch(net, gpu, half, fused)
        again = largest_batch(net.recomputing_norms(), gpu, half, fused)
        remedy = f"at most {most:,} fit" if most else "choose a GPU with more memory"
        if again > most:
            remedy += f"; with run.accel.recompute_norms, {again:,}"
        raise ConfigError(
            "--batch-size", batch,
            f"{net.name} needs {needed.total / 1e9:,.0f} GB on one GPU; {gpu.name} has "
            f"{gpu.memory_bytes / 1e9:,.0f} GB, of which {usable_bytes(gpu) / 1e9:,.0f} are usable",
            remedy,
        )  # fmt: skip
    return needed
