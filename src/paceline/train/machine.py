"""What a run ran on: device, threads, versions, hardware.

In: settings and this rank's place. Out: the device to use, and tables for summary and report.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy
import PIL
import torch

from paceline.config import RunConfig
from paceline.core.cores import available_cores
from paceline.core.errors import ConfigError, RunError
from paceline.core.gpu_connections import ask_for_connections, connections
from paceline.core.topology import Topology
from paceline.version import __version__


def choose_device(config: RunConfig, topology: Topology) -> torch.device:
    """A GPU for each rank where there are GPUs. Several ranks share one over Gloo, or over NCCL where
    `comm.share_gpus` says so."""
    ask_for_connections(topology.local_world_size if config.comm.share_gpus else 1)
    wanted = config.run.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise ConfigError("run.device", "cuda", "no CUDA device here", "use --device cpu")
    shared = topology.local_world_size > count and not _has_gpu_of_its_own(topology)
    if shared and config.comm.backend != "gloo" and not config.comm.share_gpus:
        raise ConfigError(
            "--nproc-per-node",
            topology.local_world_size,
            f"this node has {count} GPU(s), and NCCL needs one for each rank",
            f"use --nproc-per-node {count}, or share GPUs with --set comm.backend=gloo or, under "
            "NVIDIA MPS, --set comm.share_gpus=true",
        )
    device = torch.device("cuda", topology.local_rank % count)
    torch.cuda.set_device(device)
    return device


def _has_gpu_of_its_own(topology: Topology) -> bool:
    """SLURM may hide the other ranks' GPUs from a rank (`srun --gpus-per-task=1`)."""
    asked = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPU_BIND")
    return topology.launcher == "slurm" and any(name in os.environ for name in asked)


def choose_threads(config: RunConfig, topology: Topology) -> int:
    """The node's cores, shared out among its ranks."""
    if config.run.threads:
        return config.run.threads
    # srun binds each of its tasks to cores of its own, and says how many; they are not shared out.
    own = os.environ.get("SLURM_CPUS_PER_TASK", "") if topology.launcher == "slurm" else ""
    if own.isdecimal() and int(own) > 0:
        return int(own)
    return max(1, available_cores() // topology.local_world_size)


def versions() -> dict[str, str]:
    found = {
        "paceline": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # a plain text: checkpoints admit nothing else
        "numpy": numpy.__version__,
        "pillow": PIL.__version__,
    }
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def hardware(device: torch.device) -> dict[str, str]:
    """Plain words for one rank's node."""
    found = {
        "device": str(device),
        "cpu": _cpu_name(),
        "cores": str(available_cores()),
        "memory_gib": f"{_memory_gib():.0f}",
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["gpu"] = properties.name
        found["gpu_memory_gib"] = f"{properties.total_memory / 2**30:.0f}"
        found["gpus"] = str(torch.cuda.device_count())
        found["gpu_connections"] = connections()
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


# Running out of memory: how to tell it from other errors.
#
# In: what a forward or backward pass raised, and words for the user. Out: the error that says
# them, or None where it was something else.


def memory_error(error: Exception, where: str, remedy: str) -> RunError | None:
    """On GPU and CPU alike; the CPU allocator raises a plain RuntimeError."""
    told = isinstance(error, torch.OutOfMemoryError | MemoryError)
    if not told and "can't allocate memory" not in str(error):
        return None
    return RunError(f"out of memory {where}", remedy)


@contextmanager
def memory_told(where: str, remedy: str) -> Iterator[None]:
    """Within this context running out of memory is the error that says so; others stay what they are."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        fault = memory_error(error, where, remedy)
        if fault is None:
            raise
        raise fault from error


# Randomness of the training step.
#
# In: (seed, step, micro-batch). Out: a seed for torch's generators. Dropout then depends on which
# micro-batch of which step is computed, not on the rank that happens to compute it nor on
# anything before it: a resumed run, and one on another number of ranks, draw the same numbers.


def derive_seed(*parts: int | str) -> int:
    """63 bits that depend on every part."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_micro_batch(seed: int, step: int, number: int) -> None:
    """Seeds CPU and GPU generators for micro-batch `number` of `step`."""
    torch.manual_seed(derive_seed(seed, step, number))


def seed_initial_weights(seed: int) -> None:
    """Seeds the generators for drawing the initial weights."""
    torch.manual_seed(derive_seed(seed, "weights"))
