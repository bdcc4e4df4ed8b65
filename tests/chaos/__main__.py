"""`python -m chaos`: many trials, a line of JSON for each, and a table of what was survived.

In: a seed, a number of trials, numbers of ranks. Out: exit code 1 and a command that repeats the trial
where an invariant was broken. Moments are times on a clock, so a repetition hits a nearby moment.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from chaos.disturbances import WEIGHTS, unavailable
from chaos.worker import run_trial, set_up


def main() -> int:
    options = _options()
    if options.table:
        lines = [line for file in options.table for line in file.read_text().splitlines()]
        sys.stdout.write(table([json.loads(line) for line in lines]) + "\n")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of what ends the processes
    left_out = unavailable()
    for kind, reason in left_out.items():
        sys.stderr.write(f"left out: {kind} ({reason})\n")
    left_out |= {kind: "not asked for" for kind in WEIGHTS if kind not in options.only}
    root = Path(tempfile.mkdtemp(prefix="paceline-chaos-"))
    started, records = time.monotonic(), []
    numbers = range(options.trials) if options.trial is None else [options.trial]
    each = functools.partial(
        run_trial, options.seed, tuple(options.ranks), left_out, root, started + options.seconds
    )
    with multiprocessing.get_context("spawn").Pool(options.jobs, set_up) as pool:
        for record in filter(None, pool.imap_unordered(each, numbers)):
            records.append(record)
            line = json.dumps(record, separators=(",", ":")) + "\n"
            sys.stdout.write(line)
            sys.stdout.flush()
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(line)
    broken = [record for record in records if record["violations"]]
    sys.stdout.write(table(records) + f"\n{time.monotonic() - started:.0f} s\n")
    for record in broken:
        number, ranks = record["trial"], " ".join(map(str, options.ranks))
        only = "" if options.only == list(WEIGHTS) else f" --only {shlex.join(options.only)}"
        again = f"--seed {options.seed} --trial {number} --ranks {ranks}{only}"
        sys.stdout.write(
            f"trial {number}: {'; '.join(record['violations'])}\n"
            f"  again: make chaos ARGS={shlex.quote(again)}\n"
            f"  files: {root}/trial-{number}*\n"
        )
    if not broken:
        shutil.rmtree(root, ignore_errors=True)
    return 1 if broken else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trials", type=int, default=40, help="how many")
    parser.add_argument("--trial", type=int, help="only this one")
    parser.add_argument("--only", nargs="+", default=list(WEIGHTS), choices=list(WEIGHTS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], choices=[1, 2, 4])
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="start none after these"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="trials at a time")
    parser.add_argument("--out", type=Path, help="append the lines of JSON to this file")
    parser.add_argument("--table", type=Path, nargs="+", help="only the table of these files")
    options = parser.parse_args()
    options.jobs = 1 if options.trial is not None else min(options.jobs, options.trials)
    return options


def table(records: list[dict[str, Any]]) -> str:
    """How often each disturbance struck on how many ranks, and what came of it."""
    counts: Counter[tuple[str, int]] = Counter()
    missed, lost, slowest = 0, 0, 0.0
    for record in records:
        for attempt in record["attempts"]:
            kill = attempt["kind"].startswith("kill")
            # After the job's end, or before there was a rank to kill.
            if attempt["too_late"] or (kill and not attempt.get("killed")):
                missed += 1
                continue
            counts[attempt["kind"], record["ranks"]] += 1
            lost = max(lost, attempt.get("lost", 0))
            if attempt["gone_s"] is not None and kill:
                slowest = max(slowest, attempt["gone_s"])
    kinds = sorted(
        {kind for kind, _ in counts}, key=lambda kind: (not kind.startswith("kill"), kind)
    )
    rows = [f"{'disturbance':<16}{'1 rank':>8}{'2 ranks':>8}{'4 ranks':>8}{'all':>8}"]
    for kind in kinds:
        cells = [counts[kind, ranks] for ranks in (1, 2, 4)]
        rows.append(f"{kind:<16}" + "".join(f"{cell:>8}" for cell in (*cells, sum(cells))))
    kills = sum(count for (kind, _), count in counts.items() if kind.startswith("kill"))
    broken = sum(bool(record["violations"]) for record in records)
    rows.append(
        f"{len(records)} trials, {sum(counts.values())} disturbances ({kills} kills), {missed} missed; "
        f"at most {lost} steps lost; all gone at most {slowest:.1f} s after a kill; {broken} violations"
    )
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
