"""Runs of the command line in processes of their own, with a fault of `faults.py` to inject.

Processes are forked from a server that has imported torch already, so that each starts in tenths of a
second. They can be killed for real, and none outlives its test.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fork_server import Child, Request, shared_server
from ranks import free_port

if TYPE_CHECKING:
    from benchmarks.cluster import EmulatedCluster

_LAUNCHER_PREFIXES = ("SLURM_", "OMPI_", "PMI", "PRTE_", "TORCHELASTIC_", "PACELINE_", "PET_")
_LAUNCHER_NAMES = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR",
    "MASTER_PORT",
}  # fmt: skip

# Images so small that starting and saving cost more than the steps.
# 100 samples in batches of 16: the seventh batch spans the epoch's end, the last (13th) is short.
IMAGES = [
    "--set", "data.image_size=12", "--set", "data.channels=1", "--set", "data.mean=[0.5]",
    "--set", "data.std=[0.25]", "--set", "data.eval_resize=0", "--set", "data.augment=pad_crop",
    "--set", "data.crop_padding=2", "--set", "run.threads=1", "--model", "resnet_tiny",
    "--lr", "0.05", "--warmup-epochs", "0.5", "--epochs", "2", "--device", "cpu",
]  # fmt: skip
SYNTHETIC = [
    "--set", "data.source=synthetic", "--set", "data.synthetic_samples=100",
    "--set", "data.synthetic_classes=4", "--set", "run.eval_details=off",
]  # fmt: skip
TOTAL_STEPS = 13


def small(*more: str) -> list[str]:
    """The arguments of a training on synthetic images that takes a second."""
    return ["train", *SYNTHETIC, *IMAGES, "--global-batch-size", "16", *more]


def small_on(data_dir: Path | str, *more: str) -> list[str]:
    """The same on a data set of one's own, of the images of `data_sets`."""
    own = ["--data-dir", str(data_dir), *IMAGES, "--set", "data.image_size=28"]
    return ["train", *own, "--global-batch-size", "8", *more]


@dataclass(frozen=True)
class Done:
    """The end of a process; a negative code is the signal that ended it."""

    code: int | None
    out: str
    err: str

    def error_line(self) -> str:
        """The one line of a failure; there must not be another."""
        assert self.code not in (0, None), f"code {self.code}\n{self.out}\n{self.err}"
        lines = self.err.splitlines()
        assert len(lines) == 1, f"not one line:\n{self.err}"
        assert lines[0].startswith("paceline: error: "), self.err
        assert "Traceback" not in self.out
        return lines[0].removeprefix("paceline: error: ")


Call = Callable[..., Done]


def is_launchers(name: str) -> bool:
    """Whether a launcher sets this environment variable for its ranks."""
    return name in _LAUNCHER_NAMES or name.startswith(_LAUNCHER_PREFIXES)


class CliProcess:
    """A running `paceline ARGUMENTS`."""

    def __init__(
        self,
        arguments: Sequence[str],
        cwd: Path,
        fault: Any,
        extra: Mapping[str, str],
        namespace: str = "",
    ) -> None:
        env = {name: value for name, value in os.environ.items() if not is_launchers(name)}
        launches = bool({"--nproc-per-node", "--ranks"} & set(arguments))
        name = "launcher" if launches else f"rank{extra.get('RANK', '0')}"
        self._log = cwd / f".cli-{free_port()}-{name}"
        request = Request(
            name, list(arguments), env | dict(extra), str(cwd), f"{self._log}.out",
            f"{self._log}.err", namespace, launches=launches,
            fault=pickle.dumps(fault) if fault else b"",
        )  # fmt: skip
        self.process = Child(shared_server().start(request))

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def wait(self, timeout_s: float = 200.0) -> Done:
        """Waits for the end; after the time-out the process is killed and the test fails."""
        self.process.join(timeout_s)
        code = self.process.exitcode
        if code is None:
            self.kill()
        out, err = (Path(f"{self._log}.{name}").read_text() for name in ("out", "err"))
        assert code is not None, f"still running after {timeout_s} s\n{out}\n{err}"
        return Done(code, out, err)

    def output(self) -> str:
        """Standard output so far."""
        file = Path(f"{self._log}.out")
        return file.read_text() if file.exists() else ""

    def wait_until(self, reached: Callable[[], object], timeout_s: float = 200.0) -> None:
        """Waits for `reached()`; fails where the process ends, or the time runs out, first."""
        deadline = time.monotonic() + timeout_s
        while not reached():
            if not self.process.is_alive() or time.monotonic() > deadline:
                self.kill()
                done = self.wait()
                raise AssertionError(f"was not reached; code {done.code}\n{done.out}\n{done.err}")
            time.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@contextlib.contextmanager
