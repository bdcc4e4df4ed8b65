"""`EmulatedCluster`: hosts as network namespaces, connected by a switch.

Runs processes on the hosts, under torchrun or directly, and can slow, cut and restore links. It is
torn down at the end of the context, at exit and on SIGTERM, SIGINT and SIGHUP; after SIGKILL the next
cluster's `sweep` removes what is left.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Self

from benchmarks.cluster import link_probe
from benchmarks.cluster.job import (
    ClusterJob,
    Start,
    as_program,
    host_environment,
    plain_starts,
    torchrun_starts,
)
from benchmarks.cluster.link_probe import LinkSpeed
from benchmarks.cluster.network import (
    MAX_HOSTS,
    HostLink,
    Namespace,
    abandoned_namespaces,
    bits_per_s,
    host_address,
    make_switch,
    missing_prerequisite,
    new_tag,
    owner_is_gone,
)
from paceline.core.errors import ConfigError, LaunchError
from paceline.core.host import SignalContext

# Only signals with Python's default handler are handled; other handlers are kept.
_REPLACED = (signal.SIG_DFL, signal.default_int_handler)
_NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
Rates = str | Sequence[str | None] | None
_FIRST_PORT = 29500
_PROBE_LIMIT_S = 40.0


class EmulatedCluster:
    """A context manager that builds the cluster and removes it.

        with EmulatedCluster(2, rate="200mbit") as cluster:
            ended = cluster.torchrun(["train.py"], ranks=[2, 1]).wait(timeout_s=60)

    `rate` is one for all hosts or one for each; None does not limit the link.
    """

    def __init__(self, hosts: int, rate: Rates = None) -> None:
        if not 1 <= hosts <= MAX_HOSTS:
            raise ConfigError("hosts", hosts, f"must be 1 to {MAX_HOSTS}")
        self._rates = _one_for_each(hosts, rate)
        self._owner_pid = os.getpid()
        self._tag = new_tag()
        self._switch = Namespace(f"{self._tag}-switch")
        self._hosts = [Namespace(f"{self._tag}-host{number}") for number in range(hosts)]
        self._links = [HostLink(self._switch, host, n) for n, host in enumerate(self._hosts)]
        self._folder = Path(tempfile.gettempdir()) / self._tag
        self._jobs: list[ClusterJob] = []
        self._numbers = itertools.count()

    @property
    def hosts(self) -> int:
        return len(self._hosts)

    @property
    def namespaces(self) -> list[str]:
        """Names of the hosts' namespaces, then the switch's, as in `ip netns list`."""
        return [namespace.name for namespace in (*self._hosts, self._switch)]

    def address(self, host: int) -> str:
        return host_address(host)

    def __enter__(self) -> Self:
        problem = missing_prerequisite()
        if problem:
            raise LaunchError(f"no emulated cluster: {problem}")
        self.sweep()
        live_clusters.add(self)
        try:
            with live_clusters:
                self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def _build(self) -> None:
        self._folder.mkdir(mode=0o700)
        self._switch.add()
        make_switch(self._switch)
        for host, link, rate in zip(self._hosts, self._links, self._rates, strict=True):
            host.add()
            link.make()
            if rate is not None:
                link.shape(rate)

    def close(self) -> None:
        """Kills every process on the hosts and removes the cluster. A second call does nothing."""
        if os.getpid() != self._owner_pid:  # a forked process leaves the context
            return
        problems = []
        with live_clusters:
            for job in self._jobs:
                job.kill_started()
            for namespace in (*self._hosts, self._switch):
                try:
                    namespace.remove()
                except LaunchError as error:  # still remove the others
                    problems.append(error)
            for job in self._jobs:
                job.reap()
            shutil.rmtree(self._folder, ignore_errors=True)
        live_clusters.discard(self)
        if problems:
            raise problems[0]

    @staticmethod
    def sweep() -> list[str]:
        """Removes namespaces of killed owners with their processes; returns the names."""
        abandoned = abandoned_namespaces()
        for namespace in abandoned:
            namespace.remove()
        for folder in Path(tempfile.gettempdir()).glob("paceline-*"):
            if owner_is_gone(folder.name):
                shutil.rmtree(folder, ignore_errors=True)
        return [namespace.name for namespace in abandoned]

    def torchrun(
        self,
        command: Sequence[str],
        ranks: int | Sequence[int],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> ClusterJob:
        """Starts `command`, a script, `-m MODULE` or a program, under torchrun with one agent per host.

        `ranks` is one number for all hosts, or one for each of the first hosts.
        """
        counts, (port, logs) = self._counts(ranks), self._job_place()
        return self._started(torchrun_starts(command, counts, port, env or {}, logs), cwd)

    def ranks(self, command: Sequence[str], ranks: int | Sequence[int]) -> ClusterJob:
        """Starts `command` on every rank with torchrun's environment variables but without agents:
        when one rank fails the others are not ended."""
        counts, (port, logs) = self._counts(ranks), self._job_place()
        return self._started(plain_starts(command, counts, port, {}, logs))

    def start(
        self,
        host: int,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> ClusterJob:
        """Starts one program on one host; it counts as the job's rank 0."""
        self._check(host)
        program, own = as_program(command), host_environment(env or {})
        start = Start(host, program, own, self._job_place()[1], ("{stream}",))
        return self._started([start], cwd)

    def set_rate(self, rate: str | None, host: int | None = None) -> None:
        """Changes the link of one host, or of all."""
        for number in range(self.hosts) if host is None else [host]:
            self._check(number)
            self._links[number].shape(rate)

    def cut(self, host: int) -> None:
        """Drops all packets from and to the host, like a pulled cable."""
        self._check(host)
        self._links[host].cut()

    def reconnect(self, host: int) -> None:
        self._check(host)
        self._links[host].reconnect()

    def measure_link(self, sender: int, receiver: int) -> LinkSpeed:
        """Bandwidth and round trip of one TCP connection between two hosts; takes about a second."""
        probe = str(Path(link_probe.__file__))
        server = self.start(receiver, [sys.executable, probe, "serve"])
        try:
            server.wait_until(lambda: server.ended().out[0], _PROBE_LIMIT_S)
            client = self.start(sender, [sys.executable, probe, "send", self.address(receiver)])
            ended = client.wait(_PROBE_LIMIT_S)
        finally:
            server.kill()
        if not ended.ok:
            reason = (ended.err[0].strip().splitlines() or ["?"])[-1]
            raise LaunchError(f"host {sender} cannot measure its link to host {receiver}: {reason}")
        return LinkSpeed(*json.loads(ended.out[0]))

    def _started(self, starts: Sequence[Start], cwd: Path | None = None) -> ClusterJob:
        self._jobs.append(ClusterJob(starts, self._hosts, cwd or Path.cwd()))
        return self._jobs[-1]

    def _job_place(self) -> tuple[int, Path]:
        """A port that no earlier job used, and a folder for the output."""
        number = next(self._numbers)
        return _FIRST_PORT + number % 1000, self._folder / f"job{number}"

    def _counts(self, ranks: int | Sequence[int]) -> list[int]:
        counts = [ranks] * self.hosts if isinstance(ranks, int) else list(ranks)
        if not 1 <= len(counts) <= self.hosts or min(counts) < 1:
            raise ConfigError(
                "ranks", ranks, f"does not fit {self.hosts} hosts", "give each host at least one"
            )
        return counts

    def _check(self, host: int) -> None:
        if not 0 <= host < self.hosts:
            raise ConfigError("host", host, f"the cluster has hosts 0 to {self.hosts - 1}")


