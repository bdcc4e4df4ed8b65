"""Implements the scaling rule: settings for any optimizer and batch, without tuning.

`scale_recipe` is a pure function that does not need torch. It takes a `Recipe`, which may have a rate
that is known to work at some batch, and a `Target` with the batch and length of the run. It returns a
`Scaling`: a value for each changed setting, the reasons, and the expected loss of accuracy.
docs/optimizers.md has the equations and the range in which they were measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from paceline.core.batch_range import LEAST_STEPS, LEAST_STEPS_PER_EPOCH
from paceline.optim.batch_growth import largest_micro_batch
from paceline.optim.rule_settings import AdamSettings, LarsSettings, MuonSettings
from paceline.optim.scaling_report import Choice, Scaling
from paceline.optim.settings import OptimSettings


class Base(NamedTuple):
    """Settings of an optimizer that work without tuning.

    Attributes:
        rate: Peak rate at a batch of `BASE_BATCH`. With a pace, the rate of biases and norms.
        exponent: The rate is proportional to this power of the batch.
        most: Largest rate.
        weight_decay: Weight decay.
        pace: Pace times the square root of the steps per epoch; 0 without a pace. The pace is the length
            of a layer's step at the peak rate, relative to the weights.
        most_pace: Largest pace.
    """

    rate: float
    exponent: float
    most: float
    weight_decay: float
    pace: float = 0.0
    most_pace: float = 0.0


BASE_BATCH = 256
BASES = {
    "sgd": Base(0.3, 0.5, 1.0, 5e-4),
    "lars": Base(0.2, 1.0, 4.0, 5e-4, pace=0.7, most_pace=0.4),
    "muon": Base(0.2, 1.0, 4.0, 5e-4, pace=0.32, most_pace=0.2),
    "adamw": Base(4e-3, 0.5, 2e-2, 0.05),
    "lamb": Base(0.03, 0.5, 0.1, 0.02),
}
# The optimizer of runs that name none.
DEFAULT = "muon"
OF_ADAM = ("adamw", "lamb")
# If the user sets any of these settings, the rule keeps Adam.
_ADAM_SETTINGS = frozenset({"optim.weight_decay"}) | {
    f"optim.adam.{key}" for key in ("beta1", "beta2", "eps")
}
# A lower rate of Adam indicates fine-tuning, for which Muon's steps are too long.
LEAST_ADAM_RATE = 1e-4
# Settings that the rule changes or depends on. The rule keeps values that the user has given.
SCALED = (
    "optim.name", "optim.lr", "optim.lars.trust_coefficient", "optim.muon.trust_coefficient",
    "optim.muon.orthogonal", "optim.muon.steps", "optim.momentum", "optim.nesterov",
    *sorted(_ADAM_SETTINGS), "optim.warmup_epochs", "optim.warmup_max_share", "optim.schedule",
    "optim.poly.power", "optim.batch_schedule", "optim.batch_rate", "run.batch_size",
    "run.average_epochs", "run.cutmix", "run.mixup",
)  # fmt: skip
# With fewer steps per epoch, SGD with linear scaling loses accuracy (Goyal et al.: 160 on ImageNet).
SGD_STEPS_PER_EPOCH = 100.0
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
    """The settings from which the rule starts.

    Attributes:
        optim: Section `[optim]` of the recipe, with the user's values.
        batch: The batch at which the recipe is known to work; None if there is no such batch.
        optimizer: The optimizer that is known to work at this batch; empty if there is none, so that the
            rule chooses the rate.
        named: True if the recipe or the user names the optimizer.
        norm_group: Micro-batch size, over which batch norms normalize, at the known-good batch; None if
            the recipe does not set it.
        average_epochs: Epochs over which the recipe averages weights.
        mixing: Names of the enabled settings that mix images (`run.mixup`, `run.cutmix`).
        kept: Names of settings that the user has given.
        averages: True if the run can average weights.
        one_batch: The reason why the batch cannot grow during the run; empty if it can.
        pretrained: True if the run begins with pretrained weights.
    """

    optim: OptimSettings
    batch: int | None
    optimizer: str
    named: bool = True
    norm_group: int | None = None
    average_epochs: float = 0.0
    mixing: tuple[str, ...] = ()
    kept: frozenset[str] = frozenset()
    averages: bool = True
    one_batch: str = ""
    pretrained: bool = False

    @property
    def rate(self) -> float:
        """Peak rate at the known-good batch."""
        return OptimSettings.peak_lr(self.optim, self.batch or BASE_BATCH)

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
    """

    batch: int
    samples: int
    epochs: int
    ranks: int = 1

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


