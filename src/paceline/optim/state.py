"""Data of one optimizer step, shared by the Triton and the foreach implementation, and what optimizers
share in torch's list operations.

`Row` holds one parameter's tensors, `Gates` the device-side switches of a step, `Outcome` its results
on the device and `HyperTable` the hyper-parameters on the device. Optimizer state is fp32 with the
parameter's own strides: the optimizer's own buffers, such as `momentum_buffer`, and, for parameters in
fp16 or bf16, `master`. On CPUs, and on GPUs without Triton, `unscaled`, `check_finite` and `norms_of`
compute gradients, the finite check and norms. None of them synchronizes with a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from paceline.core.errors import PacelineError, RunError

HALVES = (torch.float16, torch.bfloat16)
FORMATS = (torch.float32, *HALVES)
MASTER = "master"
MOMENTUM = "momentum_buffer"
STEP = "step"  # Adam's count of a parameter's updates: a number on the device
State = dict[str, Any]
AnyHyper = TypeVar("AnyHyper", bound=NamedTuple)
# Hyper-parameters by their range; behind a name what to try.
_FINITE = ("lr", "weight_decay", "trust_coefficient", "eps", "adam_eps", "rms_rate")
_BELOW_ONE = {"momentum": "; try 0.9", "beta1": "", "beta2": ""}
_FLAGS = ("nesterov", "lr_in_momentum", "clip", "adapt")


@dataclass(frozen=True, slots=True)
class Row:
    """One parameter. `index` counts all parameters in group order; `master` is the parameter itself
    where that is fp32."""

    index: int
    group: int
    parameter: Tensor
    gradient: Tensor
    master: Tensor
    momentum: Tensor
    # Adam's average of squares.
    second: Tensor | None = None


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


def require_dense(parameter: Tensor) -> None:
    """Raises unless memory holds each element once, without gaps: the kernels iterate over memory."""
    expected = 1
    dims = [d for d in zip(parameter.stride(), parameter.shape, strict=True) if d[1] != 1]
    for stride, size in sorted(dims):
        if stride != expected and parameter.numel() > 0:
            raise PacelineError(
                f"parameter of shape {tuple(parameter.shape)} and strides {parameter.stride()} has "
                "gaps or overlaps in memory",
                "make it a parameter of its own: nn.Parameter(tensor.clone())",
            )
        expected *= size


def check_range(name: str, value: float) -> None:
    """Raises ValueError for a hyper-parameter out of the range that its name has in every optimizer."""
    if name in _FINITE and not 0 <= value < math.inf:
        raise ValueError(f"{name} = {value}: must be 0 or more, and finite")
    if name in _BELOW_ONE and not 0 <= value < 1:
        raise ValueError(f"{name} = {value}: must be in [0, 1){_BELOW_ONE[name]}")
    if name == "sgd_share" and not 0 <= value <= 1:
        raise ValueError(f"{name} = {value}: must be in [0, 1]")
    if name == "mu" and not 0 < value < math.inf:
        raise ValueError(f"{name} = {value}: must be above 0, and finite")


def check_hyper(hyper: AnyHyper) -> AnyHyper:
    """Returns the hyper-parameters of a group; raises ValueError for one that cannot be used."""
    for name, value in hyper._asdict().items():
        check_range(name, value)
    if getattr(hyper, "nesterov", False) and getattr(hyper, "momentum", 0.0) == 0:
        raise ValueError("nesterov = True: needs momentum; try momentum=0.9")
    return hyper


def read_hyper(kind: type[AnyHyper], group: Mapping[str, Any]) -> AnyHyper:
    """The hyper-parameters of a group. Reading a learning rate that is a CUDA tensor synchronizes with
    the device."""
    return kind._make(
        bool(group[name]) if name in _FLAGS else float(group[name]) for name in kind._fields
    )


class Hyper(NamedTuple):
    """Hyper-parameters of one group, in the order of the table's columns."""

    lr: float
    momentum: float
    weight_decay: float
    trust_coefficient: float
    eps: float
    nesterov: bool
    lr_in_momentum: bool
    clip: bool
    adapt: bool


class AdamHyper(NamedTuple):
    """Hyper-parameters of one group of AdamW or LAMB. Rate, decay, `eps` of the trust ratio, `clip` and
    `adapt` have the columns of `Hyper`, because the kernels share code."""

    lr: float
    beta1: float
    weight_decay: float
    beta2: float
    eps: float
    adam_eps: float
    # 1 − β₂ as fp64 has it: 1 − 0.999 in fp32 has three digits fewer.
    rest2: float
    clip: bool
    adapt: bool

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> AdamHyper:
        """Reads a parameter group of AdamW, or of LAMB, which adapts."""
        beta1, beta2 = (float(beta) for beta in group["betas"])
        return cls(
            float(group["lr"]), beta1, float(group["weight_decay"]), beta2,
            float(group.get("trust_eps", 0.0)), float(group["eps"]), 1 - beta2,
            bool(group.get("clip", False)), bool(group.get("adapt", False)),
        )  # fmt: skip


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


def _state_format(parameter: Tensor) -> torch.dtype:
    """fp32, or the format of a parameter that is wider."""
    return torch.promote_types(parameter.dtype, torch.float32)


def create_state(parameter: Tensor, state: State, buffers: Sequence[str]) -> None:
    """Adds what `state` lacks: `buffers` of zeros, and the master as a copy of the parameter."""
    require_dense(parameter)
    kind = _state_format(parameter)
    for name in buffers:
        if state.get(name) is None:
            state[name] = torch.zeros_like(
                parameter, dtype=kind, memory_format=torch.preserve_format
            )
    if parameter.dtype in HALVES and state.get(MASTER) is None:
        state[MASTER] = parameter.detach().to(torch.float32, memory_format=torch.preserve_format)


def restore_state(
    groups: list[dict[str, Any]],
    saved: Mapping[str, Any],
    old: Mapping[Tensor, State],
    new: dict[Tensor, State],
    keys: Sequence[str],
) -> None:
    """Replaces the state in `new`, which torch has cast to the parameters' formats, by the saved fp32
    values of the masters and of `keys`.

    Existing memory of `old` is reused, because captured CUDA graphs hold its addresses. A saved
    master is dropped where the parameter is its own master.
    """
    ids = chain.from_iterable(group["params"] for group in saved["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in groups)
    for name, parameter in zip(ids, parameters, strict=True):
        source = saved["state"].get(name)
        if source is None:
            continue
        state, kept = new[parameter], old.get(parameter, {})
        own_master = parameter.dtype not in HALVES
        for key in (MASTER, *keys):
            value = source.get(key)
            if key == MASTER and value is None and not own_master and MASTER in kept:
                state[MASTER] = kept[MASTER]  # saved from an fp32 parameter
                continue
            if value is None or (key == MASTER and own_master):
                state.pop(key, None)
                continue
            target = kept.get(key)
            if target is None:
                same = torch.as_tensor(value).shape == parameter.shape
                like = parameter if same and key != STEP else parameter.new_empty(value.shape)
                target = torch.empty_like(
                    like, dtype=_state_format(parameter), memory_format=torch.preserve_format
                ).detach()
            target.copy_(torch.as_tensor(value))
            state[key] = target


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
    return allowed & gates.allow(outcome)


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
