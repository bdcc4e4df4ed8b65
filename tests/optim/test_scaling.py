"""The scaling rule: its choices, values of the user, refusals."""

from __future__ import annotations

import math
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config import Job, RunConfig, load_config
from paceline.core.errors import CheckpointError, ConfigError
from paceline.optim import OptimSettings
from paceline.optim.rule_settings import LarsSettings, MuonSettings
from paceline.optim.scaling import (
    BASES,
    DEFAULT,
    SCALED,
    Recipe,
    Target,
    base_pace,
    base_rate,
    scale_recipe,
)
from paceline.optim.scaling_report import Scaling
from paceline.train.checkpoint import Checkpoint
from paceline.train.components import Components
from paceline.train.resolve import Facts, resolve
from ranks import run_ranks
from small_runs import run_small

SGD = OptimSettings(lr_base=0.2, nesterov=True, weight_decay=5e-4, warmup_epochs=5)
CIFAR = Recipe(SGD, 256, "sgd")
MUON = Recipe(
    OptimSettings.gather(name="muon", lr=0.2, trust_coefficient=0.0125, warmup_epochs=1),
    128,
    "muon",
)


def pace(scaling: Scaling, recipe: Recipe) -> float:
    """Returns the pace at the whole batch."""
    own = scaling.values.get("optim.name", recipe.optim.name)
    values = {
        **recipe.optim.__dict__,
        "trust_coefficient": getattr(recipe.optim.owned.get(own), "trust_coefficient", 0.0),
        **{k.rpartition(".")[2]: v for k, v in scaling.values.items()},
    }
    grown = 1.0
    if values["batch_schedule"]:
        assert values["batch_rate"] == "sqrt"
        last = int(values["batch_schedule"].partition(":")[2])
        grown = math.sqrt(last / values["global_batch_size"])
    return float(grown * values["lr"] * values["trust_coefficient"] / (1 - values["momentum"]))


def eta(optim: OptimSettings) -> float:
    own = optim.own_optimizer
    assert isinstance(own, LarsSettings | MuonSettings)
    return own.trust_coefficient


def test_the_known_good_batch_changes_nothing() -> None:
    assert scale_recipe(CIFAR, Target(256, 50_000, 90)).values == {}


@pytest.mark.parametrize(("batch", "best"), [(2500, (0.05, 0.10)), (10_000, (0.1, 0.2))])
def test_cifar_gets_a_pace_between_those_that_were_best_there(
    batch: int, best: tuple[float, float]
) -> None:
    """The best paces were the same at 90 and at 18 epochs."""
    found = scale_recipe(CIFAR, Target(batch, 50_000, 90))
    assert found.values["optim.name"] == "muon"
    assert best[0] < pace(found, CIFAR) < best[1]


def test_a_recipe_for_muon_scales_with_the_root_of_the_batch() -> None:
    """Fashion-MNIST: 0.025 at 128, and 0.1 was the best of three at 2,000."""
    found = scale_recipe(MUON, Target(2000, 12_000, 15))
    assert pace(found, MUON) == pytest.approx(0.025 * math.sqrt(2000 / 128), rel=1e-3)
    small = scale_recipe(MUON, Target(64, 12_000, 15))
    assert pace(small, MUON) == pytest.approx(0.025 / math.sqrt(2), rel=1e-3)


@pytest.mark.parametrize("name", ["muon", "lars"])
def test_the_pace_is_limited_to_what_was_measured(name: str) -> None:
    fast = OptimSettings.gather(name=name, lr=4.0, trust_coefficient=0.01)
    recipe = Recipe(fast, 256, name, kept=frozenset({"optim.name"}))
    found = scale_recipe(recipe, Target(10_000, 50_000, 90))
    assert pace(found, recipe) == pytest.approx(max(BASES[name].most_pace, recipe.pace), rel=1e-3)


@pytest.mark.parametrize(("batch", "ranks"), [(4999, 1), (9998, 2), (2 * 2503, 1)])
def test_a_batch_without_divisors_gets_no_batch_norm_group(batch: int, ranks: int) -> None:
    values = scale_recipe(CIFAR, Target(batch, 50_000, 90, ranks)).values
    assert "run.batch_size" not in values
    assert values["optim.name"] == "muon"


