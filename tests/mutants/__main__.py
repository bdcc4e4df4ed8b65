"""`python -m mutants`: applies each mutant to a copy of the source and expects its tests to fail."""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from mutants.mutant import PACKAGE, Mutant, StaleMutantError, read_mutants

ROOT = Path(__file__).parent.parent.parent
# Of pytest: a test failed. Everything else that is not 0 says that no test was run.
FAILED = 1
_seconds = itertools.count(1_000_000_000)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants ARGS=…", description=__doc__)
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    options = parser.parse_args()
    mutants = [mutant for mutant in read_mutants() if options.only in mutant.name]
    if not mutants:
        parser.error(f"--only {options.only!r}: no mutant has such a name")
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = _copy(Path(folder))
        stale = [str(error) for mutant in mutants if (error := _stale(mutant, copy))]
        if stale:
            _say("\n".join(stale))
            return 1
        code, output = _pytest(copy, {test for mutant in mutants for test in mutant.tests})
        if code:
            _say(f"{output}\nthe tests fail without any mutant: mend them first")
            return 1
        outcomes = [_try(mutant, copy) for mutant in mutants]
    killed = outcomes.count("killed")
    _say(f"{killed} of {len(outcomes)} mutants killed")
    return 0 if killed == len(outcomes) else 1


def _copy(folder: Path) -> Path:
    """A tree of its own: ranks that tests start import what lies beside the tests."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("src", "benchmarks", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def _stale(mutant: Mutant, copy: Path) -> StaleMutantError | None:
    try:
        mutant.mutated(copy)
    except StaleMutantError as error:
        return error
    return None


def _try(mutant: Mutant, copy: Path) -> str:
    """One row of the table."""
    path, started = copy / PACKAGE / mutant.file, time.monotonic()
    original, mutated = path.read_text(encoding="utf-8"), mutant.mutated(copy)
    _write(path, mutated)
    code, output = _pytest(copy, mutant.tests)
    _write(path, original)
    outcome = {0: "SURVIVED", FAILED: "killed"}.get(code, f"ERROR {code}")
    _say(f"{outcome:<10}{time.monotonic() - started:6.1f} s  {mutant.file:<34}{mutant.name}")
    if code not in (0, FAILED):
        _say(output)
    return outcome


def _write(path: Path, text: str) -> None:
    """At a time of its own: Python takes cached bytecode where size and second are those it knows."""
    path.write_text(text, encoding="utf-8")
    second = next(_seconds)
    os.utime(path, (second, second))


def _pytest(copy: Path, tests: Iterable[str]) -> tuple[int, str]:
    environment = os.environ | {"PYTHONPATH": str(copy / "src")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    chosen = sorted(f"tests/{test}" for test in tests)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *chosen],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
