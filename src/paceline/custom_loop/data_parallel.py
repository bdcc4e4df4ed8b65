"""`DataParallel`: DistributedDataParallel with the all-reduce algorithms of `paceline.comm`.

`DataParallel` is a subclass of torch's DistributedDataParallel (DDP) and keeps DDP's reducer. So
hooks, buckets, the search for unused parameters, `join` and overlap behave as in DDP. Tests compare
both classes, also with autocast, GradScaler and torch.compile. Paceline adds algorithms and wire
formats by `HybridAllReduce`, a communication hook of DDP.
"""

from __future__ import annotations

import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from os import PathLike
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_map_only

from paceline.comm.hybrid import HybridAllReduce
from paceline.core.errors import CommError, ConfigError
from paceline.custom_loop.context import (
    agreed,
    release_on_close,
    several_ranks,
    topology_here,
)
from paceline.custom_loop.ddp_exchange import Exchange
from paceline.plan.plan_file import ModelFacts
from paceline.plan.schedules import NATIVE

# Signature of DDP's constructor in the installed version of torch.
_DDP = inspect.signature(DistributedDataParallel)
_PREFIX = "module."
# Arguments that need a communication hook or an exchange other than `HybridAllReduce`.
_NO_HOOK = {
    "mixed_precision": "has a communication hook, which plan, wire or algorithm replace",
    "delay_all_reduce_named_params": "is exchanged without plan, wire and algorithm",
}
# Wire format of each wrapped module. After backward, gradients of these modules are means over ranks.
_wrapped: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def wire_of(module: nn.Module) -> str | None:
    """Returns the wire format of the `DataParallel` that wraps `module`; None if none does."""
    return _wrapped.get(module)


