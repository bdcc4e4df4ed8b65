"""Tile shapes (block sizes) of the kernels in `product_kernels`, and which of them are worth timing."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.accel.fused import power_of_two

# Bytes of shared memory of a Hopper multiprocessor, and those that a program needs besides its
# tiles.
_SHARED_BYTES, _OTHER_SHARED_BYTES = 228 * 1024, 5 * 1024


@dataclass(frozen=True)
class Tile:
    """Launch parameters of a kernel in `product_kernels`: tile shape, warps and pipeline stages.

    `programs` is the number of programs per multiprocessor, which registers limit. `sums` tells
    which elements of a tile a thread holds in registers, and thus how it accumulates sums over
    rows. "turned": many rows of few columns, because the tile is computed as its transpose.
    "lines": eight columns, as activations are loaded. "fragments": a quarter of all columns and two
    of every 16 rows, as tensor cores return them. If the compiler assigns registers differently,
    the kernel is slower, but still correct.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    programs: int
    sums: str = "lines"

    @property
    def name(self) -> str:
        size = f"{self.block_m}x{self.block_n}x{self.block_k}"
        sums = {"lines": "", "turned": "t", "fragments": "f"}[self.sums]
        return f"{size}w{self.warps}s{self.stages}{sums}"

    @property
    def turned(self) -> bool:
        return self.sums == "turned"

    def rows(self, columns: int) -> tuple[int, int]:
        """Returns `GROUPS` and `LINES`, with which `product_kernels._fold` sums the rows of a tile."""
        if self.sums == "turned":  # each warp has 16 columns; further warps take other rows
            return max(min(self.warps * 16 // columns, self.block_m), 1), 1
        if self.sums == "fragments":
            return self.block_m // 16, 8
        return 1, max(min(self.warps * 32 * 8 // columns, self.block_m), 1)

    def resident(self, k: int, *, inputs: int, computed: bool, ends: int) -> int:
        """Returns how many programs fit into a multiprocessor's shared memory.

        Args:
            k: The number of products that are added for an element of the result.
            inputs: The number of activations from which the operand is loaded or computed.
            computed: True if the operand is computed while it is loaded.
            ends: The number of activations that the epilogue reads.
        """
        if not self.turned:
            return self.programs
        ahead = self.stages - 1
        weights = self.block_n * self.block_k * (1 if k <= self.block_k else self.stages)
        operand = self.block_m * self.block_k * (inputs * ahead + computed)
        outputs = self.block_m * self.block_n * (1 + ends * ahead)
        used = 2 * (weights + operand + outputs) + _OTHER_SHARED_BYTES
        return min(self.programs, _SHARED_BYTES // used)


# Tiles of `product_kernel`: rows × output columns × products per step. Each was the fastest of
# about thirty on an H200 for at least one convolution of ResNet-50.
TILES = (
    Tile(64, 128, 64, 4, 3, 4, sums="turned"),
    Tile(64, 256, 64, 8, 3, 2, sums="turned"),
    Tile(64, 64, 64, 4, 4, 4, sums="turned"),
    Tile(64, 128, 128, 4, 3, 2, sums="turned"),
    Tile(32, 64, 256, 4, 2, 2, sums="turned"),
    Tile(32, 256, 128, 8, 3, 1, sums="turned"),
    Tile(32, 128, 128, 4, 2, 4, sums="turned"),
    Tile(64, 128, 64, 4, 3, 2),
    Tile(64, 64, 64, 4, 4, 2),
)
# Tiles of `weight_gradient_kernel`: rows of a step × output channels × input channels.
WEIGHT_TILES = (
    Tile(64, 64, 256, 8, 3, 1),
    Tile(64, 64, 128, 4, 3, 2),
    Tile(64, 128, 64, 4, 3, 2),
    Tile(64, 128, 128, 8, 3, 1),
    Tile(64, 64, 64, 4, 4, 2),
)
# Tiles of `both_gradients_kernel`: rows of a step × all output channels × all input channels.
BOTH_TILES = (
    Tile(64, 256, 64, 8, 2, 1, sums="fragments"),
    Tile(32, 64, 256, 8, 3, 1, sums="turned"),
    Tile(64, 64, 64, 4, 3, 2),
)


def fits(tile: Tile, k: int, n: int, *, reads: bool, sums: bool) -> bool:
    """Returns True if a tile of `TILES` is worth timing for a matrix product of this size.

    Args:
        tile: The tile.
        k: The number of input channels.
        n: The number of output channels.
        reads: True if the operations after the product read other activations.
        sums: True if the operations after the product sum over rows.
    """
    wide, deep = max(power_of_two(n), 16), max(power_of_two(k), 16)
    single = k <= tile.block_k
    # If an epilogue reads activations, the pipeline of a turned tile prefetches them only if the
    # kernel has no inner loop over k (`single`).
    if tile.turned != (sums and (single or not reads)):
        return False
    if tile.block_m < 64 and not single:  # weights would be read again for too few rows
        return False
    return min(wide, 128) <= tile.block_n <= max(wide, 64) and tile.block_k <= max(deep, 64)


def weight_fits(tile: Tile, k: int, n: int) -> bool:
    """Returns True if a tile of `WEIGHT_TILES` is worth timing for k input and n output channels."""
    wide, deep = max(power_of_two(n), 64), max(power_of_two(k), 64)
    if wide == deep == 64:
        return tile.block_n == tile.block_k == 64
    return tile.block_n <= wide and tile.block_k <= deep and tile.block_n * tile.block_k > 64 * 64


def both_fits(tile: Tile, k: int, n: int) -> bool:
    """Returns True if a tile of `BOTH_TILES` is the smallest for k input and n output channels."""
    return power_of_two(max(n, 64)) == tile.block_n and power_of_two(max(k, 64)) == tile.block_k
