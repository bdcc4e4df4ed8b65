"""Triton's interpreter on the CPU, for tests in a process of their own.

Import this before any module with kernels. They then run in Python, element by element, which checks
their logic, but neither races nor rounding.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _patch_with_index(tensor: Any, scope: Any) -> None:
    """Triton 3.6 takes loop bounds by int() of a one-element array, which NumPy 2.4 refuses."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch_with_index
