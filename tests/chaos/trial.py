"""One trial: a training that is disturbed several times, resumed each time, and left to finish.

In: a seed and a number, from which everything random follows, and the undisturbed run to compare with.
Out: one record: what was done when, how everybody ended, and which invariants were broken (none).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import pickle
import random
import shutil
import signal
import struct
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.disturbances import Disturbance, create, draw_kinds, small_disk
from chaos.job import GONE_S, INTERVAL_STEPS, Job, Stopwatch, Way
from fork_server import ForkServer

_WORDS_OF_A_DEFECT = (
    "Traceback", "Fatal Python error", "terminate called", "Exception ignored", "Exception in thread",
    "Segmentation fault", "core dumped",
)  # fmt: skip
_FIGURES = (
    "top1",
    "top5",
    "val_loss",
    "best_top1",
    "best_step",
    "images",
    "epochs",
    "skipped_steps",
)
WAYS = [Way(1, "none")] + [
    Way(ranks, starter, exchange)
    for ranks in (2, 4)
    for starter in ("hand", "launcher")
    for exchange in ("native", "hybrid")
]


@dataclass(frozen=True)
class Reference:
    """The undisturbed run."""

    seconds: float
    # What start and end take besides the steps.
    around_s: float
    summary: dict[str, Any]
    losses: dict[int, float]
    weights_file: str

    @classmethod
    def measure(cls, server: ForkServer, way: Way, root: Path) -> Reference:
        """Runs it in a folder of its own; RuntimeError where it fails."""
        job = Job(server, way, way.arguments("run"), root, root / "reference")
        taken = job.wait(120)
        if taken is None or any(job.codes.values()):
            job.kill()
            raise RuntimeError(f"the undisturbed run ({way}) failed: {job.codes}\n{job.output()}")
        events = read_events(root / "run")
        steps = [event for event in events if event["event"] == "step"]
        started = next(event["time"] for event in events if event["event"] == "start")
        ended = next(event["time"] for event in events if event["event"] == "stop")
        before = max(0.0, taken - (ended - started))
        return cls(
            taken,
            before,
            json.loads((root / "run/summary.json").read_text()),
            {event["step"]: event["loss"] for event in steps},
            tensors_sha256(root / "run/weights.safetensors"),
        )

    @property
    def total_steps(self) -> int:
        return int(self.summary["steps"])


class Measured(dict[str, Reference]):
    """The undisturbed runs by way, each measured when it is first asked for."""

    def __init__(self, server: ForkServer, root: Path) -> None:
        super().__init__()
        self._server, self._root = server, root

    def __missing__(self, name: str) -> Reference:
        """Measures it, or takes what another worker has measured."""
        way = next(way for way in WAYS if str(way) == name)
        place = self._root / name.replace(" ", "-")
        place.mkdir(parents=True, exist_ok=True)
        kept = place / "reference.pickle"
        with (place / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.exists():
                kept.write_bytes(pickle.dumps(Reference.measure(self._server, way, place)))
        self[name] = pickle.loads(kept.read_bytes())
        return self[name]


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Whole records of rank 0; a line that is no record raises ValueError."""
    file = folder / "metrics.jsonl"
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def tensors_sha256(file: Path) -> str:
    """Over all tensors by name, batch-norm statistics included; the order in the file is chance."""
    digest = hashlib.sha256()
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header, data = json.loads(data[8 : 8 + size]), data[8 + size :]
    for name in sorted(set(header) - {"__metadata__"}):
        first, last = header[name]["data_offsets"]
        digest.update(name.encode() + data[first:last])
    return digest.hexdigest()