def _one_for_each(hosts: int, rate: Rates) -> list[str | None]:
    rates = [rate] * hosts if rate is None or isinstance(rate, str) else list(rate)
    if len(rates) != hosts:
        raise ConfigError("rate", rates, f"must be one, or one for each of {hosts} hosts")
    for value in rates:
        if value is not None:
            bits_per_s(value)
    return rates


class LiveClusters:
    """The open clusters of this process, which are closed at exit and on signals. The first one
    installs the signal handlers, and the last one removes them; a signal is raised again after the
    tear-down."""

    def __init__(self) -> None:
        self._clusters: list[EmulatedCluster] = []
        self._signals: SignalContext | None = None
        self._at_work = 0
        self._waiting: int | None = None

    def add(self, cluster: EmulatedCluster) -> None:
        self._clusters.append(cluster)
        if self._signals is None and threading.current_thread() is threading.main_thread():
            numbers = [number for number in _NUMBERS if signal.getsignal(number) in _REPLACED]
            self._signals = SignalContext(numbers, self._on_signal)
            self._signals.__enter__()

    def discard(self, cluster: EmulatedCluster) -> None:
        if cluster in self._clusters:
            self._clusters.remove(cluster)
        if not self._clusters:
            self._restore_signals()

    def __enter__(self) -> None:
        """Signals are deferred while namespaces are created or removed."""
        self._at_work += 1

    def __exit__(self, *error: object) -> None:
        self._at_work -= 1
        if self._waiting is not None and self._at_work == 0:
            number, self._waiting = self._waiting, None
            self._on_signal(number, None)

    def close_all(self) -> None:
        for cluster in list(reversed(self._clusters)):
            with contextlib.suppress(LaunchError):
                cluster.close()

    def forget(self) -> None:
        """Forgets the clusters in a forked process, because its parent owns them."""
        self._clusters.clear()
        self._restore_signals()
        self._at_work, self._waiting = 0, None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._at_work:
            self._waiting = number
            return
        self.close_all()
        self._restore_signals()
        os.kill(os.getpid(), number)

    def _restore_signals(self) -> None:
        # Only the main thread may set signal handlers.
        if self._signals and threading.current_thread() is threading.main_thread():
            self._signals.__exit__(None, None, None)
            self._signals = None


live_clusters = LiveClusters()
atexit.register(live_clusters.close_all)
os.register_at_fork(after_in_child=live_clusters.forget)
