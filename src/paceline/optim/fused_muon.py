"""Runs a Muon step in about 25 launches of Triton kernels: momentum, matrix products and update.

The averaged gradients of all matrices are orthogonalized together, in bf16 on GPUs and in fp32 in
Triton's interpreter, from padded copies that keep their memory between steps. One launch computes the
tiles of all matrices, those with the longest sums first, so that no processor waits for the last
tiles. The kernels of LARS update the parameters that Muon does not. No function here synchronizes with
the device, and none allocates device memory after the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.core.errors import PacelineError
from paceline.optim import fused
from paceline.optim.fused import FusedStep, LarsStep, Layout, Tables, on_device, to_device
from paceline.optim.orthogonal import ITERATIONS
from paceline.optim.rule import Gates, Outcome, Row, capturing, unprepared
from paceline.optim.state import MOMENTUM

# Iterations alternate between two buffers and must end in the second.
assert ITERATIONS % 2 == 1
# Offsets within a matrix are 32-bit numbers.
_MOST_ELEMENTS = 2**31 - 1


class Tiling(NamedTuple):
    """Tile sizes and launch options of the kernels that multiply matrices.

    Attributes:
        square: Height and width of the tiles of symmetric matrices.
        height: Height of the tiles of P·X.
        width: Width of the tiles of P·X.
        depth: Length of one step along the summed dimension. Matrix sizes are padded to its multiples.
        warps: Warps per program.
        stages: Stages of the software pipeline.
    """

    square: int = 128
    height: int = 128
    width: int = 128
    depth: int = 64
    warps: int = 8
    stages: int = 3


TILING = Tiling()


def products_unavailable(device: torch.device) -> str:
    """Returns why kernels cannot compute matrix products on `device`, or an empty text if they can."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "bf16 matrix products in kernels need compute capability 8.0"
    return ""


@dataclass(frozen=True)
class _Matrices:
    """Memory for the matrix products, and lists of tiles, with matrices in the order of `layout`.

    Attributes:
        gram_tiles: Indices (matrix, row, column) of each tile of X·Xᵀ.
        polynomial_tiles: Indices (matrix, row, column) of each tile of the polynomial of X·Xᵀ.
        apply_tiles: Indices (matrix, row, column) of each tile of the polynomial's product with X.
        results: Orthogonalized matrices, one after the other, with padding.
    """

    layout: Layout
    tiling: Tiling
    stages: int
    table: Tensor
    gram_tiles: Tensor
    polynomial_tiles: Tensor
    apply_tiles: Tensor
    partials: Tensor
    numbers: Tensor
    memory: tuple[Tensor, ...]
    results: Tensor


