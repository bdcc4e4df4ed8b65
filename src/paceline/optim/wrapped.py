"""Gives any `torch.optim` class fp32 master weights.

The wrapped class updates fp32 masters from unscaled fp32 gradients and is not called for skipped
steps. Because the host has to read whether a step is skipped, the update synchronizes with the
device and cannot be captured in a CUDA graph.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from paceline.core.errors import ConfigError, PacelineError, RunError
from paceline.core.imports import first_line
from paceline.optim.base import MasterOptimizer, tensor_bytes
from paceline.optim.rule import Gates, Outcome, Row, Rows, UpdateRule, check_finite, unscaled
from paceline.optim.state import MASTER, plain

Groups = Sequence[dict[str, Any]]
_GROUP_KEYS = ("params", "lr")


class _Rate(NamedTuple):
    lr: float


class _NoRule(UpdateRule):
    """An `UpdateRule` without an equation, because the wrapped optimizer computes the update."""

    Hyper: ClassVar[Any] = _Rate

    def update(self, rows: Rows, hyper: Any) -> None:
        raise NotImplementedError


class WrappedOptimizer(MasterOptimizer):
    """Gives an optimizer of torch fp32 master weights.

    The learning rate of each group is copied to the inner optimizer before every step. All other
    hyper-parameters stay in the inner optimizer, which must have the same groups and parameters.

    Args:
        groups: Parameter groups of the model.
        create: Creates the inner optimizer from groups that contain the master weights as parameters.

    Example:
        >>> optimizer = WrappedOptimizer(groups, lambda groups: torch.optim.RAdam(groups, lr=1e-3))
    """

    def __init__(self, groups: Groups, create: Callable[[list[dict[str, Any]]], Any]) -> None:
        self._inner: Optimizer | None = None
        super().__init__([dict(group) for group in groups], {"lr": 0.0}, _NoRule)
        # Parameters that share the masters' memory and hold the fp32 gradients.
        self._aliases = [nn.Parameter(master.detach()) for master in self.masters()]
        left = iter(self._aliases)
        wide = [
            {key: value for key, value in group.items() if key not in _GROUP_KEYS}
            | {"params": [next(left) for _ in group["params"]]}
            for group in groups
        ]
        self._inner = _checked(create(wide))
        _check_parameters(wide, self._inner.param_groups, same_groups=True)
        self._take_groups()
        self._initial = copy.deepcopy(self._hyper_parameters())

    def _take_groups(self) -> None:
        """Copies the inner optimizer's hyperparameters into the groups of this optimizer."""
        for ours, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            ours.update({key: value for key, value in theirs.items() if key != "params"})

    @property
    def inner(self) -> Optimizer:
        """The wrapped torch optimizer."""
        assert self._inner is not None
        return self._inner

    @property
    def path(self) -> str:
        """The implementation of the step, for display."""
        return "torch"

    def describe(self) -> str:
        """Describes the wrapped class and its differences from Paceline's optimizers."""
        name = type(self.inner).__name__.lower()
        decays = any(group.get("weight_decay") for group in self.param_groups)
        ignored = decays and "weight_decay" not in self.inner.defaults
        note = ", which has no weight decay" if ignored else ""
        return f"{name}{note}, masters around torch's own, update not captured"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises PacelineError after creation, because the inner optimizer has fixed groups."""
        if self._inner is not None:
            raise PacelineError(
                "groups cannot be added to a wrapped optimizer", "create it with all groups"
            )
        super().add_param_group(param_group)

    def _run_in_lists(self, rows: list[Row], gates: Gates, outcome: Outcome) -> None:
        """Reads on the host whether the step is skipped, and if not, calls the inner optimizer."""
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
                if key not in _GROUP_KEYS
            }
            for number, group in enumerate(self.inner.param_groups)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the inner optimizer and the master weights.

        Some classes keep state in their groups. Values that have changed since the start are saved
        separately, because a resumed run has its own settings.
        """
        saved = _plain_state(self.inner)
        state = {number: dict(entry) for number, entry in saved["state"].items()}
        for number, (p, master) in enumerate(zip(self.parameters(), self.masters(), strict=True)):
            if master is not p:
                state.setdefault(number, {})[MASTER] = master
        changed = [
            {k: value for k, value in now.items() if k not in old or not _same(old[k], value)}
            for now, old in zip(self._hyper_parameters(), self._initial, strict=True)
        ]
        inner = {"class": type(self.inner).__name__, "changed": changed}
        return {**saved, "state": state, "inner": inner}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of the same optimizer class, with or without master weights."""
        inner = state_dict.get("inner", {"class": type(self.inner).__name__, "changed": []})
        if inner["class"] != type(self.inner).__name__:
            raise ValueError(f"the state dict belongs to the optimizer {inner['class']}")
        state = {
            number: {key: value for key, value in entry.items() if key != MASTER}
            for number, entry in state_dict["state"].items()
        }
        # The inner optimizer may save more entries than torch's `state` and `param_groups`.
        own = {key: value for key, value in state_dict.items() if key != "inner"}
        self.inner.load_state_dict({**own, "state": state})
        for group, changed in zip(self.inner.param_groups, inner["changed"], strict=False):
            group.update(changed)
        for number, (p, master) in enumerate(zip(self.parameters(), self.masters(), strict=True)):
            value = state_dict["state"].get(number, {}).get(MASTER)
            if value is not None and master is not p:
                master.copy_(value)
        self._take_groups()

    def state_bytes(self) -> int:
        """Returns the size in bytes of master weights and inner state, which the first step creates."""
        return super().state_bytes() + sum(map(tensor_bytes, self.inner.state.values()))

    def prepare(self) -> None:
        """Creates the master weights."""
        self._ready()

    def upload(self) -> None:
        """Does nothing: hyper-parameters are read on the host."""

    def __getstate__(self) -> dict[str, Any]:
        raise PacelineError("a wrapped optimizer cannot be copied", "save its state_dict()")


def _checked(optimizer: Any) -> Optimizer:
    """Returns `optimizer`; raises TypeError unless it is an optimizer whose step needs no closure."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"it returned a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    _refuse_closures(type(optimizer))
    return optimizer