def test_sgd_keeps_linear_scaling_while_an_epoch_has_many_steps() -> None:
    found = scale_recipe(CIFAR, Target(1024, 1_281_167, 90))
    assert "optim.name" not in found.values
    assert found.values["optim.lr"] == pytest.approx(0.8)
    assert not found.notes


def test_rates_of_adam_follow_the_root_and_averages_the_samples() -> None:
    adam = Recipe(OptimSettings(name="adamw", lr=1e-3, weight_decay=0.05), 1024, "adamw")
    values = scale_recipe(adam, Target(4096, 1_281_167, 90)).values
    assert values["optim.lr"] == pytest.approx(2e-3)
    assert values["optim.adam.beta2"] == pytest.approx(1 - 4 * 0.001)
    assert values["optim.adam.eps"] == pytest.approx(5e-9)
    # What decay takes an epoch, rate · decay · steps, is what it was.
    before, after = 1e-3 * 0.05 / 1024, values["optim.lr"] * values["optim.weight_decay"] / 4096
    assert after == pytest.approx(before)
    asked = replace(adam, kept=frozenset({"optim.name"}))
    far = scale_recipe(asked, Target(102_400, 1_281_167, 90)).values
    assert far["optim.adam.beta2"] == 0.95
    lamb = Recipe(OptimSettings(name="lamb", lr=0.005), 2048, "lamb")
    assert "optim.weight_decay" not in scale_recipe(lamb, Target(8192, 1_281_167, 90)).values


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_the_batch_of_adam_grows_where_an_epoch_has_few_steps(name: str) -> None:
    optim = OptimSettings(name=name, lr=1e-3, weight_decay=0.01, schedule="cosine")
    recipe = Recipe(optim, 128, name, kept=frozenset({"optim.name"}))
    target = Target(2000, 12_000, 15)
    values = scale_recipe(recipe, target).values
    assert values["run.global_batch_size"] == 500
    assert values["optim.batch_schedule"] == "7.5:2000"
    # By the root of each batch over the known-good one.
    assert values["optim.lr"] == pytest.approx(1e-3 * math.sqrt(500 / 128), rel=1e-3)
    one = scale_recipe(replace(recipe, one_batch="so"), target).values
    assert one["optim.lr"] == pytest.approx(1e-3 * math.sqrt(2000 / 128), rel=1e-3)
    # The rest is that of the whole batch.
    for key in ("optim.adam.beta2", "optim.adam.eps", "run.batch_size", "optim.warmup_epochs"):
        assert values.get(key) == one.get(key)
    assert "run.global_batch_size" not in scale_recipe(recipe, Target(400, 12_000, 15)).values


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_muon_takes_over_from_adam_where_an_epoch_has_few_steps(name: str) -> None:
    optim = OptimSettings(name=name, lr=1e-3, weight_decay=0.05, schedule="cosine")
    recipe, target = Recipe(optim, 128, name), Target(2000, 12_000, 15)
    values = scale_recipe(recipe, target).values
    assert values["optim.name"] == "muon"
    assert not {"optim.adam.beta2", "optim.adam.eps"} & values.keys()
    # All but the decay is as from a recipe for SGD.
    sgd = OptimSettings(name="sgd", lr=0.1, weight_decay=0.05, schedule="cosine")
    as_sgd = scale_recipe(Recipe(sgd, 128, "sgd"), target)
    assert values.pop("optim.weight_decay") == BASES["muon"].weight_decay
    assert values == as_sgd.values
    far = scale_recipe(replace(recipe, batch=8192), Target(65_536, 1_281_167, 90)).values
    assert far["optim.lr"] * 2 == pytest.approx(BASES["muon"].most, rel=1e-2)


@pytest.mark.parametrize(
    ("changes", "noted"),
    [
        ({"kept": frozenset({"optim.adam.beta2"})}, True),
        ({"kept": frozenset({"optim.name"})}, False),
        ({"optim": OptimSettings.gather(name="lamb", lr=1e-3, clip=True)}, True),
        ({"pretrained": True}, True),
        ({"kept": frozenset({"optim.name"}), "pretrained": True}, False),
        ({"optim": OptimSettings("adamw", lr=5e-5)}, True),
        ({"optim": OptimSettings("adamw", lr=1e-3, layer_decay=0.75)}, True),
    ],
)
def test_adam_stays_where_muon_might_not_suit(changes: dict[str, Any], noted: bool) -> None:
    optim = OptimSettings(name="adamw", lr=1e-3, weight_decay=0.05, schedule="cosine")
    recipe = replace(Recipe(optim, 128, "adamw"), **changes)
    found = scale_recipe(recipe, Target(2000, 12_000, 15))
    assert "optim.name" not in found.values
    assert "optim.adam.beta2" in {*found.values, *recipe.kept}
    assert len(found.notes) == 1 + noted


