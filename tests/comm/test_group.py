"""The group of all ranks, the process groups of the exchange, and their layout."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

import paceline
from comm.clusters import made_groups, run_cluster, topology
from paceline.comm import CommSettings, Group, PeerError, ProcessGroups, collectives
from paceline.comm.group import choose_backend
from paceline.comm.process_groups import (
    all_gather_json,
    group_ranks,
    prepare_nccl,
)
from paceline.core.errors import CommError, ConfigError, DataError, PacelineError
from paceline.core.topology import Topology
from paceline.plan.steps import Groups
from ranks import RankFailed, run_ranks

CPU = torch.device("cpu")


def joined() -> Group:
    return Group(Topology.from_env(os.environ), CommSettings(timeout_s=100), CPU)


def _collectives(rank: int) -> dict[str, Any]:
    with joined() as group:
        tensor = torch.tensor([1.0 + rank, 10.0])
        group.all_reduce_sum(tensor)
        rows = group.gather(torch.tensor([float(rank), -1.0]))
        before = group.stop_announced()
        group.all_reduce_sum(torch.ones(1))
        if rank == 1:
            group.announce_stop()
        group.all_reduce_sum(torch.ones(1))
        deadline = time.monotonic() + 100  # the heartbeat thread looks once a second at most
        while not group.stop_announced() and time.monotonic() < deadline:
            time.sleep(0.02)
        return {
            "sum": tensor.tolist(),
            "long": group.broadcast_bytes(bytes(range(256)) * 40 if rank == 0 else None),
            "empty": group.broadcast_bytes(b"" if rank == 0 else None),
            "rows": None if rows is None else rows.tolist(),
            "bytes": (group.gather_bytes(b""), group.gather_bytes(b"x" * (3 * rank))),
            "stop": (before, group.stop_announced()),
            "json": all_gather_json({"rank": rank, "more": "x" * 1000 * rank}),
        }


@pytest.mark.parametrize("size", [2, 3])
def test_collectives(size: int) -> None:
    for rank, found in enumerate(run_ranks(size, _collectives)):
        assert found["sum"] == [size * (size + 1) / 2, 10.0 * size]
        assert (found["long"], found["empty"]) == (bytes(range(256)) * 40, b"")
        rows, texts = [[float(r), -1.0] for r in range(size)], [b"x" * (3 * r) for r in range(size)]
        assert found["rows"] == (rows if rank == 0 else None)
        assert found["bytes"] == (([b""] * size, texts) if rank == 0 else (None, None))
        assert found["stop"] == (False, True), "a stop of one rank reaches all"
        assert found["json"] == [{"rank": r, "more": "x" * 1000 * r} for r in range(size)]


def _pieces(rank: int) -> tuple[list[bytes] | None, int]:
    """Returns rank 0's result, and the largest number of bytes of a rank in one collective."""
    sizes: list[int] = []
    gather = dist.gather

    def noted(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(tensor.numel())
        return gather(tensor, *args, **options)

    with pytest.MonkeyPatch.context() as patch, joined() as group:
        patch.setattr(collectives, "_GATHERED_BYTES", 10)
        patch.setattr(dist, "gather", noted)
        return group.gather_bytes(bytes(range(17 * rank))), max(sizes)


def test_bytes_are_gathered_piece_by_piece() -> None:
    found = run_ranks(3, _pieces)
    texts = [bytes(range(17 * rank)) for rank in range(3)]
    assert [text for text, _ in found] == [texts, None, None]
    assert {size for _, size in found} == {3}, "ten bytes for three ranks"


def _peer_gone(rank: int, posts: bool, found: Path) -> None:
    group = joined()
    if rank == 1:
        if posts:
            group.post_fault(DataError("the shard is gone", "bring it back"))
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerError) as caught:
        group.all_reduce_sum(torch.ones(4))
    found.write_text(str(caught.value))


