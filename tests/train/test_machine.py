from __future__ import annotations

import json

import pytest
import torch

from paceline.core.errors import ConfigError
from paceline.core.topology import Topology
from paceline.train.machine import choose_device, choose_threads, hardware, versions
from small_runs import small_config


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="run.device = 'cuda': no CUDA device here"):
        choose_device(small_config("", run__device="cuda"), Topology())


def test_more_ranks_than_gpus_needs_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    third = Topology(rank=3, world_size=4, local_rank=3, local_world_size=4, launcher="torchrun")
    with pytest.raises(ConfigError, match="--nproc-per-node = 4: this node has 2 GPU"):
        choose_device(small_config("", run__device="auto"), third)
    gloo = small_config("", run__device="auto", comm__backend="gloo")
    assert choose_device(gloo, third) == torch.device("cuda", 1)


def test_a_gpu_that_slurm_shows_to_one_rank_alone_is_not_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")
    third = Topology(rank=3, world_size=4, local_rank=3, local_world_size=4, launcher="slurm")
    config = small_config("", run__device="cuda")
    assert choose_device(config, third) == torch.device("cuda", 0)
    monkeypatch.delenv("SLURM_GPUS_PER_TASK")
    with pytest.raises(ConfigError, match="this node has 1 GPU"):
        choose_device(config, third)


def test_threads_are_shared_out_among_the_ranks_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    four = Topology(world_size=4, local_world_size=4, launcher="torchrun")
    assert choose_threads(small_config("", run__threads=0), four) == 2
    assert choose_threads(small_config("", run__threads=3), four) == 3


def test_a_slurm_task_has_the_cores_that_srun_gave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "6")
    config = small_config("", run__threads=0)
    task = Topology(world_size=4, local_world_size=4, launcher="slurm")
    assert choose_threads(config, task) == 6
    under_torchrun = Topology(world_size=4, local_world_size=4, launcher="torchrun")
    assert choose_threads(config, under_torchrun) == 1


def test_tables_are_plain_texts() -> None:
    for table in (versions(), hardware(torch.device("cpu"))):
        assert json.loads(json.dumps(table)) == table
        assert all(type(value) is str for value in table.values())
