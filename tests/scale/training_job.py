"""Real training steps over Gloo on forked ranks: requests of a step to the store, and opened files."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # as the command line does
from torch.distributed.distributed_c10d import PrefixStore

from fork_server import preload
from paceline.core.errors import PacelineError
from paceline.train import run_training
from paceline.train.step import TrainStep
from ranks import free_port
from small_runs import Silent, small_config

# Before these nothing counts: the first steps allocate memory.
_WARM_UP = 4
_REQUESTS = [
    "get",
    "set",
    "add",
    "check",
    "wait",
    "compare_set",
    "multi_get",
    "multi_set",
    "append",
]


@dataclass
class Meter:
    """Counts requests and files of one rank. `counts` is False before and after the counted steps."""

    last_step: int
    counts: bool = False
    steps: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    files: int = 0

    def install(self) -> None:
        """A fork does this to itself."""
        for name in _REQUESTS:
            if hasattr(PrefixStore, name):
                setattr(PrefixStore, name, self._counted(getattr(PrefixStore, name), name))
        launch = TrainStep.launch

        def launched(step: TrainStep, number: int, *more: Any) -> None:
            self.counts = _WARM_UP <= number < self.last_step
            self.steps += self.counts
            launch(step, number, *more)

        TrainStep.launch = launched  # type: ignore[method-assign]
        sys.addaudithook(self._audit)

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
    """Returns the counts of `ranks` forked processes, or the line with which each ended.

    A step has one image for each rank. Rank `killed` ends itself by SIGKILL in the first step, and has
    no result.
    """
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


def _train(
    rank: int, ranks: int, port: int, steps: int, dies: bool, folder: Path, results: Path
) -> None:
    """Runs one rank. Does not return."""
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
            "rank": rank, "line": line, "steps": meter.steps,
            "requests": sum(meter.requests.values()), "files": meter.files,
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
