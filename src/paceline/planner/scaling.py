"""`predict_scaling`: the planner in one call, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.settings import check_input_rate
from paceline.plan.cluster import Cluster
from paceline.plan.plan_file import PlanFile
from paceline.plan.schedules import algorithm_names, check_name
from paceline.plan.wires import wire_names
from paceline.planner.accelerators import accelerator as find_accelerator
from paceline.planner.accelerators import assumed, gpu_cluster
from paceline.planner.analytic_workload import analytic_workload
from paceline.planner.answer import Question, node_counts
from paceline.planner.layers import TRACED, Network, known_network, network
from paceline.planner.memory import check_memory
from paceline.planner.plan_parts import planned_cluster, required_profile
from paceline.planner.prediction import Prediction
from paceline.planner.recommend import largest_global_batch, limits_of, recommended_batch
from paceline.planner.workload import Workload

# Names of the command line, which the planner's errors have, and ours.
_ARGUMENTS = {"--gpu": "accelerator", "--wire": "wires", "--algorithm": "algorithms"}
# The data set is not said: it limits no batch.
_ANY_SAMPLES = 10**12


@dataclass(frozen=True)
class ScalingRow:
    """The prediction for one number of nodes; `uncertainty` is relative, one standard error."""

    nodes: int
    ranks: int
    images_per_s: float
    efficiency: float
    step_s: float
    exposed_s: float
    uncertainty: float


@dataclass(frozen=True)
class ScalingPrediction:
    """Throughput in images/s, efficiency against one rank alone, time of a step, and the part of the
    exchange that compute does not hide; `rows` has the same for other numbers of nodes. `assumed` has
    what was assumed of the cluster, by argument.

    >>> predict_scaling(nodes=2).describe().splitlines()[1].split()
    ['nodes', 'ranks', 'images/s', 'efficiency', 'step', 'ms', 'exposed', 'ms']
    """

    model: str
    source: str
    nodes: int
    ranks: int
    batch_size: int
    images_per_s: float
    efficiency: float
    step_s: float
    exposed_s: float
    uncertainty: float
    rows: tuple[ScalingRow, ...]
    assumed: Mapping[str, str] = field(default_factory=dict)

    def describe(self) -> str:
        """A table for the terminal."""
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
        model: a built-in model; with `profile`, the model that was profiled. For `resnet_tiny`,
            `alexnet2012`, `timm:NAME` and `module:factory` without a profile there is `paceline plan
            --model`, which needs torch.
        accelerator: a name of the catalogue, such as `h100`, `a100` or `cpu`, or a TOML file that
            describes another (docs/planner.md).
        nodes: 1, or as in the cluster file; the rows double from one node to at least twice as many.
        gpus_per_node: ranks of a node; 8.
        batch_size: of one rank; None recommends one: the smallest that is nearly as fast as the fastest
            within the accelerator's memory and the largest global batch. For a profiled model without
            known layers it is at most twice the largest batch that was timed.
        software: a round of MLPerf Training whose libraries are used, such as `v0.7`; the newest.
        image_size: edge of the images in pixels; 224. A profile has its own, also of the next two and
            of `software`.
        classes: outputs of the model; 1,000.
        channels: of an image; 3.
        max_global_batch: largest batch of all ranks that is recommended; 65,536.
        node_gbps: all links of a node, in Gb/s; those of the accelerator's reference system.
        latency_us: start of a message between nodes; 10.
        links: links of a node; 1 with `node_gbps`, otherwise those of the reference system.
        oversubscription: of the network between nodes; 1.
        input_images_per_s: what the input of a rank delivers; 0 means enough.
        algorithms: allowed all-reduce algorithms; empty means all.
        wires: allowed wire formats: `auto` (as held), `fp32`, `fp16`, `bf16`, and in 8 bits `int8`,
            `e4m3`, `e5m2`.
        profile: a file of `paceline profile` or `paceline tune`, instead of the analytic workload.
        cluster: a file of `paceline tune`, instead of `gpus_per_node` and the network's arguments.

    Example:
        >>> prediction = predict_scaling("resnet50", accelerator="h100", nodes=4)
        >>> prediction.ranks, 0 < prediction.efficiency <= 1
        (32, True)
        >>> [row.nodes for row in prediction.rows]
        [1, 2, 4, 8, 16]
        >>> predict_scaling(accelerator="h100", nodes=64, batch_size=None).batch_size
        128
    """
    with _python_names():
        limit = largest_global_batch(max_global_batch, 0.0, _ANY_SAMPLES, epochs=90.0)
        images = {"image_size": image_size, "classes": classes, "channels": channels}
        if profile is not None:
            _refuse_with_profile({**images, "software": software or None})
        net = None if profile is not None else _network(model, images)
        work = _workload(model, accelerator, net, profile, input_images_per_s, software)
        cluster_arguments = {
            "gpus_per_node": gpus_per_node, "node_gbps": node_gbps, "latency_us": latency_us,
            "links": links, "oversubscription": oversubscription,
        }  # fmt: skip
        given = {name: value for name, value in cluster_arguments.items() if value is not None}
        place = _cluster(cluster, accelerator, nodes, given)
        question = Question(work, batch_size or 1, _allowed(algorithms, place), wire_names(wires))
        net = net or known_network(model, work.image_size)
        if batch_size is None:
            # A profile may be of another format than is usual on the accelerator.
            half = None if profile is None else work.in_half
            limits = limits_of(net, find_accelerator(accelerator), limit, half=half)
            batch_size = recommended_batch(question, place, limits.near_timed(work))
        elif net is not None and profile is None:
            check_memory(net, find_accelerator(accelerator), batch_size)
        question = replace(question, batch=batch_size)
        rows = [_row(question, place.with_nodes(count)) for count in _counts(question, place)]
    now = next(row for row in rows if row.nodes == place.nodes)
    return ScalingPrediction(
        model=work.model,
        source=work.source,
        batch_size=batch_size,
        rows=tuple(rows),
        **asdict(now),
        assumed={} if cluster else assumed(find_accelerator(accelerator), given),
    )


