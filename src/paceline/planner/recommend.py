"""Which batch, how many nodes, for how long and at what price: the choices behind `paceline plan`.

In: a question without a batch, a cluster, limits (memory, the largest global batch, minutes, money).
Out: a recommended batch and a table of nodes × batch with time, GPU-hours, cost, energy and efficiency;
time is the start-up of the ranks and the training. Energy counts the boards at their power limit and
nothing else; it is an estimate from above for the GPUs and leaves hosts and cooling out. No price is
built in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from paceline.core.batch_range import (
    LEAST_STEPS,
    LEAST_STEPS_PER_EPOCH,
    largest_batch_in_range,
)
from paceline.core.errors import ConfigError
from paceline.core.files import read_regular
from paceline.core.settings import check_input_rate
from paceline.core.topology import RANKS_LIMIT
from paceline.core.untrusted import ParseError, parse_json
from paceline.plan.cluster import Cluster
from paceline.plan.noise import LEAST_SAVING, useful_batch
from paceline.planner.accelerators import Accelerator
from paceline.planner.layers import Network
from paceline.planner.memory import largest_batch
from paceline.planner.prediction import Prediction
from paceline.planner.start_up import StartUp
from paceline.planner.workload import LARGEST_BATCH, Workload

if TYPE_CHECKING:
    from paceline.planner.answer import Question

# The batch of the paper that Paceline re-creates (ResNet-50 and AlexNet on ImageNet, LARS).
PUBLISHED_GLOBAL_BATCH = 65_536
_PUBLISHED_WHY = (
    "that of Jia et al. 2018 for ResNet-50 and AlexNet on ImageNet; its accuracy has not been "
    "reproduced with Paceline"
)
_EPOCH_WHY = "the images of an epoch"
# Larger figures cannot be meant; within it no time and no price overflows.
_MOST = 1e12
# Of two batches the smaller is recommended where the larger gains less than this share of the speed.
_WORTH = 0.03
# Times the largest batch of a profile, which is recommended at the most without a limit of memory.
_TIMED_TIMES = 2
# Images/s that one core decodes beside a training (16 threads, records/input-pipeline): full-size
# ImageNet JPEGs, and shards packed to 256 pixels; and nvJPEG on one H200.
CORE_IMAGES_PER_S = 368.0
PACKED_IMAGES_PER_S = 833.0
NVJPEG_IMAGES_PER_S = 13_766.0


@dataclass(frozen=True)
class Limits:
    """`memory_batch` is the largest batch of one GPU that fits, None where the model's layers are not
    known; `minutes` and `budget` are what the job may take, 0 for no limit; `price` is that of a GPU for
    an hour, 0 where it is not known. `why` is the reason for `global_batch`, and `set_by` the flag behind
    it with its value. `timed_batch`: the largest batch of one GPU that is recommended from a profile."""

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
            if not 0 <= value <= _MOST:
                raise ConfigError(flag, value, f"must be from 0 to {_MOST:g}")
        if self.budget and not self.price:
            raise ConfigError(
                "--budget", self.budget, "needs a price", "give --price-per-gpu-hour, too"
            )
        if self.global_batch < 1:
            raise ConfigError("--max-global-batch", self.global_batch, "must be at least 1")

    @property
    def is_an_epoch(self) -> bool:
        """Whether no flag but --dataset-size allows a larger batch."""
        return self.why == _EPOCH_WHY

    def largest(self, ranks: int) -> int:
        """Of one GPU; 0 where so many ranks exceed the global batch with one image each."""
        known = (self.memory_batch, self.timed_batch)
        return min([self.global_batch // ranks, *(size for size in known if size is not None)])

    def near_timed(self, work: Workload) -> Limits:
        """For a recommended batch: where nothing is known of the memory, a profile speaks for no more
        than twice the largest batch that it timed, which fitted."""
        if self.memory_batch is not None or not work.batches:
            return self
        return replace(self, timed_batch=_TIMED_TIMES * max(work.batches))


@dataclass(frozen=True)
class Option:
    """One row of the table: a number of nodes and a batch. GPU-hours, cost and energy are of `total_s`:
    start-up and training. `cost` is 0 where no price was given."""

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
        return (not limits.minutes or self.total_s <= 60 * limits.minutes) and (
            not limits.budget or self.cost <= limits.budget
        )


@dataclass(frozen=True)
class Job:
    """What is trained, on which board, and for how long; `watts` is 0 where the board is not known.
    `nccl`: whether ranks talk over NCCL, whose start takes time. `startup_s`: until the first step, where
    it is given."""

    epochs: float
    samples: int
    watts: float
    price: float = 0.0
    nccl: bool = True
    startup_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.epochs <= _MOST:
            raise ConfigError("--epochs", self.epochs, f"must be above 0, at most {_MOST:g}")
        if not 1 <= self.samples <= _MOST:
            raise ConfigError("--dataset-size", self.samples, f"must be from 1 to {_MOST:g}")
        if self.startup_s is not None and not 0 <= self.startup_s <= _MOST:
            raise ConfigError("--startup-s", self.startup_s, f"must be from 0 to {_MOST:g}")

    def option(self, found: Prediction, nodes: int) -> Option:
        train_s = found.epochs_s(self.epochs, self.samples)
        startup_s = self.startup_s
        if startup_s is None:
            startup_s = start_up(found, nodes, nccl=self.nccl).total_s
        hours = found.ranks * (startup_s + train_s) / 3600
        return Option(
            nodes=nodes, ranks=found.ranks, batch=found.batch, images_per_s=found.images_per_s,
            efficiency=found.efficiency, train_s=train_s, startup_s=startup_s, gpu_hours=hours,
            cost=hours * self.price, energy_kwh=hours * self.watts / 1000,
        )  # fmt: skip


def start_up(found: Prediction, nodes: int, *, nccl: bool) -> StartUp:
    """Until the first step."""
    algorithms = {name for score in found.scores for name in (score.algorithm, score.beside)}
    return StartUp.of(nodes, found.ranks // nodes, algorithms, buckets=len(found.scores), nccl=nccl)


def candidate_batches(most: int) -> list[int]:
    """Powers of two and one and a half times those up to `most`, from 8 images on; and `most`."""
    found = {most}
    for power in range(3, most.bit_length()):
        found |= {size for size in (1 << power, 3 << (power - 1)) if size <= most}
    return sorted(found)


def recommended_batch(question: Question, cluster: Cluster, limits: Limits) -> int:
    """The smallest batch that is within 3 % of the fastest within the limits. The input is taken
    to keep up: one that caps the speed of every batch says nothing about which is best."""
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
        elif flag == "--noise-scale":  # which another limit does not lift
            remedy = "leave out --noise-scale"
        raise ConfigError(
            flag, value,
            f"{cluster.ranks:,} GPUs with one image each exceed the largest global batch, "
            f"{limits.global_batch:,} ({limits.why})",
            f"use fewer GPUs, or {remedy}",
        )  # fmt: skip
    question = replace(question, workload=question.workload.well_fed())
    speeds = {
        batch: replace(question, batch=batch).answer(cluster).images_per_s
        for batch in candidate_batches(most)
    }
    best = max(speeds.values())
    return min(batch for batch, speed in speeds.items() if speed >= (1 - _WORTH) * best)


def options(question: Question, cluster: Cluster, limits: Limits, job: Job) -> list[Option]:
    """Nodes from a quarter to four times those asked for, each with up to three batches."""
    counts = sorted({max(1, round(cluster.nodes * factor)) for factor in (0.25, 0.5, 1, 2, 4)})
    if limits.minutes or limits.budget:
        counts = sorted({*counts, *(1 << power for power in range(11))})
    found = []
    for nodes in counts:
        place = _resized(cluster, nodes)
        if place is None or not question.reaches(place):
            continue
        most = limits.largest(place.ranks)
        batches = {
            min(size, most) for size in (question.batch, 2 * question.batch, question.batch // 2)
        }
        for batch in sorted(size for size in batches if size >= 1):
            answer = replace(question, batch=batch).answer(place)
            found.append(job.option(answer, nodes))
    return found


def _resized(cluster: Cluster, nodes: int) -> Cluster | None:
    try:
        return cluster.with_nodes(nodes)
    except ConfigError:
        return None


def choose(found: Sequence[Option], limits: Limits) -> Option | None:
    """With a time, the fewest GPU-hours that meet it; with a budget alone, the fastest within it."""
    fitting = [option for option in found if option.within(limits)]
    if not fitting:
        return None
    if limits.minutes:
        return min(fitting, key=lambda option: (option.gpu_hours, option.total_s))
    return min(fitting, key=lambda option: (option.total_s, option.gpu_hours))


class BatchLimit(NamedTuple):
    """The largest global batch, the reason, and the flag behind it with its value."""

    images: int
    why: str = _PUBLISHED_WHY
    set_by: tuple[str, float] | None = None


def largest_global_batch(
    most: int | None, noise_scale: float, samples: int, epochs: float
) -> BatchLimit:
    """Returns the largest global batch: as given, or the smaller of the paper's and the largest that the
    large-batch rule covers for so many images and epochs. Less if a measured noise scale says that a
    doubling saves less than a tenth of the time. No batch is larger than an epoch."""
    if most is not None:
        if not 1 <= most <= _MOST:
            raise ConfigError("--max-global-batch", most, f"must be from 1 to {_MOST:g}")
        found = BatchLimit(most, "as given", ("--max-global-batch", most))
    else:
        found = BatchLimit(PUBLISHED_GLOBAL_BATCH)
        in_range = largest_batch_in_range(samples, epochs)
        if in_range < found.images:
            few = epochs * LEAST_STEPS_PER_EPOCH > LEAST_STEPS
            found = BatchLimit(
                in_range,
                f"the large-batch rule has been tried with at least {LEAST_STEPS_PER_EPOCH:g} steps an "
                f"epoch and {LEAST_STEPS} in all; few steps cost accuracy before that",
                ("--dataset-size", samples) if few else ("--epochs", epochs),
            )  # fmt: skip
    if noise_scale:
        found = min(found, _noise_limit(noise_scale), key=lambda limit: limit.images)
    if samples < found.images:
        return BatchLimit(samples, _EPOCH_WHY, ("--dataset-size", samples))
    return found


def _noise_limit(noise_scale: float) -> BatchLimit:
    if not 0 < noise_scale <= _MOST:
        raise ConfigError("--noise-scale", noise_scale, f"must be above 0, at most {_MOST:g}")
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
    """`half`: the number format of the step, where it is not the accelerator's usual one."""
    memory = None if net is None or gpu is None else largest_batch(net, gpu, half)
    images, why, set_by = limit or BatchLimit(PUBLISHED_GLOBAL_BATCH)
    return Limits(memory, images, minutes, budget, price, why, set_by)


