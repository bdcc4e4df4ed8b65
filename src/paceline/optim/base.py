"""Defines `MasterOptimizer`, the base class of all optimizers here; an `UpdateRule` adds the equation.

Parameters and gradients are fp32, fp16 or bf16. A step updates fp32 master weights and writes
half-precision parameters back, without host synchronization. A step runs in Triton kernels if the rule
has kernels and they are available, otherwise in torch's foreach operations.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import Optimizer, ParamsT

from paceline.core.errors import PacelineError, RunError
from paceline.optim.fused import FusedStep, triton_unavailable
from paceline.optim.rule import (
    Gates,
    HyperTable,
    Outcome,
    Row,
    UpdateRule,
    capturing,
    run_in_lists,
    same_strides,
)
from paceline.optim.state import FORMATS, MASTER, create_state, restore_state

if TYPE_CHECKING:
    from paceline.optim.orthogonal import SharedProducts

# Role of biases and normalization parameters in the groups of `paceline.models.parameter_groups`.
BIAS_NORM = "bias_norm"


def _not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Excludes `function` from torch.compile, which would lose attributes at graph breaks.

    `torch.compiler.disable` would import the compiler, which takes as long as importing torch itself.
    """
    disabled: Callable[..., Any] = _disable_dynamo(function)

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        return (disabled if "torch._dynamo" in sys.modules else function)(*args, **named)

    return call


class _PlainOptimizer(Optimizer):
    """A torch optimizer without torch's wrappers of methods, because they import the compiler."""

    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    load_state_dict = inspect.unwrap(Optimizer.load_state_dict)


