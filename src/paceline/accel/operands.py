"""What a convolution of a fused block reads, and where a gradient goes behind it.

Maps are in channels-last memory, in half precision on a GPU. An `Operand` is a map that a fused product
computes while it loads it, and `Operand.stored` the same map in memory; an `Epilogue` is what a product
that gives a gradient does to its result before it stores it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.accel.fused import apply, backward_input, join_sums

PLAIN, NORMALIZED, JOINED, GRADIENT, MOMENTS, MASKED, MERGED, PROJECTED = range(8)
FORMS = (
    "plain", "normalized", "joined", "gradient", "moments", "masked", "merged", "projected",
)  # fmt: skip

Dims = tuple[int, ...]


def out_dims(x: Dims, weight: Dims, stride: int) -> Dims:
    """Of a convolution whose padding is half the size of its weight."""
    sides = (
        (side + 2 * (size // 2) - size) // stride + 1
        for side, size in zip(x[2:], weight[2:], strict=True)
    )
    return (x[0], weight[0], *sides)


@dataclass(frozen=True)
class Operand:
    """A map as stored, or what `form` computes from `x`, `other` and statistics."""

    x: Tensor
    form: int = PLAIN
    other: Tensor | None = None
    saved: Tensor | None = None
    found: Tensor | None = None
    relu: bool = False

    @classmethod
    def normalized(cls, x: Tensor, saved: Tensor) -> Operand:
        """relu(norm(x))."""
        return cls(x, NORMALIZED, saved=saved)

    @classmethod
    def joined(
        cls, x: Tensor, saved: Tensor, residual: Tensor, residual_saved: Tensor | None = None
    ) -> Operand:
        """relu(norm(x) + residual), or + norm(residual) where its statistics are given."""
        form = JOINED if residual_saved is None else PROJECTED
        return cls(x, form, residual, saved, residual_saved)

    @classmethod
    def gradient(
        cls, dz: Tensor, x: Tensor, saved: Tensor, found: Tensor, *, relu: bool
    ) -> Operand:
        """The gradient of a norm's input `x`; with `relu`, `dz` is the one behind its ReLU."""
        return cls(dz, GRADIENT, x, saved, found, relu)

    @property
    def rows(self) -> int:
        return self.x.numel() // self.x.shape[1]

    def tensors(self) -> list[Tensor]:
        """What it is computed from."""
        given = (self.x, self.other, self.saved, self.found)
        return [each for each in given if each is not None]

    def stored(self) -> Tensor:
        if self.form == PLAIN:
            return self.x
        assert self.saved is not None
        if self.form == GRADIENT:
            assert self.other is not None
            assert self.found is not None
            return backward_input(self.x, None, self.other, self.saved, self.found, self.relu)
        residual = self.other
        if self.form == PROJECTED:
            assert residual is not None
            assert self.found is not None
            residual = apply(residual, self.found, None, relu=False)
        return apply(self.x, self.saved, residual, relu=True)


@dataclass(frozen=True)
class NormedMap:
    """The input of a norm with its statistics, γ and β."""

    x: Tensor
    saved: Tensor
    gamma: Tensor
    beta: Tensor


@dataclass(frozen=True)
class Epilogue:
    """`MASKED`: through the ReLU of the norm of `branch`. `MERGED`: through sum and ReLU of a block with
    output `y`, `add` being the gradient of the output's other use; the sum is that of the norm of
    `branch` and of `residual`, which only cuDNN reads, or of `shortcut`'s norm. `PLAIN`: nothing; the
    result has the shape of `like`."""

    form: int
    like: Tensor
    branch: NormedMap | None = None
    y: Tensor | None = None
    add: Tensor | None = None
    residual: Tensor | None = None
    shortcut: NormedMap | None = None

    @classmethod
    def plain(cls, like: Tensor) -> Epilogue:
        return cls(PLAIN, like)

    @classmethod
    def masked(cls, branch: NormedMap) -> Epilogue:
        return cls(MASKED, branch.x, branch)

    @classmethod
    def merged(
        cls, branch: NormedMap, y: Tensor, add: Tensor | None, shortcut: Tensor | NormedMap | None
    ) -> Epilogue:
        if isinstance(shortcut, NormedMap):
            return cls(MERGED, branch.x, branch, y, add, None, shortcut)
        return cls(MERGED, branch.x, branch, y, add, shortcut)

    def maps(self) -> list[Tensor]:
        """What a product of `product_kernels` reads behind it."""
        given = (self.like, self.y, self.add, None if self.shortcut is None else self.shortcut.x)
        return [] if self.form == PLAIN else [each for each in given if each is not None]

    def describe(self) -> str:
        return FORMS[self.form] + ("" if self.shortcut is None else " projected")


@dataclass(frozen=True)
class Gradients:
    """`dx` behind the epilogue, its partial sums, two rows for each norm, and the weight's gradient where
    it is wanted. `joined`: what cuDNN makes of the sums itself."""

    dx: Tensor
    parts: Tensor | None
    weight: Tensor | None
    joined: tuple[Tensor, ...] = ()

    def factors(self, norm: NormedMap, *, other: bool = False) -> Tensor:
        """The rows of `fused.join_sums`, for the norm of the branch, or that of the shortcut."""
        if self.joined:
            return self.joined[int(other)]
        assert self.parts is not None
        parts = self.parts[2:] if other else self.parts[:2]
        return join_sums(parts, norm.gamma, norm.saved, self.dx.numel() // self.dx.shape[1])
