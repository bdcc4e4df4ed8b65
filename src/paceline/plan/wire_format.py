"""Wire formats: what travels of a buffer's gradients in each, and which may be used.

In: names of formats; elements that are held in 16 and in 32 bits. Out: bytes of the messages, and how
many elements change their format on the way. `auto` is each gradient's own format: nothing is rounded.
The communication module sends gradients of either kind as a message of their own, in the buffer's format.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.core.errors import ConfigError, nearest
from paceline.core.flat_layout import DEFAULT_ALIGN

Floats = npt.NDArray[np.float64]
# The more exact first: of two that end as soon, the earlier one is taken. float32 comes after auto,
# because what is computed in 16 bits gains little from a wider sum and takes twice the bytes.
WIRES = ("auto", "float32", "float16", "bfloat16")
_SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}
# Beside the gradients travel, in fp32, six numbers of the step and one for each tensor.
_SIGNALS = 10


def wire_names(names: Sequence[str]) -> tuple[str, ...]:
    """Full names, each once, the most exact first; ConfigError for others."""
    full = {_SHORT.get(name, name) for name in names}
    for name in names:
        if _SHORT.get(name, name) not in WIRES:
            known = (*WIRES, *_SHORT)
            raise ConfigError("--wire", name, "unknown", nearest(name, known) or "use auto or fp16")
    return tuple(name for name in WIRES if name in full)


def travelling(
    half: npt.ArrayLike, full: npt.ArrayLike, wire: str
) -> tuple[Floats, Floats, Floats]:
    """Bytes of the message with what is held in 16 bits and of that with the rest, and the elements
    that are cast there and back."""
    narrow, wide = np.asarray(half, dtype=np.float64), np.asarray(full, dtype=np.float64)
    width = _WIDTHS.get(wire)
    cast = narrow * (width == 4) + wide * (width == 2)
    return narrow * (width or 2), wide * (width or 4), cast


def padded(elements: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """What tensors take in the flat buffers: each one begins on a boundary."""
    counts = np.asarray(elements, dtype=np.int64)
    return -(-counts // DEFAULT_ALIGN) * DEFAULT_ALIGN


def wide_is_bulk(in_buffers: npt.ArrayLike, wire: str) -> npt.NDArray[np.bool_]:
    """Whether the buffer's algorithm is for what is held in 32 bits, and the one beside it for what is
    held in 16, from padded elements (16 bits, 32 bits). As the communication module has it: before the
    signals are added, and of two as large the 32 bits."""
    half, full = np.asarray(in_buffers)
    narrow, wide, _ = travelling(half, full, wire)
    return np.asarray(wide >= narrow)


def keeps_float32(wire: str) -> bool:
    """Whether what is held in 32 bits travels in 32 bits, so that the signals may ride along."""
    return wire in ("auto", "float32")


def signal_bytes(tensors: int) -> int:
    """Of what a step's last buffer carries besides gradients."""
    return 4 * (_SIGNALS + tensors)
