"""A server that has imported torch and Paceline, and forks processes that run `paceline`, or a function.

For each `Request` on a pipe a process runs `paceline ARGUMENTS` as `python -m paceline` does, but in
tenths of a second instead of seconds. The server never computes: torch's threads do not survive a fork,
so none may exist. The new process is a child of the requester, which must be a subreaper: the server
forks twice, and the process in between ends at once.

The launcher of `paceline train --nproc-per-node` starts its ranks through its own server, which it
forks before it has any thread. So its ranks are its children, as with a real launcher.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
NAME = "fork-server"
# Dumps the stacks of all threads into the process's log; sent to a process that hangs.
STACKS_SIGNAL = signal.SIGRTMIN + 5
_PRELOADED = (
    "paceline.cli.app", "paceline.train.display", "paceline.cli.launch", "paceline.train.run",
    "paceline.cli.train", "paceline.cli.lr_find", "paceline.cli.evaluate", "paceline.cli.listings",
    "paceline.cli.summary", "paceline.cli.doctor", "paceline.cli.tune", "paceline.cli.plan",
    "paceline.cli.data", "paceline.cli.bench",
    "paceline.train.evaluate", "numpy.random", "torch._dynamo", "paceline.trainer",
    "torch.utils.serialization.config", "numpy.ma", "numpy.ctypeslib",
)  # fmt: skip
# What typer and rich import when they parse the first command line, or torch with the first step; other
# versions have no such modules.
_PRELOADED_WHERE_PRESENT = ("typer._adapters", "typer._click.decorators", "rich._emoji_codes",
                            "torch.profiler._cupti_monitor", "pydantic.type_adapter")  # fmt: skip
_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36
_CLONE_NEWNET = 0x40000000
_CAP_VERSION_3 = 0x20080522
_PASS_OVER = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Request:
    """One process. `out` and `err`: files to append to; empty keeps what the server has."""

    name: str
    arguments: list[str]
    env: dict[str, str]
    cwd: str = ""
    out: str = ""
    err: str = ""
    # The network namespace to run in, by the name that `ip netns` gives it.
    namespace: str = ""
    # Whether permissions of files count, though the user is root.
    obeys_permissions: bool = False
    # Whether it is a launcher, which starts further processes.
    launches: bool = False
    # Whether the interpreter is torn down at the end, which in a fork copies all its memory.
    tears_down: bool = False
    # A pickled function to call first: a fault of `faults.py`, or one that does not return. Of a launcher
    # it is called in each of its ranks.
    fault: bytes = b""


def set_name(name: str) -> None:
    """Sets the name that `/proc/PID/stat` shows in brackets."""
    _libc.prctl(_PR_SET_NAME, name[:15].encode(), 0, 0, 0)


def become_subreaper() -> None:
    """Makes orphans below this process its children."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def serve(channel: Connection) -> Request:
    """Forks a process for each request.

    Returns in each of them, never in the server itself, which ends with its requester.
    """
    while True:
        try:
            request = channel.recv()
        except (EOFError, ConnectionError):
            os._exit(0)
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if os.fork() == 0:
                set_name(request.name)  # from here on it is no server
                _set_environment(request.env)  # before its requester knows of it, as after an exec
                os.write(writer, struct.pack("<i", os.getpid()))
                while os.getppid() == between:  # its parent must be the requester before it looks
                    time.sleep(0.0005)
                os.close(reader)
                os.close(writer)
                return request  # type: ignore[no-any-return]
            os._exit(0)
        os.close(writer)
        (pid,) = struct.unpack("<i", os.read(reader, 4))
        os.close(reader)
        os.waitpid(between, 0)
        with contextlib.suppress(ConnectionError):  # a launcher that was killed meanwhile
            channel.send(pid)


def preload() -> None:
    """Imports what a training imports, so that its forks need not."""
    for name in _PRELOADED:
        importlib.import_module(name)
    for name in _PRELOADED_WHERE_PRESENT:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def main() -> Request:
    """The server; in its forks, `paceline`. Nothing of the server is on the stack of either."""
    channel = Connection(int(sys.argv[1]))
    preload()
    import torch
    import typer.main

    from paceline.cli.app import app

    # typer builds all commands anew for every command line: here once, for all forks.
    typer.main.get_command = functools.cache(typer.main.get_command)
    typer.main.get_command(app)

    torch.set_num_threads(1)
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"{threads} threads exist before the first fork"
    set_name(NAME)
    gc.collect()
    gc.freeze()
    channel.send("ready")
    request = serve(channel)
    channel.close()
    prepare(request)
    if request.launches:
        request = _launcher(request)
    sys.argv = ["paceline", *request.arguments]
    return request