@pytest.mark.parametrize(
    ("posts", "message"),
    [(True, "rank 1: the shard is gone"), (False, "rank 1 gives no sign of life")],
)
def test_a_dead_peer_is_an_error_and_not_a_hang(posts: bool, message: str, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rank 1 died"):
        run_ranks(2, _peer_gone, posts, tmp_path / "found", grace_s=100)
    assert message in (tmp_path / "found").read_text()


def test_a_store_that_goes_before_the_watchdog_is_an_error_of_a_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found by `make chaos ARGS="--seed 24 --trial 2 --ranks 1 2"`: rank 0 was killed in the meeting."""

    def gone(store: object) -> None:
        raise dist.DistNetworkError("Connection was likely closed")

    monkeypatch.setattr("paceline.comm.membership.RankHosts.read", gone)
    monkeypatch.setattr(
        "paceline.comm.membership.meet",
        lambda *_: SimpleNamespace(store=HashStore(), restarted=False),
    )
    with pytest.raises(PeerError, match="rank 1 lost the other ranks"):
        Group(Topology(rank=1, world_size=2), CommSettings(), CPU)


def test_a_process_alone_needs_no_backend() -> None:
    group = Group(Topology(), CommSettings(), CPU)
    tensor = torch.ones(3)
    group.all_reduce_sum(tensor)
    assert (group.backend, tensor.tolist()) == ("none", [1.0, 1.0, 1.0])
    assert group.broadcast_bytes(b"x") == b"x"
    rows = group.gather(tensor)
    assert rows is not None
    assert rows.shape == (1, 3)
    with pytest.raises(DataError):
        group.agree("phase", DataError("bad"))
    group.close()
    groups = ProcessGroups(Topology())
    assert (groups.backend, groups.world, groups.layout.groups) == ("none", None, ((0,),))
    groups.close()
    with pytest.raises(CommError, match="call torch.distributed.init_process_group"):
        ProcessGroups(Topology(world_size=2, local_world_size=2))


def test_nccl_without_a_gpu_is_refused() -> None:
    two = Topology(world_size=2, local_world_size=2, launcher="torchrun")
    with pytest.raises(CommError, match="needs CUDA"):
        choose_backend(CommSettings(backend="nccl"), two, CPU)
    assert choose_backend(CommSettings(), two, CPU) == "gloo"


def _unlike(rank: int) -> str:
    device = torch.device("cpu" if rank == 0 else "meta")
    with pytest.raises(PacelineError) as caught:
        Group(Topology.from_env(os.environ), CommSettings(backend="gloo"), device)
    return str(caught.value)


def test_ranks_on_unlike_devices_fail_before_any_backend_connects() -> None:
    for text in run_ranks(2, _unlike):
        assert "ranks differ in device: 'cpu' on rank 0, 'meta' on rank 1" in text


def _sum(group: dist.ProcessGroup | None, rank: int) -> float:
    if group is None:
        return -1.0
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=group)
    return float(tensor)


def _sums(rank: int, nodes: tuple[int, ...]) -> tuple[float, float, dict[int, float], float]:
    with made_groups(rank, nodes) as groups:
        assert not groups.layout.nested, "over Gloo one group does"
        # A rank that left now would break connections that others still make.
        _sum(groups.world, rank)
    with made_groups(rank, nodes, subgroups=True) as groups:
        assert groups.layout.nested
        assert groups.world is not dist.group.WORLD
        columns = {number: _sum(group, rank) for number, group in groups.columns.items()}
        found = (
            _sum(groups.world, rank), _sum(groups.row, rank), columns, _sum(groups.masters, rank)
        )  # fmt: skip
    # The default group stays.
    assert _sum(dist.group.WORLD, rank) == found[0]
    return found


def test_rows_columns_and_masters_of_a_ragged_cluster() -> None:
    assert run_cluster((3, 2, 1), _sums) == [
        (15.0, 3.0, {0: 8.0}, 8.0),
        (15.0, 3.0, {1: 10.0}, -1.0),
        (15.0, 3.0, {2: 10.0}, -1.0),
        (15.0, 7.0, {0: 8.0, 2: 10.0}, 8.0),
        (15.0, 7.0, {1: 10.0}, -1.0),
        (15.0, 5.0, {0: 8.0, 1: 10.0, 2: 10.0}, 8.0),
    ]


def _at_odds(rank: int, nodes: tuple[int, ...]) -> list[str]:
    place, found = topology(rank, nodes), []
    other = {"node_rank": 0, "local_rank": 0}
    for k, changed in ((1, {}), (2, other), (2, {"rank": 0})):
        own = replace(place, **changed) if rank == 1 else place  # type: ignore[arg-type]
        with pytest.raises(CommError) as caught:
            ProcessGroups(own, k if rank == 1 else 2, timeout_s=100)
        found.append(str(caught.value))
    return found


def test_ranks_at_odds_all_raise_the_same_line() -> None:
    first, second = run_cluster((1, 1), _at_odds)
    assert first == second
    assert "ranks differ in comm.group_size: 2 on rank 0, 1 on rank 1" in first[0]
    assert (
        "rank 0 contradict those of the other ranks: it counts as rank 0 of 2, with 1 " in first[1]
    )
    assert "rank 1 contradict those of the other ranks: it counts as rank 0 of 2" in first[2]


def test_nothing_is_pickled_between_ranks() -> None:
    """Torch's collectives of objects unpickle what arrives, and so run code of a peer."""
    calls = re.compile(r"\b(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?\(")
    for file in Path(paceline.__file__).parent.rglob("*.py"):
        assert not calls.search(file.read_text()), file


def places(*nodes: int) -> list[int]:
    """Returns the node of each rank, for the number of ranks on each node."""
    return [node for node, count in enumerate(nodes) for _ in range(count)]


def test_a_group_for_each_node() -> None:
    layout = Groups(group_ranks(places(3, 2, 1)))
    assert layout.groups == ((0, 1, 2), (3, 4), (5,))
    assert (layout.masters, layout.order) == ((0, 3, 5), (0, 1, 2, 3, 4, 5))
    assert layout.row_of(4) == (3, 4)
    assert not layout.is_uniform
    # The lone rank of the last node owns every chunk there.
    assert layout.columns == ((0, 3, 5), (1, 4, 5), (2, 3, 5))
    assert group_ranks([0, 1, 0, 1]) == ((0, 2), (1, 3)), "ranks dealt out in turn"


@pytest.mark.parametrize(
    ("nodes", "k", "groups"),
    [
        ((4, 4), 2, ((0, 1), (2, 3), (4, 5), (6, 7))),
        ((8,), 3, ((0, 1, 2), (3, 4, 5), (6, 7))),
        ((3, 3), 2, ((0, 1), (2,), (3, 4), (5,))),
        ((1, 1, 1, 1, 1), 2, ((0, 1), (2, 3), (4,))),
        ((2, 2), 9, ((0, 1, 2, 3),)),
        ((2, 1), 1, ((0,), (1,), (2,))),
    ],
)
def test_groups_of_k(nodes: tuple[int, ...], k: int, groups: tuple[tuple[int, ...], ...]) -> None:
    assert group_ranks(places(*nodes), k) == groups


def test_a_group_has_ranks() -> None:
    with pytest.raises(ConfigError, match="comm.group_size = 0"):
        group_ranks(places(2), 0)


def _gather_rows(rank: int) -> list[float]:
    with Group(Topology.from_env(os.environ), CommSettings(), torch.device("cpu")) as group:
        rows = torch.full((3, 4), -1.0)
        rows[rank] = torch.arange(4.0) + 10 * rank
        group.gather_rows(rows, [4, 0, 2])
    return [float(value) for value in rows.flatten()]


def test_rows_are_gathered_as_far_as_they_count() -> None:
    for rank, found in enumerate(run_ranks(3, _gather_rows)):
        second = [10.0, 11, 12, 13] if rank == 1 else [-1.0] * 4
        third = [20.0, 21, 22, 23] if rank == 2 else [20.0, 21, -1, -1]
        assert found == [0.0, 1, 2, 3, *second, *third]


@pytest.mark.parametrize(
    ("watched", "attempt", "expected"),
    [(True, None, "0"), (True, "1", "0"), (False, "0", None), (False, "1", "0")],
)
def test_torch_writes_no_dump_that_a_restarted_run_takes_for_its_own(
    monkeypatch: pytest.MonkeyPatch, watched: bool, attempt: str | None, expected: str | None
) -> None:
    name = "TORCH_NCCL_DUMP_ON_TIMEOUT"
    others = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_RETHROW_CUDA_ERRORS"
    for variable in (name, *others, "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.setenv(variable, "")  # so that it is put back afterwards
        monkeypatch.delenv(variable)
    if attempt is not None:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
    prepare_nccl(topology(0, (2,)), share_gpus=False, watched=watched)
    assert os.environ.get(name) == expected
    monkeypatch.setenv(name, "1")
    prepare_nccl(topology(0, (2,)), share_gpus=False, watched=watched)
    assert os.environ[name] == "1", "what a user has set stays"
