"""Runs a command on each rank of an emulated cluster.

    python -m benchmarks.cluster --hosts 4 --ranks-per-host 4 --link-mbit 200 -- paceline tune

COMMAND is a script, `-m MODULE` or a program. Each rank gets the environment variables of torchrun. Shows
rank 0's output, and exits with the first exit code that is not 0.
"""

from __future__ import annotations

import argparse
import sys
from typing import TypeVar

from benchmarks.cluster.emulated import EmulatedCluster
from benchmarks.cluster.job import show
from benchmarks.cluster.network import why_unavailable
from paceline.core.errors import ConfigError, LaunchError, PacelineError

Number = TypeVar("Number", int, float)


def main() -> int:
    options = _parser().parse_args()
    try:
        rates = [_rate(mbit) for mbit in _numbers("--link-mbit", options.link_mbit, float)]
        counts = _numbers("--ranks-per-host", options.ranks_per_host, int)
        problem = why_unavailable()
        if problem:
            raise LaunchError(f"no emulated cluster: {problem}")
        with EmulatedCluster(options.hosts, rates[0] if len(rates) == 1 else rates) as cluster:
            start = cluster.torchrun if options.torchrun else cluster.ranks
            return show(start(options.command, counts[0] if len(counts) == 1 else counts))
    except PacelineError as error:
        sys.stderr.write(f"paceline: error: {error}\n")
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cluster",
        description="Runs COMMAND on each rank of hosts made of network namespaces.",
        allow_abbrev=False,
    )
    parser.add_argument("--hosts", type=int, default=2, help="how many (default: 2)")
    parser.add_argument("--ranks-per-host", default="1", help="one number, or one per host: 2,1")
    parser.add_argument(
        "--link-mbit", default="0", help="rate of each link, or one per host: 200,0; 0: no limit"
    )
    parser.add_argument(
        "--torchrun", action="store_true", help="start the ranks by a torchrun agent on each host"
    )
    parser.add_argument(
        "command", nargs="+", metavar="COMMAND", help="after --, with its arguments"
    )
    return parser


def _numbers(flag: str, text: str, kind: type[Number]) -> list[Number]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(flag, text, "is not a number", "write 4, or 2,1") from None


def _rate(mbit: float) -> str | None:
    return f"{mbit:f}mbit" if mbit else None


if __name__ == "__main__":
    sys.exit(main())
