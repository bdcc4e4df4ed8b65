"""`Policy`: which number format computes, and how a model is made ready for it.

In: the settings and the device. Out: a model whose convolutions and linear layers hold half-precision
weights, while biases and normalisation keep fp32 parameters, and the context in which it computes.
The fp32 masters are the optimizer's.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.errors import ConfigError
from paceline.precision.settings import PrecisionSettings

_FORMATS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# The layers that compute in matrix units; everything else has few parameters, and gains from fp32.
_MATRIX_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Policy:
    """`dtype` is the format of activations, matrix weights and their gradients."""

    name: str
    dtype: torch.dtype
    device: torch.device

    @property
    def is_half(self) -> bool:
        return self.dtype != torch.float32

    @property
    def scales_loss(self) -> bool:
        """fp16 loses small gradients to underflow; bf16 and fp32 have exponents enough."""
        return self.dtype == torch.float16

    def convert(self, model: nn.Module) -> nn.Module:
        """Rounds the matrix weights in place; a weight shared with another layer stays shared."""
        if self.is_half:
            for weight in matrix_weights(model):
                weight.data = weight.data.to(self.dtype)
        return model

    def compute(self) -> AbstractContextManager[object]:
        """Around forward passes: casts inputs and biases, and computes losses in fp32."""
        if not self.is_half:
            return nullcontext()
        # Without the cache: a captured graph must cast anew, because parameters change under it.
        return torch.autocast(self.device.type, self.dtype, cache_enabled=False)


def matrix_weights(model: nn.Module) -> list[nn.Parameter]:
    """The weights that travel and compute in half precision, each once."""
    found: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, _MATRIX_LAYERS):
            assert isinstance(module.weight, nn.Parameter)
            found.setdefault(id(module.weight), module.weight)
    return list(found.values())


def choose_policy(settings: PrecisionSettings, device: torch.device) -> Policy:
    """Refuses a format that the device cannot compute in, before anything is built."""
    name = settings.amp_dtype
    if name == "auto":
        name = "fp16" if device.type == "cuda" else "fp32"
    dtype = _FORMATS[name]
    if dtype != torch.float32:
        problem = _problem(dtype, device)
        if problem:
            raise ConfigError(
                "precision.amp_dtype", name, f"{device} cannot compute in it ({problem})",
                "use --amp-dtype fp32",
            )  # fmt: skip
    return Policy(name, dtype, device)


def allow_tf32(settings: PrecisionSettings) -> None:
    """For the whole process: torch keeps these switches globally."""
    torch.backends.cuda.matmul.allow_tf32 = settings.tf32
    torch.backends.cudnn.allow_tf32 = settings.tf32


def _problem(dtype: torch.dtype, device: torch.device) -> str:
    """One small convolution, forward and backward: tables of what devices can do grow old."""
    try:
        image = torch.ones(2, 4, 4, 4, dtype=dtype, device=device)
        weight = torch.ones(4, 4, 3, 3, dtype=dtype, device=device, requires_grad=True)
        out: Tensor = F.conv2d(image, weight)
        out.float().sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""
