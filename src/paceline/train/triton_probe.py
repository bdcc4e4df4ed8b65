"""Whether Triton's kernels can run here.

In: a device. Out: nothing, or why not: no package, no C compiler in a slim container, a GPU too old. One
small kernel is built and launched: versions and capabilities listed in code would grow old.
"""

from __future__ import annotations

import functools
import importlib.util

import torch


@functools.cache
def triton_problem(device: torch.device) -> str:
    """Empty where kernels run. A CPU has no use for them and is asked nothing."""
    if device.type != "cuda":
        return "needs a GPU"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    try:
        from paceline.data.normalize_kernel import normalized

        pixel = torch.ones((1, 1, 1, 1), dtype=torch.uint8, device=device)
        one = torch.ones((1, 1, 1, 1), device=device)
        value = normalized(pixel, one, one, torch.float32, 0)
        return "" if float(value) == 2.0 else "a kernel gave a wrong result"
    except Exception as error:  # noqa: BLE001  (compilers and drivers raise what they like)
        lines = str(error).splitlines()
        return f"no kernel can be built: {lines[0][:160] if lines else type(error).__name__}"
