"""Triton's interpreter on the CPU, for tests in separate processes.

Import this before any module with kernels. They then run in Python, element by element, which checks
their logic, but neither races nor rounding.
"""

from __future__ import annotations

import functools
import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import triton.language as tl
from triton.runtime import interpreter

_patch, _patch_lang = interpreter._patch_lang_tensor, interpreter._patch_lang


def _patch_with_index(tensor: Any, scope: Any) -> None:
    """Triton 3.6 takes loop bounds by int() of a one-element array, which NumPy 2.4 refuses."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def _patch_once(fn: Any) -> Any:
    """A function that a kernel calls finds the language patched; Triton looks through all of it again,
    which takes a third of the time."""
    unpatched = any(tl.core.is_builtin(language.load) for language in _languages(fn))
    return _patch_lang(fn) if unpatched else interpreter._LangPatchScope()


@functools.cache
def _languages(fn: Any) -> list[Any]:
    """The modules that Triton patches for a function."""
    return [value for value in fn.__globals__.values() if value is tl or value is tl.core]


def _numpy_type(of: Any) -> Any:
    """Triton makes a table of all types for each look-up."""
    if isinstance(of, tl.block_type):
        of = of.element_ty
    return _find_numpy_type(of) if isinstance(of, tl.pointer_type) else _scalar_numpy_type(of)


_find_numpy_type = interpreter._get_np_dtype
_scalar_numpy_type = functools.cache(_find_numpy_type)
interpreter._get_np_dtype = _numpy_type
# Every sum of 32-bit integers a second time in 64 bits, a third of the time: a compiled kernel has none
# of this, and indices of small tensors do not overflow.
object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
interpreter._patch_lang_tensor = _patch_with_index
interpreter._patch_lang = _patch_once