RULED = [(name, batch) for name in BASES for batch in (8, 32, 256, 2000)]


@pytest.mark.parametrize(("name", "batch"), RULED)
@pytest.mark.parametrize("recipe_batch", [None, 128])
def test_every_optimizer_has_a_rate_at_every_batch(
    name: str, batch: int, recipe_batch: int | None
) -> None:
    """The rate does not depend on a recipe for another optimizer."""
    optim = OptimSettings(name=name, schedule="cosine")
    recipe = Recipe(optim, recipe_batch, "", kept=frozenset({"optim.name"}))
    target, base = Target(batch, 10_000, 10), BASES[name]
    found = scale_recipe(replace(recipe, one_batch="so"), target)
    assert found.values["optim.lr"] == pytest.approx(base_rate(name, batch), rel=1e-3)
    assert found.values["optim.weight_decay"] == base.weight_decay
    if base.pace:
        assert pace(found, recipe) == pytest.approx(base_pace(name, 10_000 / batch), rel=1e-3)


def test_rates_grow_with_the_power_of_the_batch_up_to_a_limit() -> None:
    for name, base in BASES.items():
        ratio = base_rate(name, 64) / base_rate(name, 16)
        assert ratio == pytest.approx(4**base.exponent)
        assert base_rate(name, 10**9) == base.most


def test_a_run_that_names_nothing_gets_the_default() -> None:
    recipe = Recipe(OptimSettings(schedule="cosine"), None, "", named=False)
    values = scale_recipe(recipe, Target(64, 10_000, 10)).values
    assert values["optim.name"] == DEFAULT
    named = Recipe(OptimSettings(name=DEFAULT, schedule="cosine"), None, "")
    assert values.pop("optim.name")
    assert values == scale_recipe(named, Target(64, 10_000, 10)).values


def test_lars_is_kept_where_asked_for_with_a_long_warm_up() -> None:
    asked = replace(CIFAR, optim=replace(SGD, name="lars"), kept=frozenset({"optim.name"}))
    found = scale_recipe(asked, Target(10_000, 50_000, 90))
    assert "optim.name" not in found.values
    assert pace(found, asked) == pytest.approx(BASES["lars"].pace / math.sqrt(5), rel=1e-3)
    assert found.values["optim.warmup_epochs"] == pytest.approx(27)
    assert found.notes


@pytest.mark.parametrize(
    ("batch", "samples", "epochs", "warm_up"),
    [(2500, 50_000, 90, None), (10_000, 50_000, 20, 4.0), (25_000, 50_000, 90, 10.0)],
)
def test_warm_up_has_enough_steps_and_at_most_a_fifth(
    batch: int, samples: int, epochs: int, warm_up: float | None
) -> None:
    values = scale_recipe(CIFAR, Target(batch, samples, epochs)).values
    assert values.get("optim.warmup_epochs") == warm_up


@pytest.mark.parametrize(
    ("batch", "ranks", "group", "wanted"),
    [(10_000, 1, None, 250), (10_000, 4, None, 250), (2048, 16, None, 128), (2048, 2, 100, 64)],
)
def test_batch_norm_keeps_its_group(batch: int, ranks: int, group: int | None, wanted: int) -> None:
    recipe = replace(CIFAR, norm_group=group)
    found = scale_recipe(recipe, Target(batch, 50_000, 90, ranks)).values["run.batch_size"]
    assert found == wanted
    assert batch % (found * ranks) == 0


def test_weights_are_averaged_where_steps_are_few() -> None:
    assert scale_recipe(CIFAR, Target(10_000, 50_000, 90)).values["run.average_epochs"] == 6.0
    assert "run.average_epochs" not in scale_recipe(CIFAR, Target(2500, 50_000, 90)).values
    own = replace(CIFAR, average_epochs=0.5)
    assert scale_recipe(own, Target(10_000, 50_000, 90)).values["run.average_epochs"] == 0.8
    values = scale_recipe(replace(CIFAR, averages=False), Target(10_000, 50_000, 90)).values
    assert "run.average_epochs" not in values


