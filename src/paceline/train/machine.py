"""Chooses device and threads of a rank, describes its machine, and sets random seeds."""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import shlex
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import numpy
import PIL
import torch

from paceline.comm.settings import CommSettings
from paceline.config import RunConfig
from paceline.core.errors import ConfigError, RunError
from paceline.core.host import ask_for_connections, available_cores, connections
from paceline.core.topology import Topology
from paceline.version import __version__

# The local launcher sets this variable for its ranks, whose command lines lack the launcher's options.
COMMAND_VARIABLE = "PACELINE_COMMAND"


def command_line() -> str:
    """Returns the command that started this run, quoted for a shell."""
    if started := os.environ.get(COMMAND_VARIABLE):
        return started
    program = Path(sys.argv[0])
    name = "paceline" if program.name in ("paceline", "__main__.py") else program.name
    return shlex.join([name, *sys.argv[1:]])


def launcher_name(topology: Topology) -> str:
    """Returns the name of the launcher for display. Our own launcher uses torchrun's agent."""
    own = topology.launcher == "torchrun" and COMMAND_VARIABLE in os.environ
    return "--nproc-per-node" if own else topology.launcher


def choose_device(config: RunConfig, topology: Topology) -> torch.device:
    """Chooses the device of this rank: the CPU, or a GPU of its own if the host has GPUs.

    Ranks can share a GPU over Gloo, or over NCCL with `comm.share_gpus`.

    Args:
        config: The settings of the run.
        topology: This rank, and the ranks of its node.

    Raises:
        ConfigError: If there are too few GPUs.
    """
    ask_for_connections(topology.local_world_size if config.comm.share_gpus else 1)
    wanted = config.run.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if torch.cuda.device_count() == 0:
        raise ConfigError("run.device", "cuda", "this host has no CUDA device", "use --device cpu")
    device = choose_gpu(topology, config.comm)
    torch.cuda.set_device(device)
    return device


def choose_gpu(topology: Topology, settings: CommSettings) -> torch.device:
    """Chooses the GPU of this rank.

    Args:
        topology: This rank, and the ranks of its node.
        settings: The section `[comm]`.

    Raises:
        ConfigError: If several NCCL ranks would use one GPU.
    """
    count = torch.cuda.device_count()
    shared = topology.local_world_size > count and not has_gpu_of_its_own(topology)
    if shared and settings.backend != "gloo" and not settings.share_gpus:
        raise ConfigError(
            "ranks of this node", topology.local_world_size,
            f"this node has {count} GPU(s), and NCCL needs one for each rank",
            f'start {count} (--nproc-per-node {count}), or share GPUs with backend="gloo" (comm.backend) '
            "or, under NVIDIA MPS, with share_gpus=True (comm.share_gpus)",
        )  # fmt: skip
    return torch.device("cuda", topology.local_rank % count)


def has_gpu_of_its_own(topology: Topology) -> bool:
    """Returns True if SLURM hides the other ranks' GPUs from this rank (`srun --gpus-per-task=1`)."""
    asked = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPU_BIND")
    return topology.launcher == "slurm" and any(name in os.environ for name in asked)


def choose_threads(config: RunConfig, topology: Topology) -> int:
    """Returns the number of threads that torch should use: the node's cores divided by its ranks."""
    if config.run.threads:
        return config.run.threads
    # srun binds each task to its own cores, so these cores are not divided.
    own = os.environ.get("SLURM_CPUS_PER_TASK", "") if topology.launcher == "slurm" else ""
    if own.isdecimal() and int(own) > 0:
        return int(own)
    return max(1, available_cores() // topology.local_world_size)


def versions() -> dict[str, str]:
    """Returns the versions of the software that affects results."""
    known = {
        "paceline": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # a plain str: checkpoints allow nothing else
        "numpy": numpy.__version__,
        "pillow": PIL.__version__,
    }
    if torch.version.cuda:
        known["cuda"] = torch.version.cuda
    return known


def hardware(device: torch.device) -> dict[str, str]:
    """Returns a description of this rank's host and `device`."""
    known = {
        "device": str(device),
        "cpu": _cpu_name(),
        "cores": str(available_cores()),
        "memory_gib": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f}",
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        known["gpu"] = properties.name
        known["gpu_memory_gib"] = f"{properties.total_memory / 2**30:.0f}"
        known["gpus"] = str(torch.cuda.device_count())
        known["gpu_connections"] = connections()
    return known


def peak_memory_bytes(device: torch.device) -> int:
    """Returns the peak memory of this process: reserved GPU memory, or resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # in KiB on Linux


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def out_of_memory(error: Exception, where: str, remedy: str) -> RunError | None:
    """Returns the error for the user if `error` means that GPU or CPU memory ran out, else None."""
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    # The CPU allocator raises a plain RuntimeError.
    if not known and "can't allocate memory" not in str(error):
        return None
    return RunError(f"out of memory {where}", remedy)


@contextmanager
def explain_out_of_memory(where: str, remedy: str) -> Iterator[None]:
    """Replaces out-of-memory errors inside the context by the error that `out_of_memory` returns."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        fault = out_of_memory(error, where, remedy)
        if fault is None:
            raise
        raise fault from error


def derive_seed(*parts: int | str) -> int:
    """Returns a seed of 63 bits, which is a hash of all arguments."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_micro_batch(seed: int, step: int, number: int) -> None:
    """Seeds torch's generators for micro-batch `number` of `step`.

    The random numbers of dropout thus depend neither on the rank that computes the micro-batch nor on
    earlier steps. Resumed runs, and runs on a different number of ranks, draw the same random numbers.
    """
    key = derive_seed(seed, step, number)
    # Not `torch.manual_seed`, which formats a stack trace for each kind of device that is not in use.
    # That takes a millisecond in every step.
    torch.default_generator.manual_seed(key)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(key)


def seed_initial_weights(seed: int) -> None:
    """Seeds torch's generators for the initial weights."""
    torch.manual_seed(derive_seed(seed, "weights"))


def run_eagerly() -> AbstractContextManager[None]:
    """Returns a context in which compiled modules run eagerly."""
    # No module is compiled unless the compiler is imported, and the import takes more than a second.
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance
