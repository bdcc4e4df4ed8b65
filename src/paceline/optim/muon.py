"""Muon: LARS along orthogonalised momentum, for batches at which LARS itself has too few steps.

In: parameters in fp32, fp16 or bf16. Out: `Muon`, LARS whose filters move in the direction of their
momentum with all singular values made equal (K. Jordan et al. 2024). Masters, kernels, switches on the
device and checkpoints are LARS's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from paceline.core.errors import PacelineError, RunError
from paceline.optim import update_rows
from paceline.optim.lars import LARS
from paceline.optim.update_rows import Gates, Hyper, HyperTable, Outcome, Row, capturing

# From a matrix to the nearest one with equal singular values, by products of matrices alone.
#
# In: gradients of filters and linear layers. Out: tensors of the same shapes, strides and norms
# whose singular values are about equal, so that a step moves a layer in all directions alike.
# Newton and Schulz's iteration with the quintic of K. Jordan et al. (2024), which trades
# exactness for speed: values that are not tiny come out between 0.68 and 1.2, before the norm is
# put back. Nothing is read back from a GPU.


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


_MOMENTUM, _NESTEROV = Hyper._fields.index("momentum"), Hyper._fields.index("nesterov")


class Muon(LARS):
    """v ← m·v + (1−m)·g; u = O(v)·‖v‖; λ = η‖w‖ / (‖u‖ + β‖w‖ + eps); w ← w − lr·λ·(u + βw).

    O makes all singular values equal; `nesterov` takes (1−m)·g + m·v in place of v. So for groups
    with `orthogonal=True`, the default, whose tensors are matrices with a row for each output; other
    groups are updated as by LARS. Momentum is an average here and comes before the layer's rate, which
    it does not multiply: η has to be 1/(1−m) times that of LARS for the same pace. A gradient of zeros
    leaves only the decay, at λ = 1 as in LARS; v goes on fading. What has to be finite is v.

    Example:
        optimizer = Muon([{"params": filters}, {"params": others, "orthogonal": False}], lr=4.0)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        trust_coefficient: float = 0.03,
        eps: float = 0.0,
        nesterov: bool = True,
        adapt: bool = True,
        fused: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            momentum,
            weight_decay,
            trust_coefficient=trust_coefficient,
            eps=eps,
            nesterov=nesterov,
            adapt=adapt,
            fused=fused,
        )

    def _set_up(self) -> None:
        super()._set_up()
        self._own: HyperTable | None = None  # the groups as they are; the kernels' has no momentum
        self._captured: list[HyperTable] = []  # a graph goes on reading these
        self._next: dict[int, Tensor] = {}
        self._directions: dict[int, Tensor] = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group({"orthogonal": True, **param_group})
        group = self.param_groups.pop()
        if group["orthogonal"]:
            _require_matrices(group["params"])
        self.param_groups.append(group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Groups that do not say whether they are orthogonal, as other optimizers', stay as here."""
        saved = list(state_dict["param_groups"])
        if len(saved) == len(self.param_groups):
            for place, (theirs, ours) in enumerate(zip(saved, self.param_groups, strict=True)):
                saved[place] = {"orthogonal": ours["orthogonal"], **theirs}
                if saved[place]["orthogonal"]:
                    _require_matrices(ours["params"])
        super().load_state_dict({**state_dict, "param_groups": saved})

    def upload(self) -> None:
        super().upload()
        if self._own is None or len(self._own.values) != len(self.param_groups):
            self._own = HyperTable(len(self.param_groups), self._device())
        self._own.send(tuple(Hyper.of(group) for group in self.param_groups))

    def _hyper(self, group: dict[str, Any]) -> Hyper:
        hyper = super()._hyper(group)
        if not group["orthogonal"]:
            return hyper
        return hyper._replace(momentum=0.0)

    def _directed(self, rows: list[Row], gates: Gates) -> list[Row]:
        """The rows with directions for gradients; momenta as they would be wait in `_next`."""
        groups = [
            (number, [row for row in rows if row.group == number])
            for number, group in enumerate(self.param_groups)
            if group["orthogonal"]
        ]
        chosen = [row for _, own in groups for row in own]
        if not chosen:
            return rows
        if self._own is None or len(self._own.values) != len(self.param_groups):
            raise RunError("a step is captured that was not prepared", "call prepare() before")
        if capturing(self._own.values.device):
            self._captured.append(self._own)
        wanted: list[Tensor] = []
        still: list[Tensor] = []
        for number, own in groups:
            if own:
                found, none = self._averaged(own, self._own.values[number], gates.grad_scale)
                wanted += found
                still += none
        found = orthogonalised(wanted, still)
        if gates.grad_scale is not None:
            # The kernels divide by the scale, a power of two, as they do with every gradient.
            torch._foreach_mul_(found, gates.grad_scale.reshape(()))
        directions = [self._kept(self._directions, row) for row in chosen]
        torch._foreach_copy_(directions, found)
        directed = {}
        for row, direction in zip(chosen, directions, strict=True):
            # The update has no momentum of its own here: it gets memory that is finite whenever it runs.
            directed[row.index] = replace(row, gradient=direction, momentum=direction)
        return [directed.get(row.index, row) for row in rows]

    def _averaged(
        self, rows: Sequence[Row], values: Tensor, scale: Tensor | None
    ) -> tuple[list[Tensor], Sequence[Tensor]]:
        """What to make orthogonal for the rows of a group, and which of them have no gradient at all.
        In list operations: launching a kernel for each small tensor costs more than its arithmetic."""
        momentum, nesterov = values[_MOMENTUM], values[_NESTEROV]
        then = [self._kept(self._next, row) for row in rows]
        fresh = [torch.empty_like(tensor) for tensor in then]
        torch._foreach_copy_(fresh, [row.gradient for row in rows])
        if scale is not None:
            torch._foreach_div_(fresh, scale.reshape(()))
        still = (torch.stack(torch._foreach_norm(fresh)) == 0).unbind()
        torch._foreach_mul_(fresh, 1 - momentum)
        torch._foreach_copy_(then, [row.momentum for row in rows])
        torch._foreach_mul_(then, momentum)
        torch._foreach_add_(then, fresh)
        # With nesterov m·v + (1−m)·g, without it v itself: `nesterov` is 1 or 0, on the device.
        wanted = list(torch._foreach_mul(then, 1 + nesterov * (momentum - 1)))
        torch._foreach_mul_(fresh, nesterov)
        torch._foreach_add_(wanted, fresh)
        return wanted, still

    def _settle(self, rows: list[Row], gates: Gates, outcome: Outcome) -> None:
        """Keeps the new momenta, unless the step was skipped: a factor of 0 would let NaN through."""
        go = outcome.overflow == 0
        for gate in (gates.found_inf, gates.hold):
            if gate is not None:
                go = go & (gate.reshape(()) == 0)
        owns = None if gates.active is None else go & (gates.active != 0)
        for row in rows:
            if not self.param_groups[row.group]["orthogonal"]:
                continue
            own = go if owns is None else owns[row.index]
            momentum = self.state[row.parameter][update_rows.MOMENTUM]
            torch.where(own, self._next[row.index], momentum, out=momentum)

    def _kept(self, store: dict[int, Tensor], row: Row) -> Tensor:
        """Memory that stays where it is: a recorded graph knows its address."""
        if row.index not in store:
            store[row.index] = torch.zeros_like(
                row.parameter, dtype=torch.float32, memory_format=torch.preserve_format
            )
        return store[row.index]


def _require_matrices(parameters: Sequence[Tensor]) -> None:
    for p in parameters:
        if not is_matrix(p):
            raise PacelineError(
                f"parameter of shape {tuple(p.shape)} has no singular values to speak of",
                "put it into a group with orthogonal=False",
            )
