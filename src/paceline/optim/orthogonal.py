"""From a matrix to the nearest one with equal singular values, by products of matrices alone.

In: gradients of filters and linear layers. Out: tensors of the same shapes, strides and norms whose
singular values are about equal, so that a step moves a layer in all directions alike. Newton and Schulz's
iteration with the quintic of K. Jordan et al. (2024), which trades exactness for speed: values that are
not tiny come out between 0.68 and 1.2, before the norm is put back. Nothing is read back from a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ITERATIONS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315
# Squares of what is below leave fp32's range: the norm comes out too small, the iteration would diverge.
_TINY = 1e-15


def is_matrix(tensor: Tensor) -> bool:
    """Whether there is anything to make orthogonal: at least two rows and two columns."""
    return tensor.dim() > 1 and len(tensor) > 1 and tensor.numel() > len(tensor)


@torch.no_grad()
def orthogonalised(tensors: Sequence[Tensor], still: Sequence[Tensor] = ()) -> list[Tensor]:
    """In fp32, with the norms that the tensors had; 0 stays 0, and what is not finite becomes NaN.

    `still`: for each tensor a flag on its device; where it is set, zeros come out whatever went in.
    """
    if still and len(still) != len(tensors):
        raise ValueError(f"{len(still)} flags for {len(tensors)} tensors")
    made: list[Tensor] = [torch.empty(0)] * len(tensors)
    alike: dict[tuple[int, ...], list[int]] = {}
    for place, tensor in enumerate(tensors):
        alike.setdefault(tuple(_matrix(tensor).shape), []).append(place)
    for places in alike.values():
        # Tensors of one shape go together: for small ones launching a kernel is the cost.
        stacked = torch.stack([_matrix(tensors[i]) for i in places])
        norms = _norms(stacked)
        unit = stacked / norms.clamp(min=_TINY)
        turned = unit.shape[1] > unit.shape[2]
        found = _iterated(unit.mT if turned else unit)
        found = (found.mT if turned else found) * (norms / _norms(found).clamp(min=_TINY))
        if still:
            flags = torch.stack([still[i] for i in places])
            found = torch.where(flags[:, None, None], 0.0, found)
        for i, matrix in zip(places, found.contiguous().unbind(), strict=True):
            made[i] = _like(matrix, tensors[i])
    return made


def _norms(matrices: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True)
    return norms


def _iterated(wide: Tensor) -> Tensor:
    """Of matrices with norms of at most 1. Tensor cores do it in bf16, whose range it stays in."""
    x = wide.to(torch.bfloat16) if wide.is_cuda else wide
    for _ in range(ITERATIONS):
        square = x @ x.mT
        polynomial = torch.baddbmm(square, square, square, beta=_B, alpha=_C)
        x = torch.baddbmm(x, polynomial, x, beta=_A)
    return x.float()


def _matrix(tensor: Tensor) -> Tensor:
    """A row for each output, in fp32; columns in the order of memory, which changes nothing."""
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        tensor = tensor.permute(0, 2, 3, 1)
    return tensor.flatten(1).float()


def _like(matrix: Tensor, tensor: Tensor) -> Tensor:
    """The inverse of `_matrix`."""
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        outputs, inputs, *window = tensor.shape
        return matrix.view(outputs, *window, inputs).permute(0, 3, 1, 2)
    return matrix.view(tensor.shape)