def test_cosine_decay_becomes_linear_for_muon_unless_the_user_gave_a_schedule() -> None:
    values = scale_recipe(CIFAR, Target(2500, 50_000, 30)).values
    assert (values["optim.schedule"], values["optim.poly.power"]) == ("poly", 1.0)
    for recipe, target in (
        (replace(CIFAR, kept=frozenset({"optim.schedule"})), Target(2500, 50_000, 30)),
        (replace(CIFAR, optim=replace(SGD, schedule="step")), Target(2500, 50_000, 30)),
        (CIFAR, Target(500, 50_000, 30)),  # SGD
        (MUON, Target(64, 12_000, 15)),  # a smaller batch
    ):
        found = scale_recipe(recipe, target).values
        assert "optim.schedule" not in found
        assert "optim.poly.power" not in found


@pytest.mark.parametrize(
    ("batch", "epochs", "dropped"),
    [(2500, 30, True), (10_000, 30, True), (2500, 90, False), (10_000, 90, False), (500, 9, False)],
)
def test_images_are_not_mixed_in_short_runs(batch: int, epochs: int, dropped: bool) -> None:
    """A run is short by its steps and epochs; with many steps per epoch the recipe stays."""
    mixed = replace(CIFAR, mixing=("run.cutmix", "run.mixup"))
    values = scale_recipe(mixed, Target(batch, 50_000, epochs)).values
    assert [values.get(name) for name in mixed.mixing] == [0.0 if dropped else None] * 2
    kept = replace(mixed, kept=frozenset(mixed.mixing))
    assert not {*mixed.mixing} & {*scale_recipe(kept, Target(batch, 50_000, epochs)).values}


def test_asynchronous_weights_are_not_averaged() -> None:
    config = auto("cifar10-resnet18", run__global_batch_size=10_000, run__strategy="asynchronous")
    assert resolve_for(config, 50_000, 4)[0].run.average_epochs == 0


@pytest.mark.parametrize(
    "own",
    [
        {"run__strategy": "asynchronous"},
        {"run__strategy": "unequal"},
        {"run__strategy": "rehearsal", "run__rehearsal__nodes": 1, "run__rehearsal__gpus_per_node": 4},
    ],
    ids=str,
)  # fmt: skip
def test_runs_that_need_one_batch_have_one(own: dict[str, Any]) -> None:
    short = {"run__global_batch_size": 10_000, "run__epochs": 30}
    config = resolve_for(auto("cifar10-resnet18", **short, **own), 50_000, 1)[0]
    assert config.run.global_batch_size == 10_000
    grown = resolve_for(auto("cifar10-resnet18", **short), 50_000, 1)[0]
    assert grown.optim.batch_growth.stages == ((15.0, 10_000),)


@pytest.mark.parametrize("given", [{"optim__lr": 4.0}, {"optim__lr_base": 0.4}])
def test_a_rate_of_the_user_leaves_all_settings_as_they_are(given: dict[str, float]) -> None:
    config = auto("quickstart", run__global_batch_size=2000, run__epochs=15, **given)
    scaled, described = resolve_for(config, 12_000, 1)
    assert (scaled, described) == (config, "")


def test_what_the_user_gives_stays_and_the_rest_follows_it() -> None:
    kept = frozenset(
        {"optim.momentum", "run.batch_size", "optim.warmup_epochs", "run.average_epochs"}
    )
    asked = replace(CIFAR, optim=replace(SGD, momentum=0.8), kept=kept)
    values = scale_recipe(asked, Target(10_000, 50_000, 90)).values
    assert not kept & values.keys()
    assert values["optim.muon.trust_coefficient"] * values["optim.lr"] == pytest.approx(
        0.2 * BASES["muon"].pace / 5**0.5, rel=1e-3
    )
    everything = replace(asked, kept=frozenset(SCALED))
    assert scale_recipe(everything, Target(10_000, 50_000, 90)).values == {}