class MasterOptimizer(_PlainOptimizer):
    """Updates fp32 master weights by an `UpdateRule`. Tensors on the device decide whether it updates.

    Args:
        params: Parameters or parameter groups.
        defaults: Hyper-parameters of groups that do not set their own. Missing hyper-parameters have
            the defaults of the rule.
        rule: Creates the `UpdateRule`: a subclass, or a `functools.partial` of a subclass.
        fused: True for Triton kernels, False for torch's foreach operations. None chooses kernels on
            CUDA if Triton is installed. The property `path` has the resulting choice.
        adapt_bias_norm: False to switch the trust ratio off in groups with the role `bias_norm` that do
            not set `adapt`.

    Attributes:
        grad_scale: Scalar by which a step divides the gradients; None to leave them unchanged.
        found_inf: Scalar; if it is not zero, a step changes nothing. None is equivalent to zero.
        hold: Scalar with the same effect as `found_inf`, for other reasons than an overflow.
        active: One value per parameter in group order. A step neither updates nor checks the
            parameters whose value is 0. None is equivalent to ones.
        overflow: 1 after a step in which a gradient, or its squared norm, was not finite in fp32. Such
            a step changes nothing.
        shared: If set, ranks share the matrix products of a rule that `has_products`.

    `grad_scale`, `found_inf`, `hold` and `active` are tensors on the parameters' device, or None.
    """

    _step_supports_amp_scaling = True  # torch's GradScaler leaves unscaling and skipping to step()
    grad_scale: Tensor | None  # no default: GradScaler multiplies whatever getattr() finds
    found_inf: Tensor | None
    hold: Tensor | None = None
    active: Tensor | None = None
    shared: SharedProducts | None = None
    # True to load state into existing tensors, because torch would change their dtypes.
    loads_into_state = False
    # Attributes that copying and pickling keep, in addition to the groups' defaults.
    CHOICES: ClassVar[tuple[str, ...]] = ("fused", "adapt_bias_norm", "_new_rule")

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        rule: Callable[[], UpdateRule],
        *,
        fused: bool | None = None,
        adapt_bias_norm: bool = True,
    ) -> None:
        self.fused, self.adapt_bias_norm = fused, adapt_bias_norm
        self._new_rule = rule
        self._set_up()
        if fused and not self.rule.has_kernels:
            raise ValueError("fused = True: this optimizer has no fused kernels; use fused=None")
        defaults = {**getattr(self.rule.Hyper, "_field_defaults", {}), **defaults}
        self.rule.check(defaults)
        super().__init__(params, defaults)

    def _set_up(self) -> None:
        self.rule = self._new_rule()
        self._ready_for = -1  # number of groups whose state exists
        self._outcome: Outcome | None = None
        self._table: HyperTable | None = None
        self.engine: FusedStep | None = None
        # Copies of gradients whose strides or dtype had to change; captured graphs may read them.
        self._staged: dict[int, Tensor] = {}
        self.overflow = torch.zeros(())

    def describe(self) -> str:
        """Returns a text such as `lars, triton`: the optimizer or rule, and the implementation."""
        of = self.rule if type(self) is MasterOptimizer else self
        return f"{type(of).__name__.lower()}, {self.path}"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, also after steps were made."""
        adapt = {}
        if param_group.get("role") == BIAS_NORM and not self.adapt_bias_norm:
            adapt = {"adapt": False}
        # A copy: torch writes its defaults into the group.
        super().add_param_group({**adapt, **param_group})
        group = self.param_groups.pop()
        self.rule.check(group)
        if len({id(p) for p in group["params"]}) < len(group["params"]):
            raise ValueError("a parameter appears twice in one group; pass each once")
        for p in group["params"]:
            if p.dtype not in self.rule.formats or p.layout != torch.strided:
                formats = [str(dtype).removeprefix("torch.") for dtype in self.rule.formats]
                raise PacelineError(
                    f"parameter of shape {tuple(p.shape)} is {p.dtype}, {p.layout}",
                    f"use dense {' or '.join(formats)}",
                )
        self.param_groups.append(group)

    @property
    def path(self) -> str:
        """The implementation of a step: `triton` or `foreach`."""
        device = self._device()
        if self.fused is None:
            usable = (
                self.rule.has_kernels and device.type == "cuda" and triton_unavailable(device) == ""
            )
            return "triton" if usable else "foreach"
        if self.fused and (problem := triton_unavailable(device)):
            raise PacelineError(f"fused = True: {problem}", "use fused=False, or fused=None")
        return "triton" if self.fused else "foreach"

    @torch.no_grad()
    def prepare(self) -> None:
        """Prepares the capture of a CUDA graph: creates all state and compiles the kernels.

        To compile the kernels, runs a step that changes nothing. This needs gradients.
        """
        outcome = self._ready()
        rows = self._rows()
        if rows and self.engine is not None:
            self.upload()
            assert self._table is not None
            held = replace(self._gates(outcome), hold=torch.ones_like(outcome.overflow))
            rows = self.rule.begin(self, rows, held)
            self.engine.run(rows, self._table.values, held, outcome)

    def upload(self) -> None:
        """Copies changed hyper-parameters to the device asynchronously.

        `step` calls this method, except during the capture of a CUDA graph. Call it before each replay.
        """
        self._ready()
        if self._table is not None:
            self._table.send(tuple(self.rule.hyper(part) for part in self.parts()))
        self.rule.upload(self)

    def _device(self) -> torch.device:
        devices = {p.device for group in self.param_groups for p in group["params"]}
        if len(devices) > 1:
            names = ", ".join(sorted(str(device) for device in devices))
            raise PacelineError(
                f"the parameters of this optimizer are on {names}", "use one optimizer per device"
            )
        return devices.pop() if devices else torch.device("cpu")

    @torch.no_grad()
    def _ready(self) -> Outcome:
        """Creates state and result tensors, at the first call and after each `add_param_group`."""
        if self._outcome is not None and self._ready_for == len(self.param_groups):
            return self._outcome
        device, path = self._device(), self.path
        fused = path == "triton"
        if path != "torch" and any(group.get("maximize") for group in self.param_groups):
            raise PacelineError("maximize = True is not supported", "minimize the negative loss")
        for p in self.parameters():
            create_state(p, self.state[p], self.rule.buffers)
        if self._outcome is None or self._outcome.bad.numel() != len(self.parameters()):
            self._outcome = Outcome(len(self.parameters()), device)
            self.overflow = self._outcome.overflow
        parts = self.parts() if fused else []
        if fused and (self._table is None or len(self._table.values) != len(parts)):
            self._table = HyperTable(len(parts), len(self.rule.hyper(parts[0])), device)
        if fused and self.engine is None:
            self.engine = self.rule.kernels(self)
        self.rule.ready(self)
        self._ready_for = len(self.param_groups)
        return self._outcome

    def parts(self) -> list[dict[str, Any]]:
        """Returns the parameter groups, split by `UpdateRule.parts`."""
        return [part for group in self.param_groups for part in self.rule.parts(group)]

    def parameters(self) -> list[Tensor]:
        """Returns all parameters in group order."""
        return [p for group in self.param_groups for p in group["params"]]

    @_not_compiled
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates all parameters that have a gradient; leaves all other parameters unchanged."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        outcome = self._ready()
        rows = self._rows()
        gates = self._gates(outcome)
        if not rows:
            outcome.clear()
            return loss
        if not capturing(outcome.bad.device):
            self.upload()
        elif self.engine is None:
            raise RunError(
                "the foreach implementation would freeze the learning rate in a CUDA graph",
                "install triton, or step outside of the graph",
            )
        rows = self.rule.begin(self, rows, gates)
        if self.engine is not None and self._table is not None:
            self.engine.run(rows, self._table.values, gates, outcome)
        else:
            self._run_in_lists(rows, gates, outcome)
        self.rule.finish(self, rows, gates, outcome)
        return loss

    def _run_in_lists(self, rows: list[Row], gates: Gates, outcome: Outcome) -> None:
        hypers = [self.rule.hyper(part) for part in self.parts()]
        run_in_lists(self.rule, rows, hypers, gates, outcome)

    def _gates(self, outcome: Outcome) -> Gates:
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        gates = Gates(scale, found_inf, self.hold, self.active)
        gates.check(outcome.bad.numel(), outcome.bad.device)
        return gates

    def _rows(self) -> list[Row]:
        rows = []
        indices = {p: index for index, p in enumerate(self.parameters())}
        for number, group in enumerate(self.parts()):
            for p in group["params"]:
                if p.grad is None or p.numel() == 0:
                    continue
                index, state = indices[p], self.state[p]
                gradient = self._gradient(index, number, p, p.grad)
                rows.append(Row(index, number, p, gradient, state.get(MASTER, p), state))
        return rows

    def _gradient(self, index: int, group: int, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Returns `gradient` with the parameter's memory layout and a dtype in `FORMATS`."""
        if gradient.layout != torch.strided:
            raise RunError(
                f"sparse gradient for a parameter of shape {tuple(parameter.shape)} in group {group}",
                "make it dense (nn.Embedding(sparse=False)), or use another optimizer for it",
            )
        if same_strides(gradient, parameter) and gradient.dtype in FORMATS:
            return gradient
        copy = self._staged.get(index)
        dtype = gradient.dtype if gradient.dtype in FORMATS else torch.float32
        if copy is None or copy.dtype != dtype:
            copy = torch.empty_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
            self._staged[index] = copy
        return copy.copy_(gradient)

    def masters(self) -> list[Tensor]:
        """Returns the fp32 master weights of each parameter; an fp32 parameter is its own master."""
        self._ready()
        return [self.state[p].get(MASTER, p) for p in self.parameters()]

    def state_bytes(self) -> int:
        """Returns the size of all optimizer state in bytes, including master weights."""
        self._ready()
        return sum(tensor_bytes(self.state[p]) for p in self.parameters())

    @torch.no_grad()
    def reset_masters(self) -> None:
        """Copies each parameter to its master weights. Call this after loading weights into the model."""
        for master, parameter in zip(self.masters(), self.parameters(), strict=True):
            if master is not parameter:
                master.copy_(parameter)

    def trust_ratios(self) -> list[float]:
        """Returns each parameter's trust ratio in the last step; 1 if it has none. Synchronizes."""
        return [float(ratio) for ratio in self._ready().ratios.tolist()]

    @property
    def bad(self) -> Tensor:
        """A tensor on the device with 1 for each parameter whose last gradient was not finite, else 0."""
        return self._ready().bad

    def nonfinite(self) -> list[int]:
        """Returns the indices of parameters with non-finite gradients in the last step. Synchronizes."""
        return [i for i, bad in enumerate(self._ready().bad.tolist()) if bad]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict into existing memory and keeps fp32 state exact.

        torch alone would cast the state to the parameters' dtypes; in fp16, 1.0001 would become 1.0.
        """
        if "inner" in state_dict:
            raise ValueError(
                f"the state dict belongs to the optimizer {state_dict['inner']['class']}"
            )
        if self.loads_into_state:
            self._ready()
        old, seen = dict(self.state), dict[str, Any]()

        def remember(_: Optimizer, saved: dict[str, Any]) -> None:
            seen.update(saved)

        def restore(_: Optimizer) -> None:
            keys = (*self.rule.buffers, *self.rule.numbers)
            restore_state(self.param_groups, seen, old, self.state, keys)

        # `remember` runs after the user's pre-hooks, which may change the state dict, and `restore`
        # runs before the user's post-hooks.
        before = self.register_load_state_dict_pre_hook(remember)
        after = self.register_load_state_dict_post_hook(restore, prepend=True)
        try:
            with torch.no_grad():
                super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self.CHOICES}}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        super().__setstate__(dict(state))
        for group in self.param_groups:  # groups from torch's own optimizers lack our keys
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        # Loading keeps the memory that captured graphs read; only an unpickled object needs new memory.
        if "_outcome" not in self.__dict__:
            self._set_up()
        self._ready_for = -1


def tensor_bytes(state: Mapping[str, Any]) -> int:
    """Returns the total size in bytes of the tensors in a parameter's state."""
    return sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
