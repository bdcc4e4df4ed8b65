"""Inputs of the convolutions of a fused block, and what follows their gradients.

Activations are in channels-last memory, in half precision on a GPU. An `Operand` is an activation that a
fused convolution computes while it loads it, and `Operand.stored` returns it in memory. An `Epilogue` is
applied to the gradient of an input before it is stored.
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
    """Returns the output shape of a convolution whose padding is half the size of its kernel."""
    sides = (
        (side + 2 * (size // 2) - size) // stride + 1
        for side, size in zip(x[2:], weight[2:], strict=True)
    )
    return (x[0], weight[0], *sides)


@dataclass(frozen=True)
class Operand:
    """A stored activation, or one that is computed from `x`, `other` and statistics as `form` says."""

    x: Tensor
    form: int = PLAIN
    other: Tensor | None = None
    saved: Tensor | None = None
    found: Tensor | None = None
    relu: bool = False

    @classmethod
    def normalized(cls, x: Tensor, saved: Tensor) -> Operand:
        """Returns the operand relu(norm(x))."""
        return cls(x, NORMALIZED, saved=saved)

    @classmethod
    def joined(
        cls, x: Tensor, saved: Tensor, residual: Tensor, residual_saved: Tensor | None = None
    ) -> Operand:
        """Returns relu(norm(x) + residual), or + norm(residual) if its statistics are given."""
        form = JOINED if residual_saved is None else PROJECTED
        return cls(x, form, residual, saved, residual_saved)

    @classmethod
    def gradient(
        cls, dz: Tensor, x: Tensor, saved: Tensor, found: Tensor, *, relu: bool
    ) -> Operand:
        """Returns the gradient of a norm's input `x`, with `dz` after its ReLU if `relu`."""
        return cls(dz, GRADIENT, x, saved, found, relu)

    @property
    def rows(self) -> int:
        return self.x.numel() // self.x.shape[1]

    def stored(self) -> Tensor:
        """Returns the activation in memory."""
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
    """The input of a norm, its statistics, γ and β."""

    x: Tensor
    saved: Tensor
    gamma: Tensor
    beta: Tensor


@dataclass(frozen=True)
class Epilogue:
    """What is applied to the gradient of a convolution's input.

    `PLAIN` applies nothing; the result has the shape of `like`. `MASKED` applies the ReLU after the norm
    of `branch`. `MERGED` applies sum and ReLU of a block with output `y` after adding `add`, the gradient
    of the output's other reader. The terms of the sum are the norm of `branch`, and `residual`, which
    only cuDNN reads, or the norm of `shortcut`.
    """

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
        """Returns the activations that a kernel of `product_kernels` reads for it."""
        maps = (self.like, self.y, self.add, None if self.shortcut is None else self.shortcut.x)
        return [] if self.form == PLAIN else [tensor for tensor in maps if tensor is not None]

    def saved(self, unused: Tensor) -> list[Tensor]:
        """Returns the statistics of both norms, `unused` for one that is missing."""
        return [unused if norm is None else norm.saved for norm in (self.branch, self.shortcut)]

    def describe(self) -> str:
        return FORMS[self.form] + ("" if self.shortcut is None else " projected")


@dataclass(frozen=True)
class Gradients:
    """Both gradients of a convolution.

    Attributes:
        dx: The gradient of the input after the epilogue.
        parts: Partial sums of the epilogue, two rows for each norm.
        weight: The gradient of the weight, if requested.
        joined: The rows of `fused.join_sums` for each norm, if cuDNN computed them.
    """

    dx: Tensor
    parts: Tensor | None
    weight: Tensor | None
    joined: tuple[Tensor, ...] = ()

    def factors(self, norm: NormedMap, place: int) -> Tensor:
        """Returns the rows of `fused.join_sums` for the norm of the branch (0) or of the shortcut (1)."""
        if self.joined:
            return self.joined[place]
        assert self.parts is not None
        parts = self.parts[2 * place : 2 * place + 2]
        return join_sums(parts, norm.gamma, norm.saved, self.dx.numel() // self.dx.shape[1])
