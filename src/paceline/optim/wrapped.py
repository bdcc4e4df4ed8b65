"""`WrappedOptimizer`: any `torch.optim` class, with fp32 masters around it.

The class updates fp32 masters from unscaled fp32 gradients; a step that is skipped never reaches it.
Whether it is skipped is read on the host, so such an update synchronizes with the device and is not
captured in a CUDA graph.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from paceline.core.errors import CheckpointError, ConfigError, PacelineError, RunError
from paceline.core.imports import first_line
from paceline.optim.base import MasterOptimizer, tensor_bytes
from paceline.optim.rule import Gates, Outcome, Row, Rows, UpdateRule, check_finite, unscaled
from paceline.optim.state import MASTER

Groups = Sequence[dict[str, Any]]


class _Rate(NamedTuple):
    lr: float


class _NoRule(UpdateRule):
    """The inner optimizer has the equation."""

    Hyper: ClassVar[Any] = _Rate

    def update(self, rows: Rows, hyper: Any) -> None:
        raise NotImplementedError


class WrappedOptimizer(MasterOptimizer):
    """`create` makes the inner optimizer of parameter groups whose tensors are the masters.

    The rate of each group is passed on before every step; all else is the inner optimizer's own. It must
    have the groups' parameters, all of them and in these groups.

    Example:
        optimizer = WrappedOptimizer(groups, lambda groups: torch.optim.RAdam(groups, lr=1e-3))
    """

    def __init__(self, groups: Groups, create: Callable[[list[dict[str, Any]]], Any]) -> None:
        self._inner: Optimizer | None = None
        super().__init__([dict(group) for group in groups], {"lr": 0.0}, _NoRule)
        # Tensors of their own over the masters' memory: they hold the fp32 gradients.
        self._aliases = [nn.Parameter(master.detach()) for master in self.masters()]
        left = iter(self._aliases)
        wide = [
            {key: value for key, value in group.items() if key not in ("params", "lr")}
            | {"params": [next(left) for _ in group["params"]]}
            for group in groups
        ]
        self._inner = checked(create(wide))
        check_groups(wide, self._inner.param_groups)
        for ours, theirs in zip(self.param_groups, self._inner.param_groups, strict=True):
            ours.update({key: value for key, value in theirs.items() if key != "params"})
        self._initial = copied(self._hyper_parameters())

    @property
    def inner(self) -> Optimizer:
        assert self._inner is not None
        return self._inner

    @property
    def path(self) -> str:
        return "torch"

    def describe(self) -> str:
        name = type(self.inner).__name__.lower()
        decays = any(group.get("weight_decay") for group in self.param_groups)
        ignored = decays and "weight_decay" not in self.inner.defaults
        note = ", which has no weight decay" if ignored else ""
        return f"{name}{note}, masters around torch's own, update not captured"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._inner is not None:
            raise PacelineError(
                "groups cannot join a wrapped optimizer", "create it with all groups"
            )
        super().add_param_group(param_group)

    def _run_in_lists(self, rows: list[Row], gates: Gates, outcome: Outcome) -> None:
        """One update of the inner optimizer, after a read of the switches on the host."""
        gradients = unscaled(rows, gates.grad_scale)
        norms = list(torch._foreach_norm(gradients, 2))
        allowed: list[bool] = check_finite(rows, norms, gates, outcome).tolist()
        for row, gradient, go in zip(rows, gradients, allowed, strict=True):
            alias = self._aliases[row.index]
            if alias.data_ptr() != row.master.data_ptr():
                raise RunError(
                    f"a parameter of shape {tuple(row.parameter.shape)} has moved to other memory",
                    "create the optimizer after the model is on its device",
                )
            alias.grad = gradient if go else None
        if any(allowed):
            for ours, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
                theirs["lr"] = ours["lr"]
            self.inner.step()
            for row, go in zip(rows, allowed, strict=True):
                if go and row.master is not row.parameter:
                    row.parameter.copy_(row.master)
        for alias in self._aliases:
            alias.grad = None

    def _hyper_parameters(self) -> list[dict[str, Any]]:
        return [
            {
                key: plain(value, f"{type(self.inner).__name__}.param_groups[{number}][{key!r}]")
                for key, value in group.items()
                if key not in ("params", "lr")
            }
            for number, group in enumerate(self.inner.param_groups)
        ]

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, and the masters. Some classes keep state in their groups: values that
        have changed since the start are saved apart, because a resumed run has its own settings."""
        saved = plain_state(self.inner)
        state = {number: dict(entry) for number, entry in saved["state"].items()}
        for number, (p, master) in enumerate(zip(self.parameters(), self.masters(), strict=True)):
            if master is not p:
                state.setdefault(number, {})[MASTER] = master
        changed = [
            {k: value for k, value in now.items() if k not in old or not same(old[k], value)}
            for now, old in zip(self._hyper_parameters(), self._initial, strict=True)
        ]
        inner = {"class": type(self.inner).__name__, "changed": changed}
        return {**saved, "state": state, "inner": inner}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        inner = state_dict.get("inner", {"class": type(self.inner).__name__, "changed": []})
        if inner["class"] != type(self.inner).__name__:
            raise ValueError(f"the state is one of {inner['class']}")
        state = {
            number: {key: value for key, value in entry.items() if key != MASTER}
            for number, entry in state_dict["state"].items()
        }
        # A class may have entries of its own beside the two of torch.
        own = {key: value for key, value in state_dict.items() if key != "inner"}
        self.inner.load_state_dict({**own, "state": state})
        for group, changed in zip(self.inner.param_groups, inner["changed"], strict=False):
            group.update(changed)
        for number, (p, master) in enumerate(zip(self.parameters(), self.masters(), strict=True)):
            value = state_dict["state"].get(number, {}).get(MASTER)
            if value is not None and master is not p:
                master.copy_(value)
        for ours, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            ours.update({key: value for key, value in theirs.items() if key != "params"})

    def state_bytes(self) -> int:
        """Of the masters, and of the inner optimizer, whose state exists once it has stepped."""
        return super().state_bytes() + sum(map(tensor_bytes, self.inner.state.values()))

    def prepare(self) -> None:
        """Creates the masters."""
        self._ready()

    def upload(self) -> None:
        """Nothing lies on the device."""

    def __getstate__(self) -> dict[str, Any]:
        raise PacelineError("a wrapped optimizer cannot be copied", "save its state_dict()")