class DataParallel(DistributedDataParallel):
    """Trains a module on all ranks: every backward pass computes the mean gradients of all ranks.

    A subclass of DistributedDataParallel with the same arguments and behaviour. All ranks start with the
    parameters and buffers of rank 0, and receive the buffers of rank 0 at each forward pass. Gradients
    are complete when `backward` returns. `no_sync()`, `join()`, `register_comm_hook()`, unused and
    ignored parameters, autocast and GradScaler work as in DDP.

    Unlike in DDP, the state dict has no `module.` prefix, but state dicts with the prefix can be loaded.
    Attribute access is forwarded to the module. Without a process group, the process computes alone.
    Without `plan`, `wire` and `algorithm`, the backend's own all-reduce runs, and results are
    bit-identical to DDP.

    Args:
        module: The module on its device. Its dtype and trained parameters must not change later.
        plan: A `plan.toml` of `paceline tune`, which names the all-reduce algorithm for each message
            size, and a wire format.
        wire: Number format in which fp32 gradients are sent: `fp32`, `fp16` or `bf16`. Overrides the
            format in the plan. 16-bit gradients are sent unchanged.
        algorithm: All-reduce algorithm for all message sizes, such as `ring` or `hierarchical`.
        *positional: Arguments of DistributedDataParallel.
        **named: Arguments of DistributedDataParallel. By default, `gradient_as_bucket_view` is True
            and `device_ids` contains the GPU of the module.

    Raises:
        ConfigError: If an argument is invalid or does not fit the cluster.
        CommError: If there are several ranks but no process group.

    Example:
        >>> import torch
        >>> net = DataParallel(torch.nn.Linear(4, 2), wire="fp16")
        >>> net(torch.ones(3, 4)).sum().backward()
        >>> sorted(net.state_dict()), net.in_features
        (['bias', 'weight'], 4)
    """

    module: nn.Module
    # True without a process group, and after `release`.
    _alone = False
    _released = False
    _hybrid: HybridAllReduce | None = None

    def __init__(
        self,
        module: nn.Module,
        *positional: Any,
        plan: str | PathLike[str] | None = None,
        wire: str | None = None,
        algorithm: str | None = None,
        **named: Any,
    ) -> None:
        given = _DDP.bind(module, *positional, **named).arguments
        group = _group(given)
        # Without `init_sync`, DDP's constructor is not a collective.
        meets = given.get("init_sync", True)
        with agreed(lambda: _facts(exchange, given), group) if meets else nullcontext():
            exchange = Exchange.choose(plan, wire, algorithm)
            _check(exchange, given, group)
        given.setdefault("gradient_as_bucket_view", True)
        devices = {p.device for p in module.parameters()}
        if len(devices) == 1 and next(iter(devices)).type == "cuda":
            given.setdefault("device_ids", list(devices))
        self._exchange = exchange  # first, because DDP's constructor may register a hook
        if group is None:
            self._compute_alone(**given)
        else:
            super().__init__(**given)
            if not exchange.is_native:
                self._hybrid = exchange.create()
        self._join_world()
        self.register_load_state_dict_pre_hook(_add_prefix)  # type: ignore[no-untyped-call]

    def _compute_alone(self, module: nn.Module, device_ids: Any = None, **_: Any) -> None:
        """Initializes the model without DDP's constructor, which needs a process group.

        Ignores the arguments that control the all-reduce of gradients.
        """
        nn.Module.__init__(self)
        Joinable.__init__(self)
        self._alone = True
        self.module = module
        self.require_backward_grad_sync = True
        self.device_ids = device_ids

    def _join_world(self) -> None:
        _wrapped[self.module] = self._exchange.wire
        if not self._alone:
            release_on_close(self)

    def _connect(self) -> None:
        """Registers Paceline's all-reduce as the communication hook before the first backward pass.

        The constructor does not register the hook, because the program may register its own hook
        instead. For a copy of a model, all ranks call this to create the process groups. Copying does
        not create them, because a single rank may copy a model.
        """
        self._hybrid = self._hybrid or self._exchange.create()
        super().register_comm_hook(self._hybrid, HybridAllReduce.ddp_hook)

    @property
    def _needs_hook(self) -> bool:
        return not (self._alone or self._exchange.is_native or self._comm_hooks)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Computes the module's outputs. If there are several ranks, calls DDP's forward."""
        trains = self.training and torch.is_grad_enabled()
        if self._alone:
            if trains and self._released:
                raise CommError(
                    "the process group of this model is closed",
                    "call close() only after training, or wrap the module again",
                )
            if trains and several_ranks():
                raise CommError(
                    "this model was wrapped before a process group existed, so it would train alone",
                    "call paceline.init() first, then wrap the module",
                )
            return self._run_alone(*inputs, **named)
        if self._needs_hook and (trains or (self._hybrid and torch.is_grad_enabled())):
            self._connect()
        self._follow_join(present=True)
        return super().forward(*inputs, **named)  # type: ignore[no-untyped-call]

    def _run_alone(self, *inputs: Any, **named: Any) -> Any:
        if self.device_ids:
            device = torch.device(self.device_ids[0])  # DDP moves inputs to this device, too
            inputs, named = tree_map_only(Tensor, lambda t: t.to(device), (inputs, named))
        return self.module(*inputs, **named)

    def join(self, *arguments: Any, **named: Any) -> AbstractContextManager[Any]:
        """Returns DDP's context for ranks with different numbers of batches."""
        return nullcontext() if self._alone else super().join(*arguments, **named)

    def join_hook(self, **named: Any) -> Any:
        """Returns DDP's join hook."""
        if self._needs_hook:
            self._connect()  # a rank without batches has no forward pass
        return super().join_hook(**named)  # type: ignore[no-untyped-call]

    def _match_all_reduce_for_bwd_pass(self) -> None:
        """Matches the all-reduces of other ranks on a rank without batches; called by DDP."""
        self._follow_join(present=False)
        super()._match_all_reduce_for_bwd_pass()  # type: ignore[no-untyped-call]

    def _follow_join(self, *, present: bool) -> None:
        if self._hybrid is not None:
            divides_by_present = self._join_config.enable and not self._divide_by_initial_world_size
            self._hybrid.present = present if divides_by_present else None

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Registers a communication hook, as DDP does.

        If this is called before the first training pass, the hook replaces the all-reduce that `plan`,
        `wire` and `algorithm` configure, and the method warns.

        Args:
            state: First argument of each call of the hook.
            hook: Communication hook as in DDP.

        Raises:
            CommError: If there is no process group.
        """
        if self._alone:
            raise CommError(
                "a communication hook needs a process group",
                "call paceline.init() under a launcher",
            )
        if self._needs_hook:
            name = getattr(hook, "__qualname__", type(hook).__name__)
            warnings.warn(f"{name} replaces plan, wire and algorithm", stacklevel=2)
            if self._hybrid is not None:
                self._hybrid.close()
            self._hybrid, self._exchange = None, Exchange()
            _wrapped[self.module] = self._exchange.wire
        super().register_comm_hook(state, hook)

    def release(self) -> None:
        """Leaves the process groups. Afterwards the model can evaluate, but not train.

        `Context.close` calls this method.
        """
        if self._alone:
            return
        if self._hybrid is not None:
            self._hybrid.close()
        self._hybrid, self._comm_hooks = None, []
        for name in ("reducer", "logger", "process_group"):
            self.__dict__.pop(name, None)
        self._alone = self._released = True

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for a copy, without connections, because the copy opens its own."""
        if self._alone:
            return dict(self.__dict__)
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        if state.pop("_hybrid", None) is not None:
            state["_comm_hooks"] = []
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a copied model. Without a process group, the model then computes alone."""
        if state.get("_alone") or not dist.is_initialized():
            nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]
            self._alone = True
        else:
            super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._join_world()

    def state_dict(self, *args: Any, **named: Any) -> dict[str, Any]:  # type: ignore[override]
        """Returns the module's state dict, without a prefix."""
        state: dict[str, Any] = self.module.state_dict(*args, **named)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **named: Any) -> Any:
        """Loads a state dict of the module or of DDP. All ranks must load the same state."""
        if _of_ddp(state_dict, self.module):
            # Copies, because torch removes the prefix of entries and of metadata in place.
            renamed = OrderedDict(state_dict)
            vars(renamed)["_metadata"] = dict(getattr(state_dict, "_metadata", {}))
            consume_prefix_in_state_dict_if_present(renamed, _PREFIX)
            state_dict = renamed
        return self.module.load_state_dict(state_dict, *args, **named)

    def named_parameters(self, *args: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields parameters by their names in the module, without a prefix."""
        return self.module.named_parameters(*args, **named)

    def named_buffers(self, *args: Any, **named: Any) -> Iterator[tuple[str, Tensor]]:
        """Yields buffers by their names in the module, without a prefix."""
        return self.module.named_buffers(*args, **named)

    def named_modules(self, *args: Any, **named: Any) -> Iterator[tuple[str, nn.Module]]:
        """Yields submodules by their names in the module, without a prefix."""
        modules: Iterator[tuple[str, nn.Module]] = self.module.named_modules(*args, **named)
        return modules

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise
            return getattr(module, name)


def _of_ddp(keys: Iterable[str], module: nn.Module, prefix: str = "") -> bool:
    """Returns True if all state-dict keys that begin with `prefix` continue with DDP's `module.`."""
    names = [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
    prefixed = bool(names) and all(name.startswith(_PREFIX) for name in names)
    return prefixed and module.state_dict().keys().isdisjoint(names)


def _add_prefix(model: DataParallel, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Adds DDP's prefix `module.` to the state-dict keys of a `DataParallel` that is a submodule.

    torch calls this before it loads the state dict of the parent module.
    """
    if _of_ddp(state, model.module, prefix):
        return
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}{_PREFIX}{key.removeprefix(prefix)}"] = state.pop(key)


def _group(given: Mapping[str, Any]) -> dist.ProcessGroup | None:
    """Returns the process group that DDP will use; None if there is none."""
    mesh = given.get("device_mesh")
    if mesh is not None and mesh.ndim == 1:
        group: dist.ProcessGroup = mesh.get_group(mesh_dim=0)
        return group
    default = dist.group.WORLD if dist.is_initialized() else None
    return given.get("process_group") or default


def _check(exchange: Exchange, given: Mapping[str, Any], group: dist.ProcessGroup | None) -> None:
    module = given["module"]
    name = type(module).__name__
    if isinstance(module, DistributedDataParallel):
        raise ConfigError("module", name, "is already wrapped", "wrap it once")
    if any(isinstance(p, UninitializedParameter) for p in module.parameters()):
        raise ConfigError("module", name, "has parameters without a shape",
                          "run one forward pass first")  # fmt: skip
    mib = given.get("bucket_cap_mb")
    if mib is not None and not 0 < mib <= 65536:
        raise ConfigError("bucket_cap_mb", mib, "must be above 0, at most 65536", "25 is usual")
    if group is None:
        ranks = topology_here().world_size
        if ranks > 1:
            raise CommError(
                f"the job has {ranks} ranks, but there is no process group",
                "call paceline.init() first",
            )
        if not any(p.requires_grad for p in module.parameters()):
            raise ConfigError("module", name, "has no parameter that requires a gradient",
                              "use it without DataParallel")  # fmt: skip
        if given.get("device_ids") and any(p.device.type == "cpu" for p in module.parameters()):
            raise ConfigError("device_ids", given["device_ids"], "the module is on the CPU",
                              "leave it out")  # fmt: skip
        if given.get("mixed_precision") is not None:
            raise ConfigError("mixed_precision", None, "needs a process group",
                              "call paceline.init() under a launcher, or use torch.autocast")  # fmt: skip
    if exchange.is_native:
        return
    # These arguments do not work with the communication hook of an exchange.
    for argument, reason in _NO_HOOK.items():
        if given.get(argument) is not None:
            raise ConfigError(argument, None, reason, "leave out plan, wire and algorithm")
    if group is not None and group.size() < dist.get_world_size():
        raise ConfigError("process_group", None, "plan, wire and algorithm need all ranks",
                          "leave them out, or use the default group")  # fmt: skip


def _facts(exchange: Exchange, given: Mapping[str, Any]) -> dict[str, Any]:
    table = exchange.table.to_table() if exchange.table else NATIVE
    return {
        "the trained parameters": trained_parameters(given["module"]),
        "wire": exchange.wire,
        "algorithm": table,
    }


def trained_parameters(module: nn.Module) -> str:
    """Returns a text with the names and sizes of all trained parameters, which ranks compare.

    Excludes parameters that DDP ignores, because these may differ between ranks.
    """
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    trained = (
        (name, p.numel())
        for name, p in module.named_parameters()
        if p.requires_grad and name not in ignored
    )
    return ModelFacts.of(trained).describe()
