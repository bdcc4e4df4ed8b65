"""The cluster that a rehearsal stands for: its settings, and a clock of predicted times.

`RehearseSettings` is the section `[rehearse]`. `cluster_clock` asks the planner how long a step, an
evaluation and the start would take there with the run's own plan; `ClusterClock` turns completed work
into the cluster's time, cost and energy. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.settings import SettingChecks
from paceline.core.topology import RANKS_LIMIT
from paceline.core.units import format_duration
from paceline.plan.analytic_workload import analytic_workload
from paceline.plan.cluster import (
    GPUS_PER_NODE,
    INTER_LATENCY_US,
    Cluster,
    accelerator,
    assumed,
    gpu_cluster,
    slowest_of,
)
from paceline.plan.fusion_plan import FusionPlan
from paceline.plan.layers import Network, known_network
from paceline.plan.memory import check_memory
from paceline.plan.plan_file import PlanFile
from paceline.plan.prediction import predict
from paceline.plan.start_up import StartUp
from paceline.plan.workload import Workload, check_input_rate

# The order of additions is worked out in time and memory in proportion to the square of the ranks: for
# 1,024, the most that were tried, 18 s and 0.9 GB with `ring` (records/2026-11-17_rehearse_2-core-cpu).
MOST_RANKS = 1024
# Optimizers whose update the planner's figures are of.
_PRICED_OPTIMIZERS = ("lars", "sgd")


@dataclass(frozen=True)
class RehearseSettings:
    """The cluster that `paceline rehearse` stands for; without `nodes` a run is no rehearsal."""

    nodes: int = 0
    """Nodes of the cluster to rehearse; 0 trains as usual."""
    gpus_per_node: int = GPUS_PER_NODE
    """Ranks of each of its nodes."""
    gpu: str = ""
    """Its accelerator, from the planner's catalog, such as `H100`, or a TOML file that describes another
    (docs/planner.md); for the predicted times."""
    profile: str = ""
    """File of `paceline profile` or `tune` with the measured step of this model, in place of one that is
    predicted from its layers."""
    cluster: str = ""
    """File of `paceline tune` with the cluster's measured links, instead of the four settings below."""
    node_gbps: float | None = None
    """All links of a node together, in Gb/s; unset, those of the reference system of `gpu`."""
    latency_us: float = INTER_LATENCY_US
    """Start of a message between nodes, in microseconds."""
    links: int | None = None
    """Links of a node; unset, 1 with `node_gbps`, otherwise those of the reference system."""
    oversubscription: float = 1.0
    """By how much the rate between nodes falls when all of them send."""
    input_images_per_s: float = 0.0
    """Images that the input of one rank delivers in a second; 0: enough."""
    eval_s: float | None = None
    """Seconds of one evaluation on the cluster; unset, predicted from the forward pass."""
    startup_s: float | None = None
    """Seconds until the first step; unset, an estimate by the number of ranks."""
    price_per_gpu_hour: float = 0.0
    """Price of a GPU for an hour, in any currency; 0 leaves the cost out."""
    watts_per_gpu: float = 0.0
    """Power of a GPU with its share of the node, in watts; 0 takes the board's from the planner's
    catalog where `gpu` is given, and leaves the energy out otherwise."""

    def __post_init__(self) -> None:
        if self.nodes and not 1 <= self.nodes <= RANKS_LIMIT:
            raise ConfigError("rehearse.nodes", self.nodes, f"must be 0 to {RANKS_LIMIT:,}")
        check = SettingChecks("rehearse", self)
        for name in ("gpus_per_node", "links"):
            check.number(name, "at least 1")
        if self.ranks > MOST_RANKS:
            raise ConfigError(
                "rehearse.nodes", self.nodes, f"{self.ranks:,} ranks are more than {MOST_RANKS:,}",
                "rehearse a smaller cluster; paceline plan predicts the time of larger ones",
            )  # fmt: skip
        for name in ("node_gbps", "latency_us", "oversubscription"):
            check.number(name, "above 0")
        for name in (
            "input_images_per_s", "eval_s", "startup_s", "price_per_gpu_hour", "watts_per_gpu",
        ):  # fmt: skip
            check.number(name, "0 or more")
        check_input_rate(self.input_images_per_s, "rehearse.input_images_per_s")
        if not self.nodes:
            self._refuse_without_nodes()

    def _refuse_without_nodes(self) -> None:
        for name in ("gpu", "profile", "cluster"):
            if getattr(self, name):
                raise ConfigError(
                    f"rehearse.{name}", getattr(self, name), "has no meaning without rehearse.nodes",
                    "use paceline rehearse --nodes N",
                )  # fmt: skip

    @property
    def ranks(self) -> int:
        """Virtual ranks; 0 where nothing is rehearsed."""
        return self.nodes * self.gpus_per_node

    def check_processes(self, processes: int) -> None:
        """Raises ConfigError for a rehearsal in several processes."""
        if self.ranks and processes > 1:
            raise ConfigError(
                "rehearse.nodes", self.nodes,
                f"a rehearsal runs in one process, and this job has {processes}",
                "start it without a launcher",
            )  # fmt: skip

    @property
    def watts(self) -> float:
        """Power of a GPU as given, or of the catalog's board; 0 where neither is known."""
        if self.watts_per_gpu or not self.gpu:
            return self.watts_per_gpu
        return accelerator(self.gpu).watts

    def network(
        self, model: str, image_size: int, classes: int, stem: str = "auto",
        count: Callable[[], Network] | None = None, *, channels: int = 3,
    ) -> Network | None:  # fmt: skip
        """The model's layers for the GPU of the catalog: as the planner knows them, else as `count` finds
        them. None without a GPU; a measured step needs no count."""
        if not self.gpu:
            return None
        known = known_network(model, image_size, classes, stem, channels)
        if known is not None or self.profile or count is None:
            return known
        try:
            return count()
        except ConfigError as error:
            _, _, problem = error.cause.partition(": ")
            problem = f"has no predicted step: {model} {problem}"
            remedy = (
                f"measure it there with paceline profile --model {model}, and give --profile FILE"
            )
            if model.startswith("python:"):  # an object, which no command can make again
                remedy = "leave it out (there is no clock then), or name a factory and profile that"
            raise ConfigError("rehearse.gpu", self.gpu, problem, remedy) from None

    def check_batch(
        self, net: Network | None, *, batch: int, half: bool, fused: bool = True
    ) -> None:
        """ConfigError for a micro-batch that does not fit the GPU, where the layers are known. `fused`:
        the run's settings allow fused norms."""
        if net is None:
            return
        try:
            check_memory(net, accelerator(self.gpu), batch, half, fused)
        except ConfigError as error:
            if error.field != "--batch-size":
                raise
            _, _, problem = error.cause.partition(": ")
            raise ConfigError("run.batch_size", batch, problem, error.remedy) from None

    def left_out(
        self, work: Workload, optimizer: str, *, half: bool, trained: Collection[str] | None = None
    ) -> tuple[str, ...]:
        """What the run does and the step of `work` has not. `half` is that of the run here; the update
        of a measured step is the one that was measured. `trained`: the names of tensors, None for all."""
        formats = {True: "half precision", False: "fp32"}
        found = []
        if half != work.in_half:
            found.append(f"{formats[half]} (the times are of {formats[work.in_half]})")
        if trained is not None and len(trained) < len(work.gradients):
            found.append("frozen layers (the times are of a step that trains all)")
        if self.is_measured:
            if not work.image_size:
                found.append("a known image size (the profile does not state it)")
        elif optimizer not in _PRICED_OPTIMIZERS:
            found.append(f"the update of {optimizer} (it is that of SGD)")
        return tuple(found)

    @property
    def is_measured(self) -> bool:
        """Whether the step is that of a file, not of the catalog."""
        return bool(self.profile) or not self.gpu

    def _check_step(
        self, work: Workload, model: str, image_size: int, trained: Collection[str]
    ) -> None:
        """ConfigError where the step is that of another model, or of images of another size."""
        field = "profile" if self.profile else "gpu" if self.gpu else "cluster"
        command = "tune" if field == "cluster" else "profile"
        again = f"paceline {command} --model {model} --image-size {image_size}"
        again += ", and give --profile FILE" if field == "gpu" else ""
        problem = ""
        if not set(trained) <= {gradient.name for gradient in work.gradients}:
            problem = (
                f"has the step of {work.model}, which lacks tensors of the model that is trained"
            )
        elif self.is_measured and work.image_size not in (0, image_size):
            problem = (
                f"has a step with images of {work.image_size} pixels, and the run has {image_size}"
            )
        if problem:
            raise ConfigError(
                f"rehearse.{field}", getattr(self, field), problem, f"measure it with {again}"
            )

    def workload(
        self, model: str, image_size: int, net: Network | None = None,
        tensors: Mapping[str, tuple[int, bool]] | None = None,
    ) -> Workload | None:  # fmt: skip
        """The step of one rank; None where neither a GPU nor a measured step was given. `net` are the
        layers behind a step that was not measured. `tensors` are those that are trained, with their
        elements and whether in half precision: a step of others is refused."""
        work: Workload | None = None
        if self.profile:
            work = PlanFile.read(Path(self.profile), "rehearse.profile").profile
        elif self.gpu and net is not None:
            work = analytic_workload(net, accelerator(self.gpu))
        elif self.cluster:
            work = PlanFile.read(Path(self.cluster), "rehearse.cluster").workload
            if work is None:
                raise ConfigError(
                    "rehearse.cluster", self.cluster, "has links, but no step: no [workload]",
                    f"run paceline tune there with --model {model}, or give --profile or --gpu as well",
                )  # fmt: skip
        if work is not None and tensors is not None:
            self._check_step(work, model, image_size, tensors)
        if work is not None and self.input_images_per_s:
            work = work.fed_at(self.input_images_per_s)
        return work

    def start_up(self, plan: FusionPlan) -> StartUp:
        """Processes, meeting, agreement and process groups of the cluster's ranks."""
        probed = (
            PlanFile.read(Path(self.cluster), "rehearse.cluster").probed if self.cluster else None
        )
        algorithms = {
            name for bucket in plan.buckets for name in (bucket.algorithm, bucket.beside_algorithm)
        }
        if probed is not None:
            nccl = probed.backend == "nccl"
        else:
            nccl = not self.gpu or accelerator(self.gpu).is_gpu
        return StartUp.of(
            self.nodes, self.gpus_per_node, algorithms, buckets=len(plan.buckets), nccl=nccl
        )

    def place(self) -> Cluster:
        """The cluster's links."""
        if self.cluster:
            file = PlanFile.read(Path(self.cluster), "rehearse.cluster")
            found = file.planned_cluster()
            if found.ranks_per_node != self.gpus_per_node:
                raise ConfigError(
                    "rehearse.gpus_per_node", self.gpus_per_node,
                    f"{self.cluster} was measured with {found.ranks_per_node} ranks on a node",
                    f"use {found.ranks_per_node}, or run paceline tune there again",
                )  # fmt: skip
            return found.with_nodes(self.nodes)
        if not self.gpu:
            raise ConfigError(
                "rehearse.profile", self.profile, "says nothing about the links of the cluster",
                "give --gpu as well, or --cluster FILE of paceline tune",
            )  # fmt: skip
        return gpu_cluster(
            accelerator(self.gpu), self.nodes, self.gpus_per_node, self.node_gbps, self.latency_us,
            self.links, self.oversubscription,
        )  # fmt: skip

    @property
    def assumed_links(self) -> tuple[str, ...]:
        """The bandwidth between nodes where the settings have none."""
        if self.cluster or not self.gpu or self.nodes < 2:
            return ()
        given = {name for name in ("node_gbps", "links") if getattr(self, name) is not None}
        words = assumed(accelerator(self.gpu), given)
        return tuple(words[name] for name in ("node_gbps", "links") if name in words)


