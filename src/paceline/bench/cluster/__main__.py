"""`python -m paceline.bench.cluster --hosts 4 --ranks 4 --rate 200mbit -- COMMAND…`

Runs COMMAND, a script, `-m MODULE` or a program, under torchrun on every host. Shows rank 0's output,
and exits with the first exit code that is not 0.
"""

from __future__ import annotations

import argparse
import sys

from paceline.bench.cluster.emulated import EmulatedCluster
from paceline.bench.cluster.job import show
from paceline.bench.cluster.network import why_unavailable
from paceline.core.errors import ConfigError, LaunchError, PacelineError


def main() -> int:
    options = _parser().parse_args()
    try:
        problem = why_unavailable()
        if problem:
            raise LaunchError(f"no emulated cluster: {problem}")
        with EmulatedCluster(options.hosts, _rates(options.rate)) as cluster:
            job = cluster.torchrun(options.command, _ranks(options.ranks))
            return show(job)
    except PacelineError as error:
        sys.stderr.write(f"paceline: error: {error}\n")
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m paceline.bench.cluster",
        description="Runs COMMAND under torchrun on hosts made of network namespaces.",
        allow_abbrev=False,
    )
    parser.add_argument("--hosts", type=int, default=2, help="how many (default: 2)")
    parser.add_argument("--ranks", default="1", help="on each host, or one number for each: 2,1")
    parser.add_argument(
        "--rate", default="none", help="of each link, or one for each: 200mbit,none"
    )
    parser.add_argument(
        "command", nargs="+", metavar="COMMAND", help="after --, with its arguments"
    )
    return parser


def _ranks(text: str) -> int | list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError("--ranks", text, "is not a number", "write 4, or 2,1") from None
    return counts if len(counts) > 1 else counts[0]


def _rates(text: str) -> str | list[str | None] | None:
    rates = [None if part == "none" else part for part in text.split(",")]
    return rates if len(rates) > 1 else rates[0]


if __name__ == "__main__":
    sys.exit(main())
