"""`resolve`: decides what follows from settings, data and device, such as batch and learning rate.

`resolve` runs before the model is built. No other code changes a configuration after it is loaded.
Decisions that need the built model or all ranks, such as fused kernels, torch.compile and CUDA graphs,
are stored in `FastPath` and do not change the configuration.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.config import CHOOSERS, SYNCHRONOUS, Job, RunConfig
from paceline.core.errors import ConfigError
from paceline.core.settings import flatten
from paceline.core.units import plural
from paceline.data import BatchPlan
from paceline.optim.batch_growth import BatchGrowth, nearest_multiples
from paceline.optim.rule_settings import LarsSettings, MuonSettings
from paceline.optim.scaling import (
    BASES,
    SCALED,
    Recipe,
    Target,
    base_pace,
    base_rate,
    scale_recipe,
)
from paceline.optim.schedules import LrSchedule
from paceline.optim.settings import OptimSettings
from paceline.train.batch_sizes import (
    BatchSizes,
    batch_stages,
    requested_batch,
    resolve_batch_sizes,
)
from paceline.train.checkpoint import Checkpoint
from paceline.train.components import Components
from paceline.train.micro_step import source_class
from paceline.train.strategy import strategy_class

# Rates that differ by more than this factor from the rule's get a hint.
FAR = 10.0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What `resolve` has to know besides the settings: job, data and checkpoint.

    Attributes:
        job: Number of processes and kind of device.
        program: Python objects of the program.
        samples: Number of training images.
        classes: Number of classes in the data.
        checkpoint: The checkpoint from which the run continues; None for a new run.
    """

    job: Job
    program: Components
    samples: int
    classes: int
    checkpoint: Checkpoint | None = None


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """What `resolve` has decided: settings, batch sizes and learning rates.

    Attributes:
        config: The settings in use. With `optim.scaling`, the settings of the scaled recipe.
        written: The settings for `RUN/config.toml`. They contain the chosen batch but no paths, so that
            they can start the run in a different place.
        sizes: Sizes of the first batch.
        batches: Samples and steps of the whole run, including all stages of a growing batch.
        peak_lr: Peak learning rate of the schedule.
        schedule: Learning rate and momentum of each step, including the warm-up.
        scaling: Description of what `optim.scaling` chose; empty if it chose nothing.
        hint: A hint on a rate that is far from the rule's; empty if there is none.
    """

    config: RunConfig
    written: RunConfig
    sizes: BatchSizes
    batches: BatchPlan
    peak_lr: float
    schedule: LrSchedule
    scaling: str = ""
    hint: str = ""


def resolve(config: RunConfig, facts: Facts) -> Resolved:
    """Decides batch sizes, learning rates and all else that follows from settings, data and device.

    Args:
        config: The settings as they were loaded.
        facts: Facts about the job, the data and the resumed run.

    Returns:
        Batches, learning rates and the settings in use.

    Raises:
        ConfigError: If a combination of settings is refused, or no batch size is possible.
    """
    ranks = strategy_class(config).ranks(config, facts.job.processes)
    refuse(config, facts.job, facts.program)
    config, scaling = _scaled(config, facts, ranks)
    if scaling:
        refuse(config, facts.job, facts.program)
    check_num_classes(config, facts.classes)
    asked = requested_batch(config, ranks, facts.checkpoint)
    sizes = resolve_batch_sizes(*asked, samples=facts.samples)
    batches = BatchPlan(
        samples=facts.samples, epochs=config.run.epochs, global_batch=sizes.global_batch,
        micro_batch=sizes.micro_batch, world_size=ranks, growth=batch_stages(config.optim, sizes),
    )  # fmt: skip
    _check_parts(batches, strategy_class(config).equal_parts)
    peak = config.optim.peak_lr(sizes.global_batch)
    written = config.with_values(
        {"run.output": "", "run.resume": "", "run.global_batch_size": sizes.global_batch}
    )
    return Resolved(
        config=config, written=written, sizes=sizes, batches=batches, peak_lr=peak,
        schedule=create_schedule(config.optim, peak, batches), scaling=scaling,
        hint=_rate_hint(config.optim, sizes.global_batch, facts.samples / sizes.global_batch),
    )  # fmt: skip


