"""The two collectives that torch renamed: `reduce_scatter_single` and `all_gather_single`.

In: flat tensors and a group. Out: the collective, under the name that this torch has; the old
names warn from torch 2.13 on, and 2.11 does not know the new ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def _either(new: str, old: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(dist, new if hasattr(dist, new) else old)
    return found


_reduce_scatter = _either("reduce_scatter_single", "reduce_scatter_tensor")
_all_gather = _either("all_gather_single", "all_gather_into_tensor")


def reduce_scatter_single(output: Tensor, source: Tensor, group: ProcessGroup) -> None:
    """output ← this member's stretch of the sum of `source` over the group."""
    _reduce_scatter(output, source, group=group)


def all_gather_single(output: Tensor, source: Tensor, group: ProcessGroup) -> None:
    """output ← the members' `source`, one behind the other."""
    _all_gather(output, source, group=group)
