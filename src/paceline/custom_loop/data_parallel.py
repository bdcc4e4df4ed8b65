"""`DataParallel`: DistributedDataParallel's contract, with the all-reduce algorithms of `paceline.comm`.

It composes torch's DistributedDataParallel (DDP) and does not replace its reducer. DDP's hooks, buckets,
unused-parameter search and overlap are the field's reference, and autocast, GradScaler and torch.compile
are tested against them. What Paceline adds is what travels and how: `HybridAllReduce` as DDP's
communication hook.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.comm.hybrid import HybridAllReduce, WireFormat
from paceline.comm.plan_choice import checked_table
from paceline.comm.process_groups import ProcessGroups
from paceline.core.errors import CommError, ConfigError, PacelineError
from paceline.custom_loop.context import (
    agreed,
    release_on_close,
    several_ranks,
    timeout_here,
    topology_here,
)
from paceline.plan.plan_file import ClusterFacts, ModelFacts, PlanFile
from paceline.plan.schedules import NATIVE, check_name
from paceline.plan.size_table import SizeTable

# Modules whose gradients are means over ranks when backward returns, with the wire format.
_wrapped: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def wire_of(module: nn.Module) -> str | None:
    """The wire format of the `DataParallel` around `module`; None where there is none."""
    return _wrapped.get(module)


class DataParallel(nn.Module):
    """Trains `module` on all ranks: every backward pass leaves the mean gradients of all ranks.

    A replacement for DistributedDataParallel with the same contract: parameters and buffers of rank 0 at
    the start, buffers of rank 0 at each forward pass, gradients complete when `backward` returns,
    `no_sync()`, unused parameters, autocast and GradScaler. Beyond DDP, the state dict has no `module.`
    prefix, attributes fall through to the module, and a process without a process group computes alone.

    Args:
        module: on its device; its format and trained parameters do not change afterwards.
        plan: a `plan.toml` of `paceline tune`: its table size → algorithm, and its wire format.
        wire: format in which fp32 gradients travel: `fp32`, `fp16` or `bf16`; takes precedence over the
            plan's. 16-bit gradients travel as they are.
        algorithm: all-reduce algorithm for all sizes, such as `ring` or `hierarchical`.
        bucket_mib: size of DDP's buckets.
        find_unused_parameters, static_graph, gradient_as_bucket_view: as in DDP.

    Without `plan`, `wire` and `algorithm` the backend's own all-reduce runs, with DDP's bits.

    Example:
        >>> import torch
        >>> net = DataParallel(torch.nn.Linear(4, 2), wire="fp16")
        >>> net(torch.ones(3, 4)).sum().backward()
        >>> sorted(net.state_dict()), net.in_features
        (['bias', 'weight'], 4)
    """

    module: nn.Module
    _ddp: DistributedDataParallel | None
    _hybrid: HybridAllReduce | None

    def __init__(
        self,
        module: nn.Module,
        *,
        plan: str | PathLike[str] | None = None,
        wire: str | None = None,
        algorithm: str | None = None,
        bucket_mib: float = 25.0,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
    ) -> None:
        super().__init__()
        self.module = module
        self._released = False
        # Not as a submodule: DDP holds the same module under another name.
        object.__setattr__(self, "_ddp", None)
        object.__setattr__(self, "_hybrid", None)
        self.register_load_state_dict_pre_hook(_add_prefix)  # type: ignore[no-untyped-call]
        with agreed(lambda: _facts(module, exchange)):
            exchange = _Exchange.choose(plan, wire, algorithm)
            _check(module, bucket_mib)
        _wrapped[module] = exchange.wire
        if not several_ranks():
            return
        devices = {p.device for p in module.parameters()}
        device = devices.pop() if len(devices) == 1 else None
        ddp = DistributedDataParallel(
            module,
            # Where it is given, DDP moves inputs to the device.
            device_ids=[device] if device is not None and device.type == "cuda" else None,
            bucket_cap_mb=bucket_mib,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view,
        )
        object.__setattr__(self, "_ddp", ddp)
        release_on_close(self)
        if not exchange.is_native:
            hybrid = exchange.create()
            object.__setattr__(self, "_hybrid", hybrid)
            ddp.register_comm_hook(hybrid, HybridAllReduce.ddp_hook)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The module's outputs; on several ranks through DDP."""
        if self._released and self.training and torch.is_grad_enabled():
            raise CommError("the process group of this model is closed", "train before close()")
        return (self.module if self._ddp is None else self._ddp)(*inputs, **named)

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside the context gradients accumulate on this rank only; the first backward pass after it
        exchanges the sums."""
        return nullcontext() if self._ddp is None else self._ddp.no_sync()

    def release(self) -> None:
        """Leaves the process groups; `Context.close` calls it. The model then computes alone, and refuses
        to train."""
        if self._hybrid is not None:
            self._hybrid.close()
        self._released = self._released or self._ddp is not None
        object.__setattr__(self, "_ddp", None)
        object.__setattr__(self, "_hybrid", None)

    def train(self, mode: bool = True) -> DataParallel:
        super().train(mode)
        if self._ddp is not None:
            self._ddp.training = mode
        return self

    def state_dict(self, *args: Any, **named: Any) -> dict[str, Any]:  # type: ignore[override]
        """The module's own, without a prefix."""
        found: dict[str, Any] = self.module.state_dict(*args, **named)
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **named: Any) -> Any:
        """Into the module. All ranks load the same state."""
        return self.module.load_state_dict(state_dict, *args, **named)

    def named_parameters(self, *args: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Under the module's own names."""
        return self.module.named_parameters(*args, **named)

    def named_buffers(self, *args: Any, **named: Any) -> Iterator[tuple[str, Tensor]]:
        return self.module.named_buffers(*args, **named)

    def named_modules(self, *args: Any, **named: Any) -> Iterator[tuple[str, nn.Module]]:
        found: Iterator[tuple[str, nn.Module]] = self.module.named_modules(*args, **named)
        return found

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise
            return getattr(module, name)


def _add_prefix(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """For a `DataParallel` inside another module, which loads the entries of each submodule by path."""
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}module.{key.removeprefix(prefix)}"] = state.pop(key)


@dataclass(frozen=True)
class _Exchange:
    """What travels and how; `file` says on which cluster its table was measured."""

    table: SizeTable | None = None
    wire: str = "float32"
    file: PlanFile | None = None

    @property
    def is_native(self) -> bool:
        return self.table is None and self.wire == "float32"

    @classmethod
    def choose(
        cls, plan: str | PathLike[str] | None, wire: str | None, algorithm: str | None
    ) -> _Exchange:
        if wire is not None:
            wire = _named_wire(wire)
        if plan is None:
            if algorithm is not None:
                check_name(algorithm, "algorithm")
            native = algorithm in (None, NATIVE)
            table = None if native else SizeTable.single(str(algorithm))
            return cls(table, wire or "float32")
        if algorithm is not None:
            raise ConfigError(
                "algorithm", algorithm, f"but plan = {str(plan)!r} decides it",
                "leave one of the two out",
            )  # fmt: skip
        file = PlanFile.read(Path(plan), "plan")
        return cls(_table(file), wire or _planned_wire(file), file)

    def create(self) -> HybridAllReduce:
        """A collective."""
        groups = ProcessGroups(topology_here(), timeout_s=timeout_here())
        try:
            problem = self._problem(ClusterFacts(groups.world_size, len(groups.layout.groups)))
            # On all ranks: none may close its connections while another still opens them.
            groups.check_same({"the plan": str(problem or "fits")})
            if problem is not None:
                raise problem
            return HybridAllReduce(groups, self.table or SizeTable.single(NATIVE), self.wire)
        except PacelineError:
            groups.close()
            raise

    def _problem(self, here: ClusterFacts) -> PacelineError | None:
        """Why the plan does not fit this cluster."""
        if self.file is not None and self.file.sizes is not None:
            try:
                checked_table(self.file, here, "plan")
            except PacelineError as error:
                return error
        return None


def _named_wire(wire: str) -> str:
    try:
        return WireFormat.named(wire).name
    except ConfigError as error:
        raise ConfigError("wire", wire, "unknown format", error.remedy) from None


def _table(file: PlanFile) -> SizeTable:
    """The table of sizes; without one, the algorithm that all buckets of the plan have in common."""
    if file.sizes is not None:
        return file.sizes
    names = {bucket.algorithm for bucket in file.fusion.buckets} if file.fusion else set()
    if len(names) != 1:
        raise ConfigError("plan", file.path, "has no table of sizes", "make it with paceline tune")
    return SizeTable.single(names.pop())


def _planned_wire(file: PlanFile) -> str:
    wires = {bucket.wire for bucket in file.fusion.buckets} if file.fusion else {"auto"}
    if len(wires) > 1:
        raise ConfigError(
            "plan", file.path, f"has buckets of several wire formats ({', '.join(sorted(wires))})",
            "choose one with wire=",
        )  # fmt: skip
    wire = wires.pop()
    return "float32" if wire == "auto" else wire


def _check(module: nn.Module, bucket_mib: float) -> None:
    if isinstance(module, DataParallel | DistributedDataParallel):
        raise ConfigError("module", type(module).__name__, "is wrapped already", "wrap it once")
    if not 0 < bucket_mib <= 65536:
        raise ConfigError("bucket_mib", bucket_mib, "must be above 0, at most 65536", "25 is usual")
    if not any(p.requires_grad for p in module.parameters()):
        raise ConfigError(
            "module", type(module).__name__, "has no parameter that requires a gradient",
            "use it without DataParallel",
        )  # fmt: skip
    ranks = topology_here().world_size
    if ranks > 1 and not dist.is_initialized():
        raise CommError(
            f"{ranks} ranks, but there is no process group", "call paceline.init() first"
        )


def _facts(module: nn.Module, exchange: _Exchange) -> dict[str, Any]:
    table = exchange.table.to_table() if exchange.table else NATIVE
    return {
        "the trained parameters": trained_parameters(module),
        "wire": exchange.wire,
        "algorithm": table,
    }


def trained_parameters(module: nn.Module) -> str:
    """Equal where the names and sizes of all trained parameters are."""
    trained = ((n, p.numel()) for n, p in module.named_parameters() if p.requires_grad)
    return ModelFacts.of(trained).describe()
