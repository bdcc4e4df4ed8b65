"""`python -m fuzz`: mutated inputs over every parser; a line for each, a file for each finding."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from fuzz.harness import Finding, Tally, fuzz
from fuzz.target import Target
from fuzz.targets import all_targets


def main() -> int:
    options = _options()
    torch.set_num_threads(1)  # threads do not survive a fork
    targets = [t for t in all_targets() if not options.only or t.name in options.only.split(",")]
    total = sum(target.share for target in targets)
    _say(f"seed {options.seed}, {options.count} inputs, {len(targets)} parsers")
    _say(f"{'parser':<22}{'inputs':>8}{'accepted':>10}{'refused':>9}{'found':>7}{'MiB':>7}{'s':>8}")
    tallies = []
    for target in targets:
        inputs = -(-options.count * target.share // total)
        numbers = (
            range(inputs) if options.number is None else range(options.number, options.number + 1)
        )

        def on_finding(finding: Finding, target: Target = target) -> None:
            _report(options.out, target, options.seed, finding)

        tallies.append(fuzz(target, options.seed, numbers.start, numbers.stop, on_finding))
        _say(_row(tallies[-1]))
    return _conclude(tallies)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make fuzz ARGS=…", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10_000, help="inputs of all parsers together")
    parser.add_argument("--only", default="", help="parsers, by name, with commas")
    parser.add_argument("--number", type=int, help="this input alone: reproduces a finding")
    parser.add_argument(
        "--out", type=Path, default=Path("fuzz-findings"), help="where findings are written"
    )
    return parser.parse_args()


def _report(out: Path, target: Target, seed: int, finding: Finding) -> None:
    name, content = target.make(seed, finding.number)
    folder = out / f"{finding.target}-{seed}-{finding.number}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    (folder / "finding.txt").write_text(f"{finding.kind}\n{finding.text}\n", encoding="utf-8")
    last = finding.text.strip().splitlines()[-1:] or [""]
    _say(f"  {finding.kind} at input {finding.number}: {last[0][:160]}")
    _say(f"  again: --only {finding.target} --seed {seed} --number {finding.number}; {folder}")


def _row(tally: Tally) -> str:
    return (
        f"{tally.target:<22}{tally.inputs:>8}{tally.accepted:>10}{tally.refused:>9}"
        f"{len(tally.findings):>7}{tally.peak_bytes / 2**20:>7.0f}{tally.seconds:>8.1f}"
    )


def _conclude(tallies: list[Tally]) -> int:
    kinds: dict[str, int] = {}
    for tally in tallies:
        for finding in tally.findings:
            kinds[finding.kind] = kinds.get(finding.kind, 0) + 1
    told = ", ".join(f"{count} × {kind}" for kind, count in sorted(kinds.items()))
    inputs, seconds = sum(t.inputs for t in tallies), sum(t.seconds for t in tallies)
    _say(
        f"{inputs} inputs in {seconds:.0f} s: {told or '0 tracebacks, 0 crashes, 0 hangs, 0 memory'}"
    )
    return 1 if kinds else 0


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
