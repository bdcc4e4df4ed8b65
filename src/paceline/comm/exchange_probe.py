"""Measures links and all-reduce algorithms when a run starts, for `comm.algorithm = auto`.

`find_constants` returns what the choice of algorithms and bucket sizes depends on: the constants of the
checkpoint, those that an earlier run on the same hosts has measured, or those that a probe measures now.
They are equal on all ranks. The choice itself is a pure function (`plan.size_choice`).

The probe uses separate process groups and draws no random numbers. All decisions depend on averages
over all ranks, so every rank runs the same all-reduces in the same order.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from paceline.comm.group import Group
from paceline.comm.link_probe import LinkProbe
from paceline.comm.plan_choice import Constants
from paceline.comm.planned_transport import PlannedAllReduce, WireFormat
from paceline.comm.probe_cache import ProbeCache, parse_constants, same_cluster
from paceline.comm.process_groups import ProcessGroups, all_gather_json, group_ranks
from paceline.comm.settings import CommSettings
from paceline.core.errors import CommError
from paceline.core.imports import first_line
from paceline.core.units import format_bytes
from paceline.plan.cluster import Cluster, Link
from paceline.plan.cost import closed_form
from paceline.plan.plan_file import PlanFile, ProbedCluster
from paceline.plan.schedules import NATIVE, tuned_names
from paceline.plan.size_choice import NOISE_LIMIT, measured_size, noise
from paceline.plan.size_table import MeasuredSize
from paceline.version import __version__

KIB = 1024
# Between two ranks, all algorithms send the same bytes in at most two rounds.
LEAST_RANKS = 3
# Message sizes in bytes. Sizes that the time limit does not allow are left out.
SIZES = (16 * KIB, 1024 * KIB, 4096 * KIB, 16 * 1024 * KIB)
# Seconds of the whole measurement, and how long one message may take before the probe gives up.
LIMIT_S = 2.4
TIMEOUT_S = 20.0
# Samples of an algorithm at one size, besides the first one, which also prepares memory: as many as take
# this many seconds, at most `_MOST_ROUNDS`.
_SIZE_S = 0.25
_MOST_ROUNDS = 8
# If one sample of each algorithm takes more than this share of the time left, only so many are measured
# besides the backend's own one.
_SHORT, _MOST_OTHERS = 0.33, 2
# Expected times may be too short by this factor.
_SAFETY = 1.2


def find_constants(group: Group, settings: CommSettings, pinned: PlanFile | None) -> Constants:
    """Returns the constants of this cluster, which are equal on all ranks. A collective.

    Two ranks, and the ranks of one node, use the backend's own all-reduce without a measurement.

    Args:
        group: The ranks.
        settings: The section `[comm]`.
        pinned: The constants of the checkpoint, if a run is resumed.
    """
    if group.world_size < LEAST_RANKS:
        return Constants()
    gather = partial(all_gather_json, [group.topology.node_rank, socket.gethostname()])
    places = group.watched("the gathering of hosts", gather)
    nodes = group_ranks([node for node, _ in places])
    if len(nodes) == 1:
        return Constants()  # on one node, differences between algorithms are within the noise
    cluster = ProbedCluster(tuple(map(len, nodes)), group.backend, group.device.type)
    if pinned is not None and same_cluster(pinned, cluster):
        return Constants(pinned, "measured when the run began")
    cache = ProbeCache({
        "hosts": [places[node[0]][1] for node in nodes], "ranks": cluster.ranks_per_node,
        "backend": group.backend, "device": group.device.type, "group_size": settings.group_size,
        "algorithms": tuned_names(), "torch": str(torch.__version__), "paceline": __version__,
    })  # fmt: skip
    kept, ignored = cache.read(cluster) if group.rank == 0 else (None, "")
    content = group.broadcast_bytes(kept.to_text().encode() if kept is not None else b"")
    if content:
        found = parse_constants(content, cluster, "rank 0")
        return Constants(found, f"measured by an earlier run ({cache.path})")
    begun = time.perf_counter()
    made, failure = _measure(group, settings, cluster, nodes)
    if made is None:
        return Constants(None, "; ".join(filter(None, (f"native, because {failure}", ignored))))
    # The text of rank 0, so that a later run that reads the file chooses the same.
    content = group.broadcast_bytes(made.to_text().encode())
    found = parse_constants(content, cluster, "rank 0")
    largest = format_bytes(found.measured[-1].size_bytes)
    note = f"links and algorithms up to {largest} in {time.perf_counter() - begun:.1f} s"
    if noise(found.measured) > NOISE_LIMIT:
        note += ", too noisy to keep"
    elif group.rank == 0 and cache.write(content):
        note += f", kept in {cache.path}"
    return Constants(found, "; ".join(filter(None, (note, ignored))))


def _measure(
    group: Group, settings: CommSettings, cluster: ProbedCluster, nodes: Sequence[Sequence[int]]
) -> tuple[PlanFile | None, str]:
    """Returns the measured constants, or None and the reason if the probe failed on any rank."""
    begun, names = time.perf_counter(), tuned_names()
    made: list[PlanFile] = []

    def run() -> str:
        groups = None
        try:
            groups = ProcessGroups(
                group.topology, settings.group_size or None,
                timeout_s=min(settings.timeout_s, TIMEOUT_S), algorithms=names,
            )  # fmt: skip
            assert groups.world is not None
            intra, inter = LinkProbe(groups.world, group.rank, nodes, group.device).brief()
            probed = replace(cluster, intra=intra, inter=inter)
            measured = AllReduceProbe(groups, probed, group.device, begun).measure(names)
            made.append(PlanFile(cluster=cluster.facts, probed=probed, measured=tuple(measured)))
        except (RuntimeError, CommError) as error:
            if group.backend == "nccl" or isinstance(error, torch.AcceleratorError):
                raise  # its communicators cannot be used any more
            return first_line(error)
        finally:
            if groups is not None:
                groups.close()
        return ""

    problem = group.watched("the probe of the exchange", run)
    # Over the group of the run, which a failure of the probe does not break.
    problems = group.watched("the end of the probe", partial(all_gather_json, problem))
    failed = [rank for rank, text in enumerate(problems) if text]
    if failed:
        return None, f"the measurement failed on rank {failed[0]} ({problems[failed[0]]})"
    return made[0], ""


class AllReduceProbe:
    """Measures all-reduces by size and algorithm, within a time limit. All ranks call its methods.

    Consecutive all-reduces need no barrier: none ends before all ranks have begun it.

    Args:
        groups: Process groups that no other thread uses.
        cluster: Ranks, nodes and links.
        device: The device of this rank.
        begun: When the probe began, by `time.perf_counter`.
    """

    def __init__(
        self, groups: ProcessGroups, cluster: ProbedCluster, device: torch.device, begun: float
    ) -> None:
        self._groups, self._cluster, self._device, self._begun = groups, cluster, device, begun
        self._planned = PlannedAllReduce(groups)
        self._wire = WireFormat.named("float32")

    def measure(self, names: Sequence[str]) -> list[MeasuredSize]:
        """Returns the median times of the algorithms, for each size that the time limit allows."""
        for name in names:
            self._planned.prepare(name)
        self._samples(names, 4 * KIB, 1)  # opens connections
        measured: list[MeasuredSize] = []
        live = list(names)
        for size, after in zip(SIZES, (*SIZES[1:], 0), strict=True):
            first = measured_size(size, self._samples(live, size, 1))
            left_s = self._left_s()
            later = self._kept([*measured, first], after, left_s) if after else {}
            later_s = sum(later.values())
            goes_on = 0 < _SAFETY * later_s <= left_s
            rounds = self._rounds(first, left_s - later_s if goes_on else left_s, ends=not goes_on)
            more = self._samples(live, size, rounds)
            # The first sample also prepares memory; it counts only if there are few others.
            samples = more if rounds > 1 else {n: [first.medians_s[n], *more[n]] for n in live}
            measured.append(measured_size(size, samples))
            if not goes_on:
                break
            live = list(later)
        return measured

    def _rounds(self, first: MeasuredSize, left_s: float, *, ends: bool) -> int:
        """Returns how many more samples to take; as many as fit if this size `ends` the probe."""
        round_s = sum(first.medians_s.values())
        wanted = _MOST_ROUNDS if ends else max(1, int(_SIZE_S / round_s))
        return max(0, min(_MOST_ROUNDS, wanted, int(left_s / (_SAFETY * round_s))))

    def _kept(self, measured: Sequence[MeasuredSize], size: int, left_s: float) -> dict[str, float]:
        """Returns the algorithms to measure at a larger size, with the expected seconds of a sample.

        If one sample of each would take much of the time left, these are the backend's own all-reduce
        and the algorithms that send the fewest bytes between nodes, by the formulas of their cost and
        the measured links: small messages do not show that. On one node, they are the fastest ones.
        """
        last = measured[-1]
        if len(measured) == 1:
            # By the links alone; inside a node, a larger message takes hardly longer.
            small, large = (
                self._formulas(list(last.medians_s), n) for n in (last.size_bytes, size)
            )
            beta_s = self._cluster.inter.beta_s_per_byte if self._cluster.inter else 0.0
            grown_s = 2 * beta_s * (size - last.size_bytes)
            seconds = {n: median_s + (large[n] - small[n] if n in large else grown_s)
                       for n, median_s in last.medians_s.items()}  # fmt: skip
        else:
            seconds = {name: _expected_s(measured[-2:], name, size) for name in last.medians_s}
        if sum(seconds.values()) <= _SHORT * left_s:
            return seconds
        ranked = self._formulas(list(seconds), size) or last.medians_s
        others = sorted((n for n in ranked if n != NATIVE), key=lambda n: (ranked[n], n))
        return {n: seconds[n] for n in (NATIVE, *others[:_MOST_OTHERS])}

    def _formulas(self, names: Sequence[str], size: int) -> dict[str, float]:
        """Returns predicted seconds; {} on one node, or if nodes differ in their ranks."""
        counts, inter = set(self._cluster.ranks_per_node), self._cluster.inter
        if inter is None or len(counts) > 1:
            return {}
        intra = self._cluster.intra or inter
        cluster = Cluster(
            len(self._cluster.ranks_per_node), counts.pop(),
            Link(intra.alpha_s, intra.beta_s_per_byte), Link(inter.alpha_s, inter.beta_s_per_byte),
        )  # fmt: skip
        costs = {name: closed_form(name) for name in names}
        sizes = np.array([float(size)])
        return {n: float(cost(cluster, sizes)[0]) for n, cost in costs.items() if cost is not None}

    def _left_s(self) -> float:
        """Returns the seconds left, equal on all ranks."""
        return LIMIT_S - self._mean([time.perf_counter() - self._begun])[0]

    def _samples(self, names: Sequence[str], size: int, rounds: int) -> dict[str, list[float]]:
        """Returns the seconds of all-reduces by algorithm, the mean of all ranks."""
        taken: dict[str, list[float]] = {name: [] for name in names}
        if not rounds:
            return taken
        buffer = torch.zeros(size // 4, device=self._device)
        self._mean([0.0])  # all ranks start together
        last = time.perf_counter()
        for number in range(rounds):
            first = number % len(names)
            for name in (*names[first:], *names[:first]):
                self._planned.run(buffer, name, self._wire)
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                now = time.perf_counter()
                taken[name].append(now - last)
                last = now
        means = self._mean([seconds for times in taken.values() for seconds in times])
        return {n: means[at * rounds : (at + 1) * rounds] for at, n in enumerate(names)}

    def _mean(self, values: Sequence[float]) -> list[float]:
        gpu = self._groups.backend == "nccl"
        row = torch.tensor(values, dtype=torch.float64, device=self._device if gpu else "cpu")
        dist.all_reduce(row, group=self._groups.world)
        means: list[float] = (row / self._groups.world_size).tolist()
        return means


def _expected_s(rows: Sequence[MeasuredSize], name: str, size: int) -> float:
    """Returns the expected seconds at a larger size, from those at the last two sizes."""
    before, last = rows
    seconds = last.medians_s[name]
    grown_s = max(0.0, seconds - before.medians_s[name]) / (last.size_bytes - before.size_bytes)
    return seconds + grown_s * (size - last.size_bytes)
