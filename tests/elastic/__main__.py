"""`python -m elastic`: jobs that lose ranks until one is left, a line of JSON for each, and a table.

In: a seed and a number of losses. Out: exit code 1 and a command that repeats the job whose invariant was
broken. The same job loses the same ranks at the same points.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from elastic.model import POINTS
from elastic.series import draw_losses, planned, reference_weights, run_job
from fork_server import ForkServer


def main() -> int:
    options = _options()
    server, root = ForkServer(), Path(tempfile.mkdtemp(prefix="paceline-elastic-"))
    plan = planned(server, root / "plan")
    records, started = list[dict[str, Any]](), time.monotonic()
    for number in itertools.count() if options.job is None else [options.job]:
        lost = sum(len(record["lost_at"]) for record in records)
        if lost >= options.losses or time.monotonic() - started > options.seconds:
            break
        ranks = options.ranks[number % len(options.ranks)]
        losses = draw_losses(random.Random(f"{options.seed} {number}"), ranks)
        result = run_job(server, ranks, losses, root / f"job-{number}", plan)
        if len(records) < options.compare and not result.violations:
            try:
                place = root / f"reference-{number}"
                expected = reference_weights(result.generations, ranks, place)
            except AssertionError as error:
                result.violations.append(f"the reference failed: {error}")
            else:
                if result.weights != expected:
                    result.violations.append("other weights than after stopping and resuming")
        records.append({"seed": options.seed, "job": number, **asdict(result)})
        line = json.dumps(records[-1], separators=(",", ":")) + "\n"
        sys.stdout.write(line)
        sys.stdout.flush()
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(line)
        if not result.violations:
            shutil.rmtree(root / f"job-{number}")
            shutil.rmtree(root / f"reference-{number}", ignore_errors=True)
    broken = [record for record in records if record["violations"]]
    sys.stdout.write(f"{table(records)}\n{time.monotonic() - started:.0f} s\n")
    for record in broken:
        again = f"--seed {options.seed} --job {record['job']} --ranks {' '.join(map(str, options.ranks))}"
        sys.stdout.write(
            f"job {record['job']}: {'; '.join(record['violations'])}\n"
            f"  again: make chaos LOSSES='{again}'\n"
        )
    if broken:
        sys.stdout.write(f"files: {root}\n")
    else:
        shutil.rmtree(root, ignore_errors=True)
    server.close()
    return 1 if broken else 0


def table(records: list[dict[str, Any]]) -> str:
    """Returns the losses by point, and the times to the next completed step by number of ranks."""
    points = Counter(point for record in records for point in record["lost_at"])
    rows = [f"{point:<14}{points[point]:>6}" for point in POINTS]
    rows.append(f"{'all':<14}{points.total():>6}")
    for ranks in sorted({record["ranks"] for record in records}):
        times = sorted(s for r in records if r["ranks"] == ranks for s in r["recover_s"])
        if times:
            late = times[min(len(times) - 1, int(0.99 * len(times)))]
            rows.append(
                f"{ranks} ranks: {len(times)} recoveries, median {statistics.median(times):.3f} s, "
                f"p99 {late:.3f} s, slowest {times[-1]:.3f} s"
            )
    broken = sum(bool(record["violations"]) for record in records)
    rows.append(f"{len(records)} jobs, {broken} with violations")
    return "\n".join(rows)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m elastic", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--losses", type=int, default=40, help="how many")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 8])
    parser.add_argument("--job", type=int, help="only this one")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="start none after these"
    )
    parser.add_argument("--compare", type=int, default=0, help="jobs whose weights are compared")
    parser.add_argument("--out", type=Path, help="append the lines of JSON to this file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
