"""Device, threads, versions, out-of-memory errors and seeds of a rank."""

from __future__ import annotations

import json

import pytest
import torch

from paceline.core.errors import ConfigError, RunError
from paceline.core.topology import Topology
from paceline.train.machine import (
    choose_device,
    choose_threads,
    derive_seed,
    explain_out_of_memory,
    hardware,
    launcher_name,
    seed_micro_batch,
    versions,
)
from refusals import refused
from small_runs import small_config


def fourth(launcher: str) -> Topology:
    return Topology(rank=3, world_size=4, local_rank=3, local_world_size=4, launcher=launcher)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return monkeypatch


def test_ranks_share_gpus_over_gloo_only(gpus: pytest.MonkeyPatch) -> None:
    with refused("ranks of this node", "this node has 2 GPU"):
        choose_device(small_config("", run__device="auto"), fourth("torchrun"))
    gloo = small_config("", run__device="auto", comm__backend="gloo")
    assert choose_device(gloo, fourth("torchrun")) == torch.device("cuda", 1)
    gpus.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="no CUDA device"):
        choose_device(small_config("", run__device="cuda"), Topology())


def test_a_gpu_that_slurm_shows_to_one_rank_alone_is_not_shared(gpus: pytest.MonkeyPatch) -> None:
    gpus.setattr(torch.cuda, "device_count", lambda: 1)
    config = small_config("", run__device="cuda")
    with pytest.raises(ConfigError, match="this node has 1 GPU"):
        choose_device(config, fourth("slurm"))
    gpus.setenv("SLURM_GPUS_PER_TASK", "1")
    assert choose_device(config, fourth("slurm")) == torch.device("cuda", 0)


def test_threads_are_divided_among_the_ranks_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "6")
    config = small_config("", run__threads=0)
    assert choose_threads(config, fourth("torchrun")) == 2
    assert choose_threads(config, fourth("slurm")) == 6, "srun gives each task its own cores"
    assert choose_threads(small_config("", run__threads=3), fourth("slurm")) == 3


def test_tables_are_plain_strings() -> None:
    for table in (versions(), hardware(torch.device("cpu"))):
        assert json.loads(json.dumps(table)) == table
        assert all(type(value) is str for value in table.values())


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to …"),
        MemoryError(),
    ],
)
def test_out_of_memory_is_explained(error: Exception) -> None:
    with pytest.raises(RunError) as caught, explain_out_of_memory("at step 3", "use less"):
        raise error
    assert str(caught.value) == "out of memory at step 3; use less"
    assert caught.value.__cause__ is error
    with pytest.raises(RunError), explain_out_of_memory("here", "use less"):
        torch.empty(1 << 60, dtype=torch.uint8)  # the real allocator


def test_a_micro_batch_is_seeded_as_by_manual_seed() -> None:
    torch.manual_seed(derive_seed(7, 3, 1))
    wanted = torch.rand(3)
    seed_micro_batch(7, 3, 1)
    assert torch.equal(torch.rand(3), wanted)


def test_seeds_depend_on_every_part_and_nothing_else() -> None:
    seeds = {derive_seed(a, b, c) for a in range(8) for b in range(8) for c in range(8)}
    assert len(seeds) == 512
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, 23) != derive_seed(12, 3)
    drawn = []
    for number in (1, 1, 2):
        seed_micro_batch(7, 3, number)
        drawn.append(torch.rand(4))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_our_launcher_is_named_by_its_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_COMMAND", raising=False)
    assert launcher_name(fourth("torchrun")) == "torchrun"
    monkeypatch.setenv("PACELINE_COMMAND", "paceline train --nproc-per-node 2")
    assert launcher_name(fourth("torchrun")) == "--nproc-per-node"
    assert launcher_name(fourth("slurm")) == "slurm"
