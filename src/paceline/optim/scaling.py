"""Implements `optim.scaling`: derives settings for a large batch from a recipe for a small batch.

`scale_recipe` is a pure function that does not need torch. It takes a `Recipe` with a known-good batch
and a `Target` with the batch and length of the run. It returns a `Scaling`: a value for each changed
setting, the reasons, and the expected loss of accuracy. docs/optimizers.md has the equations and the
range in which they are valid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from paceline.core.batch_range import (
    LEAST_STEPS,
    LEAST_STEPS_PER_EPOCH,
    largest_batch_in_range,
)
from paceline.core.errors import ConfigError, nearest
from paceline.optim.batch_growth import largest_micro_batch
from paceline.optim.rule_settings import AdamSettings, LarsSettings, MuonSettings
from paceline.optim.scaling_report import Choice, Scaling
from paceline.optim.settings import OptimSettings

OF_ADAM = ("adamw", "lamb")
KNOWN = (*OF_ADAM, "lars", "muon", "sgd")
# If the user sets any of these settings, the rule keeps Adam.
_ADAM_SETTINGS = frozenset({"optim.lr", "optim.weight_decay"}) | {
    f"optim.adam.{key}" for key in ("beta1", "beta2", "eps")
}
# A lower rate of Adam, unless it is the default, indicates fine-tuning, for which Muon's steps are too
# long.
LEAST_ADAM_RATE = 1e-4
# Settings that the rule changes or depends on. The rule keeps values that the user has given.
SCALED = (
    "optim.name", "optim.lars.trust_coefficient", "optim.muon.trust_coefficient",
    "optim.muon.orthogonal", "optim.muon.steps", "optim.momentum", "optim.nesterov",
    *sorted(_ADAM_SETTINGS), "optim.warmup_epochs", "optim.warmup_max_share", "optim.schedule",
    "optim.poly.power", "optim.batch_schedule", "optim.batch_rate", "run.batch_size",
    "run.average_epochs", "run.cutmix", "run.mixup",
)  # fmt: skip
# Smallest ratio of the new batch to the known-good batch; smaller ratios have not been measured.
LEAST_FACTOR = 1 / 4
# With fewer steps per epoch, SGD with linear scaling loses accuracy (Goyal et al.: 160 on ImageNet).
SGD_STEPS_PER_EPOCH = 100.0
# Pace: length of a layer's step at the peak rate, relative to the weights. These constants are the pace
# times the square root of the steps per epoch.
PACE = {"muon": 0.32, "lars": 0.7}
MOST_PACE = {"muon": 0.2, "lars": 0.4}
# Rate of biases and norms, which have no trust ratio. A recipe for Adam does not determine this rate, so
# the rule uses the rate in the CIFAR-10 recipe for SGD.
MOST_RATE = 4.0
RATE_PER_SAMPLE = 0.2 / 256
# Muon needs a short warm-up, LARS a third of the run.
WARMUP_STEPS, MOST_WARMUP_SHARE, LARS_WARMUP_SHARE = 20, 0.2, 0.3
# Weights are averaged over this fraction of the run if an epoch has few steps.
AVERAGE_SHARE, AVERAGED_STEPS_PER_EPOCH, LEAST_AVERAGED_STEPS = 1 / 15, 10.0, 4
# In a run with fewer steps and fewer epochs than this, mixed images cost accuracy, because they slow
# learning down.
SHORT_STEPS, SHORT_EPOCHS = 1000, 60
# With few steps per epoch, these optimizers use about a quarter of the batch in the first half of a run.
GROWN = (*OF_ADAM, "muon")
GROWTH, GROWTH_SHARE, GROWN_STEPS_PER_EPOCH = 4, 1 / 2, 25.0
_DECAYING = ("cosine", "poly")
LEAST_BETA2 = 0.95
LARGEST_AUTOMATIC_GROUP = 256


@dataclass(frozen=True)
class Recipe:
    """A recipe, and the global batch at which it is known to work.

    Attributes:
        optim: Section `[optim]` of the recipe, with the user's values.
        batch: The known-good global batch.
        optimizer: Name of the optimizer that is known to work at this batch.
        norm_group: Micro-batch size (the number of samples over which batch norm normalizes) at the
            known-good batch; None if the recipe does not set it.
        average_epochs: Epochs over which the recipe averages weights.
        mixing: Names of the enabled settings that mix images (`run.mixup`, `run.cutmix`).
        kept: Names of settings that the user has given.
        averages: True if the run can average weights.
        one_batch: The reason why the batch cannot grow during the run; empty if it can.
        pretrained: True if the run begins with pretrained weights.
    """

    optim: OptimSettings
    batch: int
    optimizer: str
    norm_group: int | None = None
    average_epochs: float = 0.0
    mixing: tuple[str, ...] = ()
    kept: frozenset[str] = frozenset()
    averages: bool = True
    one_batch: str = ""
    pretrained: bool = False

    @property
    def rate(self) -> float:
        """Peak learning rate at the known-good batch, even if the user gives one for the new batch."""
        known = self.optim.known_good.lr
        return OptimSettings.peak_lr(self.optim, self.batch) if known is None else known

    @property
    def pace(self) -> float:
        """Learning rate times η / (1 − m) of LARS or Muon at the known-good batch.

        Not used if the user gives the trust coefficient η.
        """
        known = self.optim.known_good.momentum
        momentum = self.optim.momentum if known is None else known
        own = self.optim.chosen(self.optimizer)
        assert isinstance(own, LarsSettings | MuonSettings)
        return self.rate * own.trust_coefficient / (1 - momentum)


@dataclass(frozen=True)
class Target:
    """The batch and the length of the run that a recipe is scaled to.

    Attributes:
        batch: Global batch.
        samples: Number of training images.
        epochs: Number of epochs.
        ranks: Number of ranks.
        first_batch: First global batch of a resumed run, which must not change; None for a new run.
        grows_at: Epoch at which the batch of a resumed run grows; None for a new run.
        micro_batch: Micro-batch of a resumed run, which does not depend on the number of ranks; None for
            a new run.
    """

    batch: int
    samples: int
    epochs: int
    ranks: int = 1
    first_batch: int | None = None
    grows_at: float | None = None
    micro_batch: int | None = None

    @property
    def steps_per_epoch(self) -> float:
        """Steps per epoch at the global batch `batch`."""
        return self.samples / self.batch

    @property
    def total_steps(self) -> int:
        """Steps of the run if all steps use the global batch `batch`."""
        return -(-self.samples * self.epochs // self.batch)

    @property
    def is_short(self) -> bool:
        """True if the run is too short for mixup and CutMix."""
        few = self.steps_per_epoch < SGD_STEPS_PER_EPOCH and self.total_steps < SHORT_STEPS
        return few and self.epochs < SHORT_EPOCHS


def scale_recipe(recipe: Recipe, target: Target) -> Scaling:
    """Derives settings for the batch of the requested run.

    Args:
        recipe: The recipe and its known-good batch.
        target: Batch and length of the requested run.

    Returns:
        The changed settings with their reasons.

    Raises:
        ConfigError: If the optimizer is unknown, or the batch or length is outside of the rule's range.
    """
    _check(recipe, target)
    factor, steps = target.batch / recipe.batch, target.steps_per_epoch
    headline = (
        f"batch {recipe.batch:,} → {target.batch:,}, {steps:.3g} steps per epoch, "
        f"{target.total_steps:,} in all"
    )
    kept = tuple(sorted(recipe.kept & set(SCALED)))
    if factor == 1:
        return Scaling((), headline, kept)
    rule = _Rule(recipe, target)
    name = rule.optimizer()
    if name == "sgd":
        rule.set("optim.lr", rule.rate * factor, "proportional to the batch")
    elif name in OF_ADAM:
        rule.scale_adam(name)
    else:
        rule.scale_pace(name)
    rule.warm_up(name)
    rule.decay(name)
    group = rule.normalize()
    if name in GROWN:
        rule.grow(group)
    rule.average()
    rule.unmix()
    notes = [f"{name} is kept: {rule.why_adam}"] if rule.why_adam else []
    if rule.grown_steps:
        headline += f" ({rule.grown_steps:,} with a batch that grows)"
    if target.batch > recipe.batch and steps < SGD_STEPS_PER_EPOCH:
        if rule.one_batch and not rule.grown_steps:
            notes.append(f"the batch does not grow: {rule.one_batch}")
        better = "" if name == "muon" or rule.fine_tuning else ", less with muon"
        notes.append(f"expect a loss of accuracy{better} (docs/optimizers.md)")
    return Scaling(tuple(rule.choices), headline, kept, tuple(notes))


def _check(recipe: Recipe, target: Target) -> None:
    """Raises ConfigError if the recipe cannot be scaled to the requested run."""
    for name in (recipe.optimizer, recipe.optim.name):
        if name not in KNOWN:
            raise ConfigError(
                "optim.scaling", "auto", f"is not supported with the optimizer {name!r}",
                f"{nearest(name, KNOWN)}; or use optim.scaling = 'off' and set optim.lr",
            )  # fmt: skip
    known, name = recipe.optimizer, recipe.optim.name
    to_adam = name in OF_ADAM and known not in OF_ADAM
    from_adam = known in OF_ADAM and name in ("sgd", "lars")
    # In a recipe for LARS or Muon, only biases and norms use the rate directly.
    to_sgd = name == "sgd" and known in ("lars", "muon")
    if to_adam or from_adam or to_sgd:
        raise ConfigError(
            "optim.name", name, f"optim.scaling cannot derive its rate from a recipe for {known}",
            f"use a recipe for {name}, or optim.scaling = 'off'",
        )  # fmt: skip
    if known in OF_ADAM and name == "muon" and target.batch <= recipe.batch:
        raise ConfigError(
            "optim.name", name,
            f"optim.scaling can replace {known} by it only for batches above {recipe.batch}",
            f"use --opt {known}, or a larger batch",
        )  # fmt: skip
    steps, total = target.steps_per_epoch, target.total_steps
    if steps < LEAST_STEPS_PER_EPOCH or total < LEAST_STEPS:
        epochs = math.ceil(LEAST_STEPS * target.batch / target.samples)
        remedy = f"a batch of at most {largest_batch_in_range(target.samples, target.epochs)}"
        if steps >= LEAST_STEPS_PER_EPOCH:
            remedy += f", or {epochs} epochs"
        raise ConfigError(
            "run.global_batch_size", target.batch,
            f"gives {steps:.3g} steps per epoch and {total} in all; optim.scaling = 'auto' needs "
            f"{LEAST_STEPS_PER_EPOCH:g} and {LEAST_STEPS}",
            f"use {remedy}; or optim.scaling = 'off'",
        )  # fmt: skip
    if target.batch < recipe.batch * LEAST_FACTOR:
        raise ConfigError(
            "run.global_batch_size", target.batch,
            f"is less than a quarter of the known-good batch {recipe.batch}",
            "use optim.scaling = 'off', or a recipe for a smaller batch",
        )  # fmt: skip


def _given_value(optim: OptimSettings, name: str) -> Any:
    """Returns the value of a setting such as `optim.lr`; None for settings outside of `[optim]`."""
    section, *owner, key = name.split(".")
    if section != "optim":
        return None
    return getattr(optim.owned.get(owner[0]) if owner else optim, key, None)


class _Rule:
    """Scales a recipe and collects the changed settings. Each method decides on a few settings."""

    def __init__(self, recipe: Recipe, target: Target) -> None:
        self.recipe, self.target = recipe, target
        self.factor = target.batch / recipe.batch
        self.rate = recipe.rate
        self.choices: list[Choice] = []
        self.grown_steps, self.one_batch = 0, ""
        self.why_adam, self.fine_tuning = "", self._why_fine_tuning()

    def set(self, name: str, value: Any, reason: str) -> Any:
        """Changes a setting unless the user has given it. Returns the value that the run will use."""
        if name in self.recipe.kept:
            given = _given_value(self.recipe.optim, name)
            return value if given is None else given
        value = float(f"{value:.4g}") if isinstance(value, float) else value
        self.choices.append(Choice(name, value, reason))
        return value

    def optimizer(self) -> str:
        """Chooses Muon if an epoch has few steps, unless Adam must be kept. Returns the name."""
        given, kept = self.recipe.optim.name, self.recipe.kept
        few = self.target.steps_per_epoch < SGD_STEPS_PER_EPOCH and self.factor > 1
        if given == "muon" or not few:
            return given
        if given in OF_ADAM and "optim.name" not in kept:
            self.why_adam = self._why_adam()
            if self.why_adam:
                return given
        reason = f"fewer than {SGD_STEPS_PER_EPOCH:g} steps per epoch"
        return str(self.set("optim.name", "muon", reason))

    def _why_adam(self) -> str:
        """Returns the reason to keep Adam; "" if Muon replaces it."""
        if self.fine_tuning:
            return f"{self.fine_tuning} (--opt muon overrides this)"
        optim, own = self.recipe.optim, sorted(self.recipe.kept & _ADAM_SETTINGS)
        if optim.name == "lamb" and optim.chosen("lamb").clip:
            own.append("optim.adam.clip")
        return f"given: {', '.join(own)} (otherwise muon replaces {optim.name})" if own else ""

    def _why_fine_tuning(self) -> str:
        """Returns why a recipe for Adam is considered to be fine-tuning; "" if it is not."""
        optim = self.recipe.optim
        if optim.name not in OF_ADAM:
            return ""
        if self.recipe.pretrained:
            return "the run begins with given weights"
        if optim.layer_decay < 1:
            return "optim.layer_decay is for fine-tuning"
        unset = optim.lr is None and optim.known_good.lr is None and optim.has_default_base
        if self.rate < LEAST_ADAM_RATE and not unset:
            return f"a rate of {self.rate:.3g} is for fine-tuning"
        return ""

    def scale_adam(self, name: str) -> None:
        """Scales learning rate, β₂, eps and weight decay of AdamW or LAMB."""
        root, optim = math.sqrt(self.factor), self.recipe.optim
        self.set("optim.lr", self.rate * root, "root of the batch factor")
        own = optim.chosen(name)
        assert isinstance(own, AdamSettings)
        beta2 = max(min(LEAST_BETA2, own.beta2), 1 - self.factor * (1 - own.beta2))
        self.set("optim.adam.beta2", beta2, "averages over the same number of samples")
        self.set("optim.adam.eps", own.eps / root, "root of the batch factor")
        if name == "adamw" and optim.weight_decay:
            decay = optim.weight_decay * root
            self.set("optim.weight_decay", decay, "keeps rate · decay per epoch")

    def scale_pace(self, name: str) -> None:
        """Scales LARS or Muon: learning rate · η / (1 − m) grows with the root of the batch."""
        optim, steps = self.recipe.optim, self.target.steps_per_epoch
        if name == "muon" and optim.momentum:
            self.set("optim.nesterov", True, "as measured")
        if name == "muon" and self.recipe.optimizer != name:
            self.set("optim.muon.orthogonal", "auto", "all matrices in nets of linear layers")
        own = optim.of("muon", MuonSettings)
        if name == "muon" and self.factor > 1 and own.steps == "relative":
            self.set("optim.muon.steps", "auto", "fixed length if some matrix has no norm layer")
        if self.recipe.optimizer == name:
            pace, why = self.recipe.pace * math.sqrt(self.factor), "root of the batch factor"
        else:
            pace, why = PACE[name] / math.sqrt(steps), f"{PACE[name]} / √(steps per epoch)"
        if pace > MOST_PACE[name]:
            pace, why = MOST_PACE[name], "the largest that was measured"
        from_adam = self.recipe.optimizer in OF_ADAM
        known = RATE_PER_SAMPLE * self.recipe.batch if from_adam else self.rate
        linear, most = known * self.factor, MOST_RATE if from_adam else max(MOST_RATE, known)
        reason = f"of biases and norms: proportional to the batch, at most {most:g}"
        rate = self.set("optim.lr", min(linear, most), reason)
        eta = pace * (1 - optim.momentum) / rate
        self.set(f"optim.{name}.trust_coefficient", eta, f"a pace of {pace:.3g}: {why}")
        if from_adam and optim.weight_decay:
            decay = self.factor * self.rate * optim.weight_decay / rate
            self.set("optim.weight_decay", decay, "keeps rate · decay per epoch")

    def warm_up(self, name: str) -> None:
        """Chooses the warm-up: 30 % of the run for LARS, otherwise at least 20 steps.

        Except with LARS, the warm-up is at most a fifth of the run.
        """
        optim, target = self.recipe.optim, self.target
        if name == "lars":
            share = max(LARS_WARMUP_SHARE, optim.warmup_max_share)
            epochs = max(optim.warmup_epochs, LARS_WARMUP_SHARE * target.epochs)
            self.set("optim.warmup_max_share", share, "LARS needs a long warm-up")
            epochs = min(epochs, share * target.epochs)
            self.set("optim.warmup_epochs", epochs, f"{share:.0%} of the run")
            return
        least = WARMUP_STEPS / target.steps_per_epoch
        most = MOST_WARMUP_SHARE * target.epochs
        epochs = min(max(optim.warmup_epochs, least), most)
        if epochs != optim.warmup_epochs:
            why = f"{WARMUP_STEPS} steps of the whole batch, at most a fifth of the run"
            self.set("optim.warmup_epochs", epochs, why)

    def decay(self, name: str) -> None:
        """Replaces cosine by linear decay for Muon, because cosine hardly lowers the rate at first."""
        is_cosine = self.recipe.optim.schedule == "cosine"
        given = "optim.schedule" in self.recipe.kept
        if name == "muon" and self.factor > 1 and is_cosine and not given:
            self.set("optim.schedule", "poly", "linear decay")
            self.set("optim.poly.power", 1.0, "linear")

    def unmix(self) -> None:
        """Switches mixup and CutMix off in short runs."""
        if self.target.is_short and self.factor > 1:
            reason = f"{self.target.total_steps} steps in all are too few for mixed images"
            for name in self.recipe.mixing:
                self.set(name, 0.0, reason)

    def normalize(self) -> int | None:
        """Keeps the number of samples that batch norm normalizes over, or chooses a smaller one.

        This number, called the batch-norm group, must divide the batch of a rank.

        Returns:
            The size of the batch-norm group; None if neither recipe nor user give one.

        Raises:
            ConfigError: If the group is smaller than a quarter of the recipe's group.
        """
        if "run.batch_size" in self.recipe.kept:
            return self.recipe.norm_group
        wanted = self.recipe.norm_group or min(self.recipe.batch, LARGEST_AUTOMATIC_GROUP)
        batch, ranks = math.gcd(self.target.batch, self.target.first_batch or 0), self.target.ranks
        if kept := self.target.micro_batch:
            self.set("run.batch_size", kept, "as at the start of this run")
            return kept
        rank_batch = -(-batch // ranks)
        group = largest_micro_batch(batch, ranks, wanted)
        if 4 * group < min(wanted, rank_batch):
            raise ConfigError(
                "run.global_batch_size", self.target.batch,
                f"gives batch-norm groups of {group} samples, but the recipe has {wanted}: no size near "
                f"{wanted} divides the {rank_batch} samples of a rank",
                "use a batch with more divisors, or give --batch-size",
            )  # fmt: skip
        reason = "batch-norm group of the recipe"
        if group != wanted:
            reason = f"divides the {rank_batch} samples of a rank; the recipe has {wanted}"
        self.set("run.batch_size", group, reason)
        return group

    def grow(self, group: int | None) -> None:
        """Lets the batch grow during the run, from a smaller first batch, if an epoch has few steps.

        Learning rate · η / (1 − m) is scaled by the root of the batch.
        """
        recipe, target = self.recipe, self.target
        kept = {"optim.batch_schedule", "optim.batch_rate", "optim.lr"} & recipe.kept
        batch, first = target.batch, target.first_batch or self._first_batch(group)
        if kept or first == batch:
            return
        if recipe.one_batch:
            self.one_batch = recipe.one_batch
            return
        rate = next(choice for choice in self.choices if choice.name == "optim.lr")
        self.choices.remove(rate)
        epoch = GROWTH_SHARE * target.epochs if target.grows_at is None else target.grows_at
        before = min(epoch, target.epochs) * target.samples
        self.grown_steps = round(before / first + (target.samples * target.epochs - before) / batch)
        root = math.sqrt(first / batch)
        self.set("optim.lr", rate.value * root, f"{rate.reason}, times {root:.3g} at first")
        self.set("run.global_batch_size", first, "more steps per epoch at first")
        self.set("optim.batch_schedule", f"{epoch:g}:{batch}", "the requested batch later")
        self.set("optim.batch_rate", "sqrt", "rate and pace grow with the root of the batch")

    def _first_batch(self, group: int | None) -> int:
        """Returns about a quarter of the batch, a multiple of the micro-batches of all ranks.

        The result is at least the known-good batch. Returns the whole batch if the result would be more
        than half of it, if an epoch has many steps, or if the rate does not decay.
        """
        batch = self.target.batch
        few = self.target.steps_per_epoch <= GROWN_STEPS_PER_EPOCH
        decays = self.recipe.optim.schedule in _DECAYING
        if group is None or self.factor <= 1 or not (few and decays):
            return batch
        unit = group * self.target.ranks
        units = max(math.ceil(batch / GROWTH / unit - 0.5), math.ceil(self.recipe.batch / unit))
        return units * unit if 2 * units * unit <= batch else batch

    def average(self) -> None:
        """Switches weight averaging on if an epoch has few steps. Averages over at least four steps."""
        if not self.recipe.averages:
            return
        steps, epochs = self.target.steps_per_epoch, self.recipe.average_epochs
        if epochs:
            if epochs * steps < LEAST_AVERAGED_STEPS:
                self.set("run.average_epochs", LEAST_AVERAGED_STEPS / steps, "four steps")
            return
        wanted = AVERAGE_SHARE * self.target.epochs
        if steps <= AVERAGED_STEPS_PER_EPOCH and wanted * steps >= LEAST_AVERAGED_STEPS:
            self.set("run.average_epochs", wanted, "a fifteenth of the run")