def with_epochs(config: RunConfig, epochs: int) -> RunConfig:
    """Returns the settings for a run whose length is corrected while it runs."""
    return replace(config, run=replace(config.run, epochs=epochs))


def refuse(config: RunConfig, job: Job, program: Components) -> None:
    """Raises an error for invalid combinations of settings that do not depend on data or model.

    Args:
        config: The settings of the run.
        job: Number of processes and kind of device.
        program: Python objects of the program.

    Raises:
        ConfigError: If settings exclude each other, or do not fit the kind of device, the objects
            of the program or the number of ranks.
    """
    config.check_job(job, program)
    if config.run.minutes is not None and config.run.pending is None:
        raise ConfigError(
            "run.minutes", config.run.minutes, "needs a recipe that chooses its settings",
            f"name the recipe {' or '.join(CHOOSERS.names())}, or leave it out and give --epochs",
        )  # fmt: skip
    kind = strategy_class(config)
    ranks = kind.ranks(config, job.processes)
    if not config.run.resume:  # a resumed run keeps the sizes in its checkpoint
        resolve_batch_sizes(*requested_batch(config, ranks))
    kind.check(config, ranks)
    check_min_ranks(config, job)


def _check_parts(plan: BatchPlan, reason: str) -> None:
    """Refuses ranks with unequal numbers of micro-batches if there is a `reason` to do so."""
    unit = plan.micro_batch * plan.world_size
    for batch in (plan.global_batch, *(batch for _, batch in plan.growth)):
        if reason and batch % unit:
            raise ConfigError(
                "run.global_batch_size", batch,
                f"is not a multiple of {unit} = {plan.micro_batch} (batch size) × {plan.world_size} "
                f"(ranks); {reason}",
                f"use {nearest_multiples(batch, unit)}, or another --batch-size",
            )  # fmt: skip


def check_min_ranks(config: RunConfig, job: Job) -> None:
    """Raises ConfigError if `comm.min_ranks` is set for a run whose number of ranks cannot change."""
    least, own = config.comm.min_ranks, config.optim.own_optimizer
    if not least:
        return
    reasons = [strategy_class(config).fixed_ranks, source_class(config).fixed_ranks]
    if least > job.processes:
        raise ConfigError(
            "comm.min_ranks", least, f"is more than the {plural(job.processes, 'rank')} of the job",
            "start more ranks, or lower it",
        )  # fmt: skip
    if job.device == "cuda":
        reasons.append("lost ranks have not been tested on GPUs")
    if config.run.minutes:
        reasons.append("run.minutes corrects the number of epochs on all ranks")
    if own.share_products == "on":
        reasons.append(f"optim.{config.optim.name}.share_products = 'on' needs all ranks")
    if reason := next(filter(None, reasons), ""):
        raise ConfigError(
            "comm.min_ranks", least, f"the number of ranks cannot change: {reason}",
            "leave --min-ranks out; torchrun and --max-restarts restart all ranks",
        )  # fmt: skip


def check_num_classes(config: RunConfig, classes: int) -> None:
    """Raises a ConfigError unless the model has an output for each class."""
    declared = config.model.num_classes
    if declared is not None and declared < classes:
        raise ConfigError(
            "model.num_classes", declared, f"is less than the {classes} classes of the data",
            "raise it, or leave it out to use the number of classes in the data",
        )  # fmt: skip


def create_schedule(settings: OptimSettings, peak: float, plan: BatchPlan) -> LrSchedule:
    """Creates the learning-rate schedule, which measures time in steps of the plan's first batch size."""
    per_epoch = plan.samples / plan.global_batch
    if not plan.growth:
        return LrSchedule(settings, peak, plan.total_steps, per_epoch)
    return LrSchedule(settings, peak, plan.epochs * per_epoch, per_epoch, plan.position)


