"""`python -m chaos`: many trials, a line of JSON for each, and a table of what was survived.

In: a seed, a number of trials, numbers of ranks. Out: exit code 1 and a command that repeats the trial
where an invariant was broken. Moments are times on a clock, so a repetition hits a nearby moment.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from chaos.disturbances import WEIGHTS, unavailable
from chaos.fork_server import ForkServer
from chaos.job import descendants
from chaos.trial import Measured, Trial


def main() -> int:
    options = _options()
    if options.table:
        lines = [line for file in options.table for line in file.read_text().splitlines()]
        sys.stdout.write(table([json.loads(line) for line in lines]) + "\n")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of what ends the processes
    if options.worker:
        server = ForkServer()
        try:
            return _work(options, server)
        finally:
            for pid in descendants(server.pid):
                os.kill(pid, signal.SIGKILL)
            server.close()
    root = Path(tempfile.mkdtemp(prefix="paceline-chaos-"))
    started = time.monotonic()
    command = [sys.executable, "-m", "chaos", *sys.argv[1:], "--worker", str(root)]
    workers = [
        subprocess.Popen([*command, "--share", f"{number}/{options.jobs}"], stdout=subprocess.PIPE,
                         text=True)
        for number in range(options.jobs)
    ]  # fmt: skip
    records: list[dict[str, Any]] = []
    try:
        codes = _collect(workers, records, options.out)
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait()
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
    return 1 if broken or any(codes) else 0


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
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--share", default="0/1", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.jobs = 1 if options.trial is not None else min(options.jobs, options.trials)
    return options


def _collect(
    workers: list[subprocess.Popen[str]], records: list[dict[str, Any]], out: Path | None
) -> list[int]:
    """Shows and keeps the records as they come, until every worker has ended."""
    import selectors

    with selectors.DefaultSelector() as selector:
        for worker in workers:
            assert worker.stdout is not None
            selector.register(worker.stdout, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                line = key.fileobj.readline()  # type: ignore[union-attr]
                if not line:
                    selector.unregister(key.fileobj)
                    continue
                records.append(json.loads(line))
                sys.stdout.write(line)
                sys.stdout.flush()
                if out is not None:
                    with out.open("a") as file:
                        file.write(line)
    return [worker.wait() for worker in workers]


def _work(options: argparse.Namespace, server: ForkServer) -> int:
    """One worker, with a fork server of its own: every n-th trial."""
    share, of = map(int, options.share.split("/"))
    root = Path(options.worker)
    numbers = [options.trial] if options.trial is not None else range(share, options.trials, of)
    ranks, started = tuple(options.ranks), time.monotonic()
    left_out = unavailable()
    for kind, reason in left_out.items():
        sys.stderr.write(f"left out: {kind} ({reason})\n")
    left_out |= {kind: "not asked for" for kind in WEIGHTS if kind not in options.only}
    references = Measured(server, root / "references")
    for number in numbers:
        if time.monotonic() - started > options.seconds:
            break
        trial = Trial(server, options.seed, number, references, root, left_out, ranks)
        try:
            record = trial.run()
        except Exception as error:
            known = {
                "seed": options.seed,
                "trial": number,
                "ranks": 0,
                "attempts": [],
            } | trial.record
            record = known | {"violations": [f"the harness itself failed: {error!r}"]}
            for pid in descendants(server.pid):
                os.kill(pid, signal.SIGKILL)
        sys.stdout.write(json.dumps(record, separators=(",", ":")) + "\n")
        sys.stdout.flush()
        if not record["violations"]:
            for folder in root.glob(f"trial-{number}*"):
                if folder.name in (f"trial-{number}", f"trial-{number}-logs"):
                    shutil.rmtree(folder)
    return 0


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
