"""Checks and reads what a user asks of `paceline plan` or `predict_scaling`: model and cluster.

Errors name the flags of `paceline plan`; `predict_scaling` replaces these names by its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.plan.cluster import Cluster
from paceline.plan.plan_file import PlanFile
from paceline.plan.schedules import algorithm_names
from paceline.plan.wires import wire_names
from paceline.planner.accelerators import (
    GPUS_PER_NODE,
    Accelerator,
    accelerator,
    assumed,
    catalogue,
    gpu_cluster,
)
from paceline.planner.analytic_workload import analytic_workload
from paceline.planner.answer import Question
from paceline.planner.layers import Network, network
from paceline.planner.plan_parts import planned_cluster, profile_of, required_profile
from paceline.planner.workload import Workload


@dataclass(frozen=True)
class StepRequest:
    """The training step to predict: a model on an accelerator, or a measured profile.

    None or "" means that a value was not given.
    """

    model: str = ""
    gpu: str = ""
    software: str = ""
    profile: Path | None = None
    image_size: int | None = None
    classes: int | None = None
    channels: int | None = None

    @cached_property
    def chip(self) -> Accelerator | None:
        """The accelerator that `gpu` names; None if `gpu` is empty."""
        return accelerator(self.gpu) if self.gpu else None

    @property
    def images(self) -> tuple[int, int, int]:
        """The edge length of the images in pixels, the number of classes, and the image channels."""
        return (
            224 if self.image_size is None else self.image_size,
            1000 if self.classes is None else self.classes,
            3 if self.channels is None else self.channels,
        )

    def network(self, name: str) -> Network:
        """Returns the layers of the built-in model `name` for the requested images."""
        size, classes, channels = self.images
        return network(name, size, classes, channels=channels)

    def read(self, where: ClusterRequest) -> tuple[PlanFile, Workload | None]:
        """Reads the cluster file and the profiled step; the latter is None if there is no profile.

        The profile comes from the file `profile` or, if no GPU is named, from the cluster file.

        Raises:
            ConfigError: If a file is invalid, or the request contradicts the profile.
        """
        file = where.read()
        if self.profile is not None:
            self._refuse_own()
            measured = PlanFile.read(self.profile, "--profile")
            return replace(file, workload=measured.workload), required_profile(measured)
        file = replace(file, workload=None) if self.gpu else file
        return file, profile_of(file)

    def workload(self, net: Network | None, profiled: Workload | None) -> Workload:
        """Returns the times of the step: the profiled times, or times computed from the layers.

        Args:
            net: The layers of the model, or None if unknown.
            profiled: The profiled step, or None.

        Raises:
            ConfigError: If neither GPU nor profile is given, or the request contradicts the profile.
        """
        if profiled is None:
            if self.chip is None or net is None:
                raise ConfigError(
                    "--gpu", None, "the step is unknown: give either --gpu or --profile",
                    f"known GPUs are {', '.join(catalogue())}",
                )  # fmt: skip
            return analytic_workload(net, self.chip, self.software)
        self._refuse_own()
        if self.model and profiled.model != self.model:
            raise ConfigError(
                "--model", self.model, f"differs from the model of the profile, {profiled.model}",
                f"profile {self.model}, or leave --model out",
            )  # fmt: skip
        return profiled

    def _refuse_own(self) -> None:
        """Raises ConfigError for an argument that the profile already determines."""
        for flag, value in (
            ("--image-size", self.image_size), ("--classes", self.classes),
            ("--channels", self.channels), ("--software", self.software or None),
        ):  # fmt: skip
            if value is not None:
                raise ConfigError(flag, value, "is set by the profile", "leave it out")


@dataclass(frozen=True)
class ClusterRequest:
    """The cluster to predict for: nodes and links, or the file of a measured cluster."""

    nodes: int | None = None
    gpus_per_node: int | None = None
    node_gbps: float | None = None
    latency_us: float | None = None
    links: int | None = None
    oversubscription: float | None = None
    cluster: Path | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The arguments of `gpu_cluster` that the user gave; a cluster file excludes them."""
        names = ("gpus_per_node", "node_gbps", "latency_us", "links", "oversubscription")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def read(self) -> PlanFile:
        """Reads the cluster file; returns an empty `PlanFile` if no file is given."""
        if self.cluster is None:
            return PlanFile()
        for name, value in self.given.items():
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(flag, value, "is also in the cluster file", "leave out one of them")
        return PlanFile.read(self.cluster, "--cluster")

    def place(self, chip: Accelerator | None, file: PlanFile) -> Cluster:
        """Returns the measured cluster of `file`, or builds a cluster of accelerators and links."""
        if self.cluster is not None:
            measured = planned_cluster(file)
            return measured if self.nodes is None else measured.with_nodes(self.nodes)
        given = self.given
        if chip is None and given.get("gpus_per_node", GPUS_PER_NODE) > 1:
            raise ConfigError(
                "--gpu", None, "the links inside a node are unknown",
                "name the GPU, or give --cluster, or --gpus-per-node 1",
            )  # fmt: skip
        nodes = 1 if self.nodes is None else self.nodes
        return gpu_cluster(chip or accelerator("CPU"), nodes, **given)

    def assumed(self, chip: Accelerator | None) -> dict[str, str]:
        """Describes the defaults that `place` uses for arguments that were not given, by argument."""
        return {} if self.cluster else assumed(chip or accelerator("CPU"), self.given)


def question_about(
    work: Workload, place: Cluster, algorithms: Sequence[str], wires: Sequence[str]
) -> Question:
    """Builds a `Question` with a batch size of 1, which the caller replaces.

    Without `algorithms`, all algorithms that were measured on the cluster are allowed. If the
    cluster was not measured, all algorithms are allowed.
    """
    known = place.probed.algorithms if place.probed else algorithm_names()
    return Question(work, 1, tuple(algorithms) or known, wire_names(wires or ("auto",)))
