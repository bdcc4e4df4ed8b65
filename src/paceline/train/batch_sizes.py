"""The batch of a run: its sizes, what `optim.scaling` makes of it, and the stages by which it grows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.config import EQUAL_SHARES, RunConfig
from paceline.core.errors import ConfigError
from paceline.core.settings import flatten
from paceline.optim.batch_growth import BatchGrowth, Stages
from paceline.optim.scaling import Recipe, Target, scale_recipe
from paceline.optim.settings import OptimSettings
from paceline.train.checkpoint import Checkpoint

# Without `--batch-size`, the largest micro-batch of a process.
LARGEST_AUTOMATIC_MICRO_BATCH = 256
DEFAULT_GLOBAL_BATCH = 256
# With a batch that nobody has chosen.
_LEAST_STEPS_PER_EPOCH = 8
_LEAST_AUTOMATIC_BATCH = 16
# Evaluation keeps no activations, so its batches may be larger than those of training.
_EVAL_BATCH, _EVAL_TIMES = 256, 4


@dataclass(frozen=True)
class BatchSizes:
    """`global_batch = micro_batch · ranks · accumulation`, always exactly."""

    global_batch: int
    micro_batch: int
    accumulation: int
    automatic: bool

    def describe(self, world_size: int) -> str:
        chosen = ", chosen automatically" if self.automatic else ""
        return (
            f"{self.global_batch} = {self.micro_batch} a process × {world_size} rank(s) × "
            f"{self.accumulation} micro-step(s){chosen}"
        )


def resolve_batch_sizes(
    global_batch: int | None, micro_batch: int | None, world_size: int, samples: int | None = None
) -> BatchSizes:
    """Without a global batch it is the micro-batch times the number of ranks; without both it is 256, or
    less, down to 16, where an epoch of `samples` would have fewer than eight steps. Raises ConfigError,
    with the nearest valid values, if the global batch is not divisible."""
    if micro_batch is None and global_batch is None and samples is not None:
        most = max(_LEAST_AUTOMATIC_BATCH, samples // _LEAST_STEPS_PER_EPOCH)
        if most < DEFAULT_GLOBAL_BATCH:
            share = max(1, min(most, samples) // world_size)
            return _automatic((1 << share.bit_length() - 1) * world_size, world_size)
    if micro_batch is None:
        return _automatic(global_batch or DEFAULT_GLOBAL_BATCH, world_size)
    if global_batch is None:
        return BatchSizes(micro_batch * world_size, micro_batch, 1, False)
    unit = micro_batch * world_size
    if global_batch % unit:
        raise ConfigError(
            "run.global_batch_size",
            global_batch,
            f"is not a multiple of {unit} = {micro_batch} (batch size) × {world_size} (ranks)",
            f"use {_multiples(global_batch, unit)}, or --batch-size "
            + _nearest_divisor(global_batch, world_size, micro_batch),
        )
    return BatchSizes(global_batch, micro_batch, global_batch // unit, False)


def eval_batch(micro_batch: int) -> int:
    """Images of one batch of an evaluation."""
    return min(_EVAL_BATCH, _EVAL_TIMES * micro_batch)


def requested_batch(config: RunConfig, ranks: int) -> tuple[int | None, int | None, int]:
    """What `resolve_batch_sizes` checks before the data is open: `optim.scaling` chooses the micro-batch
    unless the user gave it."""
    chosen = config.optim.scaling == "auto" and "run.batch_size" not in config.optim.scaling_keeps
    first = config.optim.batch_growth.first_batch(config.run.global_batch_size)
    return first, None if chosen else config.run.batch_size, ranks


def apply_scaling(
    config: RunConfig, samples: int, ranks: int, *, own_optimizer: bool = False,
    resumed: Checkpoint | None = None,
) -> tuple[RunConfig, str]:  # fmt: skip
    """The configuration with the choices of `optim.scaling`, which is then off so that `config.toml`
    repeats the run, and their description; unchanged where it is off. `own_optimizer`: an object of the
    program replaces the one that the settings name. A `resumed` run keeps its first batch."""
    optim = config.optim
    if optim.scaling == "off":
        return config, ""
    if own_optimizer:
        raise ConfigError(
            "optim.scaling", "auto", "the rule does not know an optimizer given in Python",
            "name one of lars, muon, sgd, adamw and lamb, or use 'off'",
        )  # fmt: skip
    known = optim.known_good_batch
    if known is None:
        raise ConfigError(
            "optim.known_good_batch", None,
            "is not known: optim.scaling = 'auto' needs the batch at which the recipe works",
            "set it, or run.global_batch_size in the recipe",
        )  # fmt: skip
    sizes = resolve_batch_sizes(*requested_batch(config, ranks), samples=samples)
    recipe = Recipe(
        optim, known, optim.known_good_optimizer or optim.name, config.run.batch_size,
        config.run.average_epochs, kept=frozenset(optim.scaling_keeps),
        mixing=tuple(f"run.{name}" for name in ("mixup", "cutmix") if getattr(config.run, name)),
        # Asynchronous ranks have different weights.
        averages=config.comm.mode == "synchronous",
        one_batch=_why_one_batch(config), pretrained=_pretrained(config, resumed),
    )  # fmt: skip
    target = Target(sizes.global_batch, samples, config.run.epochs, ranks)
    scaling = scale_recipe(recipe, target if resumed is None else _as_before(target, resumed))
    values = {"run.global_batch_size": sizes.global_batch, **scaling.values}
    # The result is a recipe of its own, known for its own batch.
    applied: dict[str, object] = {
        "optim.scaling": "off", "optim.known_good_batch": None, "optim.known_good_optimizer": "",
        "optim.known_good_lr": None, "optim.known_good_momentum": None, "optim.scaling_keeps": [],
    }  # fmt: skip
    try:
        return config.with_values(values | applied), scaling.describe()
    except ConfigError as error:
        chosen = scaling.values.get("optim.name")
        if chosen is None:
            raise
        raise ConfigError(
            "optim.scaling", "auto", f"chooses {chosen}, but {error.cause}",
            f"leave that out, or keep the optimizer with --opt {optim.name}",
        ) from None  # fmt: skip


def _as_before(target: Target, resumed: Checkpoint) -> Target:
    """With the stages of the run that is resumed; a run of another batch is refused later."""
    stages = BatchGrowth.parse(flatten(resumed.config).get("optim.batch_schedule", "")).stages
    first = int(resumed.sampler["global_batch"])
    last = stages[-1][1] if stages else first
    if last != target.batch:
        return target
    return replace(target, first_batch=first, grows_at=stages[0][0] if stages else None)


def _pretrained(config: RunConfig, resumed: Checkpoint | None) -> bool:
    """A run that is resumed may have begun with given weights, also where it is not told so again."""
    before = flatten(resumed.config).get("run.pretrained") if resumed else ""
    return bool(config.run.pretrained or before)


def _why_one_batch(config: RunConfig) -> str:
    if config.rehearse.ranks:
        return "a rehearsal has one, the cluster's run only with --set optim.batch_schedule=''"
    if config.run.shares != EQUAL_SHARES:
        return "run.shares divides a constant one"
    return "comm.mode = 'asynchronous' has one" if config.comm.mode != "synchronous" else ""


def batch_stages(settings: OptimSettings, sizes: BatchSizes, world_size: int) -> Stages:
    """The (epoch, global batch) that `optim.batch_schedule` adds to the first batch."""
    unit = sizes.micro_batch * world_size
    epochs, limit = settings.decay_epochs, settings.batch_limit
    return settings.batch_growth.after(sizes.global_batch, unit, epochs, limit)


def _automatic(global_batch: int, world_size: int) -> BatchSizes:
    """As few micro-steps as the largest automatic micro-batch allows."""
    if global_batch % world_size:
        raise ConfigError(
            "run.global_batch_size",
            global_batch,
            f"cannot be divided among {world_size} ranks",
            f"use {_multiples(global_batch, world_size)}",
        )
    share = global_batch // world_size
    accumulation = -(-share // LARGEST_AUTOMATIC_MICRO_BATCH)
    while share % accumulation:
        accumulation += 1
    return BatchSizes(global_batch, share // accumulation, accumulation, True)


def _multiples(value: int, unit: int) -> str:
    below, above = value // unit * unit, (value // unit + 1) * unit
    return f"{below} or {above}" if below else str(above)


def _nearest_divisor(global_batch: int, world_size: int, wanted: int) -> str:
    """The valid micro-batches closest to the wanted one."""
    if global_batch % world_size:
        return f"with a number of ranks that divides {global_batch}"
    share = global_batch // world_size
    divisors = [d for d in range(1, share + 1) if share % d == 0]
    near = sorted(divisors, key=lambda d: (abs(d - wanted), d))[:2]
    return " or ".join(str(d) for d in sorted(near))