@dataclass(frozen=True)
class ClusterClock:
    """Predicted seconds on the cluster. `uncertainty` is the relative standard error of a step."""

    ranks: int
    step_s: float
    eval_s: float
    startup_s: float
    uncertainty: float
    images_per_s: float
    efficiency: float
    price_per_gpu_hour: float = 0.0
    watts_per_gpu: float = 0.0
    # What the run does and the times have not.
    left_out: tuple[str, ...] = ()
    # Where the step comes from.
    source: str = ""
    # Links between nodes that nothing has set.
    assumed: tuple[str, ...] = ()

    def describe(self) -> str:
        without = f"; without {' and '.join(self.left_out)}" if self.left_out else ""
        return (
            f"a step {format_duration(self.step_s)} (± {self.uncertainty:.0%}), an evaluation "
            f"{format_duration(self.eval_s)}, the start {format_duration(self.startup_s)}; "
            f"{self.images_per_s:,.0f} images/s, efficiency {self.efficiency:.0%}{without}"
            f"{f'; from {self.source}' if self.source else ''}"
            f"{'; assumed: ' if self.assumed else ''}{', '.join(self.assumed)}"
        )

    def totals(self, predicted_s: float) -> dict[str, Any]:
        """What `predicted_s` on the cluster amount to, for the summary."""
        gpu_hours = self.ranks * predicted_s / 3600
        found: dict[str, Any] = {"predicted_s": predicted_s, "gpu_hours": gpu_hours}
        if self.price_per_gpu_hour:
            found["cost"] = gpu_hours * self.price_per_gpu_hour
        if self.watts_per_gpu:
            found["energy_kwh"] = gpu_hours * self.watts_per_gpu / 1000
        return found


