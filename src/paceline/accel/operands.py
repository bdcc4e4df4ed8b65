"""Inputs of fused convolutions, and the operations on the gradients of these inputs.

Activations are in channels-last memory, and in half precision on a GPU. An `Operand` is an input
that a fused convolution computes while it loads other tensors, for example relu(norm(x)) from x. An
`Epilogue` is applied to the gradient of an input before this gradient is stored.
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
    """An input of a fused convolution: the tensor `x`, or a function of `x` and other tensors.

    `form` names the function, and the class methods create operands. `saved` and `found` are
    statistics or gradient factors of norms. `relu` is used by the form `GRADIENT` only.
    """

    x: Tensor
    form: int = PLAIN
    other: Tensor | None = None
    saved: Tensor | None = None
    found: Tensor | None = None
    relu: bool = False

    @classmethod
    def normalized(cls, x: Tensor, saved: Tensor) -> Operand:
        """Returns the operand relu(norm(x)); `saved` is the result of `fused.statistics`."""
        return cls(x, NORMALIZED, saved=saved)

    @classmethod
    def joined(
        cls, x: Tensor, saved: Tensor, residual: Tensor, residual_saved: Tensor | None = None
    ) -> Operand:
        """Returns the operand relu(norm(x) + residual).

        If the statistics `residual_saved` are given, it is relu(norm(x) + norm(residual)).
        """
        form = JOINED if residual_saved is None else PROJECTED
        return cls(x, form, residual, saved, residual_saved)

    @classmethod
    def gradient(
        cls, dz: Tensor, x: Tensor, saved: Tensor, found: Tensor, *, relu: bool
    ) -> Operand:
        """Returns the operand a · dz + b · x + c, the gradient of a norm's input `x`.

        `found` has the factors (see `fused.join_sums`). With `relu`, `dz` is the gradient after the
        ReLU of the norm.
        """
        return cls(dz, GRADIENT, x, saved, found, relu)

    @property
    def rows(self) -> int:
        return self.x.numel() // self.x.shape[1]

    def stored(self) -> Tensor:
        """Computes the operand as a tensor in memory; returns `x` itself if the form is `PLAIN`."""
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
    """A norm and its input: the input `x`, the result of `fused.statistics`, γ and β."""

    x: Tensor
    saved: Tensor
    gamma: Tensor
    beta: Tensor


@dataclass(frozen=True)
class Epilogue:
    """The operations that are applied to the gradient of a convolution's input.

    The result has the shape of `like`. `PLAIN` applies nothing. `MASKED` applies the mask of the
    ReLU after the norm of `branch`. `MERGED` adds `add`, the gradient that the shortcut returns,
    and then applies the ReLU mask of the block's output `y`. That output is relu(norm of `branch` +
    shortcut). The shortcut is the norm of `shortcut`, or `residual`, which only cuDNN reads.
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
        """Returns the activations that the kernels read for this epilogue."""
        maps = (self.like, self.y, self.add, None if self.shortcut is None else self.shortcut.x)
        return [] if self.form == PLAIN else [tensor for tensor in maps if tensor is not None]

    def saved(self, unused: Tensor) -> list[Tensor]:
        """Returns the statistics of the norms of branch and shortcut, or `unused` for a missing norm."""
        return [unused if norm is None else norm.saved for norm in (self.branch, self.shortcut)]

    def describe(self) -> str:
        return FORMS[self.form] + ("" if self.shortcut is None else " projected")


@dataclass(frozen=True)
class Gradients:
    """The gradients of a convolution's input and weight.

    Attributes:
        dx: The gradient of the input, after the `Epilogue`.
        parts: Partial sums [2 or 4, parts, channels] for the gradients of γ and β, two for each
            norm.
        weight: The gradient of the weight; None if it was not requested.
        joined: The result of `fused.join_sums` for each norm, if cuDNN computed it.
    """

    dx: Tensor
    parts: Tensor | None
    weight: Tensor | None
    joined: tuple[Tensor, ...] = ()

    def factors(self, norm: NormedMap, place: int) -> Tensor:
        """Returns the gradients of γ and β, and the factors of `fused.backward_input`, for `norm`.

        `place` is 0 for the norm of the branch and 1 for that of the shortcut.
        """
        if self.joined:
            return self.joined[place]
        assert self.parts is not None
        parts = self.parts[2 * place : 2 * place + 2]
        return join_sums(parts, norm.gamma, norm.saved, self.dx.numel() // self.dx.shape[1])
