"""`UpdateRule`: what distinguishes one optimizer from another.

A rule declares hyper-parameters and state buffers, and computes new values of some rows. It knows no
fp16 parameters, loss scale, overflow or device switches: `paceline.optim.base.MasterOptimizer` and
`run_in_lists` handle these for all rules.

The rest of the module is shared by rules, engine and kernels: `Row` holds one parameter's tensors,
`Gates` the device-side switches of a step, `Outcome` its results and `HyperTable` the hyper-parameters on
the device. `unscaled`, `check_finite` and `norms_of` compute gradients, the finite check and norms in
torch's list operations. Nothing here synchronizes with a GPU.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from paceline.core.errors import RunError
from paceline.optim.state import FORMATS

if TYPE_CHECKING:
    from paceline.optim.base import MasterOptimizer
    from paceline.optim.fused import FusedStep


AnyHyper = TypeVar("AnyHyper", bound=NamedTuple)
# Hyper-parameters by their range; behind a name what to try.
_FINITE = ("lr", "weight_decay", "trust_coefficient", "eps", "adam_eps", "rms_rate")
_BELOW_ONE = {"momentum": "; try 0.9", "beta1": "", "beta2": ""}


@dataclass(frozen=True, slots=True)
class Row:
    """One parameter. `index` counts all parameters in group order; `master` is the parameter itself
    where that is fp32."""

    index: int
    group: int
    parameter: Tensor
    gradient: Tensor
    master: Tensor
    # The other tensors of the parameter's state, by name.
    buffers: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Gates:
    """Switches that kernels read on the device; None where unset."""

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    hold: Tensor | None = None
    active: Tensor | None = None

    def check(self, parameters: int, device: torch.device) -> None:
        """Raises RunError for a switch on another device, which could not be read without a sync."""
        for name in self.__slots__:
            switch = getattr(self, name)
            if switch is None:
                continue
            if switch.device != device:
                raise RunError(
                    f"{name} lies on {switch.device}, the parameters on {device}",
                    f"move {name} to {device}",
                )
            wanted = parameters if name == "active" else 1
            if switch.numel() != wanted or not switch.is_contiguous():
                raise RunError(
                    f"{name} has shape {tuple(switch.shape)}",
                    f"give it {wanted} contiguous value{'s' * (wanted != 1)}",
                )

    def allow(self, outcome: Outcome) -> Tensor:
        """Whether a step may change anything, on the device."""
        go = outcome.overflow == 0
        for gate in (self.found_inf, self.hold):
            if gate is not None:
                go = go & (gate.reshape(()) == 0)
        return go

    def allowed(self, rows: Sequence[Row], outcome: Outcome) -> Tensor:
        """Which rows a step may change, on the device."""
        go = self.allow(outcome)
        if self.active is None:
            return go.expand(len(rows))
        active = self.active.unbind()
        return go & (torch.stack([active[row.index] for row in rows]) != 0)


class Outcome:
    """Trust ratio last used and non-finite flag of each parameter; `overflow` is 1 if any flag is
    set."""

    def __init__(self, parameters: int, device: torch.device) -> None:
        self.ratios = torch.ones(parameters, device=device)
        self.bad = torch.zeros(parameters, device=device)
        self.overflow = torch.zeros((), device=device)

    def clear(self) -> None:
        """Resets to the values of parameters that a step does not visit."""
        self.ratios.fill_(1.0)
        self.bad.zero_()
        self.overflow.zero_()


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def same_strides(left: Tensor, right: Tensor) -> bool:
    """Whether the memory layouts are equal; strides of dimensions of size 1 do not count."""
    a, b = left.stride(), right.stride()
    if a == b:
        return True
    return all(x == y for x, y, size in zip(a, b, left.shape, strict=True) if size > 1)


@dataclass(frozen=True)
class Rows:
    """Rows of one group and one parameter format, for torch's list operations.

    `gradients` are unscaled and in the format of the masters; a rule does not change them. `norms` are
    their 2-norms.
    """

    rows: Sequence[Row]
    gradients: list[Tensor]
    norms: list[Tensor]

    @property
    def masters(self) -> list[Tensor]:
        return [row.master for row in self.rows]

    def buffers(self, name: str) -> list[Tensor]:
        """One of the rule's buffers, of every row."""
        return [row.buffers[name] for row in self.rows]


