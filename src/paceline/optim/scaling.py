"""The scaling rule: from a recipe that works at a small batch to settings for a large one.

In: `Recipe`, what is known to work and at which batch, and `Target`, the batch and length of the run.
Out: `Scaling`, a value for each setting that the rule changes, with the reason, and what will be lost.
A pure function without torch. docs/large-batch.md has the equations, what they rest on, and their range.
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
from paceline.optim.rule_settings import AdamSettings, LarsSettings, MuonSettings
from paceline.optim.scaling_report import MUON_LOSES_LESS, Choice, Scaling, expected_loss
from paceline.optim.settings import OptimSettings

OF_ADAM = ("adamw", "lamb")
KNOWN = (*OF_ADAM, "lars", "muon", "sgd")
# Who gives one of these for the new batch wants Adam there.
_ADAMS_OWN = frozenset({"optim.lr", "optim.weight_decay"}) | {
    f"optim.adam.{key}" for key in ("beta1", "beta2", "eps")
}
# Lower rates of Adam, but for its default, are those of fine-tuning, whose small steps Muon's pace would
# not keep.
LEAST_ADAM_RATE = 1e-4
# What the rule may set, or has to know of; a setting that the user gives is kept.
SCALED = (
    "optim.name", "optim.lars.trust_coefficient", "optim.muon.trust_coefficient",
    "optim.muon.orthogonal", "optim.muon.steps", "optim.momentum", "optim.nesterov",
    *sorted(_ADAMS_OWN), "optim.warmup_epochs", "optim.warmup_max_share", "optim.schedule",
    "optim.poly.power", "optim.batch_schedule", "optim.batch_rate", "run.batch_size",
    "run.average_epochs", "run.cutmix", "run.mixup",
)  # fmt: skip
# A batch this many times smaller than the known-good one, or less, has not been measured.
LEAST_FACTOR = 1 / 4
# With fewer steps an epoch SGD with linear scaling loses accuracy (Goyal et al.: 160 at 8K on ImageNet).
SGD_STEPS_PER_EPOCH = 100.0
# Relative length of a layer's step at the peak, times the root of the steps an epoch.
PACE = {"muon": 0.32, "lars": 0.7}
MOST_PACE = {"muon": 0.2, "lars": 0.4}
# Rate of biases and norms, which have no trust ratio; where the recipe is for Adam, whose rate says
# nothing about it, that of the CIFAR-10 recipe for SGD.
MOST_RATE = 4.0
RATE_PER_SAMPLE = 0.2 / 256
# Muon needs a short warm-up, LARS a third of the run.
WARMUP_STEPS, MOST_WARMUP_SHARE, LARS_WARMUP_SHARE = 20, 0.2, 0.3
# Weights are averaged over this share of the run where an epoch has few steps.
AVERAGE_SHARE, AVERAGED_STEPS_PER_EPOCH, LEAST_AVERAGED_STEPS = 1 / 15, 10.0, 4
# A run with fewer steps and epochs than these is short: mixed images, which slow learning down, cost it
# accuracy.
SHORT_STEPS, SHORT_EPOCHS = 1000, 60
# With few steps an epoch, the batch of these begins at about a quarter, for half of the run.
GROWN = (*OF_ADAM, "muon")
GROWTH, GROWTH_SHARE, GROWN_STEPS_PER_EPOCH = 4, 1 / 2, 25.0
_DECAYING = ("cosine", "poly")
LEAST_BETA2 = 0.95
# 12,000 images, three epochs, against Muon at 128 (records/large-batch-small-nets).
_LOST_OUTSIDE = "on Fashion-MNIST 5 points of top-1 at 18 steps in all, 20 at 6"
LARGEST_AUTOMATIC_GROUP = 256


@dataclass(frozen=True)
class Recipe:
    """`optim` is the recipe's section as the user may have overridden it; `optimizer` the one that is
    known to work at `batch`; `norm_group` the samples of one micro-batch there, None where the recipe
    leaves it open; `mixing` the settings of mixed images that are on; `kept` names settings that the
    user gave; `averages` says whether weights can be averaged in the run, `one_batch` why its batch
    cannot grow, and `pretrained` that it begins with given weights."""

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
        """The peak rate at the known-good batch, whichever rate the user gives for the new one."""
        known = self.optim.known_good.lr
        return OptimSettings.peak_lr(self.optim, self.batch) if known is None else known

    @property
    def pace(self) -> float:
        """LARS and Muon: the relative step of a layer at the known-good batch. Where the user gives η,
        the rule does not use it."""
        known = self.optim.known_good.momentum
        momentum = self.optim.momentum if known is None else known
        own = self.optim.chosen(self.optimizer)
        assert isinstance(own, LarsSettings | MuonSettings)
        return self.rate * own.trust_coefficient / (1 - momentum)


@dataclass(frozen=True)
class Target:
    """The run that is wanted: global batch, training images, epochs, ranks. A run that is resumed keeps
    its `first_batch`, and the epoch at which it grows, whatever its ranks and epochs were."""

    batch: int
    samples: int
    epochs: int
    ranks: int = 1
    first_batch: int | None = None
    grows_at: float | None = None

    @property
    def steps_per_epoch(self) -> float:
        return self.samples / self.batch

    @property
    def total_steps(self) -> int:
        return -(-self.samples * self.epochs // self.batch)

    @property
    def is_short(self) -> bool:
        few = self.steps_per_epoch < SGD_STEPS_PER_EPOCH and self.total_steps < SHORT_STEPS
        return few and self.epochs < SHORT_EPOCHS


def scale_recipe(recipe: Recipe, target: Target) -> Scaling:
    """Settings for `target`. Raises ConfigError for an optimizer that the rule does not know and for a
    batch or a length outside of its range."""
    _check(recipe, target)
    factor, steps = target.batch / recipe.batch, target.steps_per_epoch
    headline = (
        f"batch {recipe.batch:,} → {target.batch:,}, {steps:.3g} steps an epoch, "
        f"{target.total_steps:,} in all"
    )  # at one batch
    kept = tuple(sorted(recipe.kept & set(SCALED)))
    if factor == 1:
        return Scaling((), (), headline, kept)
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
    losses = []
    if target.batch > recipe.batch and steps < SGD_STEPS_PER_EPOCH:
        grows = bool(rule.grown_steps)
        loss = expected_loss(name, steps, target.total_steps, target.is_short, grows)
        losses.append(loss + (MUON_LOSES_LESS if name != "muon" and not rule.fine_tuning else ""))
    if rule.grown_steps:
        headline += f" ({rule.grown_steps:,} with a batch that grows)"
    elif losses and rule.one_batch:
        losses.append(f"the batch does not grow: {rule.one_batch}")
    notes = (f"{name} stays: {rule.adam_stays}",) if rule.adam_stays else ()
    return Scaling(tuple(rule.choices), tuple(losses), headline, kept, notes)


def _check(recipe: Recipe, target: Target) -> None:
    for name in (recipe.optimizer, recipe.optim.name):
        if name not in KNOWN:
            raise ConfigError(
                "optim.scaling", "auto", f"the rule does not know the optimizer {name!r}",
                f"{nearest(name, KNOWN)}; or use optim.scaling = 'off' and give the rate",
            )  # fmt: skip
    known, name = recipe.optimizer, recipe.optim.name
    to_adam = name in OF_ADAM and known not in OF_ADAM
    from_adam = known in OF_ADAM and name in ("sgd", "lars")
    # The rate of a recipe for LARS or Muon is that of its biases and norms.
    to_sgd = name == "sgd" and known in ("lars", "muon")
    if to_adam or from_adam or to_sgd:
        raise ConfigError(
            "optim.name", recipe.optim.name,
            f"the rule cannot derive its rate from a recipe for {recipe.optimizer}",
            "use a recipe whose rate is known for it",
        )  # fmt: skip
    if known in OF_ADAM and name == "muon" and target.batch <= recipe.batch:
        raise ConfigError(
            "optim.name", name,
            f"the rule derives it from a recipe for {known} only for batches above {recipe.batch}",
            f"use --opt {known}, or a larger batch",
        )  # fmt: skip
    steps, total = target.steps_per_epoch, target.total_steps
    if steps < LEAST_STEPS_PER_EPOCH or total < LEAST_STEPS:
        epochs = math.ceil(LEAST_STEPS * target.batch / target.samples)
        remedy = f"a batch of at most {largest_batch_in_range(target.samples, target.epochs)}"
        if steps >= LEAST_STEPS_PER_EPOCH:
            remedy += f", or {epochs} epochs"
        # The losses are those of runs with few steps in all.
        measured = f": fewer lose accuracy whatever the settings ({_LOST_OUTSIDE})"
        raise ConfigError(
            "run.global_batch_size", target.batch,
            f"gives {steps:.3g} steps an epoch and {total} in all, where optim.scaling = 'auto' needs "
            f"{LEAST_STEPS_PER_EPOCH:g} and {LEAST_STEPS}{measured if total < LEAST_STEPS else ''}",
            f"use {remedy}; or optim.scaling = 'off'",
        )  # fmt: skip
    if target.batch < recipe.batch * LEAST_FACTOR:
        raise ConfigError(
            "run.global_batch_size", target.batch,
            f"is less than a quarter of the known-good batch {recipe.batch}, which the rule does not "
            "cover", "use optim.scaling = 'off', or a recipe for a smaller batch",
        )  # fmt: skip


def given_value(optim: OptimSettings, name: str) -> Any:
    """Returns the value of a setting of `[optim]` or of one of its owners; None for other sections."""
    section, *owner, key = name.split(".")
    if section != "optim":
        return None
    return getattr(optim.owned.get(owner[0]) if owner else optim, key, None)


class _Rule:
    def __init__(self, recipe: Recipe, target: Target) -> None:
        self.recipe, self.target = recipe, target
        self.factor = target.batch / recipe.batch
        self.rate = recipe.rate
        self.choices: list[Choice] = []
        self.grown_steps, self.one_batch = 0, ""
        self.adam_stays, self.fine_tuning = "", self._find_fine_tuning()

    def set(self, name: str, value: Any, reason: str) -> Any:
        """The value that the run will have: the user's where it was given."""
        if name in self.recipe.kept:
            given = given_value(self.recipe.optim, name)
            return value if given is None else given
        value = float(f"{value:.4g}") if isinstance(value, float) else value
        self.choices.append(Choice(name, value, reason))
        return value

    def optimizer(self) -> str:
        """Muon in place of others where steps are few; Adam stays where Muon might not suit."""
        given, kept = self.recipe.optim.name, self.recipe.kept
        few = self.target.steps_per_epoch < SGD_STEPS_PER_EPOCH and self.factor > 1
        if given == "muon" or not few:
            return given
        if given in OF_ADAM and "optim.name" not in kept:
            self.adam_stays = self._why_adam_stays()
            if self.adam_stays:
                return given
        reason = f"fewer than {SGD_STEPS_PER_EPOCH:g} steps an epoch"
        return str(self.set("optim.name", "muon", reason))

    def _why_adam_stays(self) -> str:
        if self.fine_tuning:
            return f"{self.fine_tuning} (--opt muon replaces it all the same)"
        optim, own = self.recipe.optim, sorted(self.recipe.kept & _ADAMS_OWN)
        if optim.name == "lamb" and optim.chosen("lamb").clip:
            own.append("optim.adam.clip")
        if not own:
            return ""
        they, them = ("was", "it") if len(own) == 1 else ("were", "them")
        return f"{', '.join(own)} {they} given (without {them}, muon replaces {optim.name})"

    def _find_fine_tuning(self) -> str:
        """How Adam's recipe shows that it is for fine-tuning; empty where it does not."""
        optim = self.recipe.optim
        if optim.name not in OF_ADAM:
            return ""
        if self.recipe.pretrained:
            return "the run begins with given weights"
        if optim.layer_decay < 1:
            return "optim.layer_decay is for fine-tuning"
        unset = optim.lr is None and optim.known_good.lr is None and optim.has_default_base
        if self.rate < LEAST_ADAM_RATE and not unset:
            return f"a rate of {self.rate:.3g} is one for fine-tuning"
        return ""

    def scale_adam(self, name: str) -> None:
        root, optim = math.sqrt(self.factor), self.recipe.optim
        self.set("optim.lr", self.rate * root, "root of the batch's growth")
        own = optim.chosen(name)
        assert isinstance(own, AdamSettings)
        beta2 = max(min(LEAST_BETA2, own.beta2), 1 - self.factor * (1 - own.beta2))
        self.set("optim.adam.beta2", beta2, "averages over as many samples")
        self.set("optim.adam.eps", own.eps / root, "root of the batch's growth")
        if name == "adamw" and optim.weight_decay:
            decay = optim.weight_decay * root
            self.set("optim.weight_decay", decay, "rate · decay per epoch stays")

    def scale_pace(self, name: str) -> None:
        """LARS and Muon: the relative step of a layer, rate · η / (1 − m), grows with the root."""
        optim, steps = self.recipe.optim, self.target.steps_per_epoch
        if name == "muon" and optim.momentum:
            self.set("optim.nesterov", True, "as measured")
        if name == "muon" and self.recipe.optimizer != name:
            self.set(
                "optim.muon.orthogonal",
                "auto",
                "filters, or all matrices of a net of linear layers",
            )
        own = optim.of("muon", MuonSettings)
        if name == "muon" and self.factor > 1 and own.steps == "relative":
            self.set(
                "optim.muon.steps", "auto", "of fixed length where some matrix has no norm layer"
            )
        if self.recipe.optimizer == name:
            pace, why = self.recipe.pace * math.sqrt(self.factor), "root of the batch's growth"
        else:
            pace, why = PACE[name] / math.sqrt(steps), f"{PACE[name]} / √(steps an epoch)"
        if pace > MOST_PACE[name]:
            pace, why = MOST_PACE[name], "the largest that was measured"
        from_adam = self.recipe.optimizer in OF_ADAM
        usual = RATE_PER_SAMPLE * self.recipe.batch if from_adam else self.rate
        linear, most = usual * self.factor, MOST_RATE if from_adam else max(MOST_RATE, usual)
        limited = (
            f"grows with the batch, to at most {most:g}"
            if linear > most
            else "grows with the batch"
        )
        rate = self.set("optim.lr", min(linear, most), f"of biases and norms: {limited}")
        eta = pace * (1 - optim.momentum) / rate
        self.set(f"optim.{name}.trust_coefficient", eta, f"a pace of {pace:.3g}: {why}")
        if from_adam and optim.weight_decay:
            decay = self.factor * self.rate * optim.weight_decay / rate
            self.set("optim.weight_decay", decay, "rate · decay per epoch stays")

    def warm_up(self, name: str) -> None:
        optim, target = self.recipe.optim, self.target
        if name == "lars":
            share = max(LARS_WARMUP_SHARE, optim.warmup_max_share)
            epochs = max(optim.warmup_epochs, LARS_WARMUP_SHARE * target.epochs)
            self.set("optim.warmup_max_share", share, "LARS needs a long warm-up")
            self.set(
                "optim.warmup_epochs", min(epochs, share * target.epochs), f"{share:.0%} of the run"
            )
            return
        least = WARMUP_STEPS / target.steps_per_epoch
        most = MOST_WARMUP_SHARE * target.epochs
        epochs = min(max(optim.warmup_epochs, least), most)
        if epochs != optim.warmup_epochs:
            why = f"{WARMUP_STEPS} steps of the whole batch"
            if epochs == most:
                why = "at most a fifth of the run"
            self.set("optim.warmup_epochs", epochs, why)

    def decay(self, name: str) -> None:
        """Linear in place of cosine, whose first half changes the rate little."""
        is_cosine = self.recipe.optim.schedule == "cosine"
        given = "optim.schedule" in self.recipe.kept
        if name == "muon" and self.factor > 1 and is_cosine and not given:
            self.set("optim.schedule", "poly", "linear decay")
            self.set("optim.poly.power", 1.0, "linear")

    def unmix(self) -> None:
        """Without mixed images where the run is too short for them."""
        if self.target.is_short and self.factor > 1:
            reason = f"{self.target.total_steps} steps in all are too few for mixed images"
            for name in self.recipe.mixing:
                self.set(name, 0.0, reason)

    def normalize(self) -> int | None:
        """Batch norm sees micro-batches of the size that it has in the recipe, or the next smaller one
        that divides a rank's share. Raises ConfigError where that is less than a quarter. Returns the
        size, None where the batch is refused later."""
        if "run.batch_size" in self.recipe.kept:
            return self.recipe.norm_group
        wanted = self.recipe.norm_group or min(self.recipe.batch, LARGEST_AUTOMATIC_GROUP)
        batch = math.gcd(self.target.batch, self.target.first_batch or 0)
        share = batch // self.target.ranks
        if batch % self.target.ranks or share < 1:
            return None  # refused elsewhere, with the nearest batches
        group = _norm_group(share, wanted)
        if _is_small(group, share, wanted):
            goods = [
                next((s for s in shares if not _is_small(_norm_group(s, wanted), s, wanted)), 0)
                for shares in (range(share - 1, 0, -1), range(share + 1, 2 * share))
            ]
            near = " or ".join(str(good * self.target.ranks) for good in goods if good)
            raise ConfigError(
                "run.global_batch_size", self.target.batch,
                f"gives batch norm groups of {group} samples, but the recipe has {wanted}: no number "
                f"near that divides the {share} samples of a rank",
                f"use {near}, or give --batch-size",
            )  # fmt: skip
        reason = "batch norm's group as in the recipe"
        if group != wanted:
            reason = f"the recipe's batch-norm group is {wanted}, a rank has {share} samples a step"
        self.set("run.batch_size", group, reason)
        return group

    def grow(self, group: int | None) -> None:
        """Begins with a smaller batch, and a pace by its root, where an epoch has few steps."""
        recipe, target = self.recipe, self.target
        kept = {"optim.batch_schedule", "optim.batch_rate", "optim.lr"} & recipe.kept
        first = target.first_batch or self._first_batch(group, target.ranks)
        batch = target.batch
        if kept:
            return
        if first == batch:
            if group and not target.first_batch and self._first_batch(group, ranks=1) < batch:
                parts = batch // target.ranks // group
                self.one_batch = (
                    f"a rank has {parts} micro-batch{'es' if parts > 1 else ''} of {group} a step "
                    "(fewer ranks or a smaller --batch-size let it grow)"
                )
            return
        if recipe.one_batch:
            self.one_batch = recipe.one_batch
            return
        rate = next(choice for choice in self.choices if choice.name == "optim.lr")
        self.choices.remove(rate)
        epoch = GROWTH_SHARE * target.epochs if target.grows_at is None else target.grows_at
        before = min(epoch, target.epochs) * target.samples
        self.grown_steps = round(before / first + (target.samples * target.epochs - before) / batch)
        self.set(
            "optim.lr", rate.value * math.sqrt(first / batch), rate.reason + ", root of its share"
        )
        for number, choice in enumerate(self.choices):
            if choice.name.rpartition(".")[2] in ("beta2", "eps", "weight_decay"):
                self.choices[number] = choice._replace(
                    reason=choice.reason + ", at the whole batch"
                )
        few = f"{target.steps_per_epoch:.3g} steps an epoch are few: more at first"
        self.set("run.global_batch_size", first, few)
        self.set("optim.batch_schedule", f"{epoch:g}:{batch}", "then the batch that was asked for")
        self.set("optim.batch_rate", "sqrt", "rate and pace grow with the root of the batch")

    def _first_batch(self, group: int | None, ranks: int) -> int:
        """About a quarter, not below the known-good batch, in whole micro-batches of all ranks; the
        whole batch where that is more than half, steps are many or the rate does not decay."""
        batch = self.target.batch
        few = self.target.steps_per_epoch <= GROWN_STEPS_PER_EPOCH
        decays = self.recipe.optim.schedule in _DECAYING
        if group is None or self.factor <= 1 or not (few and decays):
            return batch
        unit = group * ranks
        units = max(math.ceil(batch / GROWTH / unit - 0.5), math.ceil(self.recipe.batch / unit))
        return units * unit if 2 * units * unit <= batch else batch

    def average(self) -> None:
        if not self.recipe.averages or self.recipe.optim.schedule_free:
            return
        steps, epochs = self.target.steps_per_epoch, self.recipe.average_epochs
        if epochs:
            if epochs * steps < LEAST_AVERAGED_STEPS:
                self.set("run.average_epochs", LEAST_AVERAGED_STEPS / steps, "four steps")
            return
        wanted = AVERAGE_SHARE * self.target.epochs
        if steps <= AVERAGED_STEPS_PER_EPOCH and wanted * steps >= LEAST_AVERAGED_STEPS:
            self.set("run.average_epochs", wanted, "a fifteenth of the run")


def _norm_group(share: int, wanted: int) -> int:
    """The largest micro-batch of at most `wanted` samples that divides `share`."""
    parts = -(-share // wanted)
    while share % parts:
        parts += 1
    return share // parts


def _is_small(group: int, share: int, wanted: int) -> bool:
    return 4 * group < min(wanted, share)
