"""Time of a training step by kernel, compared with the least time in which the memory
could move the bytes.

    python -m benchmarks.kernels --device cpu --model resnet_tiny --image-size 32 -b 16

The step is that of training, without CUDA graphs and torch.compile, so that every kernel has an operator
of torch, a Triton kernel or a graph of cuDNN that launched it. `CallCounter` notes each call with the
bytes that it has to move: what it reads and what it writes, once each. torch's profiler has the times,
and `attributed` joins the two.

Kernels that move more, such as a batch norm that reads its input twice, are further from the limit;
those that find tensors by their addresses (the optimizers) or that nothing noted have no bytes. On a
CPU the times are those of operators.
"""

from __future__ import annotations

import bisect
import itertools
import json
import os
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

# Before torch, whose profiler would report its own start and end.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.optimizer import copy_seconds
from benchmarks.program import run
from paceline.accel.cudnn_graphs import Plan
from paceline.cli import options
from paceline.cli.bench import parse_switches
from paceline.cli.measure import chosen_device, environment, print_json
from paceline.cli.options import check_at_least
from paceline.comm.group import Group
from paceline.config import RunConfig
from paceline.core.errors import ConfigError, RunError
from paceline.core.settings import from_table, unflatten
from paceline.core.topology import Topology
from paceline.core.units import format_percent
from paceline.models.settings import check_model_name
from paceline.optim.registry import OptimizerSettings
from paceline.optim.settings import OptimSettings
from paceline.tune.step import StepRow, build_step

_MARK = "paceline call "
# Operators that move nothing, or that write without reading what they are given.
_MAKE_ROOM = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_")
)
_WRITE_ONLY = frozenset(("copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_"))
# The first argument of Triton kernels that find their tensors by addresses.
_ADDRESSES = "table"
_KERNELS = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
_LAUNCHES = frozenset(("cuda_runtime", "cuda_driver"))
_COPIED_BYTES = {"cuda": 1 << 30, "cpu": 256 << 20}
_NAME_LENGTH = 60
# Settings of a run that `tune.step.build_step` does not use.
_NOT_IN_STEP = (
    "run.strategy",
    "optim.batch_schedule",
    "run.noise_scale",
)


@dataclass(frozen=True)
class Call:
    """An operator or Triton kernel that was called. `moved` is None if it is unknown; `shape` is
    that of its largest tensor."""

    name: str
    moved: int | None
    flops: int
    shape: str


class CallCounter(TorchDispatchMode):
    """Inside, every operator, in forward and backward, is noted in `calls` by the number in its mark of
    the profile."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[int, Call] = {}
        self._numbers, self._lock = itertools.count(), threading.Lock()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if func.is_view or name in _MAKE_ROOM or func.namespace == "profiler":
            return func(*args, **kwargs)
        number = self._next()
        with record_function(f"{_MARK}{number}"):
            out = func(*args, **kwargs)
        tensors = _tensors((args, kwargs, out))
        moved = _moved(func, args, kwargs, out)
        self.calls[number] = Call(name, moved, _flops(func, args, kwargs, out), _largest(tensors))
        return out

    def _next(self) -> int:
        with self._lock:
            return next(self._numbers)

    @contextmanager
    def triton_kernels(self) -> Iterator[None]:
        """Notes the launches of Triton kernels, too, if Triton is installed."""
        try:
            from triton.runtime.jit import JITFunction
        except ImportError:
            yield
            return
        launch = JITFunction.run

        def noted(kernel: Any, *args: Any, **named: Any) -> Any:
            if named.get("warmup"):
                return launch(kernel, *args, **named)
            number = self._next()
            # A descriptor has the tensor that it describes.
            given = [getattr(each, "base", each) for each in (*args, *named.values())]
            tensors = _tensors(given)
            by_address = _ADDRESSES in kernel.arg_names
            moved = None if by_address else sum(_bytes(each) for each in _distinct(tensors))
            name = f"triton {kernel.fn.__name__}"
            self.calls[number] = Call(name, moved, 0, _largest(tensors))
            with record_function(f"{_MARK}{number}"):
                return launch(kernel, *args, **named)

        JITFunction.run = noted
        try:
            yield
        finally:
            JITFunction.run = launch

    @contextmanager
    def cudnn_graphs(self) -> Iterator[None]:
        """Notes the graphs of cuDNN of `run.accel.fused_convolutions=cudnn`, too."""
        execute = Plan.run

        def noted(plan: Plan, tensors: Mapping[str, Tensor]) -> None:
            number = self._next()
            given = [tensors[value.name] for value in plan.graph.values if value.name]
            kind, flops = plan.graph.work()
            moved = sum(_bytes(each) for each in _distinct(given))
            self.calls[number] = Call(f"cudnn {kind}", moved, flops, _largest(given))
            with record_function(f"{_MARK}{number}"):
                execute(plan, tensors)

        Plan.run = noted  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            Plan.run = execute  # type: ignore[method-assign]


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({(each.data_ptr(), each.shape): each for each in tensors}.values())


def _bytes(tensor: Tensor) -> int:
    """Returns the bytes in memory; elements of an expanded dimension count once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else min(size, 1)
    return elements * tensor.element_size()