def base_rate(name: str, batch: int) -> float:
    """Returns the rate of an optimizer at a batch; of LARS and Muon, that of biases and norms."""
    base = BASES[name]
    return float(min(base.rate * (batch / BASE_BATCH) ** base.exponent, base.most))


def base_pace(name: str, steps_per_epoch: float) -> float:
    """Returns the pace of LARS or Muon."""
    base = BASES[name]
    return min(base.pace / math.sqrt(steps_per_epoch), base.most_pace)


def scale_recipe(recipe: Recipe, target: Target) -> Scaling:
    """Derives settings for the batch of the requested run.

    Args:
        recipe: The settings from which the rule starts. All optimizers are in `BASES`.
        target: Batch and length of the requested run.

    Returns:
        The changed settings with their reasons.
    """
    rule, steps = _Rule(recipe, target), target.steps_per_epoch
    known = (
        f"batch {recipe.batch:,} → {target.batch:,}" if recipe.batch else f"batch {target.batch:,}"
    )
    headline = f"{known}, {steps:.3g} steps per epoch, {target.total_steps:,} in all"
    kept = tuple(sorted(recipe.kept & set(SCALED)))
    name = rule.optimizer()
    if name == recipe.optimizer and rule.factor == 1:
        return Scaling((), headline, kept)
    rule.set_rate(name)
    rule.warm_up(name)
    rule.decay(name)
    if rule.factor != 1:
        group = rule.normalize()
        if name in GROWN:
            rule.grow(group)
        rule.average()
        rule.unmix()
    notes = [f"{name} is kept: {rule.why_adam}"] if rule.why_adam else []
    if rule.grown_steps:
        headline += f" ({rule.grown_steps:,} with a batch that grows)"
    if rule.factor > 1 and steps < SGD_STEPS_PER_EPOCH:
        if rule.one_batch and not rule.grown_steps:
            notes.append(f"the batch does not grow: {rule.one_batch}")
        better = "" if name == "muon" or rule.fine_tuning else ", less with muon"
        notes.append(f"expect a loss of accuracy{better} (docs/optimizers.md)")
    if steps < LEAST_STEPS_PER_EPOCH or target.total_steps < LEAST_STEPS:
        notes.append(
            f"not measured with fewer than {LEAST_STEPS_PER_EPOCH:g} steps per epoch or {LEAST_STEPS} in "
            "all: a smaller batch or more epochs will help"
        )
    return Scaling(tuple(rule.choices), headline, kept, tuple(notes))


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
        self.factor = target.batch / (recipe.batch or BASE_BATCH)
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
        if not self.recipe.named:
            return str(self.set("optim.name", DEFAULT, "the default"))
        few = self.target.steps_per_epoch < SGD_STEPS_PER_EPOCH and self.factor > 1
        if given == "muon" or not few or "optim.name" in kept:
            return given
        if given in OF_ADAM:
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
        if self.recipe.optimizer in OF_ADAM and self.recipe.rate < LEAST_ADAM_RATE:
            return f"a rate of {self.recipe.rate:.3g} is for fine-tuning"
        return ""

    def set_rate(self, name: str) -> None:
        """Chooses the rate and what belongs to it."""
        base, batch, own = BASES[name], self.target.batch, name == self.recipe.optimizer
        if name in OF_ADAM:
            self.scale_averages(name)
        if own:
            root = name in OF_ADAM
            rate = self.recipe.rate * self.factor ** (0.5 if root else 1.0)
            reason = "root of the batch factor" if root else "proportional to the batch"
            if base.pace:
                rate = min(rate, max(base.most, self.recipe.rate))
        else:
            rate, reason = base_rate(name, batch), f"the rate of {name} at this batch"
            if not (self.recipe.named and self.recipe.optimizer == "sgd"):
                self.set("optim.weight_decay", base.weight_decay, f"the decay of {name}")
        if base.pace:
            self.set_pace(name, rate)
        else:
            self.set("optim.lr", rate, reason)

    def scale_averages(self, name: str) -> None:
        """Scales β₂, eps and weight decay of AdamW or LAMB."""
        root, optim = math.sqrt(self.factor), self.recipe.optim
        own = optim.chosen(name)
        assert isinstance(own, AdamSettings)
        beta2 = max(min(LEAST_BETA2, own.beta2), 1 - self.factor * (1 - own.beta2))
        if self.factor > 1:
            self.set("optim.adam.beta2", beta2, "averages over the same number of samples")
        if name != self.recipe.optimizer:
            return
        self.set("optim.adam.eps", own.eps / root, "root of the batch factor")
        if name == "adamw" and optim.weight_decay:
            decay = optim.weight_decay * root
            self.set("optim.weight_decay", decay, "keeps rate · decay per epoch")

    def set_pace(self, name: str, rate: float) -> None:
        """Chooses rate and η of LARS or Muon from the pace, rate · η / (1 − m)."""
        optim, steps = self.recipe.optim, self.target.steps_per_epoch
        own = optim.of("muon", MuonSettings)
        if name == "muon" and optim.momentum:
            self.set("optim.nesterov", True, "as measured")
        if name == "muon" and self.recipe.optimizer != name:
            self.set("optim.muon.orthogonal", "auto", "all matrices in nets of linear layers")
        longer = self.factor > 1 or self.recipe.optimizer != name
        if name == "muon" and longer and own.steps == "relative":
            self.set("optim.muon.steps", "auto", "fixed length if some matrix has no norm layer")
        if self.recipe.optimizer == name:
            pace, why = self.recipe.pace * math.sqrt(self.factor), "root of the batch factor"
            pace = min(pace, max(BASES[name].most_pace, self.recipe.pace))
        else:
            pace = base_pace(name, steps)
            why = f"{BASES[name].pace:g} / √(steps per epoch), at most {BASES[name].most_pace:g}"
        rate = self.set("optim.lr", rate, "of biases and norms")
        eta = pace * (1 - optim.momentum) / rate
        self.set(f"optim.{name}.trust_coefficient", eta, f"a pace of {pace:.3g}: {why}")

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
        changes = self.factor > 1 or self.recipe.optimizer != name
        if name == "muon" and changes and is_cosine and not given:
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
            The size of the batch-norm group; None if the micro-batch is chosen as without the rule.
        """
        if "run.batch_size" in self.recipe.kept:
            return self.recipe.norm_group
        most = min(self.recipe.batch or BASE_BATCH, LARGEST_AUTOMATIC_GROUP)
        wanted = self.recipe.norm_group or most
        batch, ranks = self.target.batch, self.target.ranks
        rank_batch = -(-batch // ranks)
        group = largest_micro_batch(batch, ranks, wanted)
        if 4 * group < min(wanted, rank_batch):
            return None
        reason = "batch-norm group of the recipe"
        if group != wanted:
            reason = f"divides the {rank_batch} samples of a rank, near {wanted}"
        if self.recipe.batch is not None:
            self.set("run.batch_size", group, reason)
        return group

    def grow(self, group: int | None) -> None:
        """Lets the batch grow during the run, from a smaller first batch, if an epoch has few steps.

        Learning rate · η / (1 − m) is scaled by the root of the batch.
        """
        recipe, target = self.recipe, self.target
        kept = {"optim.batch_schedule", "optim.batch_rate"} & recipe.kept
        batch, first = target.batch, self._first_batch(group)
        if kept or first == batch:
            return
        if recipe.one_batch:
            self.one_batch = recipe.one_batch
            return
        rate = next(choice for choice in self.choices if choice.name == "optim.lr")
        self.choices.remove(rate)
        epoch = GROWTH_SHARE * target.epochs
        before = epoch * target.samples
        self.grown_steps = round(before / first + before / batch)
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
        units = max(
            math.ceil(batch / GROWTH / unit - 0.5),
            math.ceil((self.recipe.batch or BASE_BATCH) / unit),
        )
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
