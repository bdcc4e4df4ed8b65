"""What a run starts from: batch sizes, data, run folder and checkpoint, agreed among all ranks.

Each is agreed before the next, so that what is missing on one node ends all ranks with the same error.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config import RunConfig
from paceline.core.errors import ConfigError
from paceline.optim.batch_growth import Stages
from paceline.optim.scaling import Recipe, Target, scale_recipe
from paceline.optim.settings import ANCHORED, OPTIMIZERS_OF_SVRG, OptimSettings
from paceline.train.components import Components

# Without `--batch-size`, the largest micro-batch of a process.
LARGEST_AUTOMATIC_MICRO_BATCH = 256
DEFAULT_GLOBAL_BATCH = 256
# With a batch that nobody has chosen.
_LEAST_STEPS_PER_EPOCH = 8
_LEAST_AUTOMATIC_BATCH = 16


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


def requested_batch(config: RunConfig, ranks: int) -> tuple[int | None, int | None, int]:
    """What `resolve_batch_sizes` checks before the data is open: `optim.scaling` chooses the micro-batch
    unless the user gave it."""
    chosen = config.optim.scaling == "auto" and "run.batch_size" not in config.optim.scaling_keeps
    first = config.optim.batch_growth.first_batch(config.run.global_batch_size)
    return first, None if chosen else config.run.batch_size, ranks


def apply_scaling(
    config: RunConfig, samples: int, ranks: int, *, own_optimizer: bool = False
) -> tuple[RunConfig, str]:
    """The configuration with the choices of `optim.scaling`, which is then off so that `config.toml`
    repeats the run, and their description; unchanged where it is off. `own_optimizer`: an object of the
    program replaces the one that the settings name."""
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
        config.run.average_epochs, frozenset(optim.scaling_keeps),
    )  # fmt: skip
    scaling = scale_recipe(recipe, Target(sizes.global_batch, samples, config.run.epochs, ranks))
    values = {"run.global_batch_size": sizes.global_batch, **scaling.values}
    # The result is a recipe of its own, known for its own batch.
    applied: dict[str, object] = {
        "optim.scaling": "off", "optim.known_good_batch": None, "optim.known_good_optimizer": "",
        "optim.scaling_keeps": [],
    }  # fmt: skip
    return config.with_values(values | applied), scaling.describe()


def batch_stages(settings: OptimSettings, sizes: BatchSizes, world_size: int) -> Stages:
    """The (epoch, global batch) that `optim.batch_schedule` adds to the first batch."""
    unit = sizes.micro_batch * world_size
    epochs, limit = settings.decay_epochs, settings.batch_limit
    return settings.batch_growth.after(sizes.global_batch, unit, epochs, limit)


def refuse_with_svrg(config: RunConfig, components: Components, device: str) -> None:
    """Raises ConfigError for settings that contradict SVRG and its relatives: fixed-point weights are
    no half-precision weights, and a full gradient is that of a fixed function of the samples."""
    name = config.optim.name
    if name not in OPTIMIZERS_OF_SVRG:
        return
    if config.precision.amp_dtype not in ("fp32", *(["auto"] if device == "cpu" else [])):
        raise ConfigError(
            "precision.amp_dtype", config.precision.amp_dtype, f"{name} computes in fp32",
            "use --amp-dtype fp32",
        )  # fmt: skip
    if name not in ANCHORED:
        return
    reason = f"{name} needs the same gradient of a sample in every pass"
    data = config.data
    for field, value, fixed in (
        ("data.augment", data.augment, "none"),
        ("data.flip", data.flip, False),
        ("data.cutout", data.cutout, 0),
        ("data.color_jitter", data.color_jitter, (0.0, 0.0, 0.0, 0.0)),
        ("run.mixup", config.run.mixup, 0.0),
        ("run.cutmix", config.run.cutmix, 0.0),
        # It would measure the noise of differences.
        ("run.noise_scale", config.run.noise_scale, False),
    ):
        if value != fixed:
            shown = str(fixed).lower() if isinstance(fixed, bool) else fixed
            raise ConfigError(field, value, reason, f"use {field}={shown}")
    if data.randaugment[0]:
        raise ConfigError("data.randaugment", data.randaugment, reason, "use [0, 9]")
    for own in ("augment", "device_augment"):
        if getattr(components, own) is not None:
            raise ConfigError(
                own, None, f"{reason}; an own augmentation may be random", "leave it out"
            )
    if config.model.norm_group > 1:
        raise ConfigError(
            "model.norm_group", config.model.norm_group, f"{name} has passes that ranks do not make "
            "together", "use 1",
        )  # fmt: skip
