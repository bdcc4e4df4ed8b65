"""Tiles of the kernels of `product_kernels`, and which of them are timed for a shape."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.accel.fused import power_of_two

# Shared memory of a Hopper multiprocessor, and what a program needs in addition to its tiles.
_SHARED_BYTES, _OTHER_SHARED_BYTES = 228 * 1024, 5 * 1024


@dataclass(frozen=True)
class Tile:
    """The tile of a program, its warps and pipeline stages, and programs per multiprocessor.

    `programs` is limited by registers. `sums` is the part of a tile that a thread owns, and therefore how
    it accumulates the sums of an epilogue: "turned" is many rows of few columns, because the tile is
    computed as its transpose; "lines" is eight columns, as activations are loaded; "fragments" is a
    quarter of all columns and two of every 16 rows, as tensor cores return them. If the compiler lays out
    registers differently, the kernel is slower, not wrong.
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
        """Returns `GROUPS` and `LINES` of `product_kernels._fold` for an epilogue of `columns`."""
        if self.sums == "turned":  # warps own 16 columns, and further warps own further rows
            return max(min(self.warps * 16 // columns, self.block_m), 1), 1
        if self.sums == "fragments":
            return self.block_m // 16, 8
        return 1, max(min(self.warps * 32 * 8 // columns, self.block_m), 1)

    def resident(self, k: int, *, inputs: int, computed: bool, ends: int) -> int:
        """Returns how many programs fit into a multiprocessor's shared memory.

        Args:
            k: The length of the sums.
            inputs: The number of activations that the operand reads.
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


# Rows × output channels × input channels. Of about thirty tiles timed on an H200, these were fastest for
# at least one shape of ResNet-50.
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
# Rows of a step × output channels × input channels.
WEIGHT_TILES = (
    Tile(64, 64, 256, 8, 3, 1),
    Tile(64, 64, 128, 4, 3, 2),
    Tile(64, 128, 64, 4, 3, 2),
    Tile(64, 128, 128, 8, 3, 1),
    Tile(64, 64, 64, 4, 4, 2),
)
# Both gradients in one kernel: rows of a step × all output channels × all input channels.
BOTH_TILES = (
    Tile(64, 256, 64, 8, 2, 1, sums="fragments"),
    Tile(32, 64, 256, 8, 3, 1, sums="turned"),
    Tile(64, 64, 64, 4, 3, 2),
)


def fits(tile: Tile, k: int, n: int, *, reads: bool, sums: bool) -> bool:
    """Returns True if a tile is worth timing for n output and k input channels.

    Args:
        tile: The tile.
        k: The length of the sums.
        n: The columns of the output.
        reads: True if the epilogue reads activations.
        sums: True if the epilogue computes sums.
    """
    wide, deep = max(power_of_two(n), 16), max(power_of_two(k), 16)
    single = k <= tile.block_k
    # The pipeline prefetches what the epilogue of a turned tile reads only in a single loop over tiles.
    if tile.turned != (sums and (single or not reads)):
        return False
    if tile.block_m < 64 and not single:  # too few rows for weights that are read repeatedly
        return False
    return min(wide, 128) <= tile.block_n <= max(wide, 64) and tile.block_k <= max(deep, 64)


def weight_fits(tile: Tile, k: int, n: int) -> bool:
    """Returns True if a tile of `WEIGHT_TILES` is worth timing."""
    wide, deep = max(power_of_two(n), 64), max(power_of_two(k), 64)
    if wide == deep == 64:
        return tile.block_n == tile.block_k == 64
    return tile.block_n <= wide and tile.block_k <= deep and tile.block_n * tile.block_k > 64 * 64


def both_fits(tile: Tile, k: int, n: int) -> bool:
    """Returns True if a tile of `BOTH_TILES` covers all channels."""
    return power_of_two(max(n, 64)) == tile.block_n and power_of_two(max(k, 64)) == tile.block_k
