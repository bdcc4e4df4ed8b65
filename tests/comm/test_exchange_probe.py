"""The constants by which `comm.algorithm = auto` chooses: measured, kept, pinned, or given up."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from comm.exchanges import joined
from paceline.comm import CommSettings, exchange_probe
from paceline.comm.exchange_probe import AllReduceProbe, find_constants
from paceline.comm.link_probe import LinkProbe
from paceline.comm.plan_choice import Constants
from paceline.comm.probe_cache import ProbeCache
from paceline.core.topology import Topology
from paceline.plan.plan_file import LinkFacts, PlanFile, ProbedCluster
from paceline.plan.schedules import tuned_names
from paceline.plan.size_choice import careful_table
from paceline.plan.size_table import MeasuredSize
from ranks import run_ranks

TWO_NODES = ProbedCluster((2, 2), "gloo", "cpu")
SIZES = (1024, 65536, 1 << 20)
MEASURED = tuple(MeasuredSize(size, {"native": 2e-3, "tree": 1e-3}) for size in SIZES)
KEPT = PlanFile(cluster=TWO_NODES.facts, probed=TWO_NODES, measured=MEASURED)


def _on_two_nodes(rank: int, folder: str) -> Any:
    places = {"LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": rank // 2}
    return mock.patch.dict(
        os.environ, {"XDG_CACHE_HOME": folder, **{name: str(n) for name, n in places.items()}}
    )


def _find(rank: int, folder: str) -> tuple[list[Constants], bool]:
    """Measures, reads the file, meets a damaged file, and has constants of a checkpoint."""
    found = []
    state = torch.random.get_rng_state()
    with (
        _on_two_nodes(rank, folder), mock.patch.object(exchange_probe, "SIZES", SIZES),
        mock.patch.object(exchange_probe, "LIMIT_S", 1000.0), joined() as group,
    ):  # fmt: skip
        found += [find_constants(group, CommSettings(), None) for _ in range(2)]
        with group.phase("damage"):
            for file in Path(folder).rglob("*.toml") if rank == 0 else ():
                file.write_bytes(b"measured = \xff")
        found.append(find_constants(group, CommSettings(), None))
        found.append(find_constants(group, CommSettings(), found[0].file))
    return found, torch.equal(state, torch.random.get_rng_state())


def test_ranks_measure_once_and_agree(tmp_path: Path) -> None:
    results = run_ranks(4, _find, str(tmp_path))
    for found, same_random_state in results:
        assert same_random_state
        assert [one.file for one in found] == [one.file for one in results[0][0]]
    first, again, anew, pinned = results[0][0]
    assert first.file is not None
    assert first.file.probed is not None
    assert first.file.probed.ranks_per_node == (2, 2)
    assert first.file.probed.intra is not None
    assert first.file.probed.inter is not None
    assert tuple(row.size_bytes for row in first.file.measured) == SIZES
    assert set(first.file.measured[0].medians_s) == set(tuned_names())
    assert pinned.file == first.file
    # On a busy host, the measurement may be too noisy to keep.
    if "kept in" in first.note:
        (kept,) = tmp_path.rglob("*.toml")
        assert again.file == first.file
        assert str(kept) in again.note
        assert f"ignored {kept}" in anew.note
        assert anew.file is not None


def _give_up(rank: int, folder: str, hangs: bool) -> tuple[Constants, float]:
    brief = LinkProbe.brief

    def broken(probe: LinkProbe) -> tuple[LinkFacts | None, LinkFacts | None]:
        if rank == 1 and hangs:
            time.sleep(4)
        elif rank == 1:
            raise RuntimeError("no route\nsecond line")
        return brief(probe)

    with (
        _on_two_nodes(rank, folder), mock.patch.object(LinkProbe, "brief", broken),
        mock.patch.object(exchange_probe, "TIMEOUT_S", 2.0), joined() as group,
    ):  # fmt: skip
        found = find_constants(group, CommSettings(), None)
        one = torch.ones(())
        group.all_reduce_sum(one)
    return found, float(one)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_failed_probe_is_one_line_and_the_run_goes_on(tmp_path: Path, hangs: bool) -> None:
    for found, ranks in run_ranks(4, _give_up, str(tmp_path), hangs):
        assert ranks == 4
        assert found.file is None
        assert found.note.startswith("native, because the measurement failed on rank ")
        assert "second line" not in found.note
    assert not list(tmp_path.rglob("*.toml"))


class Simulated(AllReduceProbe):
    """A probe whose clock counts the seconds that messages take by `alpha_s` and `beta_s` per byte."""

    def __init__(self, cluster: ProbedCluster, costs: dict[str, tuple[float, float]]) -> None:
        self._cluster, self._costs, self.clock_s = cluster, costs, 0.3
        self._planned = mock.Mock()

    def _left_s(self) -> float:
        return exchange_probe.LIMIT_S - self.clock_s

    def _samples(self, names: Any, size: int, rounds: int) -> dict[str, list[float]]:
        taken = {n: [self._costs[n][0] + size * self._costs[n][1]] * rounds for n in names}
        self.clock_s += sum(map(sum, taken.values()))
        return taken


# Seconds and seconds per byte, about as on emulated hosts.
FAST = {"native": (5e-3, 2e-9), "ring": (3e-3, 2e-9), "hierarchical": (1e-3, 2e-9),
        "torus2d": (2e-3, 2e-9), "halving_doubling": (2e-3, 2e-9), "tree": (1e-3, 4e-9)}  # fmt: skip
SLOW = {"native": (5e-2, 9e-8), "ring": (2e-2, 9e-8), "hierarchical": (8e-3, 7e-8),
        "torus2d": (1e-2, 7e-8), "halving_doubling": (1e-2, 8e-8), "tree": (1e-3, 2e-7)}  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "costs", "inter_s", "largest", "kept"),
    [
        ((4,), FAST, None, 16 << 20, set(FAST)),
        # Formulas choose what is measured at large sizes: `tree` is fastest only for small messages.
        ((4, 4, 4, 4), SLOW, 4e-8, 4 << 20, {"native", "hierarchical", "torus2d"}),
        # Ten times as slow: larger messages would take too long.
        ((4, 4), {n: (a, 10 * b) for n, (a, b) in SLOW.items()}, 4e-7, 16 << 10, set(SLOW)),
    ],
)
def test_a_probe_measures_what_the_time_allows(
    nodes: tuple[int, ...], costs: Any, inter_s: float | None, largest: int, kept: set[str]
) -> None:
    inter = LinkFacts(1e-4, inter_s) if inter_s is not None else None
    cluster = ProbedCluster(nodes, "gloo", "cpu", LinkFacts(1e-4, 1e-9), inter)
    probe = Simulated(cluster, costs)
    measured = probe.measure(list(costs))
    assert probe.clock_s <= exchange_probe.LIMIT_S
    assert measured[-1].size_bytes == largest
    assert set(measured[-1].medians_s) == kept
    best = careful_table(measured, 0.05).choose(16 << 20)
    assert costs[best][1] <= 1.05 * min(beta_s for _, beta_s in costs.values()) or best == "native"


def test_two_ranks_and_nccl_on_one_node_measure_nothing() -> None:
    two = SimpleNamespace(world_size=2)
    assert find_constants(two, CommSettings(), None) == Constants()  # type: ignore[arg-type]
    four = SimpleNamespace(
        world_size=4, backend="nccl", topology=Topology(), watched=lambda what, run: [[0, "a"]] * 4
    )
    assert find_constants(four, CommSettings(), None) == Constants()  # type: ignore[arg-type]


def test_a_kept_file_is_that_of_its_cluster(tmp_path: Path) -> None:
    cache = ProbeCache({"hosts": ["a", "b"]}, tmp_path)
    assert cache.read(TWO_NODES) == (None, "")
    assert cache.write(KEPT.to_text().encode())
    file, problem = cache.read(TWO_NODES)
    assert not problem
    assert file is not None
    assert file.measured == MEASURED
    assert ProbeCache({"hosts": ["a", "c"]}, tmp_path).read(TWO_NODES) == (None, "")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("gloo", "nccl", "another cluster"), ("tree", "tere", "unknown algorithm"),
        ("native", "ring", "sizes in ascending order"), ("65536", "512", "ascending order"),
        ("0.001", "nan", "must be from"), ("[cluster]", "[custer]", "unknown section"),
        ("backend =", "backend", "not TOML"), ("65536", "true", "must be a table"),
        ("bytes", "byte", "must be a table"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_ignored_with_a_reason(
    tmp_path: Path, old: str, new: str, words: str
) -> None:
    cache = ProbeCache({}, tmp_path)
    cache.write(KEPT.to_text().replace(old, new).encode())
    file, problem = cache.read(TWO_NODES)
    assert file is None
    assert words in problem
    assert "\n" not in problem


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "exchange").write_text("a file")
    cache = ProbeCache({}, tmp_path)
    assert not cache.write(b"")
    assert cache.read(TWO_NODES) == (None, "")
