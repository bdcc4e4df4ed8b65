"""Muon: LARS along orthogonalized momentum, for batches so large that LARS has too few steps.

The update direction of a filter is the filter's momentum with all singular values made equal (K.
Jordan et al. 2024). With Triton the whole step runs in kernels (`fused_muon`). Otherwise torch's
foreach operations compute the update directions, and the update of LARS applies them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from paceline.core.errors import PacelineError
from paceline.optim.base import BIAS_NORM, MasterOptimizer
from paceline.optim.fused import FusedStep, LarsStep
from paceline.optim.fused_muon import MuonStep, products_unavailable, rows_are_outermost
from paceline.optim.lars import Hyper, LarsRule
from paceline.optim.orthogonal import is_matrix, orthogonalize
from paceline.optim.rule import (
    Gates,
    HyperTable,
    Outcome,
    Row,
    Rows,
    UpdateRule,
    capturing,
    norms_of,
    read_hyper,
    unprepared,
)
from paceline.optim.state import MASTER, MOMENTUM

_MOMENTUM, _NESTEROV = Hyper._fields.index("momentum"), Hyper._fields.index("nesterov")
_ETA = Hyper._fields.index("trust_coefficient")
# State of a matrix with `fixed_steps`: the norm that scales the steps; 0 until it is measured.
REFERENCE = "reference_norm"
# Key of a group with `fixed_steps`: the factor that η contains, see `muon_groups.fixed_step_factor`.
STEP_FACTOR = "step_factor"
# Squares of smaller values underflow. With this limit, a smaller average makes a shorter step.
_TINY = 1e-15
PRODUCTS = ("auto", "torch")


def split_matrices(group: dict[str, Any], least_dims: int) -> tuple[list[Any], list[Any]]:
    """Splits the tensors of a group into those to orthogonalize and all others.

    Args:
        group: A parameter group.
        least_dims: Smallest number of dimensions of an orthogonalized tensor.

    Returns:
        The tensors to orthogonalize and the remaining tensors, each in the order of the group.
    """
    orthogonal: list[Any] = []
    rest: list[Any] = []
    for p in group["params"]:
        chosen = group.get("role") != BIAS_NORM and is_matrix(p) and p.dim() >= least_dims
        (orthogonal if chosen else rest).append(p)
    return orthogonal, rest


class MuonRule(UpdateRule):
    """The update rule of Muon: LARS along u = O(v)·‖v‖ in groups with `orthogonal`, else plain LARS.

    `begin` computes v and u, and `update` applies u as LARS would apply a gradient. With Triton
    kernels, `MuonStep` does both. `Muon` has the equations.
    """

    Hyper: ClassVar[Any] = Hyper
    buffers = (MOMENTUM,)
    numbers = (REFERENCE,)
    has_kernels = True
    has_products = True

    def __init__(self) -> None:
        self._lars = LarsRule()
        self._in_kernels = False
        self._own: HyperTable | None = None  # holds the momentum, which the kernels' table lacks
        self._captured: list[HyperTable] = []  # kept alive for captured graphs
        self._former: list[FusedStep] = []
        self._next: dict[int, Tensor] = {}
        self._directions: dict[int, Tensor] = {}
        self.knows_references = False

    def update(self, rows: Rows, hyper: Any) -> Tensor | None:
        return self._lars.update(rows, hyper)

    def check(self, group: Mapping[str, Any]) -> None:
        self._lars.check(group)

    def reads_norms(self, hypers: Sequence[Any]) -> bool:
        return self._lars.reads_norms(hypers)

    def parts(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        """Splits a group without the key `orthogonal` into matrices and other parameters."""
        if "orthogonal" in group:
            return [group]
        matrices, rest = split_matrices(group, 3 if "role" in group else 2)
        parts = [group | {"params": matrices, "orthogonal": True}] if matrices else []
        if rest or not matrices:
            eta = group["trust_coefficient"] * (1 - group["momentum"])
            parts.append(group | {"params": rest, "orthogonal": False, "trust_coefficient": eta})
        return parts

    def hyper(self, group: Mapping[str, Any]) -> Hyper:
        hyper = read_hyper(Hyper, group)
        if _is_fixed(group):
            hyper = hyper._replace(adapt=False)  # the direction already has the length of the step
        if group["orthogonal"] and not self._in_kernels:
            return hyper._replace(momentum=0.0)  # the direction already contains the momentum
        return hyper

    def kernels(self, optimizer: MasterOptimizer) -> FusedStep:
        self._in_kernels = self.directions_in_kernels(optimizer)
        return MuonStep() if self._in_kernels else LarsStep()

    def directions_in_kernels(self, optimizer: MasterOptimizer) -> bool:
        """Returns True if Triton kernels can also compute the update directions."""
        shared = optimizer.shared is not None and optimizer.shared.ranks > 1
        wants_torch = getattr(optimizer, "products", "auto") == "torch"
        if wants_torch or shared or _fixed(optimizer):  # none for shared or fixed steps
            return False
        rows_fit = all(rows_are_outermost(p) for p in _matrices(optimizer))
        return rows_fit and not products_unavailable(optimizer.overflow.device)

    def ready(self, optimizer: MasterOptimizer) -> None:
        fixed = _fixed(optimizer)
        if fixed and isinstance(optimizer.engine, MuonStep):
            # A group with fixed steps was added. Captured graphs read the tables of the old step.
            self._former.append(optimizer.engine)
            optimizer.engine = self.kernels(optimizer)
        for p in fixed:
            if optimizer.state[p].get(REFERENCE) is None:
                optimizer.state[p][REFERENCE] = torch.zeros((), device=p.device)
                self.knows_references = False

    def upload(self, optimizer: MasterOptimizer) -> None:
        groups = optimizer.parts()
        if self._own is None or len(self._own.values) != len(groups):
            device = optimizer.overflow.device
            self._own = HyperTable(len(groups), len(Hyper._fields), device)
        self._own.send(tuple(read_hyper(Hyper, group) for group in groups))
        # Not in `ready`, because masters may receive their values only after their creation.
        if not self.knows_references:
            self._measure_references(optimizer)

    @torch.no_grad()
    def _measure_references(self, optimizer: MasterOptimizer) -> None:
        """Measures the initial norm r of matrices with `fixed_steps` for which it is not known yet."""
        self.knows_references = True
        if not (matrices := _fixed(optimizer)):
            return
        masters = [optimizer.state[p].get(MASTER, p) for p in matrices]
        for p, norm in zip(matrices, norms_of(masters), strict=True):
            reference = optimizer.state[p][REFERENCE]
            measured = norm.clamp(min=math.sqrt(len(p) / 3))
            reference.copy_(torch.where(reference > 0, reference, measured))

    def begin(self, optimizer: MasterOptimizer, rows: list[Row], gates: Gates) -> list[Row]:
        """Replaces gradients by orthogonalized update directions, and stores the new momenta in `_next`.

        If `MuonStep` runs the step in kernels, returns `rows` unchanged.
        """
        param_groups = optimizer.parts()
        numbers = [n for n, group in enumerate(param_groups) if group["orthogonal"]]
        if isinstance(optimizer.engine, MuonStep):
            optimizer.engine.groups = frozenset(numbers)
            return rows
        rows_by_group = {number: [row for row in rows if row.group == number] for number in numbers}
        chosen = [row for own in rows_by_group.values() for row in own]
        if not chosen:
            return rows
        if self._own is None or len(self._own.values) != len(param_groups):
            raise unprepared()
        if capturing(self._own.values.device):
            self._captured.append(self._own)
        averages: list[Tensor] = []
        is_zero: list[Tensor] = []
        for number, own in rows_by_group.items():
            if own:
                group_averages, zeros = self._averaged(
                    own, self._own.values[number], gates.grad_scale
                )
                averages += group_averages
                is_zero += zeros
        computed = self._with_lengths(
            param_groups, chosen, orthogonalize(averages, is_zero, optimizer.shared)
        )
        if gates.grad_scale is not None:
            # The update will divide every gradient by the scale, a power of two.
            torch._foreach_mul_(computed, gates.grad_scale.reshape(()))
        directions = [self._buffer(self._directions, row) for row in chosen]
        torch._foreach_copy_(directions, computed)
        directed = {}
        for row, direction in zip(chosen, directions, strict=True):
            # The update uses momentum 0 here, but still needs a buffer with finite values.
            directed[row.index] = replace(
                row, gradient=direction, buffers={**row.buffers, MOMENTUM: direction}
            )
        return [directed.get(row.index, row) for row in rows]

    def _with_lengths(
        self, groups: Sequence[dict[str, Any]], rows: Sequence[Row], directions: list[Tensor]
    ) -> list[Tensor]:
        """Scales the directions in groups with `fixed_steps` to the length η·r, with r as in `Muon`."""
        places = [i for i, row in enumerate(rows) if _is_fixed(groups[row.group])]
        if not places:
            return directions
        assert self._own is not None
        norms = torch.stack(norms_of([directions[i] for i in places])).clamp(min=_TINY)
        etas = torch.stack([self._own.values[rows[i].group, _ETA] for i in places])
        references = torch.stack([rows[i].buffers[REFERENCE] for i in places])
        for i, factor in zip(places, (etas * references / norms).unbind(), strict=True):
            directions[i] = directions[i] * factor
        return directions

    def _averaged(
        self, rows: Sequence[Row], values: Tensor, scale: Tensor | None
    ) -> tuple[list[Tensor], Sequence[Tensor]]:
        """Returns the gradients of a group averaged by momentum, and flags for gradients that are zero.

        Uses foreach operations, because launching a kernel costs more than the arithmetic of a small
        tensor.
        """
        momentum, nesterov = values[_MOMENTUM], values[_NESTEROV]
        momenta = [self._buffer(self._next, row) for row in rows]
        fresh = [torch.empty_like(tensor) for tensor in momenta]
        torch._foreach_copy_(fresh, [row.gradient for row in rows])
        if scale is not None:
            torch._foreach_div_(fresh, scale.reshape(()))
        is_zero = (torch.stack(torch._foreach_norm(fresh)) == 0).unbind()
        torch._foreach_mul_(fresh, 1 - momentum)
        torch._foreach_copy_(momenta, [row.buffers[MOMENTUM] for row in rows])
        torch._foreach_mul_(momenta, momentum)
        torch._foreach_add_(momenta, fresh)
        # m·v + (1−m)·g with Nesterov momentum, otherwise v. `nesterov` is a device tensor, 1 or 0.
        averages = list(torch._foreach_mul(momenta, 1 + nesterov * (momentum - 1)))
        torch._foreach_mul_(fresh, nesterov)
        torch._foreach_add_(averages, fresh)
        return averages, is_zero

    def finish(
        self, optimizer: MasterOptimizer, rows: list[Row], gates: Gates, outcome: Outcome
    ) -> None:
        """Stores the new momenta of each parameter unless its update was skipped."""
        if isinstance(optimizer.engine, MuonStep):
            return
        parts = optimizer.parts()
        for row, go in zip(rows, gates.allowed(rows, outcome).unbind(), strict=True):
            if parts[row.group]["orthogonal"]:
                momentum = optimizer.state[row.parameter][MOMENTUM]
                torch.where(go, self._next[row.index], momentum, out=momentum)

    def _buffer(self, store: dict[int, Tensor], row: Row) -> Tensor:
        """Returns fp32 memory for a parameter, always at the same address for captured graphs."""
        if row.index not in store:
            store[row.index] = torch.zeros_like(
                row.parameter, dtype=torch.float32, memory_format=torch.preserve_format
            )
        return store[row.index]


class Muon(MasterOptimizer):
    """Muon optimizer: LARS along orthogonalized momentum.

    v ← m·v + (1−m)·g; u = O(v)·‖v‖; λ = η‖w‖ / (‖u‖ + β‖w‖ + eps); w ← w − lr·λ·(u + βw)

    O(v) is v with all singular values made equal. With `nesterov`, (1−m)·g + m·v replaces v. These
    equations apply to groups with `orthogonal=True`, whose tensors are matrices with one row per
    output. Groups with `orthogonal=False` are updated by LARS. A group without the key `orthogonal` is
    split. If the group has a role, as from `paceline.parameter_groups`, the filters of convolutions
    are orthogonalized, otherwise all matrices. The remaining parameters of the group are updated by
    LARS with η·(1−m).

    v is an average, so momentum does not multiply the rate. For steps as long as in LARS, η must be
    1/(1−m) times as large. With a zero gradient only the decay applies, at λ = 1, and v keeps decaying.
    A step is skipped if v is not finite.

    Steps that are long relative to w make w grow. If a norm layer follows, this growth has no effect.
    Otherwise the growth is unbounded. With `fixed_steps=True` in an orthogonal group, steps have a
    fixed length:

    w ← w − lr·(η·r·O(v) / ‖O(v)‖ + βw)

    r is the norm of w before the first step, but at least √(rows/3), the norm after torch's default
    initialization.

    Args:
        params: Parameters or groups, as from `paceline.parameter_groups`.
        lr: Learning rate.
        momentum: Momentum m.
        weight_decay: Weight decay β.
        trust_coefficient: Trust coefficient η.
        eps: Added to the denominator of λ.
        nesterov: Use Nesterov momentum.
        adapt: False to use λ = 1.
        adapt_bias_norm: True to compute λ also for groups with the role `bias_norm`.
        fused: True for Triton kernels, False for torch's foreach operations. None chooses kernels on
            CUDA if Triton is installed, otherwise foreach operations.
        products: Implementation of the matrix products on a GPU: `torch`, or `auto` for Triton kernels
            unless ranks share the products or steps have a fixed length.

    Example:
        >>> optimizer = Muon(parameter_groups(model, 5e-5), lr=4.0)
        >>> loss.backward()
        >>> optimizer.step()
    """

    CHOICES: ClassVar[tuple[str, ...]] = (*MasterOptimizer.CHOICES, "products")

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
        adapt_bias_norm: bool = False,
        fused: bool | None = None,
        products: str = "auto",
    ) -> None:
        if products not in PRODUCTS:
            raise ValueError(f"products = {products!r}: use {', '.join(PRODUCTS)}")
        self.products = products
        hyper = Hyper(
            lr, momentum, weight_decay, trust_coefficient, eps, nesterov, lr_in_momentum=True,
            clip=False, adapt=adapt,
        )  # fmt: skip
        super().__init__(
            params, hyper._asdict(), MuonRule, fused=fused, adapt_bias_norm=adapt_bias_norm
        )

    @property
    def muon(self) -> MuonRule:
        """The optimizer's rule as a `MuonRule`."""
        assert isinstance(self.rule, MuonRule)
        return self.rule

    def describe(self) -> str:
        """Describes the implementation, and which matrices are orthogonalized and shared among ranks."""
        notes = [super().describe()]
        if any(p.dim() == 2 for p in _matrices(self)):
            notes.append("linear layers orthogonalized too")
        if _fixed(self):
            notes.append("steps of fixed length")
        factors = {group.get(STEP_FACTOR, 1.0) for group in self.param_groups if _is_fixed(group)}
        if factors - {1.0}:
            notes.append(f"{min(factors):.2g} of η because few matrices have a norm layer")
        if self.path == "triton" and not self.muon.directions_in_kernels(self):
            notes.append("directions by torch")
        if self.shared:
            notes.append(f"products shared by {self.shared.ranks} ranks")
        return ", ".join(notes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group. Raises PacelineError if an orthogonal group has a non-matrix."""
        super().add_param_group(param_group)
        group = self.param_groups.pop()
        if group.get("orthogonal"):
            _require_matrices(group["params"])
        self.param_groups.append(group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of Muon or of another optimizer.

        If a saved group has no key `orthogonal`, the current value of this key stays.
        """
        saved = list(state_dict["param_groups"])
        if len(saved) == len(self.param_groups):
            for place, (theirs, ours) in enumerate(zip(saved, self.param_groups, strict=True)):
                kind = {"orthogonal": ours["orthogonal"]} if "orthogonal" in ours else {}
                if "orthogonal" not in theirs and "fixed_steps" in ours:
                    kind["fixed_steps"] = ours["fixed_steps"]
                saved[place] = {**kind, **theirs}
                if saved[place].get("orthogonal"):
                    _require_matrices(ours["params"])
        held = {p: self.state[p][REFERENCE] for p in _fixed(self) if REFERENCE in self.state[p]}
        super().load_state_dict({**state_dict, "param_groups": saved})
        for p, reference in held.items():
            # A state saved before the first step has no norm. Measure it again, in the same memory,
            # because captured graphs read it.
            if self.state[p].get(REFERENCE) is None:
                self.state[p][REFERENCE] = reference.zero_()
        self.muon.knows_references = False

    def reset_masters(self) -> None:
        """Copies the parameters to their master weights and measures the norms for fixed steps again."""
        super().reset_masters()
        for p in _fixed(self):
            self.state[p][REFERENCE].zero_()
        self.muon.knows_references = False


def _is_fixed(group: Mapping[str, Any]) -> bool:
    return bool(group.get("orthogonal") and group.get("fixed_steps", False))


def _require_matrices(parameters: Sequence[Tensor]) -> None:
    for p in parameters:
        if not is_matrix(p):
            raise PacelineError(
                f"a parameter of shape {tuple(p.shape)} has fewer than two rows or columns",
                "put it into a group with orthogonal=False",
            )


def _matrices(optimizer: MasterOptimizer) -> list[Tensor]:
    return [p for part in optimizer.parts() if part["orthogonal"] for p in part["params"]]


def _fixed(optimizer: MasterOptimizer) -> list[Tensor]:
    """Returns the matrices whose updates have a fixed length (groups with `fixed_steps`)."""
    return [p for part in optimizer.parts() if _is_fixed(part) for p in part["params"]]
