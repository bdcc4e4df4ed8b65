"""`StagedGradients`: gradients as an update can walk through them.

In: gradients of any strides and floating format. Out: the same where they lie in memory as their
parameters do, else copies in memory that stays, which a captured graph may know.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.errors import RunError
from paceline.optim.update_rows import FORMATS, same_strides


class StagedGradients:
    """Of one optimizer; copies are kept by the parameter's index."""

    def __init__(self) -> None:
        self._copies: dict[int, Tensor] = {}

    def of(self, index: int, group: int, parameter: Tensor, gradient: Tensor) -> Tensor:
        """The gradient with the parameter's strides, in fp32, fp16 or bf16."""
        if gradient.layout != torch.strided:
            raise RunError(
                f"sparse gradient for a parameter of shape {tuple(parameter.shape)} in group {group}",
                "make it dense (nn.Embedding(sparse=False)), or give it an optimizer of its own",
            )
        if same_strides(gradient, parameter) and gradient.dtype in FORMATS:
            return gradient
        copy = self._copies.get(index)
        kind = gradient.dtype if gradient.dtype in FORMATS else torch.float32
        if copy is None or copy.dtype != kind:
            copy = torch.empty_like(parameter, dtype=kind, memory_format=torch.preserve_format)
            self._copies[index] = copy
        return copy.copy_(gradient)
