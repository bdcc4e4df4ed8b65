"""`python -m scale.training_job`: what the control plane costs in real training steps over Gloo.

In: numbers of ranks, steps. Out: a line of JSON for each number of ranks. Within one run the control
plane is switched off and on again every few steps, on all ranks alike, so that both halves meet the same
machine. Beside that, every rank measures how long its training thread is in code of the control plane in
each step, of which the median counts: dozens of ranks share few cores here, and one that loses its core
there does not work. It is compared with the CPU time of a step, which is what the step would take on a
core of its own. Every rank also measures the CPU time of the background threads, and counts its requests
to the store and the files that it opens for writing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # as the command line does
from torch.distributed.distributed_c10d import PrefixStore

from fork_server import preload
from paceline.comm.group import Group
from paceline.comm.heartbeats import HeartbeatChannel
from paceline.comm.progress import ProgressBoard
from paceline.comm.watchdog import Watchdog
from paceline.core.errors import PacelineError
from paceline.core.events import JsonlWriter
from paceline.train import run_training
from paceline.train.step import TrainStep
from paceline.train.step_records import RankTimes, RecentEvents
from ranks import free_port
from small_runs import Silent, small_config

BLOCK = 4
# Before these nothing counts: the first steps allocate memory.
_WARM_UP = 4
_REQUESTS = (
    "get",
    "set",
    "add",
    "check",
    "wait",
    "compare_set",
    "multi_get",
    "multi_set",
    "append",
)
# Called by the training thread in a step, and by the background threads.
_IN_STEP: tuple[tuple[type, str], ...] = (
    (ProgressBoard, "_update"), (Group, "stop_announced"), (Group, "announce_stop"),
    (RankTimes, "note"), (RecentEvents, "on_event"), (JsonlWriter, "on_event"),
)  # fmt: skip
_BEHIND: tuple[tuple[type, str, Any], ...] = (
    (HeartbeatChannel, "_beat", None), (Watchdog, "_check", None),
)  # fmt: skip


@dataclass
class Meter:
    """Of one rank. `counts` is False before and after the measured steps."""

    is_on: bool = True
    counts: bool = False
    last_step: int = 0
    in_step_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    behind_s: float = 0.0
    requests: Counter[str] = field(default_factory=Counter)
    files: int = 0
    step_begins: list[float] = field(default_factory=list)

    def install(self) -> None:
        """Around the functions of the control plane; a fork does this to itself."""
        for kind, name in _IN_STEP:
            setattr(kind, name, self._in_step(getattr(kind, name), name))
        for kind, name, idle in _BEHIND:
            setattr(kind, name, self._behind(getattr(kind, name), idle))
        for name in _REQUESTS:
            if hasattr(PrefixStore, name):
                setattr(PrefixStore, name, self._counted(getattr(PrefixStore, name), name))
        launch = TrainStep.launch

        def launched(step: TrainStep, number: int, *more: Any) -> None:
            self.step_begins.append(time.perf_counter())
            before, self.counts = self.counts, _WARM_UP <= number < self.last_step
            if before != self.counts:
                self.cpu_s = time.process_time() - self.cpu_s
            self.is_on = number // BLOCK % 2 == 0
            if self.is_on and self.counts:
                self.in_step_s.append(0.0)
            launch(step, number, *more)

        TrainStep.launch = launched  # type: ignore[method-assign]
        sys.addaudithook(self._audit)

    def _in_step(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def measured(*args: Any, **given: Any) -> Any:
            if not self.is_on:
                return None
            if threading.current_thread() is not threading.main_thread():
                return function(*args, **given)
            # No system call: each would invite the scheduler to take the core away.
            begun = time.perf_counter()
            found = function(*args, **given)
            if self.counts and self.in_step_s:
                self.in_step_s[-1] += time.perf_counter() - begun
            return found

        return measured

    def _behind(self, function: Callable[..., Any], idle: Any) -> Callable[..., Any]:
        def measured(*args: Any) -> Any:
            if not self.is_on:
                return idle
            begun = time.thread_time()
            found = function(*args)
            if self.counts:
                self.behind_s += time.thread_time() - begun
            return found

        return measured

    def _counted(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def counted(*args: Any, **given: Any) -> Any:
            if self.counts and threading.current_thread() is threading.main_thread():
                self.requests[name] += 1
            return function(*args, **given)

        return counted

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if (
            event == "open"
            and self.counts
            and isinstance(args[1], str)
            and set(args[1]) & set("wax+")
        ):
            self.files += 1


def train(ranks: int, steps: int, killed: int | None = None) -> list[dict[str, Any]]:
    """What each of `ranks` forked processes measured, or the line with which it ended. A step has one
    image for each. Rank `killed` ends itself by SIGKILL in the first step, and is not among them."""
    preload()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.jsonl"
        port, children = free_port(), list[int]()
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                _train(rank, ranks, port, steps, rank == killed, Path(folder), results)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        return [json.loads(line) for line in results.read_text().splitlines()]


def measure(ranks: int, steps: int) -> dict[str, Any]:
    found = train(ranks, steps)
    failed = [row["line"] for row in found if row["line"]]
    if failed or len(found) < ranks:
        raise SystemExit(f"{len(found)} of {ranks} ranks, {Counter(failed).most_common(2)}")
    main = next(row for row in found if row["rank"] == 0)
    on, off = _blocks(main["step_begins"])
    pairs = min(len(on), len(off))
    counted = range(_WARM_UP, steps - 1)
    step_s = (main["step_begins"][-1] - main["step_begins"][_WARM_UP]) / len(counted)
    switched_on = sum(number // BLOCK % 2 == 0 for number in counted)
    # Of the CPU time that a step takes on the same rank.
    shares = [r["in_step_s"] / (r["cpu_s"] / len(counted)) for r in found]
    return {
        "ranks": ranks, "steps": steps, "load": round(os.getloadavg()[0], 1),
        "step_s": round(step_s, 5),
        "on_s": round(median(on), 5), "off_s": round(median(off), 5),
        "on_over_off": round(median(on[i] / off[i] for i in range(pairs)), 4),
        "cpu_ms": round(1e3 * median(r["cpu_s"] for r in found) / len(counted), 2),
        "in_step_us": _spread([1e6 * r["in_step_s"] for r in found]),
        "in_step_share": _spread([100 * share for share in shares], "percent"),
        "behind_cpu_us": _spread([1e6 * r["behind_s"] / switched_on for r in found]),
        "store_requests_in_steps": sum(r["requests"] for r in found),
        "files_opened_by_other_ranks": sum(r["files"] for r in found if r["rank"]),
    }  # fmt: skip


def _spread(values: list[float], unit: str = "us") -> dict[str, Any]:
    return {"median": round(median(values), 3), "max": round(max(values), 3), "unit": unit}


def _blocks(begins: list[float]) -> tuple[list[float], list[float]]:
    """Seconds a step in each block with the control plane, and in the one without that follows."""
    halves: tuple[list[float], list[float]] = ([], [])
    for start in range(BLOCK, len(begins) - BLOCK, BLOCK):
        mean_s = (begins[start + BLOCK] - begins[start]) / BLOCK
        halves[start // BLOCK % 2].append(mean_s)
    return halves


def _train(
    rank: int, ranks: int, port: int, steps: int, dies: bool, folder: Path, results: Path
) -> None:
    """Does not return."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    meter = Meter(last_step=steps - 1)
    meter.install()
    if dies:
        TrainStep.launch = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assignment]

    def report(line: str) -> None:
        row = {
            "rank": rank, "line": line, "behind_s": meter.behind_s, "cpu_s": meter.cpu_s,
            "in_step_s": median(meter.in_step_s) if meter.in_step_s else 0.0,
            "requests": sum(meter.requests.values()), "files": meter.files,
            "step_begins": meter.step_begins if rank == 0 else [],
        }  # fmt: skip
        with results.open("a") as file:  # one write a line: they do not mix
            file.write(json.dumps(row) + "\n")

    config = small_config(
        folder / "run", run__global_batch_size=ranks, run__batch_size=1, run__epochs=1,
        data__synthetic_samples=ranks * steps, data__workers=1, checkpoint__interval_epochs=0,
        comm__timeout_s=600.0, comm__rendezvous_timeout_s=300.0,
    )  # fmt: skip
    line = ""
    try:
        run_training(config, Silent, lambda error: report(str(error)))
    except PacelineError as error:
        line = str(error)
    except BaseException as error:  # a fork must not return to its caller
        line = f"unexpected: {error!r}"
    report(line)
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scale.training_job")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 64])
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    for ranks in options.ranks:
        sys.stdout.write(json.dumps(measure(ranks, options.steps)) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main())
