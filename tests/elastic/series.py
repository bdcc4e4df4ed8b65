"""Jobs that lose ranks at random points until few are left, and the checks of their results.

A job is a training of forked ranks under a real `Supervisor` in this process, without checkpoints. Ranks
of an emulated host are killed together. Rank 0 is never killed.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import pickle
import random
import signal
import statistics
import threading
import time
import zlib
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic.points import watch
from fork_server import AdoptedChild, ForkServer, Request
from paceline.cli.failure import Failure
from paceline.cli.launch import exit_code_or_cause
from paceline.cli.nodes import Node
from paceline.cli.supervisor import Supervisor
from paceline.core.errors import PacelineError
from paceline.core.events import read_events
from paceline.core.host import process_ids, started_with
from paceline.train.checkpoint import Checkpoint
from ranks import run_ranks
from small_runs import run_small
from train.runs import EVERY_STEP

# 56 images in batches of 16, four epochs: 14 steps of 8 micro-batches.
VALUES: dict[str, Any] = {
    "run__batch_size": 2, "comm__min_ranks": 1, "checkpoint__interval_epochs": 0,
    "checkpoint__keep_best": False, "run__epochs": 4, "comm__algorithm": "native",
}  # fmt: skip
STEPS = 14
# How often a point is chosen. A later loss hits a recovery with the second row.
_ORDINARY = {"computing": 3, "reducing": 3, "reduced": 3, "finishing": 1}
_RECOVERY = {"noticed": 1, "agreed": 1, "regrouping": 1, "regrouped": 1}
_LIMIT_S = 240.0


@dataclass(frozen=True)
class Loss:
    """The end of a member when it reaches `point` for the `count`-th time, with others of its host.

    If the point is `reduced`, the exchange of this step can fail on the member `behind`.
    """

    member: int
    point: str
    count: int
    others: tuple[int, ...] = ()
    behind: int = -1


def draw_losses(draw: random.Random, ranks: int, least: int = 1) -> list[Loss]:
    """Returns losses that leave at least `least` of the ranks."""
    left, found = list(range(1, ranks)), list[Loss]()
    while len(left) > least - 1:
        last = found[-1] if found else None
        if last is not None and last.behind >= 0 and draw.random() < 0.6:
            # Either side of the transfer from a member that is ahead to one that is behind.
            member, point = (last.behind, "catching up") if last.behind else (left[0], "serving")
            left.remove(member)
            found.append(Loss(member, point, 1))
            continue
        size = min(len(left) - least + 1, 2 if draw.random() < 0.2 else 1)
        at = draw.randrange(len(left) - size + 1)
        host, left = left[at : at + size], left[:at] + left[at + size :]
        behind = -1
        if found and draw.random() < 0.5:
            point = draw.choices(list(_RECOVERY), list(_RECOVERY.values()))[0]
            count = 1
        else:
            point = draw.choices(list(_ORDINARY), list(_ORDINARY.values()))[0]
            count = 1 if point == "finishing" else draw.randint(1, STEPS)
            if point == "reduced" and left and draw.random() < 0.7:
                behind = draw.choice([0, *left])
        found.append(Loss(host[0], point, count, tuple(host[1:]), behind))
    return found


class Rank:
    """One forked rank; `main` does not return."""

    def __init__(self, folder: Path, losses: Collection[Loss], values: dict[str, Any]) -> None:
        self._folder, self._losses, self._values = folder, losses, values
        self._counts: Counter[str] = Counter()

    def main(self) -> None:
        self._member = int(os.environ["RANK"])
        (self._folder / f"pid-{self._member}").write_text(str(os.getpid()))
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._log = os.open(self._folder / f"log-{self._member}.jsonl", flags)
        code = 0
        try:
            watch(self._at, self._trained)
            run_small(self._folder / "run", **self._values)
        except PacelineError as error:
            code = Failure.of(error).report()
        except BaseException as error:  # a fork must not return to its caller
            code = Failure(f"{type(error).__name__}: {error}", 1).report()
        os._exit(code)

    def _at(self, point: str, generation: int) -> bool:
        self._counts[point] += 1
        self._generation = generation
        self._write([point, generation])
        fails = False
        for loss in self._losses:
            if (loss.point, loss.count) != (point, self._counts[point]):
                continue
            fails |= loss.behind == self._member
            if loss.member == self._member:
                others = [int((self._folder / f"pid-{n}").read_text()) for n in loss.others]
                run_id = os.environ["TORCHELASTIC_RUN_ID"]
                others = [n for n in others if started_with(n, "TORCHELASTIC_RUN_ID", run_id)]
                self._write(["killed", generation, 1 + len(others)])
                for pid in (*others, os.getpid()):
                    os.kill(pid, signal.SIGKILL)
        return fails

    def _trained(self, step: int, number: int, content: bytes) -> None:
        self._write(["trained", self._generation, step, number, zlib.crc32(content)])

    def _write(self, entry: list[Any]) -> None:
        os.write(self._log, json.dumps([time.monotonic(), *entry]).encode() + b"\n")


@dataclass
class JobResult:
    """What came of a job: the losses that took place, the generations, and violated invariants."""

    ranks: int
    losses: list[Loss]
    seconds: float = 0.0
    # The points of the losses that took place, one for each member.
    lost_at: list[str] = field(default_factory=list)
    # From a loss to the next completed step, beyond the step's own time.
    recover_s: list[float] = field(default_factory=list)
    # The completed steps and the number of ranks when each generation began.
    generations: list[tuple[int, int]] = field(default_factory=list)
    weights: str = ""
    violations: list[str] = field(default_factory=list)


Plan = dict[int, list[tuple[int, int]]]


def planned(server: ForkServer, folder: Path) -> Plan:
    """Returns the micro-batches of each step, as one rank trains them: numbers and digests."""
    result = run_job(server, 1, [], folder, {})
    assert not result.violations, result.violations
    plan: Plan = {}
    for _, what, _, *rest in _read_log(folder, 0):
        if what == "trained":
            plan.setdefault(rest[0], []).append((rest[1], rest[2]))
    assert len(plan) == STEPS
    return plan


def run_job(
    server: ForkServer, ranks: int, losses: list[Loss], folder: Path, plan: Plan, **values: Any
) -> JobResult:
    """Runs a job with these losses in a new folder, and checks it; an empty plan is not compared."""
    folder.mkdir(parents=True)
    main = pickle.dumps(functools.partial(Rank.main, Rank(folder, losses, VALUES | values)))
    run_ids = set[str]()

    def start(env: dict[str, str]) -> AdoptedChild:
        run_ids.add(env["TORCHELASTIC_RUN_ID"])
        every = {**os.environ, **env, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        out = str(folder / "output")
        request = Request(f"member{env['RANK']}", [], every, "", out, out, fault=main)
        return AdoptedChild(server.start(request), [])

    result, started = JobResult(ranks, losses), time.monotonic()
    with Supervisor(start, Node(ranks), min_ranks=1) as supervisor:

        def hangs() -> None:
            result.violations.append(f"ranks {sorted(supervisor.pids)} hang")
            for pid in supervisor.pids.values():
                os.kill(pid, signal.SIGKILL)

        limit = threading.Timer(_LIMIT_S, hangs)
        limit.start()
        code = exit_code_or_cause(supervisor.run())
        limit.cancel()
    result.seconds = round(time.monotonic() - started, 2)
    left = [
        pid for pid in process_ids() for run_id in run_ids
        if started_with(pid, "TORCHELASTIC_RUN_ID", run_id)
    ]  # fmt: skip
    if left:
        result.violations.append(f"left running: {left}")
    if code != 0:
        result.violations.append(f"ended with {code}: {(folder / 'output').read_text()[-500:]}")
    else:
        _check(result, folder, plan)
    return result


def _read_log(folder: Path, member: int) -> list[list[Any]]:
    return [json.loads(line) for line in (folder / f"log-{member}.jsonl").read_text().splitlines()]


def _check(result: JobResult, folder: Path, plan: Plan) -> None:
    """Checks steps and samples of a finished job, and measures its recoveries."""
    logs = {member: _read_log(folder, member) for member in range(result.ranks)}
    events = list(read_events(folder / "run/metrics.jsonl"))
    steps = [event["step"] for event in events if event["event"] == "step"]
    if steps != list(range(1, STEPS + 1)):
        result.violations.append(f"steps {steps} were recorded")
    result.generations = [
        (event["step"], event["ranks"]) for event in events if event["event"] == "generation"
    ]
    result.weights = json.loads((folder / "run/summary.json").read_text())["weights_sha256"]
    killed = [(log[-1][0], member) for member, log in logs.items() if log[-1][1] == "killed"]
    for at_s, member in sorted(killed):
        point, generation = logs[member][-2][1:3]
        result.lost_at += [point] * logs[member][-1][3]
        later = [
            entry[0] for entry in logs[0]
            if entry[1] == "reduced" and entry[0] > at_s and entry[2] > generation
        ]  # fmt: skip
        if later:
            result.recover_s.append(round(later[0] - at_s - _step_s(logs[0]), 4))
    if plan:
        result.violations += _trained_otherwise(logs, plan)


def _step_s(log: list[list[Any]]) -> float:
    """Returns the median time of a step that no loss has interrupted."""
    begins = [entry[0] for entry in log if entry[1] == "computing"]
    return statistics.median(after - before for before, after in itertools.pairwise(begins))


def _trained_otherwise(logs: dict[int, list[list[Any]]], plan: Plan) -> list[str]:
    """Returns the steps whose applied gradients are not of each micro-batch of the plan, once."""
    survivors = [log for log in logs.values() if log[-1][1] == "finishing"]
    # The generation that has completed each step. A step under way is that of the line before.
    completed: dict[int, int] = {}
    for log in survivors:
        step = -1
        for _, what, generation, *rest in log:
            step = rest[0] if what == "trained" else step
            if what == "reduced":
                completed[step] = max(generation, completed.get(step, -1))
    found: dict[int, list[tuple[int, int]]] = {step: [] for step in range(STEPS)}
    for log in logs.values():
        for _, what, generation, *rest in log:
            if what == "trained" and completed.get(rest[0]) == generation:
                found[rest[0]].append((rest[1], rest[2]))
    return [f"step {s} trained {found[s]}" for s in found if sorted(found[s]) != plan[s]]


def reference_weights(generations: list[tuple[int, int]], ranks: int, folder: Path) -> str:
    """Returns the weights after stopping where generations began, and resuming on fewer ranks."""
    output, resume = folder, dict[str, Any]()
    # The last generation that began after the same step counts, and none after the last step.
    starts = {at: size for at, size in [(0, ranks), *generations] if at < STEPS}
    for at, size in starts.items():
        if at:
            for path in (output / "checkpoints").glob("step-*.pt"):
                if Checkpoint.read(path).step > at:
                    path.unlink()
            resume = {"run__resume": "auto"}
        values = VALUES | {"comm__min_ranks": 0} | EVERY_STEP | resume
        summary = run_ranks(size, _summary, str(output), values)[0]
    resumed = summary["resumed_at_steps"]
    assert resumed == [*starts][1:], f"resumed at {resumed}"
    return str(summary["weights_sha256"])


def _summary(rank: int, output: str, values: dict[str, Any]) -> dict[str, Any]:
    return run_small(output, **values).summary
