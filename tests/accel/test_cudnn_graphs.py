"""The cuDNN library that torch has loaded, or one clear line if it cannot be used.

`test_kernels.py` checks that the code of graphs is that of the last GPU tests: `test_cudnn_gpu.py` and
`test_products_gpu.py` run cuDNN, and `cudnn_cases.py` computes the graphs on a CPU.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from paceline.accel import cudnn_graphs
from paceline.accel.cudnn_graphs import CudnnError


class Functions(SimpleNamespace):
    """A library with all functions but those that are named."""

    def __init__(self, *without: str, version: int = 91900) -> None:
        names = set(cudnn_graphs._FUNCTIONS) - set(without)
        super().__init__(**{name: SimpleNamespace() for name in names})
        if "cudnnGetVersion" in names:
            self.cudnnGetVersion = lambda: version


@pytest.mark.parametrize(
    ("torch_has", "loaded", "reason"),
    [
        (None, Functions(), "this build of torch has no cuDNN"),
        (8907, Functions(), "torch has cuDNN 8907, older than 90000"),
        (RuntimeError("compiled\nfor another"), Functions(), "compiled for another"),
        (91900, OSError("no such\nfile"), r"libcudnn.so.9 cannot be loaded \(no such file\)"),
        (91900, Functions("cudnnBackendExecute"), "libcudnn.so.9 has no cudnnBackendExecute"),
        (91900, Functions(version=91000), "has version 91000, and torch uses 91900"),
    ],
    ids=("cpu", "old", "broken", "missing", "symbol", "other"),
)
def test_a_library_that_cannot_be_used_has_one_clear_line(
    torch_has: object, loaded: object, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def given(value: object) -> object:
        if isinstance(value, Exception):
            raise value
        return value

    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: given(torch_has))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: given(loaded))
    cudnn_graphs._library.cache_clear()
    with pytest.raises(CudnnError, match=reason) as caught:
        cudnn_graphs.version()
    assert "\n" not in str(caught.value)


def test_the_library_of_torch_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Functions())
    cudnn_graphs._library.cache_clear()
    assert cudnn_graphs.version() == 91900
    cudnn_graphs._library.cache_clear()
