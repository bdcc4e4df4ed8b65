"""`predict_scaling`: predicts speed and scaling efficiency on a cluster, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.core.settings import check_input_rate
from paceline.plan.cluster import Cluster
from paceline.plan.schedules import check_name
from paceline.planner.answer import scaling_curve
from paceline.planner.layers import TRACED, known_network
from paceline.planner.memory import check_memory
from paceline.planner.prediction import Prediction
from paceline.planner.recommend import (
    BatchLimit,
    largest_global_batch,
    limits_of,
    recommended_batch,
)
from paceline.planner.request import ClusterRequest, StepRequest, question_about

# The arguments of `predict_scaling` for flags of the command line, which the planner's errors name.
_ARGUMENTS = {"--gpu": "accelerator", "--wire": "wires", "--algorithm": "algorithms"}
_REMEDIES = {
    "--gpu": "accelerator=", "--profile": "profile=", "--max-global-batch": "max_global_batch=",
    ", or leave --model out": "",
}  # fmt: skip
# `predict_scaling` does not know the number of training images; this number limits no batch.
_ANY_SAMPLES = 10**12


@dataclass(frozen=True)
class ScalingRow:
    """The prediction for one number of nodes.

    `exposed_s` is the time of communication after the backward pass, and `uncertainty` the relative
    standard error of `step_s`.
    """

    nodes: int
    ranks: int
    images_per_s: float
    efficiency: float
    step_s: float
    exposed_s: float
    uncertainty: float


@dataclass(frozen=True, kw_only=True)
class ScalingPrediction(ScalingRow):
    """The result of `predict_scaling`.

    Attributes:
        model: The name of the model.
        source: A text that names the origin of the compute times.
        batch_size: The batch of one rank.
        rows: The predictions for 1, 2, 4, … nodes.
        assumed: Texts about assumed properties of the cluster, by argument.

    Example:
        >>> predict_scaling(nodes=2).describe().splitlines()[1].split()
        ['nodes', 'ranks', 'images/s', 'efficiency', 'step', 'ms', 'exposed', 'ms']
    """

    model: str
    source: str
    batch_size: int
    rows: tuple[ScalingRow, ...]
    assumed: Mapping[str, str] = field(default_factory=dict)

    def describe(self) -> str:
        """Returns a table for the terminal."""
        lines = [
            f"{self.model}, batch {self.batch_size} a rank; {self.source}",
            f"{'nodes':>6} {'ranks':>7} {'images/s':>11} {'efficiency':>11} {'step ms':>9} "
            f"{'exposed ms':>11}",
        ]
        lines += [
            f"{row.nodes:>6,} {row.ranks:>7,} {row.images_per_s:>11,.0f} {row.efficiency:>11.1%} "
            f"{1e3 * row.step_s:>9.2f} {1e3 * row.exposed_s:>11.2f}"
            for row in self.rows
        ]
        if self.assumed:
            lines.append("assumed: " + "; ".join(f"{v} ({k})" for k, v in self.assumed.items()))
        return "\n".join(lines)


def predict_scaling(
    model: str = "resnet50",
    *,
    accelerator: str = "h100",
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    batch_size: int | None = 64,
    software: str = "",
    image_size: int | None = None,
    classes: int | None = None,
    channels: int | None = None,
    max_global_batch: int | None = None,
    node_gbps: float | None = None,
    latency_us: float | None = None,
    links: int | None = None,
    oversubscription: float | None = None,
    input_images_per_s: float = 0.0,
    algorithms: Sequence[str] = (),
    wires: Sequence[str] = ("auto",),
    profile: str | PathLike[str] | None = None,
    cluster: str | PathLike[str] | None = None,
) -> ScalingPrediction:
    """Predicts how fast data-parallel training runs on a cluster, with the best plan for each size.

    Args:
        model: A built-in model or, with `profile`, the profiled model. For `resnet_tiny`,
            `timm:NAME` and `module:factory` without a profile, use `paceline plan --model`, which needs
            torch.
        accelerator: A name of the catalog, such as `h100`, `a100` or `cpu`, or a TOML file that describes
            another accelerator (docs/planner.md).
        nodes: The number of nodes. Default: 1, or that of the cluster file.
        gpus_per_node: The ranks of a node. Default: 8.
        batch_size: The batch of one rank. None recommends the smallest batch that is nearly as fast as
            the fastest within the accelerator's memory and the largest global batch. For a profiled
            model without known layers it is at most twice the largest profiled batch.
        software: A round of MLPerf Training, such as `v0.7`, whose libraries are used. Default: the
            newest.
        image_size: The edge of the images in pixels. Default: 224. A profile contains image size,
            classes, channels and software, so they cannot be given with it.
        classes: The outputs of the model. Default: 1,000.
        channels: The channels of an image. Default: 3.
        max_global_batch: The largest recommended batch of all ranks. Default: 65,536.
        node_gbps: The rate of all links of a node in Gb/s. Default: that of the accelerator's reference
            system.
        latency_us: The start-up time of a message between nodes. Default: 10.
        links: The number of links of a node. Default: 1 with `node_gbps`, otherwise that of the reference
            system.
        oversubscription: The oversubscription of the network between nodes. Default: 1.
        input_images_per_s: The input rate of a rank; 0 means that the input keeps up.
        algorithms: Allowed all-reduce algorithms. Default: all.
        wires: Allowed wire formats: `auto` (the format of the gradients), `fp32`, `fp16`, `bf16`, and in
            8 bits `int8`, `e4m3`, `e5m2`.
        profile: A file of `paceline profile` or `paceline tune`, instead of the analytic workload.
        cluster: A file of `paceline tune`, instead of `gpus_per_node` and the network's arguments.

    Returns:
        The prediction for the cluster and for 1, 2, 4, … nodes.

    Raises:
        ConfigError: If an argument is invalid.

    Example:
        >>> prediction = predict_scaling("resnet50", accelerator="h100", nodes=4)
        >>> prediction.ranks, 0 < prediction.efficiency <= 1
        (32, True)
        >>> [row.nodes for row in prediction.rows]
        [1, 2, 4, 8, 16]
        >>> predict_scaling(accelerator="h100", nodes=64, batch_size=None).batch_size
        128
    """
    step = StepRequest(model, accelerator, software, _path(profile), image_size, classes, channels)
    where = ClusterRequest(
        nodes, gpus_per_node, node_gbps, latency_us, links, oversubscription, _path(cluster)
    )
    with _python_names():
        check_input_rate(input_images_per_s)
        limit = largest_global_batch(max_global_batch, 0.0, _ANY_SAMPLES, epochs=90.0)
        for name in algorithms:
            check_name(name, "algorithms")
        return _predicted(step, where, input_images_per_s, algorithms, wires, limit, batch_size)


def _path(given: str | PathLike[str] | None) -> Path | None:
    return None if given is None else Path(given)


def _predicted(
    step: StepRequest, where: ClusterRequest, input_images_per_s: float, algorithms: Sequence[str],
    wires: Sequence[str], limit: BatchLimit, batch: int | None,
) -> ScalingPrediction:  # fmt: skip
    if step.profile is None and (":" in step.model or step.model in TRACED):
        raise ConfigError(
            "model", step.model,
            "needs torch to count the layers of this model, but predict_scaling works without torch",
            f"use paceline plan --model {step.model}, or measure it with paceline profile and give "
            "profile=",
        )  # fmt: skip
    file, profiled = step.read(where)
    net = step.network(step.model) if profiled is None else None
    work = step.workload(net, profiled).fed_at(input_images_per_s)
    place, chip = where.place(step.chip, file), step.chip
    question = question_about(work, place, algorithms, wires)
    if batch is None:
        # The number format of a profile can differ from the default of the accelerator.
        half = None if profiled is None else work.in_half
        net = net or known_network(step.model, work.image_size)
        limits = limits_of(net, chip, limit, half=half)
        batch = recommended_batch(question, place, limits.near_timed(work))
    elif net is not None and chip is not None:
        check_memory(net, chip, batch)
    question = replace(question, batch=batch)
    now = _row(question.answer(place), place)
    rows = [_row(found, place) for found in scaling_curve(question, place)]
    return ScalingPrediction(
        model=work.model, source=work.source, batch_size=batch, rows=tuple(rows), **asdict(now),
        assumed=where.assumed(chip),
    )  # fmt: skip


def _row(found: Prediction, place: Cluster) -> ScalingRow:
    return ScalingRow(
        nodes=found.ranks // place.ranks_per_node, ranks=found.ranks,
        images_per_s=found.images_per_s, efficiency=found.efficiency, step_s=found.step_s,
        exposed_s=found.exposed_comm_s, uncertainty=found.uncertainty,
    )  # fmt: skip


@contextmanager
def _python_names() -> Iterator[None]:
    """Makes errors in the block name arguments of `predict_scaling` instead of command-line flags."""
    try:
        yield
    except ConfigError as error:
        if not error.field.startswith("--"):
            raise
        name = _ARGUMENTS.get(error.field, error.field[2:].replace("-", "_"))
        shown, _, problem = error.cause.removeprefix(error.field).partition(": ")
        remedy = error.remedy
        for flag, argument in _REMEDIES.items():
            remedy = remedy.replace(flag, argument)
        raise ConfigError(f"{name}{shown}", None, problem, remedy) from None
