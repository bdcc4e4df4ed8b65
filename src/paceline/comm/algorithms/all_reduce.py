"""`AllReduce`: the one interface of all algorithms.

In: a contiguous 1-D tensor on every rank, of one size and number format. Out: the same tensor, holding
the sum over ranks, bit-identical on all of them.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from paceline.core.errors import CommError

FORMATS = (torch.float32, torch.float16, torch.bfloat16)


class AllReduce(Protocol):
    """One way to sum a buffer over all ranks."""

    @property
    def name(self) -> str: ...

    def all_reduce(self, buffer: Tensor) -> None:
        """Replaces `buffer` by its sum over ranks. Every rank calls this, in the same order."""
        ...


def check_buffer(buffer: Tensor) -> None:
    """Fails on what cannot travel as one message."""
    if buffer.dim() != 1 or not buffer.is_contiguous():
        raise CommError(
            f"an all-reduce of a tensor of shape {tuple(buffer.shape)} and strides "
            f"{buffer.stride()}: a buffer must be 1-D and contiguous",
            "pass tensor.contiguous().view(-1), or a view of a flat buffer",
        )
    if buffer.dtype not in FORMATS:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in FORMATS)
        raise CommError(
            f"an all-reduce of {str(buffer.dtype).removeprefix('torch.')}", f"use one of: {known}"
        )