def _largest(tensors: Sequence[Tensor]) -> str:
    shape = max((tuple(each.shape) for each in tensors), key=_product, default=())
    return "×".join(map(str, shape))


def _product(shape: Sequence[int]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found


def _moved(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: object) -> int:
    """Bytes read and written, each tensor once for each."""
    read: list[Tensor] = []
    written: list[Tensor] = []
    writes_only = func.overloadpacket.__name__ in _WRITE_ONLY
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    for argument in func._schema.arguments:
        tensors = _tensors(given.get(argument.name))
        changed = argument.alias_info is not None and argument.alias_info.is_write
        if changed:
            written += tensors
        if not (changed and (writes_only or argument.name == "out")):
            read += tensors
    held = {each.data_ptr() for each in (*read, *written)}
    written += [each for each in _tensors(out) if each.data_ptr() not in held]
    return sum(_bytes(each) for group in (read, written) for each in _distinct(group))


def _flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: object) -> int:
    """Returns the operations of convolutions and matrix products; a multiply-add counts as two."""
    count = flop_registry.get(func.overloadpacket)
    return int(count(*args, **kwargs, out_val=out)) if count is not None else 0


class Launched(NamedTuple):
    """The kernels of one call, or of no known call: their names and total seconds."""

    call: int | None
    kernels: tuple[str, ...]
    seconds: float


def attributed(events: Iterable[Mapping[str, Any]], *, on_gpu: bool) -> list[Launched]:
    """The calls of a trace of torch's profiler (Chrome's format), with their time on the device; on a
    CPU, with their own time. A kernel belongs to the call in whose mark it was launched; kernels of no
    call are listed one by one."""
    marks: dict[Any, list[tuple[float, float, int]]] = {}
    launches: dict[int, Mapping[str, Any]] = {}
    kernels: list[Mapping[str, Any]] = []
    for event in events:
        kind, name = event.get("cat"), str(event.get("name", ""))
        if event.get("ph") != "X":
            continue
        if kind == "user_annotation" and name.startswith(_MARK):
            begin = float(event["ts"])
            span = (begin, begin + float(event["dur"]), int(name.removeprefix(_MARK)))
            marks.setdefault(event["tid"], []).append(span)
        elif kind in _LAUNCHES and "correlation" in event.get("args", {}):
            launches[event["args"]["correlation"]] = event
        elif kind in _KERNELS:
            kernels.append(event)
    if not on_gpu:
        spans = (span for of_thread in marks.values() for span in of_thread)
        return [Launched(call, (), (end - begin) / 1e6) for begin, end, call in spans]
    for of_thread in marks.values():
        of_thread.sort()
    found: dict[int, tuple[tuple[str, ...], float]] = {}
    others: list[Launched] = []
    for kernel in kernels:
        launch = launches.get(kernel.get("args", {}).get("correlation", -1))
        call = None if launch is None else _call_at(marks.get(launch["tid"], []), launch["ts"])
        name, seconds = str(kernel["name"]), float(kernel["dur"]) / 1e6
        if call is None:
            others.append(Launched(None, (name,), seconds))
        else:
            names, before = found.get(call, ((), 0.0))
            found[call] = ((*names, name), before + seconds)
    return [*(Launched(call, *rest) for call, rest in found.items()), *others]