def _plain_state(optimizer: Optimizer) -> dict[str, Any]:
    """Returns a state dict of values that a checkpoint can hold; raises CheckpointError otherwise."""
    name = type(optimizer).__name__
    saved = optimizer.state_dict()
    return {key: plain(value, f"{name}.{key}") for key, value in saved.items()}


def _check_parameters(given: Groups, used: Groups, *, same_groups: bool = False) -> None:
    """Raises PacelineError unless an optimizer (`used`) has exactly the `given` parameters or groups."""
    wanted, actual = (
        [[id(p) for p in group["params"]] for group in each] for each in (given, used)
    )
    wanted_ids, actual_ids = (set(chain.from_iterable(each)) for each in (wanted, actual))
    if wanted_ids != actual_ids:
        more = len(actual_ids - wanted_ids)
        foreign = f", and {more} others" if more else ""
        raise PacelineError(
            f"has {len(actual_ids & wanted_ids)} of the {len(wanted_ids)} trained parameters{foreign}",
            "give it all groups; freeze parameters by requires_grad_(False)",
        )
    if same_groups and wanted != actual:
        raise PacelineError(
            f"has {len(actual)} groups that differ from the {len(wanted)} given groups",
            "keep the groups and the order of their parameters; settings may differ by group",
        )


def _keep_rates(groups: Groups) -> None:
    """Converts learning rates that differ between groups to `lr_scale`, relative to the largest rate."""
    rates = [float(group["lr"]) for group in groups]
    if min(rates) == max(rates):
        return
    if any(group.get("lr_scale", 1.0) != 1.0 for group in groups):
        raise PacelineError(
            f"has rates from {min(rates):g} to {max(rates):g} in groups that have an `lr_scale` too",
            "leave optim.layer_decay at 1, or give all groups the same rate",
        )
    for group, rate in zip(groups, rates, strict=True):
        group["lr_scale"] = rate / max(rates)


def _refuse_closures(kind: type) -> None:
    """Raises TypeError for an optimizer that computes gradients several times in one step."""
    step = getattr(kind, "step", None)
    closure = inspect.signature(step).parameters.get("closure") if callable(step) else None
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(f"{kind.__name__}.step needs a closure, which training does not have")


def wrap(
    field: str, name: str, create: Callable[[list[dict[str, Any]]], Any], groups: Groups,
    kind: object = None,
) -> MasterOptimizer:  # fmt: skip
    """Creates a user's optimizer, with master weights unless it is a `MasterOptimizer`.

    Learning rates that differ between its groups become the `lr_scale` of the groups.

    Args:
        field: Setting for error messages.
        name: Value of the setting.
        create: Creates the optimizer of groups.
        groups: Parameter groups of the model.
        kind: The class of the optimizer, if it is known.

    Returns:
        The optimizer.

    Raises:
        ConfigError: For any exception of the class, and if it cannot train.
    """
    remedy = "see optim.arguments and the documentation of the class"
    try:
        if isinstance(kind, type):
            _refuse_closures(kind)
        trial = _checked(create(_samples(groups)))
        if isinstance(trial, MasterOptimizer):
            wrapped: MasterOptimizer = create([dict(group) for group in groups])
            _check_parameters(groups, wrapped.param_groups)
        else:
            # A trial step on copies, so that a class that cannot train fails here.
            for group in trial.param_groups:
                for p in group["params"]:
                    p.grad = torch.full_like(p, 1e-3)
            trial.step()
            _plain_state(trial)
            wrapped = WrappedOptimizer(groups, create)
        _keep_rates(wrapped.param_groups)
        return wrapped
    except PacelineError as error:
        raise ConfigError(field, name, error.cause, error.remedy or remedy) from error
    except Exception as error:  # a user's class may raise anything
        raise ConfigError(field, name, f"cannot be used ({first_line(error)})", remedy) from error


def _samples(groups: Groups) -> list[dict[str, Any]]:
    """Returns copies of the parameter groups that contain copies of only the smallest tensors."""
    samples = []
    for group in groups:
        by_dims: dict[int, Tensor] = {}
        for p in sorted(group["params"], key=lambda p: p.numel()):
            by_dims.setdefault(p.dim(), p)
        copies = [nn.Parameter(p.detach().float().clone()) for p in by_dims.values()]
        samples.append({key: v for key, v in group.items() if key != "lr"} | {"params": copies})
    return samples


def _same(one: Any, two: Any) -> bool:
    """Returns True if two plain values are equal; compares tensors by all of their elements."""
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        alike = (one.shape, one.dtype, one.device) == (two.shape, two.dtype, two.device)
        return alike and torch.equal(one, two)
    if type(one) is not type(two):
        return False
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(_same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(_same, one, two))
    return bool(one == two)
