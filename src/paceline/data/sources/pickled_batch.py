"""A batch of CIFAR's Python version, read without running anything that it says.

In: a pickle as Python 2 and NumPy wrote it: a table with `data` and `labels`. Out: the bytes of the
array, its shape, and the labels. A pickle may call whatever it names; this one gets stand-ins for the
three names that an array needs, and any other name is an error.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any


class _Array:
    """Keeps the state that NumPy's array would have taken on."""

    shape: tuple[int, ...] = ()
    content: bytes = b""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self.shape, element, fortran_order, self.content = state
        if not isinstance(element, _Element) or element.code not in (b"u1", "u1") or fortran_order:
            raise pickle.UnpicklingError("its array is not of bytes in C order")


class _Element:
    """In place of the array's dtype."""

    def __init__(self, code: object, *_: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        """Byte order and alignment: nothing to a byte."""


def _reconstruct(*_: object) -> _Array:
    return _Array()


_STAND_INS = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Element,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _STAND_INS[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}") from None


def _check_memo(content: bytes) -> None:
    """Raises where a length or a place in the memo is beyond what the file can fill: the unpickler
    would allocate as much memory as they claim. `genops` checks the lengths."""
    for operation, argument, _ in pickletools.genops(content):
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > len(content):
            raise pickle.UnpicklingError("its memo is larger than the file")


def read_pickled_batch(content: bytes) -> tuple[tuple[int, ...], bytes, list[int]]:
    """Shape and bytes of the array, and the labels; ValueError where `content` is anything else."""
    try:
        _check_memo(content)
        table = _Unpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # damaged bytes make the unpickler raise almost anything
        raise ValueError(f"is not a pickled batch: {error}") from error
    if not isinstance(table, dict):
        raise ValueError("is not a pickled batch: no table in it")
    data, labels = table.get(b"data"), table.get(b"labels")
    if not isinstance(data, _Array) or not isinstance(labels, list):
        raise ValueError("is not a pickled batch: no data and labels in it")
    return data.shape, data.content, labels
