"""Muon: LARS along orthogonalized momentum, for batches so large that LARS has too few steps.

Filters move in the direction of their momentum with all singular values made equal (K. Jordan et al.
2024). With Triton the whole step runs in
kernels (`fused_muon`); elsewhere list operations of torch prepare directions for the update of LARS.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from paceline.core.errors import PacelineError, RunError
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
)
from paceline.optim.state import MASTER, MOMENTUM

_MOMENTUM, _NESTEROV = Hyper._fields.index("momentum"), Hyper._fields.index("nesterov")
_ETA = Hyper._fields.index("trust_coefficient")
# State of a matrix with steps of fixed length: the norm to which they are relative, 0 until it is known.
REFERENCE = "reference_norm"
# Of a group with such steps: what its η was multiplied by, see `build.fixed_step_factor`.
STEP_FACTOR = "step_factor"
# Squares of smaller numbers underflow: a shorter average makes a shorter step, not a longer one.
_TINY = 1e-15


def split_matrices(group: dict[str, Any], least_dims: int) -> tuple[list[Any], list[Any]]:
    """The tensors of a group that are orthogonalized, and the others, each in their order."""
    orthogonal: list[Any] = []
    rest: list[Any] = []
    for p in group["params"]:
        chosen = group.get("role") != BIAS_NORM and is_matrix(p) and p.dim() >= least_dims
        (orthogonal if chosen else rest).append(p)
    return orthogonal, rest


PRODUCTS = ("auto", "kernels", "torch")


class MuonRule(UpdateRule):
    """LARS along u = O(v)·‖v‖ in groups with `orthogonal`, LARS elsewhere; see `Muon`.

    `begin` computes v and u, and `update` is that of LARS. In Triton's kernels `MuonStep` does both.
    """

    Hyper: ClassVar[Any] = Hyper
    buffers = (MOMENTUM,)
    numbers = (REFERENCE,)
    has_kernels = True
    has_products = True

    def __init__(self, directions_in_kernels: bool = True) -> None:
        self._along = LarsRule()
        # Whether Triton's kernels can compute the directions too, not only the update.
        self._may_use_kernels = directions_in_kernels
        self._in_kernels = False
        self._own: HyperTable | None = None  # with momentum; the kernels' table has none
        self._captured: list[HyperTable] = []  # kept for graphs that read them
        self._former: list[FusedStep] = []
        self._next: dict[int, Tensor] = {}
        self._directions: dict[int, Tensor] = {}
        self.knows_references = False

    def update(self, rows: Rows, hyper: Any) -> Tensor | None:
        return self._along.update(rows, hyper)

    def check(self, group: Mapping[str, Any]) -> None:
        self._along.check(group)

    def reads_norms(self, hypers: Sequence[Any]) -> bool:
        return self._along.reads_norms(hypers)

    def parts(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        """Matrices and others, in a group that does not say whether it is `orthogonal`."""
        if "orthogonal" in group:
            return [group]
        matrices, rest = split_matrices(group, 3 if "role" in group else 2)
        made = [group | {"params": matrices, "orthogonal": True}] if matrices else []
        if rest or not matrices:
            eta = group["trust_coefficient"] * (1 - group["momentum"])
            made.append(group | {"params": rest, "orthogonal": False, "trust_coefficient": eta})
        return made

    def hyper(self, group: Mapping[str, Any]) -> Hyper:
        hyper = read_hyper(Hyper, group)
        if _is_fixed(group):
            hyper = hyper._replace(adapt=False)  # the length is in the direction already
        if group["orthogonal"] and not self._in_kernels:
            return hyper._replace(momentum=0.0)  # it is in the direction already
        return hyper

    def kernels(self, optimizer: MasterOptimizer) -> FusedStep:
        self._in_kernels = not self.why_in_torch(optimizer)
        return MuonStep() if self._in_kernels else LarsStep()

    def why_in_torch(self, optimizer: MasterOptimizer) -> str:
        """Why torch computes the directions beside Triton's update; empty where it does not."""
        if not self._may_use_kernels:
            return "the rule has no kernels for them"
        if _fixed(optimizer):
            return "there are no kernels for steps of fixed length"
        products, shared = getattr(optimizer, "products", "auto"), optimizer.shared
        if products == "torch":
            return "as asked for"
        if products == "auto" and shared is not None and shared.ranks > 1:
            return "not yet run with products that ranks share"
        if not all(rows_are_outermost(p) for p in _matrices(optimizer)):
            return "a matrix whose rows are not outermost in memory"
        return products_unavailable(optimizer.overflow.device)

    def ready(self, optimizer: MasterOptimizer) -> None:
        fixed = _fixed(optimizer)
        if fixed and isinstance(optimizer.engine, MuonStep):
            # A group of another kind has come. Graphs that were captured read the old one's tables.
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
        # Here, not with the other state: masters may be filled after that was created.
        if not self.knows_references:
            self._measure_references(optimizer)

    @torch.no_grad()
    def _measure_references(self, optimizer: MasterOptimizer) -> None:
        """Those that are not known yet."""
        self.knows_references = True
        if not (matrices := _fixed(optimizer)):
            return
        masters = [optimizer.state[p].get(MASTER, p) for p in matrices]
        for p, norm in zip(matrices, norms_of(masters), strict=True):
            reference = optimizer.state[p][REFERENCE]
            found = norm.clamp(min=math.sqrt(len(p) / 3))
            reference.copy_(torch.where(reference > 0, reference, found))

    def begin(self, optimizer: MasterOptimizer, rows: list[Row], gates: Gates) -> list[Row]:
        """Rows with orthogonalized directions as gradients; the new momenta are kept in `_next`.
        `MuonStep` takes the rows as they are."""
        param_groups, shared = optimizer.parts(), optimizer.shared
        if isinstance(optimizer.engine, MuonStep):
            optimizer.engine.groups = frozenset(
                number for number, group in enumerate(param_groups) if group["orthogonal"]
            )
            optimizer.engine.shared = shared
            return rows
        groups = [
            (number, [row for row in rows if row.group == number])
            for number, group in enumerate(param_groups)
            if group["orthogonal"]
        ]
        chosen = [row for _, own in groups for row in own]
        if not chosen:
            return rows
        if self._own is None or len(self._own.values) != len(param_groups):
            raise RunError("a step was captured without preparation", "call prepare() before")
        if capturing(self._own.values.device):
            self._captured.append(self._own)
        wanted: list[Tensor] = []
        still: list[Tensor] = []
        for number, own in groups:
            if own:
                found, none = self._averaged(own, self._own.values[number], gates.grad_scale)
                wanted += found
                still += none
        found = self._with_lengths(param_groups, chosen, orthogonalize(wanted, still, shared))
        if gates.grad_scale is not None:
            # The kernels divide by the scale, a power of two, as they do with every gradient.
            torch._foreach_mul_(found, gates.grad_scale.reshape(()))
        directions = [self._kept(self._directions, row) for row in chosen]
        torch._foreach_copy_(directions, found)
        directed = {}
        for row, direction in zip(chosen, directions, strict=True):
            # The update ignores momentum here; it gets memory that is finite whenever it runs.
            directed[row.index] = replace(
                row, gradient=direction, buffers={**row.buffers, MOMENTUM: direction}
            )
        return [directed.get(row.index, row) for row in rows]

    def _with_lengths(
        self, groups: Sequence[dict[str, Any]], rows: Sequence[Row], directions: list[Tensor]
    ) -> list[Tensor]:
        """η times the reference, where steps have a fixed length; other directions as they are."""
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
        """Averaged gradients of a group's rows, and flags of rows whose gradient is zero. List
        operations, because a kernel launch per small tensor costs more than its arithmetic."""
        momentum, nesterov = values[_MOMENTUM], values[_NESTEROV]
        then = [self._kept(self._next, row) for row in rows]
        fresh = [torch.empty_like(tensor) for tensor in then]
        torch._foreach_copy_(fresh, [row.gradient for row in rows])
        if scale is not None:
            torch._foreach_div_(fresh, scale.reshape(()))
        still = (torch.stack(torch._foreach_norm(fresh)) == 0).unbind()
        torch._foreach_mul_(fresh, 1 - momentum)
        torch._foreach_copy_(then, [row.buffers[MOMENTUM] for row in rows])
        torch._foreach_mul_(then, momentum)
        torch._foreach_add_(then, fresh)
        # With nesterov m·v + (1−m)·g, without it v itself: `nesterov` is 1 or 0, on the device.
        wanted = list(torch._foreach_mul(then, 1 + nesterov * (momentum - 1)))
        torch._foreach_mul_(fresh, nesterov)
        torch._foreach_add_(wanted, fresh)
        return wanted, still

    def finish(
        self, optimizer: MasterOptimizer, rows: list[Row], gates: Gates, outcome: Outcome
    ) -> None:
        """Stores the new momenta unless the step was skipped. A factor of 0 would let NaN through."""
        if isinstance(optimizer.engine, MuonStep):
            return
        parts = optimizer.parts()
        for row, go in zip(rows, gates.allowed(rows, outcome).unbind(), strict=True):
            if parts[row.group]["orthogonal"]:
                momentum = optimizer.state[row.parameter][MOMENTUM]
                torch.where(go, self._next[row.index], momentum, out=momentum)

    def _kept(self, store: dict[int, Tensor], row: Row) -> Tensor:
        """Memory at a constant address, which captured graphs hold."""
        if row.index not in store:
            store[row.index] = torch.zeros_like(
                row.parameter, dtype=torch.float32, memory_format=torch.preserve_format
            )
        return store[row.index]


