"""`run_ranks(n, fn)`: runs `fn(rank, *args)` on n real processes that can form a Gloo group.

`fn` must be at the top level of a module; the results are in order of rank. Processes are
forks of a server that has imported torch, and those of a pool live on between calls; each call gets a
port of its own. A rank that fails shows its traceback, and a rank that hangs is killed with its pool.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import multiprocessing
import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from fork_server import Child, Request, shared_server

_pools: dict[int, Pool] = {}
# Ports that the kernel gives to nobody who asks for any, as connections and other servers do.
_FIRST_PORT = 12_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


class RankFailed(AssertionError):
    """A rank raised, hung or died."""


class Pool:
    """n processes, each connected by a pipe."""

    def __init__(self, size: int) -> None:
        self.pipes: list[Connection] = []
        self.processes: list[Child] = []
        key = bytes(multiprocessing.current_process().authkey)
        with Listener(family="AF_UNIX") as listener:
            for rank in range(size):
                serve = functools.partial(_serve, listener.address, key, rank, size)
                request = Request(f"rank{rank}", [], dict(os.environ), fault=pickle.dumps(serve))
                self.processes.append(Child(shared_server().start(request)))
                self.pipes.append(listener.accept())

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join()
            pipe.close()


def free_port() -> int:
    """Returns a port that is still free when its receiver listens on it.

    All test processes take turns, so none gets it again before thousands of others.
    """
    end = 32_768
    with contextlib.suppress(OSError):
        end = max(int(_EPHEMERAL.read_text().split()[0]), _FIRST_PORT + 5000)
    with (Path(tempfile.gettempdir()) / f"paceline-test-ports-{os.getuid()}").open("a+") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        turn.seek(0)
        port = int(turn.read() or 0)
        while True:
            port = port + 1 if _FIRST_PORT <= port < end - 1 else _FIRST_PORT
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind(("", port))
                break
        turn.truncate(0)
        turn.write(str(port))
    return port


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 200.0,
    grace_s: float = 5.0,
) -> list[Any]:
    """Calls `function(rank, *args)` on each of `size` ranks and returns their results.

    After the first failure the other ranks have `grace_s` left, because they may wait for it for ever.
    """
    pool = _pools.get(size) or _pools.setdefault(size, Pool(size))
    port = free_port()
    for pipe in pool.pipes:
        pipe.send((function, args, port))
    results: dict[int, Any] = {}
    failures: list[tuple[int, str]] = []
    deadline = time.monotonic() + timeout_s
    while len(results) + len(failures) < size and time.monotonic() < deadline:
        for rank, pipe in enumerate(pool.pipes):
            if rank in results or rank in dict(failures) or not pipe.poll(0.02):
                continue
            try:
                ok, value = pipe.recv()
            except EOFError:
                ok, value = False, f"rank {rank} died"
            if ok:
                results[rank] = value
            else:
                failures.append((rank, value))
                deadline = min(deadline, time.monotonic() + grace_s)
    if len(results) == size:
        return [results[rank] for rank in range(size)]
    _pools.pop(size).kill()
    if failures:
        rank, text = failures[0]
        others = "".join(f"\n\nthen rank {other}:\n{why}" for other, why in failures[1:])
        raise RankFailed(f"rank {rank} of {size} failed first:\n{text}{others}")
    missing = sorted(set(range(size)) - set(results))
    raise RankFailed(f"ranks {missing} of {size} did not return within {timeout_s} s")


def _serve(address: str, key: bytes, rank: int, size: int) -> None:
    """The loop of one rank. The key is what lets tensors pass between processes."""
    multiprocessing.current_process().authkey = key
    pipe = Client(address)
    while True:
        try:
            function, args, port = pipe.recv()
        except EOFError:
            os._exit(0)
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )  # fmt: skip
        try:
            answer = (True, function(rank, *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)


@atexit.register
def _kill_pools() -> None:
    for pool in _pools.values():
        pool.kill()