def _call_at(marks: Sequence[tuple[float, float, int]], moment: float) -> int | None:
    """The call whose mark holds `moment`; marks of a thread follow one another."""
    place = bisect.bisect_right(marks, (float(moment), float("inf"), 0)) - 1
    if place < 0 or marks[place][1] < moment:
        return None
    return marks[place][2]


@dataclass
class KernelRow:
    """Calls with the same name and kernels, over all steps. `moved` counts what is known; `unknown` are
    calls of which it is not."""

    name: str
    kernels: str
    shape: str = ""
    calls: int = 0
    seconds: float = 0.0
    moved: int = 0
    flops: int = 0
    unknown: int = 0

    def to_dict(self, steps: int, copy_bytes_per_s: float) -> dict[str, Any]:
        """For one step. `limit_ms`: a copy of as many bytes; null if they are unknown."""
        known = not self.unknown and self.moved > 0
        limit_s = self.moved / copy_bytes_per_s
        return {
            "call": self.name, "kernels": self.kernels, "shape": self.shape,
            "calls": self.calls / steps, "ms": 1e3 * self.seconds / steps,
            "mb": self.moved / steps / 1e6 if known else None,
            "limit_ms": 1e3 * limit_s / steps if known else None,
            "share_of_copy": limit_s / self.seconds if known and self.seconds else None,
            "tflops_per_s": self.flops / self.seconds / 1e12 if self.flops else None,
        }  # fmt: skip


def grouped(
    launched: Iterable[Launched], calls: Mapping[int, Call], *, shapes: bool
) -> list[KernelRow]:
    """Longest first; with `shapes`, one row for each shape."""
    rows: dict[tuple[str, str, str], KernelRow] = {}
    for each in launched:
        call = calls.get(each.call, _UNKNOWN) if each.call is not None else _UNKNOWN
        names = ", ".join(name[:_NAME_LENGTH] for name in dict.fromkeys(each.kernels))
        shape = call.shape if shapes else ""
        row = rows.setdefault((call.name, names, shape), KernelRow(call.name, names, shape))
        row.calls += 1
        row.seconds += each.seconds
        row.flops += call.flops
        row.moved += call.moved or 0
        row.unknown += call.moved is None
    return sorted(rows.values(), key=lambda row: -row.seconds)


_UNKNOWN = Call("–", None, 0, "")


def _check(switches: Mapping[str, Any]) -> None:
    """Refuses what the profiled step does not have."""
    if switches.get("run.cuda_graphs") == "on":
        raise ConfigError(
            "run.cuda_graphs", "on", "kernels inside of a graph have no launch of their own",
            "leave it out: the kernels are the same",
        )  # fmt: skip
    if switches.get("run.accel.compile", "off") not in ("off", "auto"):
        raise ConfigError(
            "run.accel.compile", switches["run.accel.compile"],
            "compiled kernels have no operators to count",
            "leave it out, or use `paceline bench step` for the time of the whole step",
        )  # fmt: skip
    for name in _NOT_IN_STEP:
        if name in switches:
            raise ConfigError("--set", name, "is not part of the profiled step", "leave it out")
    given = unflatten({k: v for k, v in switches.items() if k.startswith("optim.")})
    optimizer = from_table(OptimSettings, "optim", given.get("optim", {})).own_optimizer
    if optimizer.GRADIENTS != OptimizerSettings.GRADIENTS:
        raise ConfigError(
            "optim.name", switches["optim.name"],
            "its passes over the data are not part of the profiled step",
            "use another optimizer",
        )  # fmt: skip