def started(
    arguments: Sequence[str], cwd: Path, fault: Any = None, **extra: str
) -> Iterator[CliProcess]:
    """One process, without a launcher; `fault` is a partial of a function of `faults.py`."""
    process = CliProcess(arguments, cwd, fault, extra)
    try:
        yield process
    finally:
        process.kill()


def run(
    arguments: Sequence[str], cwd: Path, fault: Any = None, timeout_s: float = 200.0, **extra: str
) -> Done:
    with started(arguments, cwd, fault, **extra) as process:
        return process.wait(timeout_s)


@contextlib.contextmanager
def started_ranks(
    arguments: Sequence[Sequence[str]],
    cwd: Path,
    faults: Sequence[Any] | None = None,
    master_port: int | None = None,
    job_id: str | None = None,
    cluster: EmulatedCluster | None = None,
    per_host: Sequence[int] = (),
) -> Iterator[list[CliProcess]]:
    """One rank for each list of arguments, in the environment that a launcher sets.

    The default job id depends on the port, so that ranks with different settings are of one job.
    `cluster`: as many ranks on each of its hosts, or those of `per_host`."""
    port, size = str(master_port or free_port()), len(arguments)
    hosts = cluster.hosts if cluster else 1
    places = [
        {
            "RANK": "",
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(ranks),
            "GROUP_RANK": str(host),
        }
        for host, ranks in enumerate(per_host or [size // hosts] * hosts)
        for local in range(ranks)
    ]
    world = {
        "WORLD_SIZE": str(size), "MASTER_PORT": port,
        "MASTER_ADDR": cluster.address(0) if cluster else "127.0.0.1",
        "PACELINE_JOB_ID": f"test-{port}" if job_id is None else job_id,
    }  # fmt: skip
    if cluster:
        world["GLOO_SOCKET_IFNAME"] = "eth0"
    ranks: list[CliProcess] = []
    try:
        for rank, (own, place) in enumerate(zip(arguments, places, strict=True)):
            place["RANK"] = str(rank)
            host = cluster.namespaces[int(place["GROUP_RANK"])] if cluster else ""
            fault = faults[rank] if faults else None
            ranks.append(CliProcess(own, cwd, fault, place | world, host))
        yield ranks
    finally:
        for process in ranks:
            process.kill()


def run_two(
    arguments: Sequence[str],
    cwd: Path,
    faults: Sequence[Any] | None = None,
    second: Sequence[str] | None = None,
    timeout_s: float = 200.0,
) -> list[Done]:
    """Two ranks with the same arguments, or with those of `second` on rank 1."""
    with started_ranks([arguments, second or arguments], cwd, faults) as ranks:
        return [process.wait(timeout_s) for process in ranks]


def summary(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "summary.json").read_text()))


def events(folder: Path, kind: str, rank: int = 0) -> list[dict[str, Any]]:
    """The complete records of one kind, also while the run writes them."""
    file = folder / ("metrics.jsonl" if rank == 0 else f"metrics.rank{rank}.jsonl")
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [record for record in map(json.loads, lines) if record["event"] == kind]


def steps(folder: Path) -> list[int]:
    return [record["step"] for record in events(folder, "step")]
