"""`ClusterClock`: the predicted times of training on the cluster that a rehearsal simulates.

`cluster_clock` creates it from the planner's predictions for a step, an evaluation and the start-up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.settings import SettingChecks
from paceline.core.units import format_duration
from paceline.plan.cluster import Cluster, slowest_of
from paceline.plan.fusion_plan import FusionPlan
from paceline.plan.plan_file import PlanFile
from paceline.planner.accelerators import accelerator, assumed, gpu_cluster
from paceline.planner.analytic_workload import analytic_workload
from paceline.planner.layers import Network, known_network
from paceline.planner.memory import check_memory
from paceline.planner.plan_parts import planned_cluster, profile_of, required_profile
from paceline.planner.prediction import predict
from paceline.planner.start_up import StartUp
from paceline.planner.workload import Workload
from paceline.rehearsal.settings import RehearsalSettings


@dataclass(frozen=True)
class ClusterClock:
    """Predicted seconds of a step, of an evaluation and of the start-up on the cluster.

    `uncertainty` is the relative standard error of the step time.
    """

    ranks: int
    step_s: float
    eval_s: float
    startup_s: float
    uncertainty: float
    images_per_s: float
    efficiency: float
    price_per_gpu_hour: float = 0.0
    watts_per_gpu: float = 0.0
    # Describes the measurement or the prediction from which the step time was computed.
    source: str = ""
    # Descriptions of the assumptions about links between nodes that no setting describes.
    assumed: tuple[str, ...] = ()

    def describe(self) -> str:
        return (
            f"a step {format_duration(self.step_s)} (± {self.uncertainty:.0%}), an evaluation "
            f"{format_duration(self.eval_s)}, the start {format_duration(self.startup_s)}; "
            f"{self.images_per_s:,.0f} images/s, efficiency {self.efficiency:.0%}; from {self.source}"
            f"{'; assumed: ' if self.assumed else ''}{', '.join(self.assumed)}"
        )

    def totals(self, predicted_s: float) -> dict[str, Any]:
        """Returns GPU hours and, if known, cost and energy of `predicted_s` on the cluster."""
        gpu_hours = self.ranks * predicted_s / 3600
        totals: dict[str, Any] = {"predicted_s": predicted_s, "gpu_hours": gpu_hours}
        if self.price_per_gpu_hour:
            totals["cost"] = gpu_hours * self.price_per_gpu_hour
        if self.watts_per_gpu:
            totals["energy_kwh"] = gpu_hours * self.watts_per_gpu / 1000
        return totals


@dataclass(frozen=True)
class RehearsedCluster:
    """What the planner knows about the cluster of `settings`: its links, GPUs and step time."""

    settings: RehearsalSettings

    def _error(self, name: str, problem: str, remedy: str) -> ConfigError:
        return SettingChecks("run.rehearsal", self.settings).error(name, problem, remedy)

    def _file(self, name: str) -> PlanFile:
        return PlanFile.read(Path(getattr(self.settings, name)), f"run.rehearsal.{name}")

    @property
    def watts(self) -> float:
        """Power of one GPU in watts, or 0 if the settings name no GPU."""
        return accelerator(self.settings.gpu).watts if self.settings.gpu else 0.0

    def network(
        self, model: str, image_size: int, classes: int, stem: str = "auto",
        count: Callable[[], Network] | None = None, *, channels: int = 3,
    ) -> Network | None:  # fmt: skip
        """Returns the model's layers, from which the planner predicts the time of a step.

        Returns None if the settings name no GPU, or if the step is measured and the layers are
        unknown.

        Args:
            model: The name of the model.
            image_size: Side of an image in pixels.
            classes: Number of classes.
            stem: The variant of the model's first layers.
            count: Called to count the layers if the planner does not know the model.
            channels: Number of channels of an image.

        Raises:
            ConfigError: If the layers cannot be counted.
        """
        if not self.settings.gpu:
            return None
        known = known_network(model, image_size, classes, stem, channels)
        if known is not None or self.settings.profile or count is None:
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
            raise self._error("gpu", problem, remedy) from None

    def check_batch(
        self, net: Network | None, *, batch: int, half: bool, fused: bool = True
    ) -> None:
        """Raises ConfigError if a micro-batch does not fit into the memory of the GPU.

        Args:
            net: The layers of the model; without them, nothing is checked.
            batch: Number of images in the micro-batch.
            half: True for half precision.
            fused: True if the settings allow fused norms.
        """
        if net is None:
            return
        try:
            check_memory(net, accelerator(self.settings.gpu), batch, half, fused)
        except ConfigError as error:
            if error.field != "--batch-size":
                raise
            _, _, problem = error.cause.partition(": ")
            raise ConfigError("run.batch_size", batch, problem, error.remedy) from None

    def _check_step(
        self, work: Workload, model: str, image_size: int, trained: Collection[str]
    ) -> None:
        """Raises ConfigError if `work` belongs to a different model or image size than the run.

        `trained` are the names of the tensors that the run trains.
        """
        field = "profile" if self.settings.profile else "gpu" if self.settings.gpu else "cluster"
        command = "tune" if field == "cluster" else "profile"
        again = f"paceline {command} --model {model} --image-size {image_size}"
        again += ", and give --profile FILE" if field == "gpu" else ""
        problem = ""
        if not set(trained) <= {gradient.name for gradient in work.gradients}:
            problem = (
                f"has the step of {work.model}, which lacks tensors of the model that is trained"
            )
        elif field != "gpu" and work.image_size not in (0, image_size):
            problem = (
                f"has a step with images of {work.image_size} pixels, and the run has {image_size}"
            )
        if problem:
            raise self._error(field, problem, f"measure it with {again}")

    def workload(
        self, model: str, image_size: int, net: Network | None = None,
        tensors: Mapping[str, tuple[int, bool]] | None = None,
    ) -> Workload | None:  # fmt: skip
        """Returns times and gradient sizes of one rank's step, or None if no setting gives them.

        Args:
            model: The name of the model.
            image_size: Side of an image in pixels.
            net: The layers of the model, from which the step is predicted if it is not measured.
            tensors: By the name of each trained tensor: the number of elements, and True for half
                precision. A measured step without one of these tensors is an error.
        """
        work: Workload | None = None
        if self.settings.profile:
            work = required_profile(self._file("profile"))
        elif self.settings.gpu and net is not None:
            work = analytic_workload(net, accelerator(self.settings.gpu))
        elif self.settings.cluster:
            work = profile_of(self._file("cluster"))
            if work is None:
                raise self._error(
                    "cluster", "contains links, but no measured step (section [workload])",
                    f"run paceline tune there with --model {model}, or give --profile or --gpu as well",
                )  # fmt: skip
        if work is not None and tensors is not None:
            self._check_step(work, model, image_size, tensors)
        if work is not None and self.settings.input_images_per_s:
            work = work.fed_at(self.settings.input_images_per_s)
        return work

    def start_up(self, plan: FusionPlan) -> StartUp:
        """Predicts the time to start processes, meet in the rendezvous and create process groups."""
        settings, probed = self.settings, None
        if settings.cluster:
            probed = self._file("cluster").probed
        algorithms = {
            name for bucket in plan.buckets for name in (bucket.algorithm, bucket.beside_algorithm)
        }
        if probed is not None:
            nccl = probed.backend == "nccl"
        else:
            nccl = not settings.gpu or accelerator(settings.gpu).is_gpu
        return StartUp.of(
            settings.nodes, settings.gpus_per_node, algorithms, buckets=len(plan.buckets), nccl=nccl
        )

    def place(self) -> Cluster:
        """Returns the cluster with its links: measured, or those of the GPU's reference system."""
        if self.settings.cluster:
            file = self._file("cluster")
            tuned = planned_cluster(file)
            if tuned.ranks_per_node != self.settings.gpus_per_node:
                each = tuned.ranks_per_node
                raise self._error(
                    "gpus_per_node", f"{self.settings.cluster} was measured with {each} ranks on a node",
                    f"use {each}, or run paceline tune there again",
                )  # fmt: skip
            return tuned.with_nodes(self.settings.nodes)
        if not self.settings.gpu:
            raise self._error(
                "profile", "does not contain the links of the cluster",
                "give --gpu as well, or --cluster FILE of paceline tune",
            )  # fmt: skip
        settings = self.settings
        return gpu_cluster(
            accelerator(settings.gpu), settings.nodes, settings.gpus_per_node, settings.node_gbps
        )  # fmt: skip

    @property
    def assumed_links(self) -> tuple[str, ...]:
        """Describes the link speeds that are assumed because no setting gives them."""
        if self.settings.cluster or not self.settings.gpu or self.settings.nodes < 2:
            return ()
        given = {"node_gbps"} if self.settings.node_gbps is not None else set()
        words = assumed(accelerator(self.settings.gpu), given)
        return tuple(words[name] for name in ("node_gbps", "links") if name in words)


