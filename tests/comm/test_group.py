from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from paceline.comm.group import Group, PeerError, choose_backend
from paceline.comm.settings import CommSettings
from paceline.core.errors import CommError, DataError, PacelineError
from paceline.core.topology import Topology
from ranks import RankFailed, run_ranks

CPU = torch.device("cpu")


def _group() -> Group:
    return Group(Topology.from_env(os.environ), CommSettings(timeout_s=20), CPU)


def _all(rank: int) -> tuple[list[float], bytes, bytes, list[list[float]] | None]:
    group = _group()
    try:
        tensor = torch.tensor([1.0 + rank, 10.0])
        group.all_reduce_sum(tensor)
        long = group.broadcast_bytes(bytes(range(256)) * 40 if rank == 0 else None)
        empty = group.broadcast_bytes(b"" if rank == 0 else None)
        rows = group.gather(torch.tensor([float(rank), -1.0]))
        return tensor.tolist(), long, empty, None if rows is None else rows.tolist()
    finally:
        group.close()


def _peer_gone(rank: int, told: bool, heard: Path) -> None:
    group = _group()
    if rank == 1:
        if told:
            group.post_fault(DataError("the shard is gone", "bring it back"))
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerError) as caught:
        group.all_reduce_sum(torch.ones(4))
    heard.write_text(str(caught.value))


@pytest.mark.parametrize("size", [2, 3])
def test_collectives(size: int) -> None:
    results = run_ranks(size, _all)
    for rank, (total, long, empty, rows) in enumerate(results):
        assert total == [size * (size + 1) / 2, 10.0 * size]
        assert long == bytes(range(256)) * 40
        assert empty == b""
        assert (rows == [[float(r), -1.0] for r in range(size)]) is (rank == 0)


@pytest.mark.parametrize(
    ("told", "words"),
    [(True, "rank 1: the shard is gone"), (False, "rank 1 gives no sign of life")],
)
def test_a_dead_peer_is_an_error_and_not_a_hang(told: bool, words: str, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rank 1 died"):
        run_ranks(2, _peer_gone, told, tmp_path / "heard")
    assert words in (tmp_path / "heard").read_text()


def test_a_process_alone_needs_no_backend() -> None:
    group = Group(Topology(), CommSettings(), CPU)
    tensor = torch.ones(3)
    group.all_reduce_sum(tensor)
    assert group.backend == "none"
    assert tensor.tolist() == [1.0, 1.0, 1.0]
    assert group.broadcast_bytes(b"x") == b"x"
    rows = group.gather(tensor)
    assert rows is not None
    assert rows.shape == (1, 3)
    with pytest.raises(DataError):
        group.settle("phase", DataError("bad"))
    group.close()


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


def test_ranks_on_unlike_devices_are_told_before_any_backend_connects() -> None:
    for text in run_ranks(2, _unlike):
        assert "ranks differ in device: 'cpu' on rank 0, 'meta' on rank 1" in text


def _announce(rank: int) -> tuple[bool, bool]:
    group = _group()
    try:
        before = group.stop_announced()
        group.all_reduce_sum(torch.ones(1))
        if rank == 1:
            group.announce_stop()
        group.all_reduce_sum(torch.ones(1))
        group._ask_again_at = 0.0  # it asks once a second at most
        return before, group.stop_announced()
    finally:
        group.close()


def test_a_stop_on_one_rank_is_heard_by_all() -> None:
    assert run_ranks(2, _announce) == [(False, True), (False, True)]