@dataclass
class MuonStep(FusedStep):
    """Launches the kernels of Muon for the parameters in `groups`, and those of LARS for all others.

    Attributes:
        groups: Indices of the parameter groups whose updates are orthogonalized.
    """

    buffers: tuple[str, ...] = (MOMENTUM,)
    groups: frozenset[int] = frozenset()
    _lars: LarsStep = field(default_factory=LarsStep)
    _rest: Tables | None = None
    _matrices: _Matrices | None = None
    _kept: list[_Matrices] = field(default_factory=list)  # kept alive for captured graphs

    def run(self, rows: Sequence[Row], hyper: Tensor, gates: Gates, outcome: Outcome) -> None:
        chosen = [row for row in rows if row.group in self.groups]
        rest = [row for row in rows if row.group not in self.groups]
        # Create all tables before the first launch: a new table clears the flags of the last step.
        for engine, own in ((self, chosen), (self._lars, rest)):
            if not own and engine._tables is not None:
                engine._tables = None
                outcome.clear()
        if not chosen:
            self._lars.run(rows, hyper, gates, outcome)
            return
        self._rest = self._lars.ready(rest, hyper, outcome) if rest else None
        tables = self.ready(chosen, hyper, outcome)
        self._place(tables.layout, chosen, hyper.device)
        with on_device(hyper.device):
            self.launch(tables, hyper, gates, outcome)

    def _place(self, layout: Layout, rows: Sequence[Row], device: torch.device) -> None:
        """Creates memory and tile lists for the matrix products, or keeps the ones of the last step."""
        matrices, in_graph = self._matrices, capturing(device)
        if matrices is None or matrices.layout is not layout:
            if in_graph:
                raise unprepared()
            for row in rows:
                if not rows_are_outermost(row.parameter):
                    raise PacelineError(
                        f"parameter of shape {tuple(row.parameter.shape)} and strides "
                        f"{row.parameter.stride()}: Muon's kernels need consecutive rows in memory",
                        "use products='torch'",
                    )
            shapes = [(len(row.parameter), row.parameter[0].numel()) for row in rows]
            self._matrices = matrices = _create(layout, shapes, device)
        if in_graph:
            self._kept.append(matrices)

    def _is_aligned(self, row: Row, addresses: tuple[Any, ...]) -> bool:
        """Returns False also for a padded matrix, whose rows have gaps and need separate launches."""
        pads = row.parameter[0].numel() % TILING.depth != 0
        return not pads and super()._is_aligned(row, addresses)

    def launch(self, tables: Tables, hyper: Tensor, gates: Gates, outcome: Outcome) -> None:
        from paceline.optim import muon_kernels as kernels
        from paceline.optim.kernels import KINDS

        matrices = self._matrices
        assert matrices is not None
        scale, found_inf, hold, active = self._switches(gates)
        layout, kind = tables.layout, KINDS[matrices.results.dtype]
        count, chunks = tables.tensors.shape[1], matrices.partials.shape[1]
        sizes = {"CHUNK": fused.CHUNK, "BLOCK": fused.BLOCK}
        by_tensor = {"CHUNK": fused.CHUNK, "WIDTH": fused.WIDTH, "num_warps": 4}
        for b in layout.buckets:
            kernels.average[(b.count,)](
                tables.tensors, matrices.table, layout.chunk_tensor, hyper, scale, matrices.partials,
                b.first, count, chunks,
                GRAD=KINDS[b.gradient], KIND=kind, PADS=b.align < fused.ALIGN, ALIGN=b.align,
                # Half blocks: with three sums, full blocks leave room for only one program at a time.
                CHUNK=fused.CHUNK, BLOCK=fused.BLOCK // 2, num_warps=fused.WARPS,
            )  # fmt: skip
        kernels.norms[(count,)](
            tables.tensors, matrices.partials, matrices.numbers, count, chunks, **by_tensor
        )
        self._multiply(matrices)
        for b in layout.buckets:
            kernels.result_sums[(b.count,)](
                tables.tensors, matrices.table, layout.chunk_tensor, matrices.partials,
                b.first, count, chunks,
                KIND=kind, PADS=b.align < fused.ALIGN, **sizes, num_warps=fused.WARPS,
            )  # fmt: skip
        kernels.ratios[(count,)](
            tables.tensors, hyper, active, matrices.partials, matrices.numbers,
            outcome.ratios, outcome.bad, count, chunks, **by_tensor,
        )  # fmt: skip
        # Sets the flags of the parameters that LARS updates. After this all flags are known.
        if self._rest is not None:
            self._lars.launch(self._rest, hyper, gates, outcome)
        for b in layout.buckets:
            half = None if b.parameter == torch.float32 else KINDS[b.parameter]
            kernels.update[(b.count,)](
                tables.tensors, matrices.table, layout.chunk_tensor, hyper, scale, found_inf, hold,
                active, matrices.numbers, outcome.ratios, outcome.bad, outcome.overflow,
                b.first, count, outcome.bad.numel(),
                GRAD=KINDS[b.gradient], HALF=half, KIND=kind, PADS=b.align < fused.ALIGN,
                ALIGN=b.align, **sizes, WIDTH=fused.WIDTH, num_warps=fused.WARPS,
            )  # fmt: skip

    def _multiply(self, matrices: _Matrices) -> None:
        """Launches the iterations that orthogonalize all matrices."""
        from paceline.optim import muon_kernels as kernels
        from paceline.optim.kernels import KINDS

        tiling, kind = matrices.tiling, KINDS[matrices.results.dtype]
        count = matrices.table.shape[1]
        common = {"KIND": kind, "DEPTH": tiling.depth, "num_warps": tiling.warps}
        common["num_stages"] = matrices.stages
        source, target = kernels.SOURCE.value, kernels.RESULT.value
        scale = kernels.INVERSE_NORM.value
        for _ in range(ITERATIONS):
            kernels.gram[(len(matrices.gram_tiles),)](
                matrices.table, matrices.gram_tiles, matrices.numbers, source, scale, count,
                TILE=tiling.square, **common,
            )  # fmt: skip
            kernels.polynomial[(len(matrices.polynomial_tiles),)](
                matrices.table, matrices.polynomial_tiles, count, TILE=tiling.square, **common
            )
            kernels.apply[(len(matrices.apply_tiles),)](
                matrices.table, matrices.apply_tiles, matrices.numbers, source, target, scale, count,
                HEIGHT=tiling.height, WIDTH=tiling.width, **common,
            )  # fmt: skip
            source, target, scale = target, source, kernels.ONE.value


