"""`make ddp-conformance`: PyTorch's tests of DistributedDataParallel, run with `pl.DataParallel`.

The tests are those of the installed torch. They run on two Gloo ranks, once natively and once with
`algorithm="ring"`. `passed_by_ddp.txt` lists the tests that DistributedDataParallel itself passes this
way; `known_failures.toml` says which of them `pl.DataParallel` does not pass, and why. `--record` writes
the former anew.
"""

from __future__ import annotations

import argparse
import inspect
import io
import logging
import os
import sys
import tomllib
import unittest
from collections.abc import Iterable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}

import torch
from torch.nn.parallel import DistributedDataParallel

import paceline as pl
from ddp_conformance.cpu_devices import count_two_gpus, on_cpu, use_cpu

torch.set_num_threads(1)  # threads do not survive a fork
count_two_gpus()

from torch.testing._internal.distributed import distributed_test  # noqa: E402

HERE = Path(__file__).parent
PASSED, KNOWN = HERE / "passed_by_ddp.txt", HERE / "known_failures.toml"
# Tests of GPUs with inputs of gigabytes.
TOO_LARGE = {"test_ddp_uneven_inputs"}
KINDS: dict[str, dict[str, str]] = {"native": {}, "ring": {"algorithm": "ring"}}


class Case(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """All tests; the ranks are forked from this process."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    @classmethod
    def _run(cls, *args: Any, **named: Any) -> None:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        use_cpu()
        super()._run(*args, **named)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make ddp-conformance ARGS=…", description=__doc__)
    parser.add_argument("--only", default="", help="tests whose name contains this")
    parser.add_argument("--show", action="store_true", help="print why tests fail")
    parser.add_argument("--record", action="store_true", help="write the list of DDP itself")
    options = parser.parse_args()
    logging.disable(logging.INFO)
    if options.record:
        return _record()
    names = [name for name in PASSED.read_text("utf-8").split() if options.only in name]
    known: dict[str, dict[str, str]] = tomllib.loads(KNOWN.read_text("utf-8"))
    failures = {
        kind: _failures(on_cpu(pl.DataParallel, **arguments), names)
        for kind, arguments in KINDS.items()
    }
    unlisted = 0
    for name in names:
        row = f"{name:<74}"
        for kind in KINDS:
            failed, listed = name in failures[kind], name in known[kind]
            unlisted += failed != listed
            word = f"{'fails' if failed else 'passes'}{'' if failed == listed else ' (!)'}"
            row += f"{word:<12}"
        _say(row)
        for kind in KINDS if options.show else ():
            _say(failures[kind].get(name, ""))
    for kind in KINDS:
        _say(f"{kind}: {len(names) - len(failures[kind])} of {len(names)} pass")
    _say(f"{unlisted} results differ from {KNOWN.name}" if unlisted else f"all as in {KNOWN.name}")
    return 1 if unlisted else 0


def _record() -> int:
    tests = {name for name in dir(Case) if name.startswith("test_")}
    names = sorted(filter(_wraps, tests - TOO_LARGE))
    failures = _failures(on_cpu(DistributedDataParallel), names)
    passed = [name for name in names if name not in failures]
    PASSED.write_text("".join(f"{name}\n" for name in passed), "utf-8")
    _say(f"{len(passed)} of {len(names)} pass")
    return 0


def _wraps(name: str) -> bool:
    """Returns True if the test uses DDP."""
    source = inspect.getsource(inspect.unwrap(getattr(Case, name)))
    return any(word in source for word in ("ddp", "DDP", "DistributedDataParallel"))


def _failures(wrapper: type[Any], names: Iterable[str]) -> dict[str, str]:
    """Runs the tests with `wrapper` as DistributedDataParallel; a skipped test counts as failed."""
    found = {}
    with (
        mock.patch.object(torch.nn.parallel, "DistributedDataParallel", wrapper),
        mock.patch.object(distributed_test, "DistributedDataParallel", wrapper),
    ):
        for name in names:
            result = unittest.TestResult()
            with redirect_stdout(io.StringIO()):
                unittest.TestSuite([Case(name)]).run(result)
            problems = [text for _, text in result.failures + result.errors + result.skipped]
            if problems:
                found[name] = problems[0]
    return found


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
