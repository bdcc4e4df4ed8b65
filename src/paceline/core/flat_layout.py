"""`FlatLayout`: how many tensors lie in one contiguous buffer.

In: the tensors' names, shapes and number format, in the order in which they shall lie. Out: for
each its offset and length in elements, and the padded length of the whole. Precision, comm and
optim share this one layout, so that an element has the same place in gradients, masters and
momentum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# 32 elements are 128 bytes of float32 and 64 of the 16-bit formats; a tensor that starts on such a
# boundary is read in full-width vector loads on every device.
DEFAULT_ALIGN = 32


@dataclass(frozen=True)
class TensorSpec:
    """A tensor by name and shape. `dtype` is the format's plain name, such as `float32`."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.shape):
            raise ValueError(f"tensor {self.name!r}: shape {self.shape} has a negative size")

    @property
    def length(self) -> int:
        """Number of elements; a scalar has one."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Slot:
    """The place of one tensor: elements `offset` to `offset + length`."""

    spec: TensorSpec
    offset: int

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def length(self) -> int:
        return self.spec.length

    @property
    def stop(self) -> int:
        return self.offset + self.spec.length


@dataclass(frozen=True)
class FlatLayout:
    """Tensors of one number format laid end to end, each start aligned, the whole padded."""

    slots: tuple[Slot, ...]
    dtype: str
    length: int
    align: int

    @classmethod
    def build(cls, specs: Sequence[TensorSpec], *, align: int = DEFAULT_ALIGN) -> FlatLayout:
        """Lays `specs` out in the order given. All must have one format, and names must differ."""
        if align < 1:
            raise ValueError(f"align = {align}: must be at least 1")
        formats = {spec.dtype for spec in specs}
        if len(formats) > 1:
            raise ValueError(f"one layout has one number format, not {sorted(formats)}")
        names = [spec.name for spec in specs]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"tensor names must differ; repeated: {twice}")
        slots, offset = [], 0
        for spec in specs:
            slots.append(Slot(spec, offset))
            offset += -(-spec.length // align) * align
        return cls(tuple(slots), next(iter(formats), "float32"), offset, align)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots)

    def __len__(self) -> int:
        return len(self.slots)
