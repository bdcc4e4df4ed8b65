"""Tiles of the products of `product_kernels`, and which of them are timed for a shape."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.accel.fused import power_of_two

# Shared memory of a multiprocessor of Hopper, and what a program takes besides its tiles.
_SHARED_BYTES, _OTHER_SHARED_BYTES = 228 * 1024, 5 * 1024


@dataclass(frozen=True)
class Tile:
    """Tile of a program, its warps and pipeline stages, and programs per multiprocessor whose registers
    fit.

    `sums` decides what a thread has of a tile, and so where it keeps the sums of an epilogue until the
    last tile: "turned", many rows of few columns, because the tile is computed as its transpose;
    "lines", eight columns, as maps are loaded; "fragments", a quarter of all columns and two rows of each
    16, as the tensor cores leave them. Where the compiler lays out registers otherwise, a form is slower,
    not wrong."""

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
        """`GROUPS` and `LINES` of `product_kernels._fold` for an epilogue of `columns`."""
        if self.sums == "turned":  # warps of 16 columns; the others have other rows
            return max(min(self.warps * 16 // columns, self.block_m), 1), 1
        if self.sums == "fragments":
            return self.block_m // 16, 8
        return 1, max(min(self.warps * 32 * 8 // columns, self.block_m), 1)

    def resident(self, k: int, *, inputs: int, computed: bool, ends: int) -> int:
        """Programs per multiprocessor whose shared memory fits, 0 if none; more would wait for others to
        end. The operand is made of `inputs` maps, `computed` or as they are, and the epilogue reads
        `ends` maps, all in half precision."""
        if not self.turned:
            return self.programs
        ahead = self.stages - 1
        weights = self.block_n * self.block_k * (1 if k <= self.block_k else self.stages)
        operand = self.block_m * self.block_k * (inputs * ahead + computed)
        outputs = self.block_m * self.block_n * (1 + ends * ahead)
        used = 2 * (weights + operand + outputs) + _OTHER_SHARED_BYTES
        return min(self.programs, _SHARED_BYTES // used)


# Rows × output channels × input channels: of some thirty that were timed on an H200, those that were
# fastest for some shape of ResNet-50.
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
# Both gradients at once: rows of a step × output channels × input channels, all of them.
BOTH_TILES = (
    Tile(64, 256, 64, 8, 2, 1, sums="fragments"),
    Tile(32, 64, 256, 8, 3, 1, sums="turned"),
    Tile(64, 64, 64, 4, 3, 2),
)


def fits(tile: Tile, k: int, n: int, *, reads: bool, sums: bool) -> bool:
    """Whether it is no wider than the map; all columns are in few tiles, which read the operand once
    each. `reads` and `sums`: whether the epilogue has maps to read and something to sum."""
    wide, deep = max(power_of_two(n), 16), max(power_of_two(k), 16)
    single = k <= tile.block_k
    # Of a loop over tiles alone, the pipeline loads ahead also what the epilogue of a turned tile reads.
    if tile.turned != (sums and (single or not reads)):
        return False
    if tile.block_m < 64 and not single:  # too few rows for weights that are read again and again
        return False
    return min(wide, 128) <= tile.block_n <= max(wide, 64) and tile.block_k <= max(deep, 64)


def weight_fits(tile: Tile, k: int, n: int) -> bool:
    wide, deep = max(power_of_two(n), 64), max(power_of_two(k), 64)
    if wide == deep == 64:
        return tile.block_n == tile.block_k == 64
    return tile.block_n <= wide and tile.block_k <= deep and tile.block_n * tile.block_k > 64 * 64


def both_fits(tile: Tile, k: int, n: int) -> bool:
    return power_of_two(max(n, 64)) == tile.block_n and power_of_two(max(k, 64)) == tile.block_k