def prepare(request: Request) -> None:
    """Makes a fork what a new process would be, together with `_set_environment`."""
    os.setsid()
    if request.cwd:
        os.chdir(request.cwd)
    for number, path in ((1, request.out), (2, request.err)):
        if path:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(descriptor, number)
            os.close(descriptor)
    os.closerange(3, 1024)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)
    if request.namespace:
        with open(f"/run/netns/{request.namespace}") as namespace:  # noqa: PTH123
            _checked(_libc.setns(namespace.fileno(), _CLONE_NEWNET))
    if request.obeys_permissions:
        _obey_permissions(True)


def _set_environment(values: dict[str, str]) -> None:
    """Sets the environment, also in the server's memory that `/proc/PID/environ` shows."""
    os.environ.clear()
    os.environ.update(values)  # copies: nothing points into that memory any more
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    text = b"".join(b"%b=%b\0" % pair for pair in os.environb.items())
    if len(text) <= end - begin:  # a kernel that does not say where it is has 0 in both
        ctypes.memset(begin, 0, end - begin)
        ctypes.memmove(begin, text, len(text))


def _checked(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _obey_permissions(obeyed: bool) -> None:
    """Drops or restores the two capabilities by which root ignores the permissions of files."""
    header = (ctypes.c_uint32 * 2)(_CAP_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)()
    _checked(_libc.capget(header, data))
    effective, permitted = data[0], data[1]
    data[0] = effective & ~_PASS_OVER if obeyed else effective | permitted & _PASS_OVER
    _checked(_libc.capset(header, data))


@contextlib.contextmanager
def permissions_obeyed() -> Iterator[None]:
    """Makes permissions of files count for this thread, also if the user is root."""
    _obey_permissions(True)
    try:
        yield
    finally:
        _obey_permissions(False)


def _launcher(request: Request) -> Request:
    """Gives a launcher its own server. Returns in the launcher and in each rank."""
    channel, theirs = Pipe()
    become_subreaper()
    set_name(NAME)  # also of the fork, from its first moment on
    if os.fork() == 0:
        channel.close()
        rank = serve(theirs)
        theirs.close()
        prepare(rank)
        return rank
    set_name(request.name)
    theirs.close()

    from paceline.cli import launch

    def start_rank(arguments: Sequence[str], *variables: Mapping[str, str]) -> AdoptedChild:
        env = dict(os.environ)
        for some in variables:
            env |= some
        rank = Request(
            f"rank{env['RANK']}", list(arguments), env, obeys_permissions=request.obeys_permissions,
            tears_down=request.tears_down, fault=request.fault,
        )  # fmt: skip
        return AdoptedChild(_start(channel, rank), arguments)

    launch.start_rank = start_rank
    return request


class AdoptedChild(subprocess.Popen[bytes]):
    """A `Popen` of a child that another process has started for this one."""

    def __init__(self, pid: int, args: Any) -> None:
        self.args, self.pid, self.returncode = args, pid, None
        self.stdin = self.stdout = self.stderr = None
        self._child_created = True
        self._waitpid_lock = threading.Lock()


class Child:
    """A process that the server has forked for this one, with the interface of multiprocessing's."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.exitcode: int | None = None
        self._descriptor = os.pidfd_open(pid)

    def join(self, timeout_s: float | None = None) -> None:
        if self.exitcode is None and select.select([self._descriptor], [], [], timeout_s)[0]:
            self.exitcode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._descriptor)

    def is_alive(self) -> bool:
        self.join(0)
        return self.exitcode is None

    def kill(self) -> None:
        if self.is_alive():
            os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """The requester's side: starts the server, and ends it."""

    def __init__(self) -> None:
        become_subreaper()
        self._channel, theirs = Pipe()
        threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        # pytest calls a module `tests.x.test_y`, which pickled functions bear.
        own = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT)]
        paths = filter(None, [*own, os.environ.get("PYTHONPATH")])
        env = {"TORCH_CPP_LOG_LEVEL": "ERROR"} | os.environ | dict.fromkeys(threads, "1")
        env["ROOM"] = "-" * (16 << 10)  # for the environments of forks
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fork_server", str(theirs.fileno())], stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()], env=env | {"PYTHONPATH": os.pathsep.join(paths)},
        )  # fmt: skip
        theirs.close()
        if self._channel.recv() != "ready":
            raise RuntimeError("the fork server did not start")

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, request: Request) -> int:
        """The new process's id."""
        return _start(self._channel, request)

    def close(self) -> None:
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)


@functools.cache
def shared_server() -> ForkServer:
    """One for all tests of this process; it ends with it."""
    server = ForkServer()
    atexit.register(server.close)
    return server


def _start(channel: Connection, request: Request) -> int:
    channel.send(request)
    return int(channel.recv())


def end(code: object) -> None:
    """Ends the process as the interpreter does, without freeing everything."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    started = main()
    if started.fault and not started.launches:
        pickle.loads(started.fault)()
    from paceline.__main__ import main as paceline

    try:
        paceline()
    except SystemExit as left:
        if started.tears_down:
            raise
        end(left.code)
