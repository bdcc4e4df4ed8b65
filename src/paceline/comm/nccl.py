"""What is particular to NCCL: its environment, several ranks on one GPU, and leaving after a failure.

torch's own NCCL watchdog aborts the process with a C++ stack trace when a peer is gone. Paceline's
watchdog (`watchdog.py`) knows which rank is missing and in which collective, so torch's is told to leave
the error to us. Variables that a user has set stay as they are.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d

from paceline.core.errors import ConfigError
from paceline.core.topology import Topology

_ENVIRONMENT = {
    # 0: no abort of the process; NCCL's errors stay readable, and our watchdog ends the rank.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # After a CUDA error torch's watchdog would throw in its own thread, which ends in SIGABRT.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
_MPS_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def prepare_environment(topology: Topology, *, share_gpus: bool) -> None:
    """Before the process group is created; NCCL and torch read the environment only then."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not share_gpus or topology.world_size == 1:
        return
    require_mps()
    # NCCL refuses two ranks of one host on one GPU. Ranks with different host ids take each other for
    # remote and talk through sockets.
    os.environ.setdefault("NCCL_HOSTID", f"{socket.gethostname()}-rank{topology.rank}")
    if topology.master_addr in _LOOPBACK:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def require_mps() -> None:
    """Without MPS the processes' kernels take turns, and a collective waits for its peer forever."""
    pipes = Path(os.environ.get(_MPS_PIPES) or "/tmp/nvidia-mps")
    if not (pipes / "control").exists():
        raise ConfigError(
            "comm.share_gpus", True, f"NVIDIA MPS does not run (no {pipes / 'control'})",
            "start it with `nvidia-cuda-mps-control -d`",
        )  # fmt: skip


def abort(release_graphs: Iterable[Callable[[], None]], limit_s: float) -> None:
    """Ends all process groups without waiting for the other ranks, within about `limit_s` seconds.

    The abort ends kernels that wait for a lost rank. It returns once no CUDA graph refers to the
    communicators any more, so graphs are destroyed first. A thread does it, because after a CUDA error
    or on a stuck device the calls may not return.
    """

    def run() -> None:
        for release in release_graphs:
            with suppress(
                Exception
            ):  # a lost context; the others are released and aborted all the same
                release()
        with suppress(Exception):  # likewise, or the groups are gone already
            if dist.is_initialized():
                distributed_c10d._abort_process_group()

    thread = threading.Thread(target=run, name="paceline-abort", daemon=True)
    thread.start()
    thread.join(limit_s)