def checked(found: Any) -> Optimizer:
    """Raises unless `found` is an optimizer whose step needs no closure."""
    if not isinstance(found, Optimizer):
        raise TypeError(f"gave a {type(found).__name__}, not a torch.optim.Optimizer")
    refuse_closures(type(found))
    return found


def plain_state(optimizer: Optimizer) -> dict[str, Any]:
    """The state dict as a checkpoint holds it. CheckpointError where it cannot."""
    name = type(optimizer).__name__
    saved = optimizer.state_dict()
    return {key: plain(value, f"{name}.{key}") for key, value in saved.items()}


def check_groups(given: Groups, found: Groups) -> None:
    """Raises unless the optimizer has the parameters that it was given, in the same groups."""
    wanted, held = ([[id(p) for p in group["params"]] for group in each] for each in (given, found))
    check_parameters(given, found)
    if wanted != held:
        raise PacelineError(
            f"has its parameters in {len(held)} other groups than the {len(wanted)} given",
            "keep the groups and the order in them; settings may differ by group",
        )


def check_parameters(given: Groups, found: Groups) -> None:
    """Raises unless the optimizer has exactly the parameters that it was given."""
    wanted, held = ({id(p) for group in each for p in group["params"]} for each in (given, found))
    if wanted != held:
        foreign = f", and {len(held - wanted)} others" if held - wanted else ""
        raise PacelineError(
            f"has {len(held & wanted)} of the {len(wanted)} trained parameters{foreign}",
            "give it all groups; freeze parameters by requires_grad_(False)",
        )