@pytest.mark.parametrize("target", [Target(25_000, 50_000, 3), Target(30_000, 50_000, 90)])
def test_runs_with_fewer_steps_than_measured_have_a_note(target: Target) -> None:
    assert "not measured" in scale_recipe(CIFAR, target).notes[-1]
    assert "not measured" not in "".join(scale_recipe(CIFAR, Target(25_000, 50_000, 45)).notes)


def test_the_layers_of_muon_are_chosen_by_the_net_unless_the_recipe_is_for_muon() -> None:
    assert scale_recipe(CIFAR, Target(2500, 50_000, 30)).values["optim.muon.orthogonal"] == "auto"
    for recipe in (MUON, replace(CIFAR, kept=frozenset({"optim.muon.orthogonal"}))):
        assert "optim.muon.orthogonal" not in scale_recipe(recipe, Target(1000, 12_000, 15)).values


def test_the_length_of_steps_is_chosen_by_the_net_where_they_get_longer() -> None:
    for recipe in (CIFAR, MUON):
        assert scale_recipe(recipe, Target(2000, 12_000, 30)).values["optim.muon.steps"] == "auto"
    given = replace(CIFAR, kept=frozenset({"optim.muon.steps"}))
    on = replace(MUON, optim=OptimSettings.gather(name="muon", lr=0.2, steps="fixed"))
    smaller = replace(MUON, batch=4000)
    for recipe in (given, on, smaller, replace(CIFAR, optim=replace(SGD, name="lars"),
                                               kept=frozenset({"optim.name"}))):  # fmt: skip
        assert "optim.muon.steps" not in scale_recipe(recipe, Target(2000, 12_000, 30)).values


@pytest.mark.parametrize(
    ("target", "first"),
    [
        (Target(10_000, 50_000, 30), 2500), (Target(2500, 50_000, 30), 500),
        (Target(1500, 30_000, 30), 500),  # not below the known-good batch
        (Target(625, 12_500, 30), None),  # no batch between that and half of 625
        (Target(10_000, 50_000, 90), 2500), (Target(2500, 50_000, 90), 500),  # long runs too
        (Target(1024, 50_000, 30), None), (Target(1024, 50_000, 90), None),  # 49 steps an epoch
        (Target(10_000, 50_000, 30, 10), 2500), (Target(10_000, 50_000, 30, 20), 5000),
        (Target(10_000, 50_000, 30, 40), None),  # one micro-batch of 250 a rank
    ],
    ids=str,
)  # fmt: skip
def test_the_batch_grows_where_an_epoch_has_few_steps(target: Target, first: int | None) -> None:
    found = scale_recipe(CIFAR, target)
    assert found.values.get("run.global_batch_size") == first
    pace_at_target = BASES["muon"].pace / math.sqrt(target.steps_per_epoch)
    assert pace(found, CIFAR) == pytest.approx(pace_at_target, rel=1e-3)
    if first is None:
        assert not {"optim.batch_schedule", "optim.batch_rate"} & found.values.keys()
        return
    assert found.values["optim.batch_schedule"] == f"{target.epochs / 2:g}:{target.batch}"
    assert first % (target.ranks * found.values["run.batch_size"]) == 0
    # The rate of biases and norms follows the root too, and is stated once.
    whole = scale_recipe(replace(CIFAR, one_batch="so"), target).values["optim.lr"]
    assert found.values["optim.lr"] == pytest.approx(whole * math.sqrt(first / target.batch), 1e-3)
    assert len(found.values) == len(found.choices)


@pytest.mark.parametrize("schedule", ["constant", "step"])
def test_the_batch_grows_only_where_the_rate_decays(schedule: str) -> None:
    recipe = replace(CIFAR, optim=replace(SGD, schedule=schedule))
    assert "run.global_batch_size" not in scale_recipe(recipe, Target(10_000, 50_000, 30)).values


@pytest.mark.parametrize("kept", ["optim.batch_schedule", "optim.batch_rate"])
def test_a_batch_schedule_of_the_user_leaves_the_batch_as_it_is(kept: str) -> None:
    asked = replace(CIFAR, kept=frozenset({kept}))
    found = scale_recipe(asked, Target(10_000, 50_000, 30))
    assert "run.global_batch_size" not in found.values
    assert "optim.batch_schedule" not in found.values


# --- in the configuration and in runs -----------------------------------------------------------


