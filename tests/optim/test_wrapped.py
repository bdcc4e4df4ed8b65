"""Optimizers of torch with masters: bits, skipped steps, state, refusals."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from optim.reference import KINDS, bits_equal, fill_gradients, grad_of, parameters
from paceline.core.errors import ConfigError, PacelineError
from paceline.optim import LARS, OptimSettings, WrappedOptimizer, create_optimizer, set_rate


def named(name: str, arguments: str = "") -> OptimSettings:
    return OptimSettings(name=name, arguments=arguments, lr=0.05, weight_decay=0.1)


def create(name: str = "torch.optim:RAdam", *kinds: torch.dtype) -> tuple[Any, list[nn.Parameter]]:
    ps = parameters(*(kinds or KINDS))
    groups = [{"params": ps[:1], "weight_decay": 0.1}, {"params": ps[1:], "lr_scale": 0.5}]
    return create_optimizer(named(name), groups, 0.05), ps


def held(optimizer: Any, ps: list[nn.Parameter]) -> list[Tensor]:
    found = [p.detach().clone() for p in ps] + [m.detach().clone() for m in optimizer.masters()]
    for entry in optimizer.state_dict()["state"].values():
        found += [value.clone() for value in entry.values() if isinstance(value, Tensor)]
    return found


def test_it_computes_what_the_class_computes_on_unscaled_fp32_gradients() -> None:
    optimizer, ps = create()
    wide = [nn.Parameter(p.detach().float()) for p in ps]
    groups = [{"params": wide[:1], "weight_decay": 0.1}, {"params": wide[1:]}]
    theirs = torch.optim.RAdam(groups, lr=0.05)
    optimizer.grad_scale = torch.tensor(64.0)
    for step in range(7):
        fill_gradients(ps, step, 64.0)
        for p, w in zip(ps, wide, strict=True):
            w.grad = grad_of(p).float() / 64.0
        optimizer.step()
        theirs.step()
    assert bits_equal([m.detach() for m in optimizer.masters()], [w.detach() for w in wide])
    for p, master in zip(ps, optimizer.masters(), strict=True):
        assert torch.equal(p, master.to(p.dtype))


def test_a_skipped_step_leaves_no_trace_and_inactive_parameters_stay() -> None:
    optimizer, ps = create()
    fill_gradients(ps, 0)
    optimizer.step()
    before = held(optimizer, ps)
    grad_of(ps[1]).view(-1)[3] = float("inf")
    optimizer.step()
    assert (int(optimizer.overflow), optimizer.nonfinite()) == (1, [1])
    assert bits_equal(held(optimizer, ps), before)
    optimizer.active = torch.tensor([1.0, 0.0, 1.0])
    untouched = ps[1].detach().clone()
    optimizer.hold = torch.ones(())
    optimizer.step()
    assert optimizer.overflow == 0
    assert bits_equal(held(optimizer, ps), before)
    optimizer.hold = torch.zeros(())
    optimizer.step()
    assert torch.equal(ps[1], untouched)
    assert not torch.equal(ps[0], before[0])


class Estimating(torch.optim.SGD):
    """Keeps a number in its groups, like optimizers that estimate their rate."""

    def __init__(self, params: Any, lr: float, estimate: float = 1.0) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["estimate"] = estimate

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["estimate"] *= 1.5
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(group["estimate"])
        return super().step(closure)


@pytest.mark.parametrize(
    "name",
    ["torch.optim:RAdam", "torch.optim:Adafactor", "torch.optim:Rprop", f"{__name__}:Estimating"],
)
def test_state_survives_a_checkpoint_exactly(name: str) -> None:
    optimizer, ps = create(name)
    for step in range(3):
        fill_gradients(ps, step)
        optimizer.step()
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    resumed, others = create(name)
    with torch.no_grad():
        for p, q in zip(ps, others, strict=True):
            q.copy_(p)
    loaded = torch.load(saved, weights_only=True)
    # As a run is resumed: with its own settings, and the state of the checkpoint.
    own = resumed.state_dict()["param_groups"]
    resumed.load_state_dict({**loaded, "param_groups": own})
    for step in range(3, 5):
        for made, own_ps in ((optimizer, ps), (resumed, others)):
            fill_gradients(own_ps, step)
            made.step()
    assert bits_equal(held(optimizer, ps), held(resumed, others))
    other = LARS(parameters(*KINDS), 0.1)
    with pytest.raises(ValueError, match="the state dict belongs to"):
        other.load_state_dict(loaded)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("torch.optim:LBFGS", "", "needs a closure"),
        ("torch.optim:SparseAdam", "", "dense gradients"),
        ("torch.optim:RAdamm", "", "did you mean 'RAdam'?"),
        ("nowhere.at_all:Best", "", "'nowhere'"),
        ("torch.optim:RAdam", "{bets = [0.9, 0.9]}", "unexpected keyword argument 'bets'"),
        ("torch.nn:Linear", "", "cannot be used"),
        ("torch.optim:lr_scheduler", "", "is not an optimizer"),
    ],
)
def test_what_cannot_train_is_refused_in_one_line(name: str, arguments: str, message: str) -> None:
    ps = parameters(*KINDS)
    groups = [{"params": [p], "weight_decay": 0.1} for p in ps]
    with pytest.raises(ConfigError) as caught:
        create_optimizer(named(name, arguments), groups, 0.05)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("optim.name = ")


def test_a_function_of_groups() -> None:
    ps = parameters(*KINDS)
    groups = [{"params": ps}]
    made = create_optimizer(
        OptimSettings(), groups, 0.1, lambda groups: torch.optim.Adagrad(groups, lr=0.1)
    )
    assert isinstance(made, WrappedOptimizer)
    ours = create_optimizer(OptimSettings(), groups, 0.1, lambda groups: LARS(groups, lr=0.1))
    assert type(ours) is LARS, "has masters of its own"
    with pytest.raises(ConfigError, match="it returned a list, not a torch.optim.Optimizer"):
        create_optimizer(OptimSettings(), groups, 0.1, list)
    with pytest.raises(PacelineError, match="state_dict"):
        copy.deepcopy(made)


class Keeping(torch.optim.SGD):
    """Keeps `kept()` in its groups from the start, and in the state after a step."""

    def __init__(self, params: Any, kept: Any, state: Any = float) -> None:
        super().__init__(params, lr=0.1)
        self.state_of = state
        for group in self.param_groups:
            group["kept"] = kept()

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if isinstance(group["kept"], Tensor):
                group["kept"] += 1
            for p in group["params"]:
                self.state[p]["more"] = self.state_of()
        return super().step(closure)


def made_by(factory: Any, groups: Any = None) -> Any:
    groups = groups or [{"params": [p]} for p in parameters(*KINDS)]
    return create_optimizer(OptimSettings(), groups, 0.1, factory)


def test_state_is_what_a_checkpoint_can_hold() -> None:
    optimizer = made_by(lambda groups: Keeping(groups, lambda: torch.zeros(3), np.float64))
    ps = [p for group in optimizer.param_groups for p in group["params"]]
    fill_gradients(ps, 0)
    optimizer.step()
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    assert [group["kept"].tolist() for group in loaded["inner"]["changed"]] == [[1.0] * 3] * 3
    assert type(loaded["state"][0]["more"]) is float
    optimizer.load_state_dict(loaded)
    for kept, state, words in (
        (float, lambda: np.zeros(2), r"Keeping.state\[0\]\['more'\] is a ndarray"),
        (lambda: abs, float, r"Keeping.param_groups\[0\]\['kept'\] is a builtin_function"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            made_by(lambda groups, kept=kept, state=state: Keeping(groups, kept, state))
        assert "\n" not in str(caught.value)


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1)


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (lambda groups: sgd([{**g, "params": g["params"][:1]} for g in groups]), "has 2 of the 4"),
        (lambda groups: LARS(groups[:1], lr=0.1), "has 2 of the 4 trained parameters"),
        (lambda groups: sgd([*groups, {"params": [nn.Parameter(torch.ones(2))]}]), "and 1 others"),
        (lambda groups: sgd([p for g in groups for p in g["params"]]), "1 groups that differ from"),
    ],
)
def test_a_function_must_keep_the_groups(factory: Any, words: str) -> None:
    ps = parameters(*[torch.float32] * 4)
    with pytest.raises(ConfigError, match=words) as caught:
        made_by(factory, [{"params": ps[:2]}, {"params": ps[2:]}])
    assert str(caught.value).startswith("optimizer = ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [torch.optim.SGD, LARS])
def test_rates_of_groups_are_kept_relative_to_the_largest(kind: Any) -> None:
    def rates(groups: Any) -> Any:
        return kind([{**g, "lr": 0.2 / 4**n} for n, g in enumerate(groups)], lr=0.2)

    optimizer = made_by(rates)
    set_rate(optimizer, 1.0)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.25, 0.0625]
    layers = [{"params": [p], "lr_scale": 0.5} for p in parameters(*KINDS)]
    with pytest.raises(ConfigError, match="rates from 0.0125 to 0.2 in groups that have an"):
        made_by(rates, layers)