def without_exchange(config: RunConfig, ranks: int) -> RunConfig:
    """Returns settings with which one process can measure a rank's computation without communication."""
    config = replace(config, run=replace(config.run, strategy=SYNCHRONOUS))
    if ranks == 1:
        return config
    alone = replace(config.comm, plan="", algorithm="auto")
    return replace(config, comm=alone)


def _scaled(config: RunConfig, facts: Facts, ranks: int) -> tuple[RunConfig, str]:
    """Applies the scaling rule; returns the scaled settings and a description of the choices.

    In the returned settings, scaling is off, so that `config.toml` repeats the run. A resumed run keeps
    its settings.
    """
    optim, samples, known = config.optim, facts.samples, config.optim.known_good
    if not optim.follows_rule or optim.name not in BASES or facts.program.optimizer is not None:
        return config, ""
    # The rates of the rule are for training from scratch.
    if known.optimizer == "" and (config.run.pretrained or optim.layer_decay < 1):
        return config, ""
    sizes = resolve_batch_sizes(*requested_batch(config, ranks, facts.checkpoint), samples=samples)
    strategy = strategy_class(config)
    recipe = Recipe(
        optim, optim.known_batch, optim.name if known.optimizer is None else known.optimizer,
        known.named, config.run.batch_size, config.run.average_epochs, kept=frozenset(known.keeps),
        mixing=tuple(f"run.{name}" for name in ("mixup", "cutmix") if getattr(config.run, name)),
        averages=strategy.same_weights, one_batch=strategy.one_batch,
        pretrained=bool(config.run.pretrained),
    )  # fmt: skip
    target = Target(sizes.global_batch, samples, config.run.epochs, ranks)
    scaling = scale_recipe(recipe, target)
    if not scaling.choices:
        return config, ""
    values = {"run.global_batch_size": sizes.global_batch, **scaling.values}
    described = scaling.describe()
    if facts.checkpoint is not None and _last_batch(facts.checkpoint) == sizes.global_batch:
        values, described = _as_before(config, facts.checkpoint), ""
    # The result is a new recipe, whose known good batch is its own batch.
    applied: dict[str, object] = {"optim.scaling": "off", "optim.known_good_batch": None}
    return config.with_values(values | applied), described


def _last_batch(resumed: Checkpoint) -> int:
    """Returns the global batch with which the resumed run ends."""
    stages = BatchGrowth.parse(flatten(resumed.config).get("optim.batch_schedule", "")).stages
    return stages[-1][1] if stages else int(resumed.sampler["global_batch"])


def _as_before(config: RunConfig, resumed: Checkpoint) -> dict[str, object]:
    """Returns the settings of a resumed run that the scaling rule would choose for a new run."""
    before = flatten(resumed.config)
    names = set(SCALED) - set(config.optim.known_good.keeps)
    values = {name: before[name] for name in names if name in before}
    values["run.global_batch_size"] = int(resumed.sampler["global_batch"])
    values["run.batch_size"] = config.run.batch_size or resumed.sampler.get("micro_batch")
    return values


def _rate_hint(optim: OptimSettings, batch: int, steps_per_epoch: float) -> str:
    """Returns a hint if the user's rate is far from the rule's; empty otherwise."""
    given = "optim.lr" in optim.known_good.keeps or "optim.lr_base" in optim.known_good.keeps
    if not given or optim.name not in BASES:
        return ""
    own, rate = optim.own_optimizer, optim.peak_lr(batch)
    usual, shown = base_rate(optim.name, batch), f"lr {rate:.3g}"
    if isinstance(own, LarsSettings | MuonSettings):
        usual = base_pace(optim.name, steps_per_epoch)
        rate *= own.trust_coefficient / (1 - optim.momentum)
        shown += f", a pace of {rate:.3g},"
    if usual / FAR <= rate <= usual * FAR:
        return ""
    much = f"{rate / usual:,.0f} times" if rate > usual else f"1/{usual / rate:,.0f} of"
    return (
        f"{shown} is {much} the rule's {usual:.3g} for {optim.name} at batch {batch:,}; leave it out "
        "to use the rule's"
    )