def cluster_clock(
    settings: RehearsalSettings, plan: FusionPlan, work: Workload, *, batch: int, accumulation: int,
    validation: int, eval_batch: int,
) -> ClusterClock:  # fmt: skip
    """Predicts the times of steps, evaluations and the start-up on the cluster.

    Args:
        settings: The settings that describe the cluster.
        plan: The buckets and algorithms of the gradient all-reduce.
        work: The times and gradient sizes of one rank's step.
        batch: Number of images in a rank's micro-batch.
        accumulation: Number of micro-batches of a rank in a step.
        validation: Number of images in an evaluation, of all ranks together.
        eval_batch: Number of images in a rank's batch in an evaluation.
    """
    there = RehearsedCluster(settings)
    place = there.place()
    predicted = predict(work, place, plan, batch)
    slow = slowest_of(place.ranks)
    # The exchange overlaps only with the last micro-step of a step.
    extra = (accumulation - 1) * (work.forward.at(batch) + work.backward.at(batch)) * slow
    # The loader prepares the micro-batches of a step one after the other.
    input_s = accumulation * work.input.at(batch)
    step_s = max(predicted.step_s + extra, input_s)
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
        startup_s = there.start_up(plan).total_s
    return ClusterClock(
        ranks=place.ranks,
        step_s=step_s,
        eval_s=eval_s,
        startup_s=startup_s,
        uncertainty=predicted.uncertainty,
        images_per_s=accumulation * batch * place.ranks / step_s,
        efficiency=alone / step_s,
        price_per_gpu_hour=settings.price_per_gpu_hour,
        watts_per_gpu=there.watts,
        source=work.source,
        assumed=there.assumed_links,
    )
