"""Runs optimizer steps in Triton kernels, with a few launches for all parameters.

The kernels find the tensors in a table of memory addresses on the device. `FusedStep` builds this
table and rebuilds it only if an address changed. Each subclass (`LarsStep`, `AdamStep`,
`fused_muon.MuonStep`) launches the kernels of one kind of optimizer. Nothing here synchronizes with
the device, and no allocation depends on tensor values.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import RunError
from paceline.optim.rule import Gates, Outcome, Row, capturing, same_strides
from paceline.optim.state import EXP_AVG, EXP_AVG_SQ, MOMENTUM

CHUNK = 16384  # elements per program; ResNet-50 has about 1,700 chunks
BLOCK = 4096  # elements per loop iteration of a program
WIDTH = 256  # partial sums and flags per load
WARPS = 8
ALIGN = 16  # bytes of the widest load


def triton_unavailable(device: torch.device) -> str:
    """Returns why the Triton kernels cannot run on `device`, or an empty text if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return (
            "on the CPU the kernels need Triton's interpreter (set TRITON_INTERPRET=1 beforehand)"
        )
    if device.type not in ("cpu", "cuda"):
        return f"no kernels for {device.type}"
    return ""


@dataclass(frozen=True)
class _Bucket:
    """The chunks of one kernel launch, from tensors with the same dtypes and alignment."""

    gradient: torch.dtype
    parameter: torch.dtype
    align: int
    first: int
    count: int


@dataclass(frozen=True)
class Layout:
    """How the tensors of a step are divided into chunks, one for each program of a kernel.

    The layout depends only on dtypes, sizes and alignment, so it stays valid if addresses change.

    Attributes:
        key: dtypes, sizes and alignment of the tensors of all parameters.
        order: Positions of the parameters in the step, sorted by bucket.
        first_chunks: Index of the first chunk of each tensor, in the sequence of `order`.
        chunk_tensor: Index of the tensor that contains each chunk.
        partials: Memory for sums of squares over chunks.
        buckets: Ranges of chunks; each kernel is launched once per bucket.
    """

    key: tuple[Any, ...]
    order: tuple[int, ...]
    first_chunks: tuple[int, ...]
    chunk_tensor: Tensor
    partials: Tensor
    buckets: tuple[_Bucket, ...]


@dataclass(frozen=True)
class Tables:
    """The addresses of all tensors in a step, in a tensor on the device, and their layout."""

    key: tuple[Any, ...]
    layout: Layout
    tensors: Tensor


