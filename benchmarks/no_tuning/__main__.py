"""Commands of `python -m benchmarks.no_tuning`: `prepare`, `run` and `table`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.no_tuning.data import EMBEDDED, prepare
from benchmarks.no_tuning.runs import (
    BATCHES,
    DATA_SETS,
    METHODS,
    Cell,
    rate_cells,
    table_cells,
)
from benchmarks.no_tuning.table import show
from benchmarks.no_tuning.workers import Job, finish


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.no_tuning")
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("prepare", help="write the subsets")
    made.add_argument("--data", type=Path, required=True)
    made.add_argument("--cifar10", type=Path)
    made.add_argument("--tiny", type=Path)
    run = commands.add_parser("run", help="train the runs that the file does not contain")
    run.add_argument("--data", type=Path, required=True)
    run.add_argument("--out", type=Path, required=True)
    run.add_argument("--workers", type=int, default=1)
    run.add_argument("--device", default="cpu")
    run.add_argument("--seeds", type=int, default=2)
    run.add_argument("--seconds", type=float, default=1e9, help="start no run after this time")
    run.add_argument("--methods", type=_listed, default=METHODS)
    run.add_argument("--cells", type=Path, help="JSON lines of runs, instead of the table's runs")
    run.add_argument("--opt", help="one optimizer of Paceline, instead of the table's methods")
    run.add_argument("--rates", type=_listed, default=("",), help="its rates; empty: the rule's")
    run.add_argument("--nets", type=_listed, default=("resnet_tiny",))
    run.add_argument("--sets", type=_listed, default=DATA_SETS)
    run.add_argument("--batches", type=_listed, default=tuple(map(str, BATCHES)))
    run.add_argument("--set", action="append", default=[], help="KEY=JSON, a setting of all runs")
    shown = commands.add_parser("table", help="show the table of finished runs")
    shown.add_argument("files", type=Path, nargs="+")
    shown.add_argument("--rates", action="store_true", help="compare rates of each optimizer")
    return parser.parse_args()


def _cells(options: argparse.Namespace) -> list[Cell]:
    if options.cells:
        lines = options.cells.read_text(encoding="utf-8").splitlines()
        return [Cell.of(json.loads(line)) for line in lines]
    if options.opt:
        rates = [float(rate) if rate else None for rate in options.rates]
        batches = tuple(map(int, options.batches))
        return rate_cells(options.opt, rates, options.nets, options.sets, batches, options.seeds)
    return table_cells(options.seeds, options.methods)


def _run(options: argparse.Namespace) -> None:
    done = set()
    if options.out.exists():
        lines = options.out.read_text(encoding="utf-8").splitlines()
        done = {Cell.of(json.loads(line)).key for line in lines}
    left = [cell for cell in _cells(options) if cell.key not in done]
    more = {name: json.loads(value) for name, _, value in (s.partition("=") for s in options.set)}
    with options.out.open("a", encoding="utf-8") as out:
        job = Job(options.data, options.device, more)
        for number, line in enumerate(finish(left, job, options.workers, options.seconds), start=1):
            out.write(json.dumps(line) + "\n")
            out.flush()
            keys = ("data", "net", "batch", "method", "rate", "seed")
            name = " ".join(str(line[key]) for key in keys)
            value = line.get("top1", line.get("error"))
            print(f"{number}/{len(left)}: {name}: {value} ({line['seconds']} s)", flush=True)


def main() -> None:
    options = _parse()
    if options.command == "prepare":
        prepare(EMBEDDED, None, options.data)
        for name, directory in (("cifar10", options.cifar10), ("tiny25", options.tiny)):
            if directory:
                prepare(name, directory, options.data)
    elif options.command == "run":
        _run(options)
    else:
        lines = [
            json.loads(line) for file in options.files for line in file.read_text().splitlines()
        ]
        sys.stdout.write(show(lines, by_rate=options.rates))


if __name__ == "__main__":
    main()
