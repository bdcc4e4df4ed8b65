"""The finite check.

In: gradient buffers after the exchange. Out: whether every element is a finite number. The sum over
ranks carries any rank's NaN or infinity to all, so every rank comes to the same answer.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def all_finite(buffers: Iterable[Tensor]) -> bool:
    """One pass over each buffer and no copy: the largest magnitude is NaN or inf iff one is."""
    peaks = [
        torch.linalg.vector_norm(buffer, ord=float("inf")) for buffer in buffers if buffer.numel()
    ]
    return not peaks or bool(torch.isfinite(torch.stack(peaks)).all())
