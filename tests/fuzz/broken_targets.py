"""Parsers that are broken on purpose, one in each way that the harness must notice."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from fuzz.harness import Finding, fuzz
from fuzz.target import MIB, Seed, Target
from paceline.core.errors import DataError

_BAD = 3


def _crash(number: int) -> None:
    if number == _BAD:
        os.kill(os.getpid(), signal.SIGSEGV)


def _traceback(number: int) -> None:
    if number == _BAD:
        raise KeyError("a bug")


def _hang(number: int) -> None:
    while number == _BAD:
        pass


def _memory(number: int) -> None:
    if number == _BAD:
        bytearray(8 << 30)


def _sound(number: int) -> None:
    if number % 2:
        raise DataError("refused")


def main() -> None:
    for parser in (_crash, _traceback, _hang, _memory, _sound):
        count = iter(range(100))

        def drive(content: bytes, name: str, folder: Path, parser=parser, count=count) -> None:  # type: ignore[no-untyped-def]
            parser(next(count))

        target = Target(parser.__name__, [Seed("x", b"abc")], drive, 1, memory_bytes=64 * MIB)
        kinds: list[Finding] = []
        # A worker starts its own count: 5 inputs hold one bad one.
        tally = fuzz(target, 0, 0, 5, kinds.append, cpu_limit_s=0.5)
        told = ",".join(finding.kind for finding in kinds)
        sys.stdout.write(f"{parser.__name__} [{told}] {tally.accepted} {tally.refused}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
