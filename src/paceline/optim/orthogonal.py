"""Orthogonalized matrices by Newton-Schulz iteration, on one rank or shared out among many.

Matrices of one shape are batched. With `SharedProducts` each rank iterates on its share of the matrices,
and the results are gathered in the format in which they were computed (fp32 on CPUs, bf16 on GPUs),
which loses nothing; norms and scaling, which are cheap, stay on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

ITERATIONS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315
# Squares of smaller numbers underflow in fp32: the norm would be too small and the iteration diverge.
_TINY = 1e-15


def is_matrix(tensor: Tensor) -> bool:
    """Whether the tensor has at least two rows (outputs) and two columns."""
    return tensor.dim() > 1 and len(tensor) > 1 and tensor.numel() > len(tensor)


def product_cost(rows: int, columns: int) -> int:
    """Multiplications of one iteration on a matrix; only ratios matter."""
    small, large = min(rows, columns), max(rows, columns)
    return small * small * (2 * large + small)


def share_out(shapes: Sequence[tuple[int, int]], ranks: int) -> list[int]:
    """The rank of each matrix: the costliest first, each to the rank with the least work so far, which
    is at most 4/3 of the best division (Graham 1969). Depends on nothing but its arguments."""
    owners, load = [0] * len(shapes), [0] * ranks
    by_cost = sorted(range(len(shapes)), key=lambda i: (-product_cost(*shapes[i]), i))
    for i in by_cost:
        owner = load.index(min(load))
        owners[i] = owner
        load[owner] += product_cost(*shapes[i])
    return owners


@dataclass(eq=False)
class SharedProducts:
    """The ranks that share products out, and how they exchange them.

    `gather(rows, lengths)` completes a tensor with one row for each rank, of which this rank has
    filled its own; row r has `lengths[r]` elements that count. All ranks call it alike, and it may be
    captured in a CUDA graph if its collective may.
    """

    rank: int
    ranks: int
    gather: Callable[[Tensor, Sequence[int]], None]
    # Memory at constant addresses, which captured graphs hold.
    _rows: dict[tuple[int, torch.dtype, torch.device], Tensor] = field(default_factory=dict)

    def rows(self, width: int, like: Tensor) -> Tensor:
        key = (width, like.dtype, like.device)
        if key not in self._rows:
            self._rows[key] = torch.zeros(self.ranks, width, dtype=like.dtype, device=like.device)
        return self._rows[key]


@dataclass(frozen=True)
class _Batch:
    """Matrices of one shape, in order of the ranks that own them: where they come from, their norms,
    and those of this rank, divided by their norms and not higher than wide."""

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
    """Tensors of the same shapes, strides and norms whose singular values are about equal, in fp32.

    Newton-Schulz iteration with the quintic polynomial of K. Jordan et al., which trades exactness
    for speed: singular values that are not tiny end between 0.68 and 1.2, before the norm is
    restored. Zero stays zero; non-finite input gives NaN. `still` holds a flag per tensor on its
    device; where it is set the result is zero. With `shared`, every rank passes the same tensors and
    gets all results. Does not synchronize with the device.
    """
    if still and len(still) != len(tensors):
        raise ValueError(f"{len(still)} flags for {len(tensors)} tensors")
    shapes = [(len(tensor), tensor[0].numel()) for tensor in tensors]
    alike: dict[tuple[int, int], list[int]] = {}
    for place, shape in enumerate(shapes):
        alike.setdefault(shape, []).append(place)
    made: list[Tensor] = [torch.empty(0)] * len(tensors)

    def finish(batch: _Batch, found: Tensor) -> None:
        found = found.float()
        found = (found.mT if batch.turned else found) * (
            batch.norms / _norms(found).clamp(min=_TINY)
        )
        if still:
            flags = torch.stack([still[i] for i in batch.places])
            found = torch.where(flags[:, None, None], 0.0, found)
        for i, matrix in zip(batch.places, found.contiguous().unbind(), strict=True):
            made[i] = like_tensor(matrix, tensors[i])

    if shared is None or shared.ranks == 1:
        # One after the other: temporary memory of one batch only.
        for places in alike.values():
            batch = _batch(tensors, places, [0] * len(tensors), 0, 1)
            finish(batch, _iterated(batch.own))
        return made
    owners = share_out(shapes, shared.ranks)
    batches = [
        _batch(tensors, sorted(places, key=lambda i: owners[i]), owners, shared.rank, shared.ranks)
        for places in alike.values()
    ]
    for batch, found in zip(batches, _gathered(batches, shared), strict=True):
        finish(batch, found)
    return made


def _batch(
    tensors: Sequence[Tensor], places: list[int], owners: Sequence[int], rank: int, ranks: int
) -> _Batch:
    # Tensors of one shape are batched: the cost of small ones is the kernel launch.
    stacked = torch.stack([as_matrix(tensors[i]) for i in places])
    norms = _norms(stacked)
    counts = [sum(owners[i] == r for i in places) for r in range(ranks)]
    first = sum(counts[:rank])
    own = slice(first, first + counts[rank])
    unit = stacked[own] / norms[own].clamp(min=_TINY)
    turned = unit.shape[1] > unit.shape[2]
    return _Batch(places, norms, unit.mT if turned else unit, turned, counts)


def _gathered(batches: Sequence[_Batch], shared: SharedProducts) -> list[Tensor]:
    """The iterated matrices of all ranks, batch by batch, in one collective."""
    iterated = [_iterated(batch.own) for batch in batches]
    lengths = [sum(b.counts[r] * b.elements for b in batches) for r in range(shared.ranks)]
    rows = shared.rows(max(lengths), iterated[0])
    mine = torch.cat([matrices.reshape(-1) for matrices in iterated])
    rows[shared.rank, : len(mine)].copy_(mine)
    shared.gather(rows, lengths)
    starts = [0] * shared.ranks
    found = []
    for batch, matrices in zip(batches, iterated, strict=True):
        parts = []
        for r, count in enumerate(batch.counts):
            if count:
                stop = starts[r] + count * batch.elements
                parts.append(rows[r, starts[r] : stop].view(count, *matrices.shape[1:]))
                starts[r] = stop
        found.append(torch.cat(parts))
    return found


def _norms(matrices: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True)
    return norms


def _iterated(wide: Tensor) -> Tensor:
    """For matrices with norms of at most 1; on GPUs in bf16, which uses tensor cores."""
    x = wide.to(torch.bfloat16) if wide.is_cuda else wide
    for _ in range(ITERATIONS if len(wide) else 0):
        square = x @ x.mT
        polynomial = torch.baddbmm(square, square, square, beta=_B, alpha=_C)
        x = torch.baddbmm(x, polynomial, x, beta=_A)
    return x


def as_matrix(tensor: Tensor) -> Tensor:
    """One row per output, in fp32. Columns are in memory order, which does not affect the result."""
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        tensor = tensor.permute(0, 2, 3, 1)
    return tensor.flatten(1).float()


def like_tensor(matrix: Tensor, tensor: Tensor) -> Tensor:
    """The inverse of `as_matrix`."""
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        outputs, inputs, *window = tensor.shape
        return matrix.view(outputs, *window, inputs).permute(0, 3, 1, 2)
    return matrix.view(tensor.shape)