def profile_step(row: StepRow, *, shapes: bool = False) -> dict[str, Any]:
    """The rows of `row.steps` steps, after `row.warm_up`; totals; and the speed of a copy."""
    device = torch.device(row.device)
    on_gpu = device.type == "cuda"
    if on_gpu:
        device = torch.device("cuda", torch.cuda.current_device())
    _check(row.switches)
    # Under a dispatch mode, torch.compile would run the function that it has compiled from.
    uncompiled = {"run.cuda_graphs": "off", "run.accel.compile": "off"}
    row = replace(row, switches={**row.switches, **uncompiled})
    counter = CallCounter()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with Group(Topology(), RunConfig().comm, device) as group:
        step, words = build_step(row, group)

        def run(first: int, count: int) -> None:
            for number in range(first, first + count):
                step.launch(number, 0.1)
                while step.under_way > step.lag:
                    step.collect()
            while step.under_way:
                step.collect()

        run(0, row.warm_up)
        with profile(activities=activities, acc_events=True) as profiled:
            with counter.triton_kernels(), counter.cudnn_graphs(), counter:
                run(row.warm_up, row.steps)
            if on_gpu:
                torch.cuda.synchronize(device)
    launched = attributed(_trace(profiled), on_gpu=on_gpu)
    if not launched:
        raise RunError("the profile of the step has no kernels", "check torch's profiler here")
    size = _COPIED_BYTES[device.type]
    speed = size / copy_seconds(size, device, repeats=5)
    rows = [
        each.to_dict(row.steps, speed) for each in grouped(launched, counter.calls, shapes=shapes)
    ]
    return {
        "step": words, "steps": row.steps, "device_ms": sum(each["ms"] for each in rows),
        "limit_ms": sum(each["limit_ms"] or 0.0 for each in rows),
        "unknown_ms": sum(each["ms"] for each in rows if each["limit_ms"] is None),
        "copy_bytes_per_s": speed, "rows": rows,
    }  # fmt: skip


def _trace(profiled: profile) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["traceEvents"]
    return events


def main(
    model: options.Model = "resnet50",
    batch_size: int = typer.Option(256, "--batch-size", "-b", help="Of one process."),
    image_size: options.ImageSize = 224,
    classes: options.Classes = 1000,
    steps: int = typer.Option(3, help="Steps to profile."),
    warm_up: int = typer.Option(3, help="Steps before."),
    top: int = typer.Option(30, help="Rows to print; --json has all."),
    shapes: bool = typer.Option(False, "--shapes", help="A row for each shape."),
    settings: list[str] = typer.Option([], "--set", help="section.key=value of the step."),
    device: options.Device = "auto",
    as_json: options.AsJson = False,
) -> None:
    """Time of a training step by kernel, compared with the limit of the memory."""
    check_model_name(model)
    counts = {"--batch-size": batch_size, "--steps": steps, "--warm-up": warm_up}
    check_at_least(1, counts | {"--classes": classes, "--top": top})
    switches = parse_switches(settings)
    chosen = chosen_device(device)
    row = StepRow(
        name="kernels", kind="ours", model=model, batch_size=batch_size, image_size=image_size,
        classes=classes, device=chosen, steps=steps, warm_up=warm_up, switches=switches,
    )  # fmt: skip
    found = profile_step(row, shapes=shapes)
    if as_json:
        print_json({
            "settings": {"model": model, "batch_size": batch_size, "image_size": image_size,
                         "changed": switches}, **found, **environment(chosen),
        })  # fmt: skip
        return
    console = Console(highlight=False)
    table = Table("ms", "share", "calls", "MB", "of copy", "TFLOP/s")
    for name in ("call", "kernels"):
        table.add_column(name, overflow="fold")
    for each in found["rows"][:top]:
        table.add_row(*_cells(each, found["device_ms"]))
    console.print(table)
    console.print(
        f"a step: {found['device_ms']:.2f} ms in {len(found['rows'])} rows, "
        f"{found['unknown_ms']:.2f} ms by calls without known bytes; a copy of the known ones takes "
        f"{found['limit_ms']:.2f} ms at {found['copy_bytes_per_s'] / 1e9:,.0f} GB/s"
    )
    console.print(found["step"], markup=False)


def _cells(row: dict[str, Any], whole_ms: float) -> tuple[str | Text, ...]:
    def shown(name: str, form: str) -> str:
        return "–" if row[name] is None else format(row[name], form)

    return (
        f"{row['ms']:.3f}", format_percent(100 * row["ms"] / whole_ms, 1), f"{row['calls']:g}",
        shown("mb", ",.1f"), shown("share_of_copy", ".2f"), shown("tflops_per_s", ",.3g"),
        Text(" ".join(filter(None, (row["call"], row["shape"])))), Text(row["kernels"]),
    )  # fmt: skip


if __name__ == "__main__":
    run(main)