def resolve_for(
    config: RunConfig, samples: int, ranks: int, program: Components | None = None,
    resumed: Checkpoint | None = None,
) -> tuple[RunConfig, str]:  # fmt: skip
    facts = Facts(
        job=Job(processes=ranks, device="cpu"), program=program or Components(), samples=samples,
        classes=10, checkpoint=resumed,
    )  # fmt: skip
    found = resolve(config, facts)
    return found.config, found.scaling


def auto(recipe: str, **overrides: Any) -> RunConfig:
    named = {name.replace("__", "."): value for name, value in overrides.items()}
    return load_config(recipe, {"optim.scaling": "auto", **named})


def test_a_recipe_and_a_batch_are_enough() -> None:
    config = auto("cifar10-resnet18", run__global_batch_size=10_000)
    scaled, described = resolve_for(config, 50_000, 4)
    assert scaled.optim.name == "muon"
    assert scaled.optim.scaling == "off"
    assert scaled.run.average_epochs == 6.0
    assert described.startswith("batch 256 → 10,000")
    # `config.toml` of the run repeats it.
    again = RunConfig.from_tables(scaled.to_tables())
    assert resolve_for(again, 50_000, 4) == (scaled, "")
    # As a recipe it is known for its own batch and optimizer.
    assert scaled.optim.known_good_batch is None
    assert scaled.run.global_batch_size == 2000
    assert scaled.optim.batch_growth.stages == ((45.0, 10_000),)


def test_a_resumed_run_keeps_its_settings() -> None:
    config = auto("quickstart", run__global_batch_size=2000)
    first = resolve_for(config, 12_000, 4)[0]
    resumed = Checkpoint.__new__(Checkpoint)
    object.__setattr__(resumed, "sampler", {"global_batch": first.run.global_batch_size})
    changed = first.with_values({"optim.muon.trust_coefficient": 0.004, "optim.warmup_epochs": 1.0})
    object.__setattr__(resumed, "config", changed.to_tables())
    again, described = resolve_for(config, 12_000, 4, resumed=resumed)
    assert (again.optim, described) == (changed.optim, "")
    # A run of a Paceline without the rule: SGD at the default rate.
    before = load_config("quickstart", {"optim.scaling": "off", "run.global_batch_size": 2000})
    object.__setattr__(resumed, "sampler", {"global_batch": 2000})
    object.__setattr__(resumed, "config", before.to_tables())
    again = resolve_for(config, 12_000, 4, resumed=resumed)[0]
    assert (again.optim.name, again.optim.peak_lr(2000)) == ("sgd", before.optim.peak_lr(2000))


def test_a_rate_without_a_known_batch_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text("[optim]\nlr = 0.1\n")
    config = auto(str(path), run__global_batch_size=512)
    assert resolve_for(config, 50_000, 1) == (config, "")
    known = auto(str(path), run__global_batch_size=512, optim__known_good_batch=128)
    assert resolve_for(known, 500_000, 1)[0].optim.lr == pytest.approx(0.4)


@pytest.mark.parametrize("name", list(BASES))
def test_an_optimizer_on_the_command_line_gets_the_rate_of_the_rule(name: str) -> None:
    """At the recipe's batch, too, unless it is the recipe's optimizer."""
    optim = resolve_for(auto("quickstart", optim__name=name), 12_000, 1)[0].optim
    wanted = 0.2 if name == "sgd" else base_rate(name, 128)
    assert optim.peak_lr(128) == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("tuned", [{"run__pretrained": "w.pt"}, {"optim__layer_decay": 0.75}])
def test_fine_tuning_does_not_get_the_rates_of_training_from_scratch(tuned: dict[str, Any]) -> None:
    config = auto("quickstart", optim__name="adamw", **tuned)
    assert resolve_for(config, 12_000, 1) == (config, "")


def test_files_of_the_first_version_of_the_defaults_keep_their_settings(tmp_path: Path) -> None:
    path = tmp_path / "old.toml"
    path.write_text("defaults = 1\n[run]\nglobal_batch_size = 128\n[optim]\nlr = 0.1\n")
    config = load_config(str(path), {"run.global_batch_size": 512})
    assert config.optim.scaling == "off"
    assert resolve_for(config, 50_000, 1)[0].optim.lr == 0.1
    path.write_text(path.read_text().replace("defaults = 1\n", ""))
    later = load_config(str(path), {"run.global_batch_size": 512})
    assert resolve_for(later, 500_000, 1)[0].optim.lr == pytest.approx(0.4)