@dataclass
class Trial:
    """`run()` returns the record."""

    server: ForkServer
    seed: int
    number: int
    references: dict[str, Reference]
    root: Path
    left_out: dict[str, str]
    ranks: tuple[int, ...] = (1, 2, 4)
    violations: list[str] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)

    def run(self) -> dict[str, Any]:
        draw = random.Random(f"{self.seed}/{self.number}")
        # The more ranks, the longer a trial takes, so the fewer there are.
        ranks = draw.choices(self.ranks, [1 / (1 + count) for count in self.ranks])[0]
        self.way = draw.choice([way for way in WAYS if way.ranks == ranks])
        self.folder = self.root / f"trial-{self.number}"
        self.logs = self.root / f"trial-{self.number}-logs"
        self.folder.mkdir(parents=True)
        self.logs.mkdir()
        kinds = draw_kinds(draw, self.way, self.left_out)
        self.record |= {
            "seed": self.seed, "trial": self.number, "ranks": self.way.ranks,
            "starter": self.way.starter, "exchange": self.way.exchange, "attempts": [],
        }  # fmt: skip
        self.history = History(self.folder / "run", self.references[str(self.way)])
        clock = Stopwatch()
        with small_disk(self.folder) if "full disk" in kinds else nullcontext():
            for number, kind in enumerate(kinds):
                self.record["attempts"].append(self._attempt(number, kind, draw))
                if self.violations or (self.folder / "run/summary.json").exists():
                    break
            if not self.violations:
                self.record["final"] = self._finish(draw.random() < 0.1)
            if self.violations and "full disk" in kinds:  # which takes its files along
                shutil.copytree(self.folder, self.logs / "folder")
        self.record |= {"salvaged": self.history.salvaged, "wall_s": round(clock(), 2)}
        self.record["violations"] = self.violations
        return self.record

    def _attempt(self, number: int, kind: str, draw: random.Random) -> dict[str, Any]:
        reference = self.references[str(self.way)]
        disturbance = create(kind, draw, self.way, self.folder)
        left = 1 - self.history.done / reference.total_steps
        steps_s = reference.seconds - reference.around_s
        at_s = draw.uniform(0, reference.around_s + left * steps_s)
        disturbance.request["tears_down"] = draw.random() < 0.1
        disturbance.set_up()
        arguments = self.way.arguments("run", *disturbance.more)
        log = self.logs / f"{number}"
        job = Job(
            self.server,
            self.way,
            arguments,
            self.folder,
            log,
            disturbance.place,
            **disturbance.request,
        )
        clock = Stopwatch()
        job.wait(at_s)
        found: dict[str, Any] = {"kind": kind, "at_s": round(clock(), 3)}
        found["at"] = round(at_s / reference.seconds, 3)
        found["too_late"] = not job.processes()
        if not found["too_late"]:
            disturbance.strike(job, self.server)
            disturbance.struck = True
        limit = GONE_S + (3 * reference.seconds if disturbance.goes_on else 0)
        gone_s = job.wait(limit)
        if gone_s is None:
            self._violate(
                f"still there {limit:.0f} s after: {sorted(job.processes().values())}", job
            )
            job.kill()
        disturbance.clean_up()
        found["gone_s"] = None if gone_s is None else round(gone_s, 2)
        found["codes"] = job.codes
        found |= disturbance.detail
        if disturbance.killed:
            found["killed"] = disturbance.killed
        self._check_output(job)
        new = self.history.update(disturbance)
        found |= {"done": self.history.done, **new}
        self._check_codes(job, disturbance, bool(new.get("steps")))
        self.violations += self.history.violations
        return found

    def _violate(self, text: str, job: Job) -> None:
        self.violations.append(f"{job.log.name}: {text}")

    def _check_output(self, job: Job) -> None:
        for name, text in job.output().items():
            for word in _WORDS_OF_A_DEFECT:
                if word in text:
                    self._violate(f"{name} has '{word}'", job)

    def _check_codes(self, job: Job, disturbance: Disturbance, had_steps: bool) -> None:
        """By docs/distributed.md. `had_steps`: whether a step was done in this attempt."""
        finished = (self.folder / "run/summary.json").exists()
        sent = set(disturbance.sent)
        if "launcher" in disturbance.killed or self.way.starter == "launcher":
            sent.add(signal.SIGTERM)  # the launcher's own to its ranks, or in its place
        twice = disturbance.kind in ("second job", "same port")
        may_fail = disturbance.struck and (not disturbance.goes_on or twice)
        may_fail |= bool(disturbance.sent) and not had_steps  # SIGUSR1 to a rank that still starts
        for name, code in job.codes.items():
            if code == -signal.SIGKILL and name in disturbance.killed:
                continue
            if code == 0 and (finished or name.startswith("b-")):
                continue
            if code > 128 and code - 128 in sent:
                continue
            # Before the first step and after the last a signal ends a process at once.
            if code < 0 and -code in sent and (not had_steps or finished):
                continue
            if code == 1 and may_fail and self._says_one_line(job, name):
                continue
            self._violate(f"exit code {code} of {name} after {disturbance.kind}", job)
        if twice and not finished:
            others = [code for name, code in job.codes.items() if name.startswith("b-")]
            if disturbance.kind == "second job" or not others or any(others):
                self._violate("neither of two jobs has finished", job)

    def _says_one_line(self, job: Job, name: str) -> bool:
        text = job.output().get(f"{name}.err", job.output().get("launcher.err", ""))
        lines = [line for line in text.splitlines() if line.startswith("paceline: error: ")]
        return len(lines) == 1 if f"{name}.err" in job.output() else bool(lines)

    def _finish(self, check_again: bool) -> dict[str, Any]:
        """Without any disturbance, to the same end as the undisturbed run."""
        log = self.logs / "final"
        job = Job(self.server, self.way, self.way.arguments("run"), self.folder, log)
        reference = self.references[str(self.way)]
        taken = job.wait(GONE_S + 3 * reference.seconds)
        if taken is None:
            self._violate("the last attempt does not end", job)
            job.kill()
            return {"codes": job.codes}
        self._check_output(job)
        if any(job.codes.values()):
            self._violate(f"the last attempt ends with {job.codes}", job)
            return {"codes": job.codes}
        new = self.history.update(None)
        self.violations += self.history.violations
        self._check_end(job)
        if check_again and not self.violations:
            again = Job(
                self.server, self.way, self.way.arguments("run"), self.folder, self.logs / "again"
            )
            if again.wait(GONE_S) is None or any(again.codes.values()):
                self._violate(f"the finished run cannot be resumed: {again.codes}", again)
                again.kill()
        return {"seconds": round(taken, 2), **new}

    def _check_end(self, job: Job) -> None:
        reference, run = self.references[str(self.way)], self.folder / "run"
        missing = [
            name for name in ("summary.json", "weights.safetensors", "report.html", "config.toml")
            if not (run / name).is_file()
        ]  # fmt: skip
        if missing:
            self._violate(f"no {', '.join(missing)} at the end", job)
        left = [path.name for path in run.rglob("*") if path.name.endswith(".tmp")]
        left += ["run.lock"] * (run / "run.lock").exists()
        if left:
            self._violate(f"left behind: {left}", job)
        if "summary.json" in missing:
            return
        ended = json.loads((run / "summary.json").read_text())
        if ended["weights_sha256"] != reference.summary["weights_sha256"]:
            self._violate(
                "wrong bits: weights_sha256 differs from that of the undisturbed run", job
            )
        if ended["steps"] != reference.total_steps or ended["stopped_by"] != "finished":
            self._violate(f"ended at step {ended['steps']}, {ended['stopped_by']}", job)
        if not self.history.salvaged:
            # Salvaged checkpoints have one rank's batch-norm statistics, which change evaluations.
            differ = [name for name in _FIGURES if ended[name] != reference.summary[name]]
            if differ:
                self._violate(f"figures differ: {differ}", job)
            if (
                not missing
                and tensors_sha256(run / "weights.safetensors") != reference.weights_file
            ):
                self._violate("weights.safetensors differs", job)


