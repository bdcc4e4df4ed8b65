"""Lets tests that are written for two GPUs run on CPUs: in a rank's process, every device is the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed

CPU = torch.device("cpu")
GPUS = 2


def count_two_gpus() -> None:
    """Call it before the tests are imported: their conditions are decorators."""
    original = common_distributed.skip_if_lt_x_gpu

    def skip_if_fewer(wanted: int, **named: Any) -> Any:
        return original(wanted, **named) if wanted > GPUS else lambda test: test

    common_distributed.skip_if_lt_x_gpu = skip_if_fewer
    common_distributed.skip_if_no_gpu = lambda test: test


def use_cpu() -> None:
    """In the process of a rank, for the rest of its life."""
    _CudaIsCpu().__enter__()
    for name in ("set_device", "manual_seed", "synchronize"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: GPUS
    nn.Module.cuda = lambda module, *_: module  # type: ignore[assignment, method-assign]
    nn.Module.to = _module_to(nn.Module.to)  # type: ignore[method-assign]


def on_cpu(wrapper: type[Any], **options: Any) -> type[Any]:
    """`wrapper` with `options`, without the GPUs that a test names."""

    class OnCpu(wrapper):  # type: ignore[misc]
        def __init__(self, module: Any, *args: Any, **named: Any) -> None:
            named |= {"device_ids": None, "output_device": None}
            super().__init__(module, *args[2:], **named, **options)

    # Tests pickle models: a class is found by its name.
    globals()["OnCpu"] = OnCpu
    OnCpu.__qualname__ = "OnCpu"
    return OnCpu


class _CudaIsCpu(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = {n: _cpu(v) if n == "device" else v for n, v in (kwargs or {}).items()}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = (args[0], *map(_cpu, args[1:]))
        return func(*args, **named)


def _module_to(original: Any) -> Any:
    def to(module: nn.Module, *args: Any, **named: Any) -> Any:
        return original(module, *map(_cpu, args), **{n: _cpu(v) for n, v in named.items()})

    return to


def _cpu(value: Any) -> Any:
    """The CPU for what names a device; other values as they are."""
    is_name = isinstance(value, str) and value.startswith("cuda")
    return CPU if type(value) is int or is_name or isinstance(value, torch.device) else value
