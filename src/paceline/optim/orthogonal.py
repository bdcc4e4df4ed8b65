"""Orthogonalizes matrices by Newton-Schulz iteration, on one rank or divided among ranks.

Matrices of one shape are batched. With `SharedProducts`, each rank computes a part of the matrices.
The results are gathered in the dtype of the computation (fp32 on CPUs, bf16 on GPUs), so no accuracy
is lost. Every rank computes the norms and the scaling of all matrices, because this is cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

ITERATIONS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315
# Squares of smaller values underflow in fp32. The norm would be too small, and the iteration diverge.
_TINY = 1e-15


def is_matrix(tensor: Tensor) -> bool:
    """Returns True if the tensor has at least two rows (outputs) and two columns."""
    return tensor.dim() > 1 and len(tensor) > 1 and tensor.numel() > len(tensor)


def product_cost(rows: int, columns: int) -> int:
    """Returns the number of multiplications in one iteration on a matrix, up to a constant factor."""
    small, large = min(rows, columns), max(rows, columns)
    return small * small * (2 * large + small)


def share_out(shapes: Sequence[tuple[int, int]], ranks: int) -> list[int]:
    """Assigns matrix products to ranks: the costliest first, each to the rank with the least work.

    The largest load of a rank is at most 4/3 of the smallest possible value (Graham 1969).

    Args:
        shapes: Rows and columns of each matrix.
        ranks: Number of ranks.

    Returns:
        The rank of each matrix. Equal arguments give equal results on all ranks.
    """
    owners, load = [0] * len(shapes), [0] * ranks
    by_cost = sorted(range(len(shapes)), key=lambda i: (-product_cost(*shapes[i]), i))
    for i in by_cost:
        owner = load.index(min(load))
        owners[i] = owner
        load[owner] += product_cost(*shapes[i])
    return owners


@dataclass(eq=False)
class SharedProducts:
    """Divides the matrix products of Muon among ranks, and gathers the results.

    Attributes:
        rank: Index of this rank.
        ranks: Number of ranks.
        gather: A collective. `gather(rows, lengths)` completes a tensor with one row per rank, in
            which each rank has filled its own row. Row r has `lengths[r]` valid elements. A CUDA graph
            can capture `gather` if the backend supports this.
    """

    rank: int
    ranks: int
    gather: Callable[[Tensor, Sequence[int]], None]
    # Memory whose addresses must not change, because captured graphs use it.
    _rows: dict[tuple[int, torch.dtype, torch.device], Tensor] = field(default_factory=dict)

    def rows(self, width: int, like: Tensor) -> Tensor:
        """Returns memory of shape (ranks, width), with the dtype and device of `like`."""
        key = (width, like.dtype, like.device)
        if key not in self._rows:
            self._rows[key] = torch.zeros(self.ranks, width, dtype=like.dtype, device=like.device)
        return self._rows[key]


@dataclass(frozen=True)
class _Batch:
    """Matrices of one shape, sorted by the rank that computes them.

    Attributes:
        places: Positions of the matrices in the list of tensors.
        norms: Norms of all matrices of the batch.
        own: The matrices that this rank computes, divided by their norms.
        turned: True if the matrices in `own` are transposed, to have no more rows than columns.
        counts: Number of matrices that each rank computes.
    """

    places: list[int]
    norms: Tensor
    own: Tensor
    turned: bool
    counts: list[int]

    @property
    def elements(self) -> int:
        return self.own.shape[1] * self.own.shape[2]


@torch.no_grad()
def orthogonalize(
    tensors: Sequence[Tensor],
    still: Sequence[Tensor] = (),
    shared: SharedProducts | None = None,
) -> list[Tensor]:
    """Makes the singular values of each matrix about equal and keeps the norm of the matrix.

    Uses Newton-Schulz iteration with the quintic polynomial of K. Jordan et al., which trades exactness
    for speed. Singular values that are not tiny end between 0.68 and 1.2, before the norm is restored.
    A zero matrix stays zero; non-finite input gives NaN. Does not synchronize with the device.

    Args:
        tensors: Matrices with one row per output; dimensions after the first are flattened.
        still: One flag per tensor, on the device of the tensor. If a flag is set, the result is zero.
        shared: If set, all ranks pass the same tensors. Each rank computes a part and gets all results.

    Returns:
        fp32 tensors of the same shapes and strides.

    Raises:
        ValueError: If the number of flags is wrong.
    """
    if still and len(still) != len(tensors):
        raise ValueError(f"{len(still)} flags for {len(tensors)} tensors")
    shapes = [(len(tensor), tensor[0].numel()) for tensor in tensors]
    alike: dict[tuple[int, int], list[int]] = {}
    for place, shape in enumerate(shapes):
        alike.setdefault(shape, []).append(place)
    results: list[Tensor] = [torch.empty(0)] * len(tensors)

    def finish(batch: _Batch, iterated: Tensor) -> None:
        wide = iterated.float()
        wide = (wide.mT if batch.turned else wide) * (batch.norms / _norms(wide).clamp(min=_TINY))
        if still:
            flags = torch.stack([still[i] for i in batch.places])
            wide = torch.where(flags[:, None, None], 0.0, wide)
        for i, matrix in zip(batch.places, wide.contiguous().unbind(), strict=True):
            results[i] = like_tensor(matrix, tensors[i])

    if shared is None or shared.ranks == 1:
        # One batch at a time, to limit temporary memory.
        for places in alike.values():
            batch = _batch(tensors, places, [0] * len(tensors), 0, 1)
            finish(batch, _iterated(batch.own))
        return results
    owners = share_out(shapes, shared.ranks)
    batches = [
        _batch(tensors, sorted(places, key=lambda i: owners[i]), owners, shared.rank, shared.ranks)
        for places in alike.values()
    ]
    for batch, iterated in zip(batches, _gathered(batches, shared), strict=True):
        finish(batch, iterated)
    return results


def _batch(
    tensors: Sequence[Tensor], places: list[int], owners: Sequence[int], rank: int, ranks: int
) -> _Batch:
    # Tensors of one shape are batched, because kernel launches dominate the cost of small tensors.
    stacked = torch.stack([as_matrix(tensors[i]) for i in places])
    norms = _norms(stacked)
    counts = [sum(owners[i] == r for i in places) for r in range(ranks)]
    first = sum(counts[:rank])
    own = slice(first, first + counts[rank])
    unit = stacked[own] / norms[own].clamp(min=_TINY)
    turned = unit.shape[1] > unit.shape[2]
    return _Batch(places, norms, unit.mT if turned else unit, turned, counts)


def _gathered(batches: Sequence[_Batch], shared: SharedProducts) -> list[Tensor]:
    """Orthogonalizes this rank's matrices, and gathers the results of all ranks by one collective.

    Returns:
        One tensor per batch with all matrices of the batch.
    """
    iterated = [_iterated(batch.own) for batch in batches]
    lengths = [sum(b.counts[r] * b.elements for b in batches) for r in range(shared.ranks)]
    rows = shared.rows(max(lengths), iterated[0])
    mine = torch.cat([matrices.reshape(-1) for matrices in iterated])
    rows[shared.rank, : len(mine)].copy_(mine)
    shared.gather(rows, lengths)
    starts = [0] * shared.ranks
    gathered = []
    for batch, matrices in zip(batches, iterated, strict=True):
        parts = []
        for r, count in enumerate(batch.counts):
            if count:
                stop = starts[r] + count * batch.elements
                parts.append(rows[r, starts[r] : stop].view(count, *matrices.shape[1:]))
                starts[r] = stop
        gathered.append(torch.cat(parts))
    return gathered


def _norms(matrices: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True)
    return norms


def _iterated(wide: Tensor) -> Tensor:
    """Runs the Newton-Schulz iterations on matrices with norms of at most 1; on GPUs in bf16."""
    x = wide.to(torch.bfloat16) if wide.is_cuda else wide
    for _ in range(ITERATIONS if len(wide) else 0):
        square = x @ x.mT
        polynomial = torch.baddbmm(square, square, square, beta=_B, alpha=_C)
        x = torch.baddbmm(x, polynomial, x, beta=_A)
    return x


def as_matrix(tensor: Tensor) -> Tensor:
    """Returns an fp32 matrix with one row per output, whose columns follow the memory order."""
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        tensor = tensor.permute(0, 2, 3, 1)
    return tensor.flatten(1).float()


def like_tensor(matrix: Tensor, tensor: Tensor) -> Tensor:
    """Gives `matrix`, a result of `as_matrix(tensor)`, the shape and memory layout of `tensor`."""
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        outputs, inputs, *window = tensor.shape
        return matrix.view(outputs, *window, inputs).permute(0, 3, 1, 2)
    return matrix.view(tensor.shape)
