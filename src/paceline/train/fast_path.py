"""`FastPath`: fused kernels, torch.compile and CUDA graphs, each where it helps.

`choose_fast_path` returns the function that computes a forward pass, whether micro-steps are captured
in CUDA graphs, and a description of what was chosen. A switch that cannot be obeyed is refused.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.config import RunSettings
from paceline.core.errors import ConfigError
from paceline.models.resnet import PADDED_CHANNELS, ResidualBlock, fuse_norms, use_torch_norms

Forward = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class FastPath:
    """What was chosen for one run."""

    forward: Forward
    channels_last: bool
    fused_norm: bool
    compile: str
    graphs: bool
    remark: str = ""
    image_channels: int | None = None

    def describe(self) -> str:
        def switch(on: bool) -> str:
            return "on" if on else "off"

        return (
            f"{'NHWC' if self.channels_last else 'NCHW'}, fused norms {switch(self.fused_norm)}, "
            f"compile {self.compile}, CUDA graphs {switch(self.graphs)}{self.remark}"
        )


def choose_fast_path(
    settings: RunSettings,
    model: nn.Module,
    device: torch.device,
    triton_problem: str,
    *,
    shared_gpu: bool = False,
) -> FastPath:
    """Decides the switches and prepares `model` for them. `triton_problem`: why kernels cannot run.
    `shared_gpu`: other ranks use the same GPU; cuDNN's batch norm hangs beside their collectives."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        # Shapes hardly ever change in training: the search for the fastest algorithm pays at once.
        torch.backends.cudnn.benchmark = True
    fused = _choose_fused(settings, model, triton_problem)
    how = settings.compile
    if how == "auto":
        how = "model" if on_gpu and not fused else "off"
    # The exchange is between the graphs, so they work with any number of ranks and any backend.
    graphs = settings.cuda_graphs == "on" or (settings.cuda_graphs == "auto" and on_gpu)
    if graphs and not on_gpu:
        raise ConfigError("run.cuda_graphs", "on", f"needs a GPU, not {device}", "use 'auto'")
    # The fused stem takes images with a fourth channel of zeros, which GPUs convolve faster than three.
    channels = PADDED_CHANNELS if fused and getattr(model, "pads_images", False) else None
    remark = f" (Triton: {triton_problem})" if on_gpu and triton_problem else ""
    if on_gpu and shared_gpu and use_torch_norms(model):
        remark += ", no batch norm by cuDNN (shared GPU)"
    forward = compiled(model, how)
    return FastPath(forward, settings.channels_last, fused, how, graphs, remark, channels)


def _choose_fused(settings: RunSettings, model: nn.Module, problem: str) -> bool:
    if not fuse_norms(model, False):
        problem = problem or "this model has no fused form"
    elif not settings.channels_last:
        problem = problem or "needs run.channels_last"
    if settings.fused_norm == "on" and problem:
        raise ConfigError("run.fused_norm", "on", problem, "use 'auto'")
    if settings.fused_norm == "off" or problem or settings.compile not in ("auto", "off"):
        return False
    return fuse_norms(model, True) > 0


def compiled(model: nn.Module, how: str) -> Forward:
    """The forward pass under torch.compile: not at all, block by block, or as a whole.

    Static shapes: a batch of another size, such as the run's last, compiles once more.
    """
    if how == "model":
        # A model of its own name in the compiler's eyes: evaluation calls the plain one.
        forward: Forward = torch.compile(model, dynamic=False)
        return forward
    if how == "blocks":
        blocks = [module for module in model.modules() if isinstance(module, ResidualBlock)]
        if not blocks:
            raise ConfigError(
                "run.compile", how, "this model has no residual blocks", "use 'model' or 'off'"
            )
        # One code object serves blocks of many shapes; each gets a version of its own.
        torch._dynamo.config.recompile_limit = max(64, 4 * len(blocks))
        for block in blocks:
            block.compile(dynamic=False)
    return model


# Whether Triton's kernels can run here.
#
# In: a device. Out: nothing, or why not: no package, no C compiler in a slim container, a GPU too
# old. One small kernel is built and launched: versions and capabilities listed in code would grow
# old.


@functools.cache
def triton_problem(device: torch.device) -> str:
    """Empty where kernels run. A CPU has no use for them and is asked nothing."""
    if device.type != "cuda":
        return "needs a GPU"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    try:
        from paceline.data.device.kernels import normalized

        pixel = torch.ones((1, 1, 1, 1), dtype=torch.uint8, device=device)
        one = torch.ones((1, 1, 1, 1), device=device)
        value = normalized(pixel, one, one, torch.float32, 0)
        return "" if float(value) == 2.0 else "a kernel gave a wrong result"
    except Exception as error:  # noqa: BLE001  (compilers and drivers raise what they like)
        lines = str(error).splitlines()
        return f"no kernel can be built: {lines[0][:160] if lines else type(error).__name__}"