def keep_rates(groups: Groups) -> None:
    """Turns rates that differ between groups into their `lr_scale`: the schedule's rate is that of the
    largest."""
    rates = [float(group["lr"]) for group in groups]
    if min(rates) == max(rates):
        return
    if any(group.get("lr_scale", 1.0) != 1.0 for group in groups):
        raise PacelineError(
            f"has rates from {min(rates):g} to {max(rates):g} in groups that have an `lr_scale` too",
            "set one of them: leave optim.layer_decay at 1, or the rates out of the groups",
        )
    for group, rate in zip(groups, rates, strict=True):
        group["lr_scale"] = rate / max(rates)


def refuse_closures(kind: type) -> None:
    """Raises for an optimizer that computes gradients several times in one step."""
    step = getattr(kind, "step", None)
    closure = inspect.signature(step).parameters.get("closure") if callable(step) else None
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(f"{kind.__name__}.step needs a closure, which training does not have")


def wrap(
    field: str, name: str, create: Callable[[list[dict[str, Any]]], Any], groups: Groups,
    kind: object = None,
) -> MasterOptimizer:  # fmt: skip
    """The optimizer that `create` makes, with masters around it; one of ours is taken as it is. Rates
    that differ between its groups become their `lr_scale`. Errors out of the class become a ConfigError
    that names `field`. `kind` is the class, where it is known."""
    remedy = "see optim.arguments and the class's own documentation"
    try:
        if isinstance(kind, type):
            refuse_closures(kind)
        found = checked(create(_samples(groups)))
        if isinstance(found, MasterOptimizer):
            made = create([dict(group) for group in groups])
            check_parameters(groups, made.param_groups)
            keep_rates(made.param_groups)
            return made  # type: ignore[no-any-return]
        # A step that changes nothing of the run, so that a class that cannot train fails here.
        for group in found.param_groups:
            for p in group["params"]:
                p.grad = torch.full_like(p, 1e-3)
        found.step()
        plain_state(found)
        wrapped = WrappedOptimizer(groups, create)
        keep_rates(wrapped.param_groups)
        return wrapped
    except PacelineError as error:
        raise ConfigError(field, name, error.cause, error.remedy or remedy) from error
    except Exception as error:  # a user's class may raise anything
        raise ConfigError(field, name, f"cannot be used ({first_line(error)})", remedy) from error


def _samples(groups: Groups) -> list[dict[str, Any]]:
    """The groups with copies of their smallest tensors only."""
    made = []
    for group in groups:
        by_dims: dict[int, Tensor] = {}
        for p in sorted(group["params"], key=lambda p: p.numel()):
            by_dims.setdefault(p.dim(), p)
        copies = [nn.Parameter(p.detach().float().clone()) for p in by_dims.values()]
        made.append({key: v for key, v in group.items() if key != "lr"} | {"params": copies})
    return made


# The state of a wrapped optimizer as `torch.load(weights_only=True)` reads it: plain values and tensors.


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def plain(value: Any, where: str) -> Any:
    """The value, with Python's numbers in place of NumPy's. CheckpointError for anything that could not
    be read back without executing code."""
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return value.item()
    if isinstance(value, Tensor) or type(value) in _PLAIN:
        return value
    if type(value) in (dict, OrderedDict) and all(type(key) in _PLAIN for key in value):
        items = ((key, plain(item, f"{where}[{key!r}]")) for key, item in value.items())
        return type(value)(items)
    if type(value) in (list, tuple):
        return type(value)(plain(item, f"{where}[{n}]") for n, item in enumerate(value))
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold",
        "keep numbers, texts, tensors, lists and dicts in the optimizer's state",
    )


def copied(value: Any) -> Any:
    """A copy of a plain value that later steps do not change."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied(item) for item in value)
    return value


def same(one: Any, two: Any) -> bool:
    """Whether plain values are equal; tensors are compared as wholes."""
    if isinstance(one, Tensor) or isinstance(two, Tensor):
        if not (isinstance(one, Tensor) and isinstance(two, Tensor)):
            return False
        alike = (one.shape, one.dtype, one.device) == (two.shape, two.dtype, two.device)
        return alike and torch.equal(one, two)
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if type(one) in (list, tuple) and type(one) is type(two):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)