def rows_are_outermost(parameter: Tensor) -> bool:
    """Returns True if each index of dimension 0 has consecutive elements in memory."""
    return parameter.stride(0) == parameter[0].numel()


def _create(layout: Layout, shapes: Sequence[tuple[int, int]], device: torch.device) -> _Matrices:
    """Creates memory and tile lists for matrices of `shapes`; `layout.order` indexes `shapes`."""
    tiling = TILING
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    by_row, length, square_length = _place_all(shapes, tiling.depth)
    places = [by_row[row] for row in layout.order]
    # The padding of `sources` stays zero: only matrix products write to it, and they write zeros.
    sources = torch.zeros(length, dtype=dtype, device=device)
    symmetric = torch.empty(2, square_length, dtype=dtype, device=device)
    results = torch.empty(length, dtype=dtype, device=device)
    columns = [
        [
            _address(sources, place.start), _address(results, place.start),
            _address(symmetric, place.square), _address(symmetric, place.square + square_length),
            *place.padded, *place.shape,
        ]
        for place in places
    ]  # fmt: skip
    numbers = torch.zeros(3, len(places), device=device)
    numbers[1].fill_(1.0)
    padded = [(i, place.padded) for i, place in enumerate(places)]
    square = tiling.square
    return _Matrices(
        layout=layout,
        tiling=tiling,
        stages=_stages(tiling, device),
        table=to_device(torch.tensor(columns, dtype=torch.int64).t().contiguous(), device),
        gram_tiles=_tiles(
            [(i, min(both), min(both), max(both)) for i, both in padded],
            square,
            square,
            device,
            True,
        ),
        polynomial_tiles=_tiles(
            [(i, min(both), min(both), min(both)) for i, both in padded],
            square,
            square,
            device,
            True,
        ),
        apply_tiles=_tiles(
            [(i, *both, min(both)) for i, both in padded], tiling.height, tiling.width, device
        ),
        partials=torch.zeros(4, len(layout.chunk_tensor), device=device),
        numbers=numbers,
        memory=(sources, symmetric),
        results=results,
    )


class _Place(NamedTuple):
    """The position of one matrix in the memory that all matrices share.

    Attributes:
        shape: Numbers of rows and columns without padding.
        padded: Numbers of rows and columns with padding.
        start: Offset of the matrix in the results and in the sources, in elements.
        square: Offset of its symmetric products (X·Xᵀ and the polynomial) in their memory, in
            elements.
    """

    shape: tuple[int, int]
    padded: tuple[int, int]
    start: int
    square: int


def _place_all(shapes: Sequence[tuple[int, int]], multiple: int) -> tuple[list[_Place], int, int]:
    """Assigns a position in memory to each matrix, padded to multiples of `multiple`.

    Returns:
        The positions in the order of `shapes`, the number of elements of all results, and the number
        of elements of all symmetric matrices.
    """
    places, start, square = [], 0, 0
    for shape in shapes:
        rows, columns = padded = (_round_up(shape[0], multiple), _round_up(shape[1], multiple))
        if rows * columns > _MOST_ELEMENTS:
            raise PacelineError(
                f"a matrix of shape {shape} is too large for the kernels of Muon",
                "use products='torch'",
            )
        places.append(_Place(shape, padded, start, square))
        start += rows * columns
        square += min(rows, columns) ** 2
    return places, start, square


def _tiles(
    matrices: Sequence[tuple[int, int, int, int]],
    height: int,
    width: int,
    device: torch.device,
    upper: bool = False,
) -> Tensor:
    """Returns (matrix, tile row, tile column) of each tile, those with the longest sums first.

    Programs start in this order. A long program that started last would delay the end.

    Args:
        matrices: Index, rows, columns and summed length (depth) of each matrix.
        height: Height of a tile.
        width: Width of a tile.
        device: Device of the returned table.
        upper: Omit the tiles below the diagonal.
    """
    tiles = [
        (place, i, j)
        for place, rows, columns, _ in sorted(matrices, key=lambda m: (-m[3], m[0]))
        for i in range(-(-rows // height))
        for j in range(-(-columns // width))
        if not upper or j >= i
    ]
    return to_device(torch.tensor(tiles, dtype=torch.int32), device)


def _stages(tiling: Tiling, device: torch.device) -> int:
    """Returns the number of pipeline stages: at most `tiling.stages`, limited by shared memory."""
    if device.type != "cuda":
        return tiling.stages
    side = max(2 * tiling.square, tiling.height + tiling.width)
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack the field
    most = int(properties.shared_memory_per_block_optin) // (side * tiling.depth * 2)
    return max(1, min(tiling.stages, most))


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _address(tensor: Tensor, element: int) -> int:
    return tensor.data_ptr() + element * tensor.element_size()