class UpdateRule(ABC):
    """The equation of an optimizer. Subclasses need `Hyper` and `update`; see docs/optimizers.md."""

    # Names and defaults of hyper-parameters, which are the keys of parameter groups.
    Hyper: ClassVar[Any]
    # fp32 state of each parameter beside its master, in its shape; then other state that is saved.
    buffers: ClassVar[tuple[str, ...]] = ()
    numbers: ClassVar[tuple[str, ...]] = ()
    # The part of `numbers` that `update` changes.
    changed_numbers: ClassVar[tuple[str, ...]] = ()
    # Formats of parameters.
    formats: ClassVar[tuple[torch.dtype, ...]] = FORMATS
    # True: `kernels` returns a step.
    has_kernels: ClassVar[bool] = False
    # True: it multiplies matrices, whose last bits depend on the kind of device. Ranks may share the
    # products out (`MasterOptimizer.shared`).
    has_products: ClassVar[bool] = False
    # True: `update` gets skipped rows too, as a rule needs that draws one random number after another.
    draws: ClassVar[bool] = False

    @abstractmethod
    def update(self, rows: Rows, hyper: Any) -> Tensor | None:
        """Changes masters and buffers in place. Returns the trust ratios of the rows, if it has any."""

    def hyper(self, group: Mapping[str, Any]) -> Any:
        """The hyper-parameters with which a group is updated: a row of the kernels' table."""
        return read_hyper(self.Hyper, group)

    def check(self, group: Mapping[str, Any]) -> None:
        """Raises ValueError for hyper-parameters of a new group that cannot be used."""
        check_hyper(self.hyper(group))

    def parts(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        """Splits a group if the rule moves some of its parameters in another way than the others."""
        return [group]

    def reads_norms(self, hypers: Sequence[Any]) -> bool:
        """Returns True if `update` uses the norms of the gradients, which are then accurate."""
        return False

    def gradients(self, rows: Sequence[Row], gradients: list[Tensor]) -> list[Tensor]:
        """What the finite check and `update` get in place of the unscaled gradients."""
        return gradients

    def kernels(self, optimizer: MasterOptimizer) -> FusedStep:
        """Creates the step in Triton kernels, if the rule `has_kernels`."""
        raise NotImplementedError

    # What a rule with more state on the device does around a step.

    def ready(self, optimizer: MasterOptimizer) -> None:  # noqa: B027  (optional)
        """Creates state beside `buffers`: once, and again after a group was added or state loaded."""

    def upload(self, optimizer: MasterOptimizer) -> None:  # noqa: B027  (optional)
        """Sends values to the device that `begin` reads. Not called while a CUDA graph is captured."""

    def begin(self, optimizer: MasterOptimizer, rows: list[Row], gates: Gates) -> list[Row]:
        """The rows that the update uses; changes no state."""
        return rows

    def finish(  # noqa: B027  (optional)
        self, optimizer: MasterOptimizer, rows: list[Row], gates: Gates, outcome: Outcome
    ) -> None:
        """Called after the update, also if a gate skipped it."""


def run_in_lists(
    rule: UpdateRule,
    rows: Sequence[Row],
    hypers: Sequence[NamedTuple],
    gates: Gates,
    outcome: Outcome,
) -> None:
    """One step in torch's list operations: changes masters, buffers and parameters in place, or leaves
    them bit-identical.

    All norms come first, because one non-finite gradient skips all updates. Flags that lie on the host
    are read there; on a device the rule works on copies, from which `torch.where` selects.
    """
    gradients = rule.gradients(rows, unscaled(rows, gates.grad_scale))
    # The finite check alone needs no accuracy.
    accurate = rule.reads_norms(hypers)
    norms = norms_of(gradients) if accurate else list(torch._foreach_norm(gradients, 2))
    allowed = check_finite(rows, norms, gates, outcome)
    go = allowed.tolist() if on_host(allowed.device) and not rule.draws else None
    buckets: dict[tuple[int, torch.dtype], list[int]] = {}
    for position, row in enumerate(rows):
        if go is None or go[position]:
            buckets.setdefault((row.group, row.parameter.dtype), []).append(position)
    for (group, _), positions in buckets.items():
        own = [rows[i] for i in positions]
        names = (*rule.buffers, *rule.changed_numbers)
        moved = own if go is not None else [_copy(row, names) for row in own]
        ratios = rule.update(
            Rows(moved, [gradients[i] for i in positions], [norms[i] for i in positions]),
            hypers[group],
        )
        flags = [allowed[i] for i in positions] if go is None or ratios is not None else []
        if ratios is not None:
            put(outcome.ratios, own, torch.where(torch.stack(flags), ratios.float(), 1.0))
        if go is None:
            for old, new, flag in zip(own, moved, flags, strict=True):
                _select(old, new, flag, names)
            continue
        for row in own:
            if row.master is not row.parameter:
                row.parameter.copy_(row.master)


def _copy(row: Row, names: Sequence[str]) -> Row:
    copied = {name: row.buffers[name].clone() for name in names if name in row.buffers}
    return replace(row, master=row.master.clone(), buffers={**row.buffers, **copied})


def _select(old: Row, new: Row, go: Tensor, names: Sequence[str]) -> None:
    """Keeps or replaces values on the device. A product with 0 would let NaN through."""
    for name in names:
        if name in old.buffers:
            torch.where(go, new.buffers[name], old.buffers[name], out=old.buffers[name])
    if old.master is not old.parameter:
        half = new.master.to(old.parameter.dtype)
        torch.where(go, half, old.parameter, out=old.parameter)
    torch.where(go, new.master, old.master, out=old.master)


def check_range(name: str, value: float) -> None:
    """Raises ValueError for a hyper-parameter out of the range that its name has in every optimizer."""
    if name in _FINITE and not 0 <= value < math.inf:
        raise ValueError(f"{name} = {value}: must be 0 or more, and finite")
    if name in _BELOW_ONE and not 0 <= value < 1:
        raise ValueError(f"{name} = {value}: must be in [0, 1){_BELOW_ONE[name]}")


def check_hyper(hyper: AnyHyper) -> AnyHyper:
    """Returns the hyper-parameters of a group; raises ValueError for one that cannot be used."""
    for name, value in hyper._asdict().items():
        check_range(name, value)
    if getattr(hyper, "nesterov", False) and getattr(hyper, "momentum", 0.0) == 0:
        raise ValueError("nesterov = True: needs momentum; try momentum=0.9")
    return hyper


def read_hyper(kind: type[AnyHyper], group: Mapping[str, Any]) -> AnyHyper:
    """The hyper-parameters of a group, each of the type that its field has. Reading a learning rate that
    is a CUDA tensor synchronizes with the device."""
    return kind._make(of(group[name]) for name, of in _types(kind))


def _whole(value: Any) -> int:
    if int(value) != value:
        raise ValueError(f"{value}: must be a whole number")
    return int(value)


@cache
def _types(kind: type[NamedTuple]) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    """Returns the fields of a class of hyper-parameters, each with what converts its values."""
    hints = getattr(kind, "__annotations__", {})
    names = {field: getattr(hint, "__forward_arg__", hint) for field, hint in hints.items()}
    types: dict[Any, Callable[[Any], Any]] = {bool: bool, "bool": bool, int: _whole, "int": _whole}
    return tuple((field, types.get(names.get(field), float)) for field in kind._fields)


class HyperTable:
    """One fp32 row per group, or per parameter, on `device`, always in the same memory: a captured CUDA
    graph reads the current values."""

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        self.values = torch.zeros(rows, columns, device=device)
        self._sent: tuple[tuple[float, ...], ...] | None = None

    def send(self, rows: tuple[tuple[float, ...], ...]) -> None:
        """Copies the rows to the device asynchronously, if any value changed."""
        if rows == self._sent:
            return
        # New pinned memory each time: the previous copy may still be in progress.
        pinned = self.values.is_cuda
        host = torch.tensor(rows, dtype=torch.float32, pin_memory=pinned)
        self.values.copy_(host, non_blocking=pinned)
        self._sent = rows


class StagedGradients:
    """Gradients in their parameters' memory layout. A gradient of other strides or format is copied
    into memory that stays allocated, so that captured graphs may read it."""

    def __init__(self) -> None:
        self._copies: dict[int, Tensor] = {}

    def of(self, index: int, group: int, parameter: Tensor, gradient: Tensor) -> Tensor:
        if gradient.layout != torch.strided:
            raise RunError(
                f"sparse gradient for a parameter of shape {tuple(parameter.shape)} in group {group}",
                "make it dense (nn.Embedding(sparse=False)), or give it an optimizer of its own",
            )
        if same_strides(gradient, parameter) and gradient.dtype in FORMATS:
            return gradient
        copy = self._copies.get(index)
        kind = gradient.dtype if gradient.dtype in FORMATS else torch.float32
        if copy is None or copy.dtype != kind:
            copy = torch.empty_like(parameter, dtype=kind, memory_format=torch.preserve_format)
            self._copies[index] = copy
        return copy.copy_(gradient)


# Elements per fp32 sum of squares. The largest relative error measured, with equal elements, is 5.4e-7
# for 512 and 1.0e-6 for 1,024; the time is the same.
_CHUNK = 512


def unscaled(rows: Sequence[Row], grad_scale: Tensor | None) -> list[Tensor]:
    """Gradients in the master's format, divided by the scale; does not change the gradients."""
    gradients = [row.gradient.to(row.master.dtype) for row in rows]
    if grad_scale is None:
        return gradients
    return list(torch._foreach_mul(gradients, grad_scale.reshape(()).float().reciprocal()))


def check_finite(
    rows: Sequence[Row], norms: Sequence[Tensor], gates: Gates, outcome: Outcome
) -> Tensor:
    """Sets the flags of `outcome` from the norms of the unscaled gradients. Returns which rows may be
    updated, on the device."""
    bad = ~torch.isfinite(torch.stack([norm.float() for norm in norms]).square())
    allowed = torch.ones_like(bad)
    if gates.active is not None:
        active = gates.active.unbind()
        allowed = torch.stack([active[row.index] for row in rows]) != 0
    outcome.clear()
    put(outcome.bad, rows, (bad & allowed).float())
    outcome.overflow.copy_(outcome.bad.amax())
    return gates.allowed(rows, outcome)


def on_host(device: torch.device) -> bool:
    """Whether flags can be read without a synchronization."""
    return device.type == "cpu"


def put(vector: Tensor, rows: Sequence[Row], values: Tensor) -> None:
    """vector[index] = value for each row. Indexing with a list would synchronize with the device."""
    entries = list(vector.unbind())
    for row, value in zip(rows, values.unbind(), strict=True):
        entries[row.index] = value
    vector.copy_(torch.stack(entries))


def norms_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    if not tensors or not on_host(tensors[0].device):
        return list(torch._foreach_norm(list(tensors), 2))
    return accurate_norms(tensors)


def accurate_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """2-norms of fp32 tensors on the CPU, with a relative error of at most 1e-6.

    torch's CPU norm sums all squares of a tensor in a few fp32 accumulators; its relative error grows
    with the size, to 3e-3 for 40 million normally distributed elements. Here fp32 sums cover one
    chunk each, and chunks are added in fp64.
    """
    norms: list[Tensor | None] = [None] * len(tensors)
    small = [i for i, tensor in enumerate(tensors) if tensor.numel() <= _CHUNK]
    if small:
        found = torch._foreach_norm([tensors[i] for i in small], 2)
        for i, norm in zip(small, found, strict=True):
            norms[i] = norm
    return [
        _chunked_norm(t) if norm is None else norm for t, norm in zip(tensors, norms, strict=True)
    ]


def _chunked_norm(tensor: Tensor) -> Tensor:
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        tensor = tensor.permute(0, 2, 3, 1)  # in memory order: reshape does not copy
    flat = tensor.reshape(-1)
    even = flat.numel() // _CHUNK * _CHUNK
    parts = torch.linalg.vector_norm(flat[:even].view(-1, _CHUNK), dim=1)
    if even < flat.numel():
        parts = torch.cat([parts, torch.linalg.vector_norm(flat[even:]).reshape(1)])
    whole: Tensor = torch.linalg.vector_norm(parts, dtype=torch.float64)
    return whole.to(tensor.dtype)
