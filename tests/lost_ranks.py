"""`run_members(n, fn, folder)`: n ranks that may be lost, and a supervisor that reports their losses.

`fn(rank, *args)` must be at the top level of a module. Each rank is a fork of a server that has imported
torch. The supervisor is this process: it hosts the store, and reports each rank that ends with another
exit code than 0 in the log of losses. It kills ranks that others have given up, and leaves all others
alone.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from fork_server import Child, Request, shared_server
from paceline.comm.generations import SUPERVISOR_VARIABLE
from paceline.comm.losses import LossLog
from ranks import free_port

_POLL_S = 0.002


def run_members(
    size: int, function: Callable[..., Any], folder: Path, *args: Any, timeout_s: float = 200.0
) -> dict[int, Any]:
    """Returns the results of the ranks that have ended with exit code 0, by rank.

    Raises:
        AssertionError: If a rank has raised an exception, or has not ended in time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, multi_tenant=True,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    log = LossLog(store)
    children = {}
    for rank in range(size):
        env = {
            "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(size), "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": f"lost-{port}",
            "TORCHELASTIC_USE_AGENT_STORE": "True", SUPERVISOR_VARIABLE: str(os.getpid()),
            "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        act = functools.partial(_act, str(folder), rank, function, args)
        request = Request(f"member{rank}", [], dict(os.environ) | env, fault=pickle.dumps(act))
        children[rank] = Child(shared_server().start(request))
    requests = log.own_connection()
    threading.Thread(target=_evict, args=(requests, children), daemon=True).start()
    deadline = time.monotonic() + timeout_s
    waiting = dict(children)
    while waiting and time.monotonic() < deadline:
        for rank, child in list(waiting.items()):
            if not child.is_alive():
                del waiting[rank]
                if child.exitcode:
                    log.report([rank], f"rank {rank} ended with {child.exitcode}")
        time.sleep(_POLL_S)
    for child in waiting.values():
        child.kill()
        child.join()
    assert not waiting, f"ranks {sorted(waiting)} have not ended"
    results = {}
    for rank in range(size):
        path = folder / f"{rank}.pickle"
        if path.exists():
            ok, value = pickle.loads(path.read_bytes())
            assert ok, f"rank {rank}:\n{value}"
            results[rank] = value
    return results


def _evict(log: LossLog, children: dict[int, Child]) -> None:
    with contextlib.suppress(RuntimeError):  # the store has ended
        while True:
            for member, _ in log.evictions():
                os.kill(children[member].pid, signal.SIGKILL)


def _act(folder: str, rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        answer = (True, function(rank, *args))
    except BaseException:
        answer = (False, traceback.format_exc())
    path = Path(folder) / f"{rank}.part"
    path.write_bytes(pickle.dumps(answer))
    path.rename(path.with_suffix(".pickle"))
    os._exit(0 if answer[0] else 1)