@dataclass(frozen=True)
class InputSupply:
    """What the input of a node delivers, in images/s, and by what."""

    images_per_s: float
    source: str


def input_supply(
    gpus_per_node: int, cores: int = 0, packed: bool = False, nvjpeg: bool = False,
    bench: Path | None = None,
) -> InputSupply | None:  # fmt: skip
    """None where nothing is said of it: the input is taken to keep up."""
    if not 0 <= cores <= RANKS_LIMIT:
        raise ConfigError("--cores-per-node", cores, f"must be from 0 to {RANKS_LIMIT:,}")
    if bench is not None:
        workers, rate = _bench_rate(bench)
        what = f"{cores} cores" if cores else f"{workers} workers"
        rate *= cores / workers if cores else 1.0
        # Each rank has a share of it.
        check_input_rate(rate / gpus_per_node, "--input-bench")
        return InputSupply(rate, f"{what} as measured ({bench.name})")
    if nvjpeg:
        rate = NVJPEG_IMAGES_PER_S * gpus_per_node
        return InputSupply(rate, f"nvJPEG at {NVJPEG_IMAGES_PER_S:,.0f} images/s a GPU")
    if cores:
        each = PACKED_IMAGES_PER_S if packed else CORE_IMAGES_PER_S
        what = "packed shards" if packed else "full-size JPEGs"
        return InputSupply(cores * each, f"{cores} cores at {each:,.0f} images/s, {what}")
    return None


def _bench_rate(path: Path) -> tuple[int, float]:
    """Workers and images/s of the fastest of our own rows in a file of `paceline bench input --json`."""
    try:
        rows = parse_json(read_regular(path))["rows"]
        found = [
            (float(row["images_per_s"]), int(row["workers"]))
            for row in rows
            if row["kind"] == "ours"
        ]
        rate, workers = max(found)
    except OSError as error:
        raise ConfigError(
            "--input-bench", str(path), f"cannot be read ({error.strerror})", "check the path"
        ) from None
    except (ParseError, ValueError, KeyError, TypeError, OverflowError):
        rate, workers = 0.0, 0
    if not (0 < rate < math.inf and 0 < workers < 1 << 20):
        raise ConfigError(
            "--input-bench", str(path), "is no output of paceline bench input",
            "write it with paceline bench input --json",
        )  # fmt: skip
    return workers, rate


def fed_by(work: Workload, supply: InputSupply | None, gpus_per_node: int) -> Workload:
    """The workload with an input of that speed, shared by the GPUs of a node."""
    if supply is None:
        return work
    return work.fed_at(supply.images_per_s / gpus_per_node)
