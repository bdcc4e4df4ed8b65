"""Settings, schedules, recipes, and the optimizers that are created from them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.config import load_config
from paceline.core.settings import from_table
from paceline.optim import (
    LARS,
    SGD,
    AdamW,
    LrSchedule,
    Muon,
    OptimSettings,
    create_optimizer,
    set_rate,
)
from paceline.optim.lars import Hyper
from paceline.optim.registry import schedule_names
from paceline.optim.rule_settings import LarsSettings
from paceline.optim.schedules import Poly
from refusals import refused


@pytest.mark.parametrize(
    "values",
    [{"name": "sdg"}, {"schedule": "cosin"}, {"lr": 0.0}, {"lr": float("nan")}, {"lr_base": -1.0},
     {"lr_base_batch": 0}, {"momentum": 1.0}, {"weight_decay": -1e-4}, {"warmup_epochs": -1.0},
     {"warmup_max_share": 0.0}, {"warmup_max_share": 1.5},
     {"decay_over_epochs": 5.0}, {"decay_over_epochs": float("inf")},
     {"fused": "cuda"}, {"scaling": "on"}, {"known_good_batch": 0},
     {"nesterov": True, "momentum": 0.0}],
)  # fmt: skip
def test_a_bad_value_is_named(values: dict[str, Any]) -> None:
    with refused(f"optim.{next(iter(values))}") as caught:
        OptimSettings(**values)
    assert values.get("name") != "sdg" or "did you mean 'sgd'" in str(caught.value)


@pytest.mark.parametrize(
    ("owner", "values"),
    [("step", {"factor": 0.0}), ("step", {"epochs": [60.0, 30.0]}), ("poly", {"power": -1.0}),
     ("step", {"factors": [1.0]}), ("step", {"factors": [1.0, -1.0, 0.0, 0.0]}),
     ("lars", {"trust_coefficient": 0.0}), ("muon", {"orthogonal": "most"}),
     ("muon", {"steps": "long"}), ("muon", {"clip": True}), ("adam", {"beta2": 1.0}),
     ("adam", {"eps": -1.0})],
)  # fmt: skip
def test_a_bad_value_of_an_owner_is_named(owner: str, values: dict[str, Any]) -> None:
    with refused(f"optim.{owner}.{next(iter(values))}"):
        from_table(OptimSettings, "optim", {"schedule": "piecewise", owner: values})


# --- schedules ---------------------------------------------------------------------------------


def schedule(kind: str, total: int = 100, per_epoch: float = 10.0, **extra: Any) -> LrSchedule:
    return LrSchedule(OptimSettings.gather(schedule=kind, **extra), 1.0, total, per_epoch)


def test_linear_scaling_and_warm_up() -> None:
    assert OptimSettings(lr_base=0.1).peak_lr(8192) == pytest.approx(3.2)
    assert OptimSettings(lr_base=0.1, lr=0.7).peak_lr(8192) == 0.7
    rates = [schedule("constant", warmup_epochs=1).rate(step) for step in range(12)]
    assert rates == pytest.approx([0.1 * (step + 1) for step in range(10)] + [1.0, 1.0])
    gradual = schedule("constant", warmup_epochs=1, warmup_start=0.5)
    assert (gradual.rate(0), gradual.rate(9)) == (pytest.approx(0.55), 1.0)


@pytest.mark.parametrize(
    ("kind", "extra", "rates"),
    [
        ("poly", {"power": 2}, {0: 1.0, 50: 0.25, 90: 0.01}),
        ("exponential", {"lr_end": 0.01}, {0: 1.0, 50: 0.1}),
        ("exponential", {"lr_end": 100.0, "decay_over_epochs": 5}, {25: 10.0, 50: 100.0, 99: 100.0}),
        ("cosine", {"lr_end": 0.2}, {50: 0.6, 100: 0.2}),
        # The decay may end after the run, or before.
        ("poly", {"warmup_epochs": 1, "decay_over_epochs": 20}, {9: 1, 10: 1, 99: (1 - 89 / 190) ** 2}),
        ("cosine", {"decay_over_epochs": 20}, {100: 0.5}),
        ("poly", {"decay_over_epochs": 5, "lr_end": 0.1}, {25: 0.1 + 0.9 * 0.25, 50: 0.1, 99: 0.1}),
    ],
)  # fmt: skip
def test_decays(kind: str, extra: dict[str, float], rates: dict[int, float]) -> None:
    found = schedule(kind, **{"warmup_epochs": 0, **extra})
    assert {step: found.rate(step) for step in rates} == pytest.approx(rates)


def test_piecewise_takes_one_part_after_another() -> None:
    """Akiba et al. 2017: half of the rate first, and three decays."""
    made = schedule("piecewise", warmup_epochs=0, epochs=(4.0, 7.0, 8.5))
    wanted = [0.5] * 40 + [0.075] * 30 + [0.01] * 15 + [0.001] * 15
    assert [made.rate(step) for step in range(100)] == pytest.approx(wanted)


def test_momentum_reaches_the_groups() -> None:
    weight = nn.Parameter(torch.zeros(3))
    sgd, adam = SGD([weight], lr=0.1), AdamW([weight], lr=0.1)
    for optimizer in (sgd, adam):
        set_rate(optimizer, 0.5, {"momentum": 0.8})
    assert sgd.param_groups[0]["momentum"] == 0.8
    assert adam.param_groups[0]["betas"] == (0.8, 0.999)


def test_steps_of_goyal_et_al() -> None:
    goyal = LrSchedule(OptimSettings(schedule="step", warmup_epochs=5), 3.2, 90 * 156, 156.0)
    found = [goyal.rate(step) for step in (30 * 156 - 1, 30 * 156, 60 * 156, 80 * 156)]
    assert found == pytest.approx([3.2, 0.32, 0.032, 0.0032])


@given(
    kind=st.sampled_from(schedule_names()),
    total=st.integers(1, 500),
    per_epoch=st.floats(0.01, 50),
    warmup=st.floats(0, 20),
)
def test_every_rate_is_finite_and_never_above_the_peak(
    kind: str, total: int, per_epoch: float, warmup: float
) -> None:
    end = 0.01 if kind == "exponential" else 0.0
    made = schedule(kind, total, per_epoch, warmup_epochs=warmup, lr_end=end)
    rates = [made.rate(step) for step in range(total)]
    assert all(math.isfinite(rate) and 0 <= rate <= 1.0 + 1e-12 for rate in rates)
    assert max(rates) > 0


def test_warm_up_takes_at_most_its_share_of_the_run() -> None:
    cut = schedule("cosine", 20, warmup_epochs=3, warmup_max_share=0.2)  # 2 epochs of 10 steps
    assert cut.warmup_steps == 4
    assert [cut.rate(step) for step in range(4)] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert cut.rate(19) < 0.05
    assert "from 3 to 0.4 epochs" in cut.describe_cut()
    asked = schedule("cosine", 20, warmup_epochs=3)
    exact = schedule("cosine", 150, warmup_epochs=3, warmup_max_share=0.2)
    assert (asked.warmup_steps, asked.describe_cut()) == (20, "")
    assert (exact.warmup_steps, exact.describe_cut()) == (30, "")


# --- recipes -----------------------------------------------------------------------------------


def test_a_resnet50_recipe() -> None:
    """An MLPerf submission: the run ends before the decay does."""
    config = load_config("imagenet-resnet50-3k", {})
    optim, per_epoch = config.optim, 1_281_167 / 3200
    assert (optim.name, optim.own_schedule) == ("lars", Poly(power=2))
    assert optim.own_optimizer == LarsSettings(trust_coefficient=0.001)
    total = int(35 * per_epoch)
    rates = LrSchedule(optim, optim.peak_lr(3200), total, per_epoch)
    assert rates.rate(0) == pytest.approx(11.0 / (2 * per_epoch))
    assert max(rates.rate(step) for step in range(total)) == pytest.approx(11.0, rel=0.01)
    assert rates.rate(round(19.5 * per_epoch)) == pytest.approx(11.0 / 4, rel=0.01)
    assert rates.rate(total) == pytest.approx(11.0 * (2 / 35) ** 2, rel=0.2)


# --- create_optimizer --------------------------------------------------------------------------


def groups_of(
    *shapes: tuple[int, ...], bias: tuple[tuple[int, ...], ...] = ((2,),)
) -> list[dict[str, Any]]:
    """A group of weights of these shapes, and one of biases."""
    return [
        {"params": [nn.Parameter(torch.ones(s)) for s in shapes], "weight_decay": 0.5, "role": "weight"},
        {"params": [nn.Parameter(torch.ones(s)) for s in bias], "weight_decay": 0.0, "role": "bias_norm"},
    ]  # fmt: skip


def test_one_step_is_momentum_sgd_with_decay_by_group() -> None:
    groups = groups_of((1,), bias=((1,),))
    optimizer = create_optimizer(OptimSettings(momentum=0.9), groups, lr=1.0)
    assert type(optimizer) is SGD
    assert not any(group["lr_in_momentum"] or group["adapt"] for group in optimizer.param_groups)
    set_rate(optimizer, 0.1)
    (weight,), (bias,) = groups[0]["params"], groups[1]["params"]
    for _ in range(2):
        for parameter in (weight, bias):
            parameter.grad = torch.tensor([1.0])
        optimizer.step()
    # w: v = 1.5, w = 0.85; v = 1.35 + 1.425 = 2.775, w = 0.5725.  b: v = 1, 1.9; b = 0.9, 0.71
    torch.testing.assert_close(weight.detach(), torch.tensor([0.5725]))
    torch.testing.assert_close(bias.detach(), torch.tensor([0.71]))


def test_lars_does_not_adapt_biases() -> None:
    values = {"momentum": 0.8, "trust_coefficient": 0.02, "clip": True, "nesterov": True}
    settings = OptimSettings.gather(name="lars", **values)
    optimizer = create_optimizer(settings, groups_of((2,)), 0.5)
    assert type(optimizer) is LARS
    assert [group["adapt"] for group in optimizer.param_groups] == [True, False]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    assert [group["role"] for group in optimizer.param_groups] == ["weight", "bias_norm"]
    for group in optimizer.param_groups:
        assert {name: group[name] for name in values} == values
        assert group["lr"] == 0.5


@pytest.mark.parametrize(
    ("orthogonal", "expected"),
    [
        ("filters", [(True, [(4, 3, 3, 3)]), (False, [(5, 4), (7,)])]),
        ("all", [(True, [(4, 3, 3, 3), (5, 4)]), (False, [(7,)])]),
    ],
)
def test_muon_orthogonalizes_filters_or_all_weights_and_no_bias(
    orthogonal: str, expected: list[Any]
) -> None:
    settings = OptimSettings.gather(
        name="muon", momentum=0.75, trust_coefficient=0.04, nesterov=True, orthogonal=orthogonal
    )
    groups = groups_of((4, 3, 3, 3), (5, 4), (7,), bias=((4,), (2, 2)))
    optimizer = create_optimizer(settings, groups, 0.5)
    assert type(optimizer) is Muon
    made = optimizer.param_groups
    found = [(group["orthogonal"], [tuple(p.shape) for p in group["params"]]) for group in made]
    assert found == [*expected, (False, [(4,), (2, 2)])]
    assert [group["adapt"] for group in made] == [True, True, False]
    assert [group["weight_decay"] for group in made] == [0.5, 0.5, 0.0]
    assert [g["trust_coefficient"] for g in made] == pytest.approx([0.16, 0.04, 0.04])
    for group in made:
        assert (group["lr"], group["momentum"], group["eps"]) == (0.5, 0.75, 0.0)
        assert group["nesterov"] is True
    only = create_optimizer(settings, groups_of((4, 3, 3, 3))[:1], 0.1)
    assert [group["orthogonal"] for group in only.param_groups] == [True], "no empty group"


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([(8, 3, 3, 3), (8, 8, 3, 3), (1000, 8)], "filters"),  # the classifier does not count
        ([(16, 3, 4, 4), (16, 16), (64, 16), (16, 64), (10, 16)], "all"),  # a transformer
        ([(32, 1, 7, 7), (128, 32), (32, 128), (10, 32)], "all"),  # ConvNeXt
        ([(32, 64), (10, 32)], "all"),
        ([(10, 64)], "all"),
    ],
    ids=["resnet", "vit", "convnext", "perceptron", "linear"],
)
def test_muon_finds_out_whether_linear_layers_carry_the_net(
    shapes: list[tuple[int, ...]], expected: str
) -> None:
    made = {}
    for orthogonal in ("auto", expected):
        settings = OptimSettings.gather(name="muon", orthogonal=orthogonal)
        optimizer = create_optimizer(settings, groups_of(*shapes, bias=((16,),)), 0.1)
        made[orthogonal] = [
            (g["orthogonal"], [tuple(p.shape) for p in g["params"]]) for g in optimizer.param_groups
        ]
        assert ("linear layers" in optimizer.describe()) == (expected == "all")
    assert made["auto"] == made[expected]


@pytest.mark.parametrize(
    ("norms", "fixed"), [(0, True), (2, True), (3, False), (9, False)], ids="norms {0}".format
)
def test_steps_have_a_fixed_length_where_some_matrix_has_no_norm_layer(
    norms: int, fixed: bool
) -> None:
    groups = groups_of((8, 3, 3, 3), (8, 8, 3, 3), (8, 8, 3, 3), (10, 8), bias=((16,),))
    for wanted in ("auto", "relative", "fixed"):
        settings = OptimSettings.gather(name="muon", steps=wanted)
        optimizer = create_optimizer(settings, groups, 0.1, norms=norms)
        expected = fixed if wanted == "auto" else wanted == "fixed"
        for group in optimizer.param_groups:
            assert bool(group.get("fixed_steps")) == (expected and group["orthogonal"])
            if group["orthogonal"]:
                hyper = optimizer.rule.hyper(group)
                assert isinstance(hyper, Hyper)
                assert hyper.adapt is not expected, "a fixed length has no trust ratio"
        assert ("fixed length" in optimizer.describe()) == expected
    everything = OptimSettings.gather(name="muon", steps="auto", orthogonal="all")
    optimizer = create_optimizer(everything, groups, 0.1, norms=norms)
    assert bool(optimizer.param_groups[0]["fixed_steps"]) == fixed, "the classifier does not count"
    head = create_optimizer(everything, groups_of((10, 8)), 0.1, norms=norms)
    assert bool(head.param_groups[0]["fixed_steps"]) == (norms == 0)


@pytest.mark.parametrize(
    ("matrices", "factor"), [(1, 1.0), (4, 1.0), (8, 0.5**0.5), (16, 0.5), (64, 0.5)]
)
@pytest.mark.parametrize("wanted", ["relative", "fixed", "auto"])
def test_steps_of_fixed_length_are_shorter_in_deep_nets(
    matrices: int, factor: float, wanted: str
) -> None:
    """This applies to `auto` only; `fixed` uses η as given."""
    settings = OptimSettings.gather(name="muon", steps=wanted, trust_coefficient=0.02, momentum=0.9)
    expected = factor if wanted == "auto" else 1.0
    # Of twice as many, half have a norm.
    for count, norms in ((matrices, 0), (2 * matrices, matrices)):
        groups = groups_of(*[(8, 8, 3, 3)] * count, (10, 8))
        optimizer = create_optimizer(settings, groups, 0.1, norms=norms)
        filters, head, *_ = optimizer.param_groups
        assert filters["trust_coefficient"] == pytest.approx(0.2 * expected)
        assert head.get("trust_coefficient", 0.02) == 0.02, "it is not orthogonalized"


@pytest.mark.parametrize("name", ["sgd", "lars", "muon"])
def test_the_implementation_and_the_ablation_are_passed_on(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refused("optim.fused", "use 'auto'"):
        create_optimizer(OptimSettings(name=name, fused="triton"), groups_of((2,)), 1.0)
    monkeypatch.setattr("paceline.optim.build.triton_unavailable", lambda device: "")
    for chosen, fused in (("auto", None), ("triton", True), ("foreach", False)):
        made = create_optimizer(OptimSettings(name=name, fused=chosen), groups_of((2,)), 1.0)
        assert made.fused is fused