SCALED_RUN: dict[str, Any] = {
    "optim__scaling": "auto", "optim__known_good_batch": 8, "data__synthetic_samples": 64,
    "run__global_batch_size": 32, "run__epochs": 45, "run__eval_interval_epochs": 45,
    "checkpoint__interval_epochs": 0, "data__image_size": 12, "model__name": "scaling_net",
}  # fmt: skip


def _run(rank: int, output: str, values: dict[str, Any]) -> dict[str, Any] | str:
    from paceline.models import register_model

    def net(num_classes: int, in_channels: int = 1, **_: Any) -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Conv2d(in_channels, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(),
            torch.nn.Flatten(), torch.nn.Linear(400, num_classes),
        )  # fmt: skip

    register_model("scaling_net", net)
    try:
        return run_small(output, **values).summary
    except ConfigError as error:
        return str(error)


def test_a_run_of_another_batch_is_resumed_neither_as_it_was_nor_as_a_first_stage(
    tmp_path: Path,
) -> None:
    small = SCALED_RUN | {"run__global_batch_size": 8, "run__batch_size": 8, "run__epochs": 12}
    assert isinstance(_run(0, str(tmp_path / "a"), small), dict)
    with pytest.raises(CheckpointError, match="global_batch_size|epochs|optim"):
        _run(0, str(tmp_path / "a"), SCALED_RUN | {"run__batch_size": 4, "run__resume": "auto"})
    known = auto("cifar10-resnet18", run__global_batch_size=10_000, run__epochs=30)
    other = Checkpoint.__new__(Checkpoint)
    object.__setattr__(other, "sampler", {"global_batch": 256})
    object.__setattr__(other, "config", {})
    fresh = resolve_for(known, 50_000, 1)
    assert resolve_for(known, 50_000, 1, resumed=other) == fresh
    object.__setattr__(other, "sampler", {"global_batch": 10_000})
    assert resolve_for(known, 50_000, 1, resumed=other)[0].run.global_batch_size == 10_000


def test_a_run_that_grows_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    """The same command: a new run on two ranks would begin with 16, this one began with 8."""
    grows = SCALED_RUN | {"run__batch_size": 8, "checkpoint__interval_epochs": 40}
    whole = _run(0, str(tmp_path / "a"), grows)
    assert isinstance(whole, dict)
    stages = tomllib.loads((tmp_path / "a/config.toml").read_text())
    assert (stages["run"]["global_batch_size"], stages["optim"]["batch_schedule"]) == (8, "22.5:32")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    last = max((tmp_path / "b/checkpoints").glob("step-*.pt"))
    last.unlink()
    resumed = run_ranks(
        2, _run, str(tmp_path / "b"), grows | {"run__resume": "auto", "run__batch_size": 4}
    )[0]
    assert isinstance(resumed, dict)
    assert resumed["steps"] == whole["steps"]
    assert resumed["resumed_at_steps"] == [whole["steps"] - 10]
    # More epochs: it goes on with its stages.
    longer = grows | {"run__resume": "auto", "run__epochs": 50}
    more = _run(0, str(tmp_path / "a"), longer)
    assert isinstance(more, dict)
    assert more["steps"] == whole["steps"] + 10


@pytest.mark.parametrize(
    ("name", "rate", "far"),
    [
        ("sgd", 0.1, ""), ("sgd", 100.0, "times"), ("adamw", 1e-3, ""), ("adamw", 0.5, "times"),
        ("lars", 1e-3, "a pace of"), ("muon", 1e-3, "1/"), ("torch.optim:RAdam", 9.0, ""),
    ],
)  # fmt: skip
def test_a_rate_far_from_the_rules_gets_a_hint(name: str, rate: float, far: str) -> None:
    config = load_config("quickstart", {"optim.name": name, "optim.lr": rate})
    facts = Facts(job=Job(processes=1), program=Components(), samples=12_000, classes=10)
    hint = resolve(config, facts).hint
    assert bool(hint) == bool(far)
    assert far in hint
    # A recipe's own rate, or the rule's, gets none.
    assert not resolve(load_config("quickstart", {}), facts).hint