class History:
    """What `metrics.jsonl` says, attempt by attempt: steps done, steps lost, losses equal to the bit."""

    def __init__(self, folder: Path, reference: Reference) -> None:
        self._folder, self._reference = folder, reference
        self._read = 0
        self._may_lose = 2 * INTERVAL_STEPS
        self.done = 0
        self.salvaged = False
        self.violations: list[str] = []

    def update(self, disturbance: Disturbance | None) -> dict[str, Any]:
        """Reads on; returns the steps done since, and where it was resumed with how many steps lost."""
        self.violations = []
        try:
            events = read_events(self._folder)
        except ValueError as error:
            self.violations.append(f"metrics.jsonl is damaged: {error}")
            return {}
        new, self._read = events[self._read :], len(events)
        found: dict[str, Any] = {"steps": 0}
        for event in new:
            if event["event"] == "start":
                lost = self.done - event["step"]
                self.salvaged |= "salvaged" in (event["resumed_from"] or "")
                found |= {"resumed_at": event["step"], "lost": max(0, lost)}
                if lost > self._may_lose:
                    self.violations.append(f"lost {lost} steps, more than {self._may_lose}")
                self.done = event["step"]
            elif event["event"] == "step":
                self.done, found["steps"] = event["step"], found["steps"] + 1
                if event["loss"] != self._reference.losses.get(event["step"]):
                    self.violations.append(f"wrong bits: the loss of step {event['step']} differs")
            elif event["event"] == "stop":
                # It has saved: nothing may be lost.
                self._may_lose = 0
            if event["event"] == "step" and disturbance is not None:
                self._may_lose = disturbance.lost_steps
        return found
