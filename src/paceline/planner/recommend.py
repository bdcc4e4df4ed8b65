"""Recommends a batch size, and a number of nodes for a given time or budget (`paceline plan`).

The predicted time of a job includes start-up and training. Its energy assumes that every GPU board
draws its power limit, and leaves out hosts and cooling. There are no built-in prices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from paceline.core.batch_range import (
    LEAST_STEPS,
    LEAST_STEPS_PER_EPOCH,
    largest_batch_in_range,
)
from paceline.core.errors import ConfigError
from paceline.plan.cluster import Cluster
from paceline.plan.noise import LEAST_SAVING, useful_batch
from paceline.planner.accelerators import Accelerator
from paceline.planner.layers import Network
from paceline.planner.memory import largest_batch
from paceline.planner.prediction import Prediction
from paceline.planner.start_up import StartUp
from paceline.planner.workload import LARGEST_BATCH, Affine, Workload

if TYPE_CHECKING:
    from paceline.planner.answer import Question

# The batch of the paper that Paceline implements (ResNet-50 and AlexNet on ImageNet, LARS).
PUBLISHED_GLOBAL_BATCH = 65_536
_PUBLISHED_WHY = (
    "that of Jia et al. 2018 for ResNet-50 and AlexNet on ImageNet; its accuracy has not been "
    "reproduced with Paceline"
)
_EPOCH_WHY = "the images of an epoch"
# Larger values are mistakes; up to this value neither times nor prices overflow.
_MAX_VALUE = 1e12
# The recommended batch is the smallest batch whose speed is within this share of the highest speed.
_WORTH = 0.03
# If the memory limit is unknown, at most this multiple of the largest profiled batch is recommended.
_TIMED_TIMES = 2
# The images/s that one core decodes during a training with 16 threads (records/input-pipeline), for
# full-size ImageNet JPEGs and for shards packed to 256 pixels.
CORE_IMAGES_PER_S = 368.0
PACKED_IMAGES_PER_S = 833.0


@dataclass(frozen=True)
class Limits:
    """Limits on the batch size, time and cost of a job.

    Attributes:
        memory_batch: The largest batch that fits into one GPU's memory; None if the model's layers
            are unknown.
        global_batch: The largest batch of all GPUs together.
        minutes: The longest time of the job; 0 for no limit.
        budget: The highest cost of the job; 0 for no limit.
        price: The price of one GPU for one hour; 0 if unknown.
        why: The reason for the value of `global_batch`, for messages.
        set_by: The name and the value of the flag that determined `global_batch`.
        timed_batch: The largest batch of one GPU for which a profile is used; None for no limit.
    """

    memory_batch: int | None = None
    global_batch: int = PUBLISHED_GLOBAL_BATCH
    minutes: float = 0.0
    budget: float = 0.0
    price: float = 0.0
    why: str = _PUBLISHED_WHY
    set_by: tuple[str, float] | None = None
    timed_batch: int | None = None

    def __post_init__(self) -> None:
        for flag, value in (
            ("--target-minutes", self.minutes),
            ("--budget", self.budget),
            ("--price-per-gpu-hour", self.price),
        ):
            if not 0 <= value <= _MAX_VALUE:
                raise ConfigError(flag, value, f"must be from 0 to {_MAX_VALUE:g}")
        if self.budget and not self.price:
            raise ConfigError(
                "--budget", self.budget, "needs a price", "give --price-per-gpu-hour, too"
            )
        if self.global_batch < 1:
            raise ConfigError("--max-global-batch", self.global_batch, "must be at least 1")

    @property
    def is_an_epoch(self) -> bool:
        """True if `global_batch` is limited by the number of images in the data set."""
        return self.why == _EPOCH_WHY

    def largest(self, ranks: int) -> int:
        """Returns the largest batch of one GPU within the limits, or 0 if even one image exceeds them."""
        known = (self.memory_batch, self.timed_batch)
        return min([self.global_batch // ranks, *(size for size in known if size is not None)])

    def near_timed(self, work: Workload) -> Limits:
        """Limits the batch to twice the largest profiled one if the memory of larger ones is unknown."""
        if self.memory_batch is not None or not work.batches:
            return self
        return replace(self, timed_batch=_TIMED_TIMES * max(work.batches))


@dataclass(frozen=True)
class Option:
    """The predicted time and cost of a job with some number of nodes and batch size per GPU.

    GPU-hours, cost and energy include the start-up. `cost` is 0 if the price is unknown.
    """

    nodes: int
    ranks: int
    batch: int
    images_per_s: float
    efficiency: float
    train_s: float
    startup_s: float
    gpu_hours: float
    cost: float
    energy_kwh: float

    @property
    def global_batch(self) -> int:
        return self.batch * self.ranks

    @property
    def total_s(self) -> float:
        return self.startup_s + self.train_s

    def to_table(self) -> dict[str, float]:
        return {**asdict(self), "total_s": self.total_s}

    def within(self, limits: Limits) -> bool:
        """Returns True if the job meets the limits on time and cost."""
        return (not limits.minutes or self.total_s <= 60 * limits.minutes) and (
            not limits.budget or self.cost <= limits.budget
        )


@dataclass(frozen=True)
class Job:
    """The length, data size and prices of a training job.

    Attributes:
        epochs: The number of epochs.
        samples: The number of training images.
        watts: The power limit of one GPU in watts; 0 if unknown.
        price: The price of one GPU for one hour; 0 if unknown.
        nccl: True if ranks communicate over NCCL, which takes time to start.
        startup_s: The seconds until the first step; None to estimate them.
    """

    epochs: float
    samples: int
    watts: float
    price: float = 0.0
    nccl: bool = True
    startup_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.epochs <= _MAX_VALUE:
            raise ConfigError("--epochs", self.epochs, f"must be above 0, at most {_MAX_VALUE:g}")
        if not 1 <= self.samples <= _MAX_VALUE:
            raise ConfigError("--dataset-size", self.samples, f"must be from 1 to {_MAX_VALUE:g}")
        if self.startup_s is not None and not 0 <= self.startup_s <= _MAX_VALUE:
            raise ConfigError("--startup-s", self.startup_s, f"must be from 0 to {_MAX_VALUE:g}")

    def option(self, prediction: Prediction, nodes: int) -> Option:
        """Computes the time and the cost of the job from a predicted step on `nodes` nodes."""
        train_s = prediction.epochs_s(self.epochs, self.samples)
        startup_s = self.startup_s
        if startup_s is None:
            startup_s = start_up(prediction, nodes, nccl=self.nccl).total_s
        hours = prediction.ranks * (startup_s + train_s) / 3600
        return Option(
            nodes=nodes,
            ranks=prediction.ranks,
            batch=prediction.batch,
            images_per_s=prediction.images_per_s,
            efficiency=prediction.efficiency,
            train_s=train_s,
            startup_s=startup_s,
            gpu_hours=hours,
            cost=hours * self.price,
            energy_kwh=hours * self.watts / 1000,
        )


def start_up(prediction: Prediction, nodes: int, *, nccl: bool) -> StartUp:
    """Estimates the time until the first step of a predicted job on `nodes` nodes."""
    scores = prediction.scores
    algorithms = {name for score in scores for name in (score.algorithm, score.small_algorithm)}
    ranks_per_node = prediction.ranks // nodes
    return StartUp.of(nodes, ranks_per_node, algorithms, buckets=len(scores), nccl=nccl)


def candidate_batches(most: int) -> list[int]:
    """Returns the batch sizes 8, 12, 16, 24, 32, … up to `most`, and `most` itself."""
    sizes = {most}
    for power in range(3, most.bit_length()):
        sizes |= {size for size in (1 << power, 3 << (power - 1)) if size <= most}
    return sorted(sizes)


def recommended_batch(question: Question, cluster: Cluster, limits: Limits) -> int:
    """Finds the smallest batch per GPU that trains at 97 % or more of the highest speed.

    Assumes that the input pipeline is fast enough. A slow one would limit all batches to the same
    speed.

    Raises:
        ConfigError: If no batch satisfies the limits.
    """
    most = limits.largest(cluster.ranks)
    if most < 1:
        if limits.memory_batch == 0:
            raise ConfigError(
                "--model", question.workload.model, "does not fit one GPU with a single image",
                "choose a GPU with more memory",
            )  # fmt: skip
        flag, value = limits.set_by or ("--nodes", cluster.nodes)
        remedy = "give another limit with --max-global-batch"
        if limits.is_an_epoch:
            remedy = "give another --dataset-size"
        elif flag == "--noise-scale":  # --max-global-batch does not lift this limit
            remedy = "leave out --noise-scale"
        raise ConfigError(
            flag, value,
            f"{cluster.ranks:,} GPUs with one image each exceed the largest global batch, "
            f"{limits.global_batch:,} ({limits.why})",
            f"use fewer GPUs, or {remedy}",
        )  # fmt: skip
    question = replace(question, workload=replace(question.workload, input=Affine(0.0, 0.0)))
    speeds = {
        batch: replace(question, batch=batch).answer(cluster).images_per_s
        for batch in candidate_batches(most)
    }
    best = max(speeds.values())
    return min(batch for batch, speed in speeds.items() if speed >= (1 - _WORTH) * best)


def options(question: Question, cluster: Cluster, limits: Limits, job: Job) -> list[Option]:
    """Predicts the job for several numbers of nodes, each with up to three batch sizes.

    The numbers are a quarter to four times the nodes of the cluster and, with a limit on time or cost,
    also the powers of two up to 1,024.
    """
    counts = {max(1, round(cluster.nodes * factor)) for factor in (0.25, 0.5, 1, 2, 4)}
    if limits.minutes or limits.budget:
        counts |= {1 << power for power in range(11)}
    rows = []
    for nodes in sorted(counts):
        try:
            place = cluster.with_nodes(nodes)
        except ConfigError:  # more ranks than are supported, or no links between nodes
            continue
        if not question.is_priced(place):
            continue
        most = limits.largest(place.ranks)
        batches = {
            min(size, most) for size in (question.batch, 2 * question.batch, question.batch // 2)
        }
        for batch in sorted(size for size in batches if size >= 1):
            rows.append(job.option(replace(question, batch=batch).answer(place), nodes))
    return rows


def choose(rows: Sequence[Option], limits: Limits) -> Option | None:
    """Chooses the option with the fewest GPU-hours if there is a time limit, else the fastest one.

    Returns None if no option meets the limits.
    """
    fitting = [option for option in rows if option.within(limits)]
    if not fitting:
        return None
    if limits.minutes:
        return min(fitting, key=lambda option: (option.gpu_hours, option.total_s))
    return min(fitting, key=lambda option: (option.total_s, option.gpu_hours))


class BatchLimit(NamedTuple):
    """The largest recommended global batch, the reason, and the flag that set it with its value."""

    images: int
    why: str = _PUBLISHED_WHY
    set_by: tuple[str, float] | None = None


def largest_global_batch(
    most: int | None, noise_scale: float, samples: int, epochs: float
) -> BatchLimit:
    """Finds the largest global batch that is recommended.

    The default is the smaller of 65,536 and the largest batch for which the rule for large batches
    was tested. The result never exceeds the number of training images.

    Args:
        most: The limit that the user gave, or None.
        noise_scale: A measured gradient noise scale; 0 if unknown. It limits the batch to the size from
            which on doubling the batch saves less than a tenth of the time.
        samples: The number of training images.
        epochs: The number of epochs.

    Raises:
        ConfigError: If `most` or `noise_scale` is out of range.
    """
    if most is not None:
        if not 1 <= most <= _MAX_VALUE:
            raise ConfigError("--max-global-batch", most, f"must be from 1 to {_MAX_VALUE:g}")
        limit = BatchLimit(most, "as given", ("--max-global-batch", most))
    else:
        limit = BatchLimit(PUBLISHED_GLOBAL_BATCH)
        in_range = largest_batch_in_range(samples, epochs)
        if in_range < limit.images:
            is_per_epoch = epochs * LEAST_STEPS_PER_EPOCH > LEAST_STEPS
            limit = BatchLimit(
                in_range,
                f"the large-batch rule has been tried with at least {LEAST_STEPS_PER_EPOCH:g} steps an "
                f"epoch and {LEAST_STEPS} in all; few steps cost accuracy before that",
                ("--dataset-size", samples) if is_per_epoch else ("--epochs", epochs),
            )  # fmt: skip
    if noise_scale:
        limit = min(limit, _noise_limit(noise_scale), key=lambda limit: limit.images)
    if samples < limit.images:
        return BatchLimit(samples, _EPOCH_WHY, ("--dataset-size", samples))
    return limit


def _noise_limit(noise_scale: float) -> BatchLimit:
    if not 0 < noise_scale <= _MAX_VALUE:
        raise ConfigError("--noise-scale", noise_scale, f"must be above 0, at most {_MAX_VALUE:g}")
    images = max(1, min(LARGEST_BATCH, int(useful_batch(noise_scale))))
    why = (
        f"with a noise scale of {noise_scale:g}, doubling it from here on saves less than "
        f"{LEAST_SAVING:.0%} of the time"
    )
    return BatchLimit(images, why, ("--noise-scale", noise_scale))


def limits_of(
    net: Network | None, gpu: Accelerator | None, limit: BatchLimit | None = None,
    minutes: float = 0.0, budget: float = 0.0, price: float = 0.0, half: bool | None = None,
) -> Limits:  # fmt: skip
    """Builds `Limits`, with the largest batch that fits into the memory of the accelerator.

    Args:
        net: The layers of the model, if known.
        gpu: The accelerator, if known.
        limit: The largest global batch; 65,536 if None.
        minutes: The longest time of the job; 0 for no limit.
        budget: The highest cost of the job; 0 for no limit.
        price: The price of one GPU for one hour; 0 if unknown.
        half: True for half precision; None for the default of the accelerator.
    """
    memory = None if net is None or gpu is None else largest_batch(net, gpu, half)
    images, why, set_by = limit or BatchLimit(PUBLISHED_GLOBAL_BATCH)
    return Limits(memory, images, minutes, budget, price, why, set_by)
