"""`python -m scale`: the control plane with many ranks on one machine, a line of JSON for each job.

Measures how long meeting, phases and the whole job took, or how long after the time-out the last rank
had its line. The exit code is 1 if a rank has another line than expected, or none.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections import Counter
from statistics import median
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # as the command line does
import torch.distributed  # noqa: F401  (before the forks)

import faults
from paceline.planner.start_up import PHASES
from scale.forked_job import (
    KINDS,
    RankResult,
    Scenario,
    run,
    start_up_s,
)  # fmt: skip

_SECONDS = re.compile(r"for [\d.]+ s")


def main() -> int:
    options = _options()
    if options.patient:
        faults.patient_watchdog(0.7)
    broken = False
    for ranks in options.ranks:
        for kind in options.only:
            for phase in options.phases if kind == "dies" else [0]:
                place = options.per_node, options.timeout
                scenario = Scenario(kind, ranks, *place, phase=phase % PHASES)
                record = measure(scenario)
                broken |= bool(record["broken"])
                sys.stdout.write(json.dumps(record) + "\n")
                sys.stdout.flush()
    return int(broken)


def measure(scenario: Scenario) -> dict[str, Any]:
    """Runs a job. `after_s` is the time from the failure or the time-out until the last line."""
    load = os.getloadavg()[0]
    started = time.monotonic()
    results = run(scenario)
    record: dict[str, Any] = {
        "kind": scenario.kind, "ranks": scenario.ranks, "per_node": scenario.per_node,
        "phase": scenario.phase, "load": round(load, 1),
        "with_forks_s": round(time.monotonic() - started, 2),
    }  # fmt: skip
    if scenario.kind == "healthy":
        met_s, phase_s, all_s = start_up_s(results)
        record |= {
            "met_s": round(met_s, 3), "phase_s": round(phase_s, 4), "phases": PHASES,
            "all_s": round(all_s, 3),
            "rank0_cpu_s": [round(results[0].met_cpu_s, 3), round(results[0].cpu_s, 3)],
            "median_cpu_s": [
                round(median(result.met_cpu_s for result in results), 4),
                round(median(result.cpu_s for result in results), 4),
            ],
        }  # fmt: skip
    elif scenario.kind not in ("differs", "twice"):
        since_s = max(result.failed_s for result in results) or scenario.timeout_s
        if scenario.kind in ("dies", "late"):  # the wait began once the ranks had met
            since_s += max(result.met_s for result in results)
        record["after_s"] = round(max(result.ended_s for result in results) - since_s, 2)
    lines = Counter(_common(result) for result in results)
    record["lines"] = dict(lines.most_common(3))
    record["broken"] = problem(scenario, results)
    return record


def problem(scenario: Scenario, results: list[RankResult]) -> str:
    """Returns what is wrong with the lines of the ranks, or ""."""
    started = len(scenario.started)
    expected = {
        "healthy": r"$",
        "fault": r"no images; check data\.dir$",
        "missing rank": rf"rank {scenario.odd} of {scenario.ranks} did not come to ",
        "missing node": r"ranks 8 to 15 of \d+ did not come to ",
        "differs": r"ranks differ in torch: '2\.1[23]' on rank \d+, '2\.1[23]' on rank \d+; ",
        "dies meeting": rf"rank {scenario.odd} of {scenario.ranks} did not come to ",
        "dies": rf"rank {scenario.odd}\b.* did not reach '{scenario.next_phase}' within ",
        "late": rf"rank {scenario.odd}\b.* did not reach 'phase 0' within ",
        "stall": rf"all-reduce stalled for .* s: rank {scenario.odd}\b.* did not arrive ",
        "dead": rf"all-reduce stalled for .* s: rank {scenario.odd}\b.* gives no sign of life ",
        "twice": rf"$|rank {scenario.odd} has met another job ",
    }[scenario.kind]
    if len(results) != started - scenario.silent:
        return f"{len(results)} of {started - scenario.silent} ranks ended by themselves"
    for result in results:
        if not re.match(expected, _common(result)):
            return f"rank {result.rank}: {result.line!r}"
    if scenario.kind == "twice" and sum(bool(result.line) for result in results) != 1:
        return "not exactly one of the two was refused"
    return ""


def _common(result: RankResult) -> str:
    """Returns a rank's line without the parts that differ between ranks: its number and its wait."""
    return _SECONDS.sub("for ... s", re.sub(r"^rank \d+: ", "", result.line))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scale")
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--per-node", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=10.0)
    parser.add_argument(
        "--patient", action="store_true", help="for hosts that are busy with other things"
    )
    parser.add_argument("--phases", type=int, nargs="+", default=[0, -1])
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