@dataclass
class FusedStep(ABC):
    """Runs an optimizer step in Triton kernels; keeps its table of tensor addresses for the next step.

    Attributes:
        buffers: Names of the optimizer's state buffers, at most two, in the order in which kernels
            read them.
    """

    buffers: tuple[str, ...]
    _tables: Tables | None = None
    _constants: tuple[Tensor, Tensor, Tensor] | None = None
    _captured: list[tuple[Any, ...]] = field(default_factory=list)  # kept alive for captured graphs

    def run(self, rows: Sequence[Row], hyper: Tensor, gates: Gates, outcome: Outcome) -> None:
        """Launches the kernels of one step on the current stream."""
        tables = self.ready(rows, hyper, outcome)
        with on_device(hyper.device):
            self.launch(tables, hyper, gates, outcome)

    def ready(self, rows: Sequence[Row], hyper: Tensor, outcome: Outcome) -> Tables:
        """Returns the address table for `rows`: that of the last step if no address has changed."""
        device = hyper.device
        in_graph = capturing(device)
        key = tuple(_address_key(row, self.buffers) for row in rows)
        if self._tables is None or self._tables.key != key:
            if in_graph:
                raise RunError(
                    "the gradients' addresses changed between the last step and a CUDA graph capture",
                    "keep gradients in place (zero_grad(set_to_none=False)) and call prepare() before",
                )
            self._tables = self._build(rows, key, outcome)
        if self._constants is None or self._constants[2].shape != outcome.bad.shape:
            zero, one = torch.zeros((), device=device), torch.ones((), device=device)
            self._constants = (zero, one, torch.ones_like(outcome.bad))
        if in_graph:
            self._captured.append((self._tables, self._constants, hyper, outcome))
        return self._tables

    def _build(self, rows: Sequence[Row], key: tuple[Any, ...], outcome: Outcome) -> Tables:
        """Builds the address table; keeps the layout if dtypes, sizes and alignment are unchanged."""
        device = outcome.bad.device
        layout_key = tuple(map(self._layout_key, rows, key))
        layout = None if self._tables is None else self._tables.layout
        if layout is None or layout.key != layout_key:
            outcome.clear()  # the old rows may contain parameters that the new ones lack
            layout = _lay_out(layout_key, device)
        columns = []
        for position, first in zip(layout.order, layout.first_chunks, strict=True):
            row, (_, _, *addresses, second) = rows[position], key[position]
            _check_strides(row, self.buffers)
            numbers = [row.parameter.numel(), first, row.group, row.index]
            columns.append([*addresses, *numbers, second])
        table = torch.tensor(columns, dtype=torch.int64).t().contiguous()
        return Tables(key, layout, to_device(table, device))

    def _layout_key(self, row: Row, addresses: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns dtypes and alignment, which determine a row's kernel launch, its index and its size."""
        sizes = row.gradient.element_size(), row.parameter.element_size()
        align = ALIGN if self._is_aligned(row, addresses) else min(sizes)
        return row.gradient.dtype, row.parameter.dtype, align, row.index, row.parameter.numel()

    def _is_aligned(self, row: Row, addresses: tuple[Any, ...]) -> bool:
        """Returns True if all tensors of a row can be read and written 16 bytes at a time."""
        return all(address % ALIGN == 0 for address in addresses[2:])

    def _switches(self, gates: Gates) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns `grad_scale`, `found_inf`, `hold` and `active` of a step, with constants for None."""
        assert self._constants is not None
        zero, one, ones = self._constants
        return (
            one if gates.grad_scale is None else gates.grad_scale,
            zero if gates.found_inf is None else gates.found_inf,
            zero if gates.hold is None else gates.hold,
            ones if gates.active is None else gates.active,
        )

    def _launch_norms(self, tables: Tables, hyper: Tensor, scale: Tensor) -> None:
        """Launches the kernels that compute the sum of squares of each chunk."""
        from paceline.optim import kernels

        layout, kinds = tables.layout, kernels.KINDS
        count, chunks = tables.tensors.shape[1], layout.partials.shape[1]
        for b in layout.buckets:
            kernels.norms[(b.count,)](
                tables.tensors, layout.chunk_tensor, hyper, scale, layout.partials,
                b.first, count, chunks,
                GRAD=kinds[b.gradient], ALIGN=b.align, CHUNK=CHUNK, BLOCK=BLOCK, num_warps=WARPS,
            )  # fmt: skip

    @abstractmethod
    def launch(self, tables: Tables, hyper: Tensor, gates: Gates, outcome: Outcome) -> None:
        """Launches the kernels of one step."""


@dataclass
class LarsStep(FusedStep):
    """Launches the kernels of LARS and SGD: norms, trust ratios and update."""

    buffers: tuple[str, ...] = (MOMENTUM,)

    def launch(self, tables: Tables, hyper: Tensor, gates: Gates, outcome: Outcome) -> None:
        from paceline.optim import kernels

        scale, found_inf, hold, active = self._switches(gates)
        layout, kinds = tables.layout, kernels.KINDS
        count, chunks = tables.tensors.shape[1], layout.partials.shape[1]
        self._launch_norms(tables, hyper, scale)
        kernels.ratios[(count,)](
            tables.tensors, hyper, active, layout.partials, outcome.ratios, outcome.bad,
            count, chunks, CHUNK=CHUNK, WIDTH=WIDTH, num_warps=4,
        )  # fmt: skip
        for b in layout.buckets:
            half = None if b.parameter == torch.float32 else kinds[b.parameter]
            kernels.update[(b.count,)](
                tables.tensors, layout.chunk_tensor, hyper, scale, found_inf, hold, active,
                outcome.ratios, outcome.bad, outcome.overflow,
                b.first, count, outcome.bad.numel(),
                GRAD=kinds[b.gradient], HALF=half, ALIGN=b.align,
                CHUNK=CHUNK, BLOCK=BLOCK, WIDTH=WIDTH, num_warps=WARPS,
            )  # fmt: skip


@dataclass
class AdamStep(FusedStep):
    """Launches the kernels of AdamW or, if `adapts`, of LAMB.

    Attributes:
        steps: The tensor `AdamRule.steps`.
        corrections: The tensor `AdamRule.corrections`.
        adapts: True for LAMB.
    """

    buffers: tuple[str, ...] = (EXP_AVG, EXP_AVG_SQ)
    steps: Tensor = field(default_factory=lambda: torch.zeros(0))
    corrections: Tensor = field(default_factory=lambda: torch.zeros(2, 0))
    adapts: bool = False

    def launch(self, tables: Tables, hyper: Tensor, gates: Gates, outcome: Outcome) -> None:
        from paceline.optim import kernels

        scale, found_inf, hold, active = self._switches(gates)
        layout, kinds = tables.layout, kernels.KINDS
        count, chunks = tables.tensors.shape[1], layout.partials.shape[1]
        parameters = outcome.bad.numel()
        self._launch_norms(tables, hyper, scale)
        kernels.flags[(count,)](
            tables.tensors, active, layout.partials, outcome.bad, count, chunks,
            CHUNK=CHUNK, WIDTH=WIDTH, num_warps=4,
        )  # fmt: skip
        for b in layout.buckets:
            half = None if b.parameter == torch.float32 else kinds[b.parameter]
            kernels.moments[(b.count,)](
                tables.tensors, layout.chunk_tensor, hyper, scale, found_inf, hold, active,
                self.corrections, outcome.bad, outcome.overflow, layout.partials,
                b.first, count, chunks, parameters,
                GRAD=kinds[b.gradient], HALF=half, ADAPTS=self.adapts, ALIGN=b.align,
                CHUNK=CHUNK, BLOCK=BLOCK, WIDTH=WIDTH, num_warps=WARPS,
            )  # fmt: skip
        if self.adapts:
            kernels.trust[(count,)](
                tables.tensors, hyper, found_inf, hold, active, outcome.overflow,
                layout.partials, outcome.ratios, count, chunks,
                CHUNK=CHUNK, WIDTH=WIDTH, num_warps=4,
            )  # fmt: skip
            for b in layout.buckets:
                half = None if b.parameter == torch.float32 else kinds[b.parameter]
                kernels.apply[(b.count,)](
                    tables.tensors, layout.chunk_tensor, hyper, found_inf, hold, active,
                    self.corrections, outcome.ratios, outcome.overflow,
                    b.first, count, parameters,
                    HALF=half, ALIGN=b.align, CHUNK=CHUNK, BLOCK=BLOCK, num_warps=WARPS,
                )  # fmt: skip
        kernels.advance[(count,)](
            tables.tensors,
            found_inf,
            hold,
            active,
            outcome.overflow,
            self.steps,
            count,
            num_warps=1,
        )


def _address_key(row: Row, buffers: Sequence[str]) -> tuple[Any, ...]:
    first, second = [row.buffers[name].data_ptr() for name in buffers] + [0] * (2 - len(buffers))
    gradient, master, parameter = row.gradient, row.master.data_ptr(), row.parameter.data_ptr()
    return row.index, gradient.dtype, gradient.data_ptr(), master, first, parameter, second


def _check_strides(row: Row, buffers: Sequence[str]) -> None:
    for tensor in (row.master, *(row.buffers[name] for name in buffers)):
        if not same_strides(tensor, row.parameter):
            raise RunError(
                f"a parameter of shape {tuple(row.parameter.shape)} and its state have different strides",
                "choose the memory format before the first step",
            )


def _lay_out(key: tuple[Any, ...], device: torch.device) -> Layout:
    order = sorted(range(len(key)), key=lambda row: [str(part) for part in key[row][:3]])
    chunk_tensor: list[int] = []
    first_chunks, buckets, start = [], [], 0
    for column, row in enumerate(order):
        gradient, parameter, align, _, numel = key[row]
        first_chunks.append(len(chunk_tensor))
        chunk_tensor += [column] * -(-numel // CHUNK)
        if column + 1 == len(order) or key[order[column + 1]][:3] != key[row][:3]:
            count = len(chunk_tensor) - start
            buckets.append(_Bucket(gradient, parameter, align, start, count))
            start = len(chunk_tensor)
    return Layout(
        key,
        tuple(order),
        tuple(first_chunks),
        to_device(torch.tensor(chunk_tensor, dtype=torch.int32), device),
        torch.empty(2, len(chunk_tensor), device=device),
        tuple(buckets),
    )


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Returns a context in which `device` is current, because Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copies the CPU tensor `host` to `device` asynchronously."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
