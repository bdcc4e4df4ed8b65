"""Settings of rehearsals: the table `[run.rehearsal]`, used if `run.strategy = "rehearsal"`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.core.exclusions import Exclusion, above, not_in, one_of, switched_off
from paceline.core.settings import SettingChecks, check_input_rate
from paceline.core.topology import RANKS_LIMIT

# Time and memory to compute the order of additions grow with the square of the number of ranks.
# 1,024 is the largest number that was tried; it needs 18 s and 0.9 GB with `ring`
# (records/rehearsal).
MOST_RANKS = 1024


@dataclass(frozen=True)
class RehearsalSettings:
    """The cluster that a rehearsal simulates, and data from which the speed there is predicted."""

    nodes: int = 0
    """Nodes of the cluster; required."""
    gpus_per_node: int = 8
    """Ranks on each node."""
    gpu: str = ""
    """GPU, for the predicted times: a name of the planner's catalog, such as `H100`, or a TOML file
    that describes another (docs/planner.md)."""
    profile: str = ""
    """File of `paceline profile` or `tune` with the measured step of this model; unset, predicted
    from its layers."""
    cluster: str = ""
    """File with the links of the cluster, as `paceline tune` writes it; replaces `node_gbps`."""
    node_gbps: float | None = None
    """Bandwidth of all network links of a node together, in Gb/s; unset, that of the reference
    system of `gpu`."""
    input_images_per_s: float = 0.0
    """Images per second that the input pipeline of a rank delivers; 0: never the bottleneck."""
    eval_s: float | None = None
    """Seconds of one evaluation on the cluster; unset, predicted from the forward pass."""
    startup_s: float | None = None
    """Seconds until the first step; unset, an estimate by the number of ranks."""
    price_per_gpu_hour: float = 0.0
    """Price of a GPU for an hour, in any currency; 0 leaves the cost out."""

    def __post_init__(self) -> None:
        check = SettingChecks("run.rehearsal", self)
        if not 0 <= self.nodes <= RANKS_LIMIT:
            raise check.error("nodes", f"must be 1 to {RANKS_LIMIT:,}")
        check.number("gpus_per_node", "at least 1")
        if self.ranks > MOST_RANKS:
            raise check.error(
                "nodes", f"{self.ranks:,} ranks are more than {MOST_RANKS:,}",
                "rehearse a smaller cluster; paceline plan predicts the time of larger ones",
            )  # fmt: skip
        check.number("node_gbps", "above 0")
        for name in (
            "input_images_per_s", "eval_s", "startup_s", "price_per_gpu_hour",
        ):  # fmt: skip
            check.number(name, "0 or more")
        check_input_rate(self.input_images_per_s, "run.rehearsal.input_images_per_s")

    @property
    def ranks(self) -> int:
        """Returns the number of virtual ranks."""
        return self.nodes * self.gpus_per_node

    EXCLUSIONS: ClassVar[tuple[Exclusion, ...]] = (
        Exclusion(
            "run.rehearsal.nodes", one_of(0), {}, "says which cluster to rehearse",
            "try 64, or paceline rehearse --nodes 64",
        ),
        Exclusion(
            "run.strategy", one_of("rehearsal"), {"job.processes": above(1)},
            "a rehearsal runs in one process, and this job has {job.processes}",
            "start it without a launcher",
        ),
        *switched_off({"optim.batch_schedule": ""}, "is not supported in a rehearsal"),
        Exclusion(
            "run.traced_steps", not_in(()), {}, "is not supported in a rehearsal", "use []"
        ),
    )  # fmt: skip