def cluster_clock(
    settings: RehearseSettings, plan: FusionPlan, work: Workload, *, batch: int, accumulation: int,
    validation: int, eval_batch: int, left_out: tuple[str, ...] = (),
) -> ClusterClock:  # fmt: skip
    """`batch` is a rank's micro-batch, of which it does `accumulation` for a step; an evaluation is of
    `validation` images, in batches of `eval_batch`."""
    place = settings.place()
    found = predict(work, place, plan, batch)
    slow = slowest_of(place.ranks)
    # Only the last micro-step of a step hides an exchange.
    extra = (accumulation - 1) * (work.forward.at(batch) + work.backward.at(batch)) * slow
    # The loader prepares the micro-batches of a step one after the other.
    input_s = accumulation * work.input.at(batch)
    step_s = max(found.step_s + extra, input_s)
    compute_s = accumulation * (work.forward.at(batch) + work.backward.at(batch)) + work.update_s
    alone = max(compute_s, input_s)
    eval_s = settings.eval_s
    if eval_s is None:
        whole, rest = divmod(-(-validation // place.ranks), eval_batch)
        eval_s = slow * (
            whole * work.forward.at(eval_batch) + (work.forward.at(rest) if rest else 0)
        )
    startup_s = settings.startup_s
    if startup_s is None:
        startup_s = settings.start_up(plan).total_s
    return ClusterClock(
        ranks=place.ranks,
        step_s=step_s,
        eval_s=eval_s,
        startup_s=startup_s,
        uncertainty=found.uncertainty,
        images_per_s=accumulation * batch * place.ranks / step_s,
        efficiency=alone / step_s,
        price_per_gpu_hour=settings.price_per_gpu_hour,
        watts_per_gpu=settings.watts,
        left_out=left_out,
        source=work.source,
        assumed=settings.assumed_links,
    )