class Muon(MasterOptimizer):
    """v ← m·v + (1−m)·g; u = O(v)·‖v‖; λ = η‖w‖ / (‖u‖ + β‖w‖ + eps); w ← w − lr·λ·(u + βw).

    O makes all singular values equal; `nesterov` uses (1−m)·g + m·v in place of v. This applies to
    groups with `orthogonal=True`, whose tensors are matrices with one row per output; other groups are
    updated as by LARS. In a group without that key, the filters of convolutions are orthogonalized if it
    has a role, as `paceline.models.parameter_groups` makes them, otherwise all matrices; its other
    parameters move as by LARS at η·(1−m). Momentum is an average here and does
    not multiply the layer's rate: η must be 1/(1−m) times that of LARS for equal step sizes. With a
    zero gradient only the decay applies, at λ = 1 as in LARS, and v keeps fading. The finite check
    applies to v. `products`: matrix products on a GPU by Triton's `kernels` or by `torch`; `auto` means
    kernels, unless ranks share the products out.

    Steps that are long relative to w make w grow: without effect where a norm follows the layer,
    without bound where none does. In orthogonal groups with `fixed_steps=True` they have a fixed length:
    w ← w − lr·(η·r·O(v) / ‖O(v)‖ + βw), where r is the norm of w before the first step or, if that is
    larger, of torch's default initialization, √(rows / 3).

    Example:
        optimizer = Muon(parameter_groups(model, 5e-5), lr=4.0)
    """

    # Whether Triton's kernels can compute the directions too, not only the update.
    directions_in_kernels: ClassVar[bool] = True
    CHOICES: ClassVar[tuple[str, ...]] = (*MasterOptimizer.CHOICES, "products")
    products = "auto"

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
        foreach: bool | None = None,
        maximize: bool = False,
    ) -> None:
        if products not in PRODUCTS:
            raise ValueError(f"products = {products!r}: use {', '.join(PRODUCTS)}")
        self.products = products
        defaults = Hyper(
            lr, momentum, weight_decay, trust_coefficient, eps, nesterov, lr_in_momentum=True,
            clip=False, adapt=adapt,
        )._asdict()  # fmt: skip
        super().__init__(
            params, defaults, partial(MuonRule, self.directions_in_kernels), fused=fused,
            adapt_bias_norm=adapt_bias_norm, foreach=foreach, maximize=maximize,
        )  # fmt: skip

    @property
    def muon(self) -> MuonRule:
        assert isinstance(self.rule, MuonRule)
        return self.rule

    def describe(self) -> str:
        shared = f", products shared by {self.shared.ranks} ranks" if self.shared else ""
        has_linear = any(p.dim() == 2 for p in _matrices(self))
        linear = ", linear layers orthogonalized too" if has_linear else ""
        fixed = ", steps of fixed length" if _fixed(self) else ""
        factors = {group.get(STEP_FACTOR, 1.0) for group in self.param_groups if _is_fixed(group)}
        if factors - {1.0}:
            fixed += f", {min(factors):.2g} of η because few of the matrices have a norm layer"
        directions = ""
        if self.directions_in_kernels and self.path == "triton" and self.muon.why_in_torch(self):
            directions = ", directions by torch"
        return f"{super().describe()}{linear}{fixed}{directions}{shared}"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups.pop()
        if group.get("orthogonal"):
            _require_matrices(group["params"])
        self.param_groups.append(group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Groups without the key `orthogonal`, as saved by other optimizers, keep their current kind."""
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
            # Saved before the first step: measured anew, in the memory that captured graphs read.
            if self.state[p].get(REFERENCE) is None:
                self.state[p][REFERENCE] = reference.zero_()
        self.muon.knows_references = False

    def reset_masters(self) -> None:
        super().reset_masters()
        for p in _fixed(self):
            self.state[p][REFERENCE].zero_()
        self.muon.knows_references = False


def keep_step_factors(groups: list[dict[str, Any]], saved: Sequence[dict[str, Any]]) -> bool:
    """Gives `groups` the factors of the run that `saved` comes from; whether that changed any."""
    changed = False
    for ours, theirs in zip(groups, saved, strict=True):
        now, before = ours.get(STEP_FACTOR, 1.0), theirs.get(STEP_FACTOR, 1.0)
        if _is_fixed(ours) and theirs.get("fixed_steps") and now != before:
            ours["trust_coefficient"] *= before / now
            ours[STEP_FACTOR], changed = before, True
    return changed


def _is_fixed(group: Mapping[str, Any]) -> bool:
    return bool(group.get("orthogonal") and group.get("fixed_steps", False))


def _require_matrices(parameters: Sequence[Tensor]) -> None:
    for p in parameters:
        if not is_matrix(p):
            raise PacelineError(
                f"parameter of shape {tuple(p.shape)} has fewer than two rows or columns",
                "put it into a group with orthogonal=False",
            )


def _matrices(optimizer: MasterOptimizer) -> list[Tensor]:
    return [p for part in optimizer.parts() if part["orthogonal"] for p in part["params"]]


def _fixed(optimizer: MasterOptimizer) -> list[Tensor]:
    """The matrices with steps of fixed length."""
    return [p for part in optimizer.parts() if _is_fixed(part) for p in part["params"]]