def _refuse_with_profile(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if value is not None:
            raise ConfigError(name, value, "a profile has its own", "leave it out")


def _allowed(algorithms: Sequence[str], place: Cluster) -> tuple[str, ...]:
    """The given algorithms; else those measured on the cluster, or all where it was not probed."""
    for name in algorithms:
        check_name(name, "algorithms")
    known = place.probed.algorithms if place.probed else algorithm_names()
    return tuple(algorithms) or known


def _cluster(
    path: str | PathLike[str] | None, gpu: str, nodes: int | None, given: dict[str, Any]
) -> Cluster:
    if path is None:
        return gpu_cluster(find_accelerator(gpu), 1 if nodes is None else nodes, **given)
    for name, value in given.items():
        raise ConfigError(name, value, "is in the cluster file already", "leave out one of them")
    place = planned_cluster(PlanFile.read(Path(path), "cluster"))
    return place if nodes is None else place.with_nodes(nodes)


def _counts(question: Question, place: Cluster) -> list[int]:
    """Numbers of nodes for which some algorithm has a price; the cluster's own always."""
    return [
        count
        for count in node_counts(place)
        if count == place.nodes or question.reaches(place.with_nodes(count))
    ]


def _row(question: Question, place: Cluster) -> ScalingRow:
    found: Prediction = question.answer(place)
    return ScalingRow(
        nodes=place.nodes, ranks=found.ranks, images_per_s=found.images_per_s,
        efficiency=found.efficiency, step_s=found.step_s, exposed_s=found.exposed_comm_s,
        uncertainty=found.uncertainty,
    )  # fmt: skip


def _network(model: str, images: dict[str, int | None]) -> Network:
    if ":" in model or model in TRACED:
        raise ConfigError(
            "model", model, "its layers are counted with torch, which predict_scaling does without",
            f"use paceline plan --model {model}, or measure it with paceline profile and give profile=",
        )  # fmt: skip
    given = {name: value for name, value in images.items() if value is not None}
    return network(
        model, given.get("image_size", 224), given.get("classes", 1000),
        channels=given.get("channels", 3),
    )  # fmt: skip


def _workload(
    model: str, gpu: str, net: Network | None, profile: str | PathLike[str] | None, input_rate: float,
    software: str,
) -> Workload:  # fmt: skip
    check_input_rate(input_rate)
    if profile is None:
        assert net is not None
        work = analytic_workload(net, find_accelerator(gpu), software)
    else:
        work = required_profile(PlanFile.read(Path(profile), "profile"))
        if work.model != model:
            raise ConfigError("model", model, f"the profile is of {work.model}", f"profile {model}")
    return work.fed_at(input_rate)


@contextmanager
def _python_names() -> Iterator[None]:
    """Names arguments, not flags, in errors."""
    try:
        yield
    except ConfigError as error:
        if not error.field.startswith("--"):
            raise
        name = _ARGUMENTS.get(error.field, error.field[2:].replace("-", "_"))
        shown, _, problem = error.cause.removeprefix(error.field).partition(": ")
        remedy = error.remedy.replace("--gpu", "accelerator=").replace("--profile", "profile=")
        remedy = remedy.replace("--max-global-batch", "max_global_batch=")
        raise ConfigError(f"{name}{shown}", None, problem, remedy) from None
