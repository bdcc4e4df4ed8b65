"""`WireFormat`: the number format in which a gradient buffer travels.

In: a buffer in fp32 (or in the wire's own format). Out: what travels, and after the sum the buffer
again. fp16 ends at 65504, which a sum over thousands of ranks passes: where asked, each rank divides by
a power of two that is at least the number of ranks, and the sum is multiplied back. Both are exact but
where a number falls below fp16's smallest, 2⁻²⁴.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.errors import ConfigError, nearest
from paceline.plan.fusion_plan import SHORT_WIRES

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
WIRES = tuple(_DTYPES)


@dataclass(frozen=True)
class WireFormat:
    """A number format and a scale, 2^-`shift`, applied before sending."""

    name: str = "float32"
    shift: int = 0

    @classmethod
    def named(cls, name: str, world_size: int = 1, *, scaled: bool | None = None) -> WireFormat:
        """`scaled`: room for a sum over `world_size` ranks; None means for fp16 alone."""
        full = SHORT_WIRES.get(name, name)
        if full not in _DTYPES:
            raise ConfigError("comm.wire", name, "unknown format", nearest(str(name), WIRES))
        wanted = full == "float16" if scaled is None else scaled
        # 2^shift ≥ p: p numbers of up to 65504 / 2^shift cannot add up to more than 65504.
        return cls(full, (world_size - 1).bit_length() if wanted else 0)

    @classmethod
    def for_tensor(cls, tensor: Tensor, name: str) -> WireFormat:
        """Unscaled, for shares of a mean; `auto` is the tensor's own format."""
        return cls.named(str(tensor.dtype).removeprefix("torch.") if name == "auto" else name,
                         scaled=False)  # fmt: skip

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.name]

    @property
    def unit_roundoff(self) -> float:
        """The largest relative error of one rounding."""
        return float(torch.finfo(self.dtype).eps) / 2

    def encode(self, buffer: Tensor, wire: Tensor) -> None:
        """wire ← buffer · 2^-shift, rounded once. The two may be one tensor."""
        if self.shift:
            torch.mul(buffer, 2.0**-self.shift, out=wire)
        elif wire is not buffer:
            wire.copy_(buffer)

    def decode(self, wire: Tensor, buffer: Tensor, divide_by: int = 1) -> None:
        """buffer ← wire · 2^shift / divide_by; exact where that is a power of two."""
        if wire is not buffer:
            buffer.copy_(wire)
        factor = 2.0**self.shift
        if divide_by & (divide_by - 1):
            # One rounding rather than two; the scale itself is exact.
            buffer.mul_(factor / divide_by) if self.shift else buffer.div_(divide_by)
        elif factor != divide_by:
            buffer.mul_(factor / divide_by)
