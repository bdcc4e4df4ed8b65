"""Which tests may be skipped, and the last line of `make test`.

`SkipRecorder`, a pytest plugin that tests/conftest.py registers, appends each skipped test to the file
that `PACELINE_SKIPS` names. `python tests/allowed_skips.py FILE` then says how many tests were skipped.
It fails if a skip is not in `ALLOWED`, in CI (`CI=true`) and for root on Debian, who can install every
package that a test needs.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

MISSING = [
    "sh",
    str(Path(__file__).parent.parent / "tools/install_system_packages.sh"),
    "--missing",
]
# By kind: patterns of reasons. A missing program or library of the system is never one of them.
ALLOWED: Mapping[str, Sequence[str]] = {
    "GPU": [
        r"needs (a|one) (CUDA device|GPU)|no CUDA device|NCCL on one GPU: .*",
        r"needs a machine without CUDA|there is a GPU here|a GPU is here, .*",
    ],
    "optional packages": [
        r"(timm|lightning|accelerate) is not installed",
        r"could not import '(timm|torchvision(\.models)?|wandb|mlflow)'.*",
        r"(timm|torchvision) cannot be imported: .*",
        # The test extra installs it on the only platform that it has a wheel for.
        *(
            [r"no triton|could not import 'triton'.*|triton has no wheel for .*"]
            if platform.machine() != "x86_64"
            else []
        ),
    ],
    "data": [
        r"shared/data/\w+ is not here|.*\.\./shared/data is absent",
    ],
    # What a container or another user may not do, whatever is installed.
    "rights": [
        r"no emulated cluster here: (?!.*install iproute2).*",
        r"cannot mount a small file system here: .*|only root can .*|needs Linux's schedstat",
    ],
}


def kind_of(reason: str) -> str | None:
    """The kind of an allowed skip; None if it is not allowed."""
    for kind, patterns in ALLOWED.items():
        if any(re.fullmatch(pattern, reason, re.DOTALL) for pattern in patterns):
            return kind
    return None


class SkipRecorder:
    """A plugin for the process that gets all reports, not for the workers of pytest-xdist."""

    def __init__(self, file: Path) -> None:
        self._file = file.absolute()
        self._reasons: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A skipped module counts as one test."""
        if report.skipped:
            self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        where = report.longrepr
        reason = str(where[2] if isinstance(where, tuple | list) else where)
        self._reasons[report.nodeid] = reason.removeprefix("Skipped: ")

    def pytest_sessionfinish(self) -> None:
        lines = [json.dumps({"test": t, "reason": reason}) for t, reason in self._reasons.items()]
        with self._file.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)


def must_be_complete() -> bool:
    """Returns True if every package that a test needs can be installed here, or has to be."""
    in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    return in_ci or (os.geteuid() == 0 and shutil.which("apt-get") is not None)


def summary(reasons: Sequence[str], missing: Sequence[str]) -> tuple[list[str], int]:
    """The lines to show, and how many skips are not allowed."""
    kinds = Counter(kind_of(reason) for reason in reasons)
    others = kinds.pop(None, 0)
    unlisted = Counter(reason for reason in reasons if kind_of(reason) is None)
    lines = [f"skipped and not allowed: {count} × {reason}" for reason, count in unlisted.items()]
    counts = [
        f"{count} {kind}" for kind, count in sorted(kinds.items(), key=lambda item: str(item))
    ]
    last = f"{len(reasons)} tests skipped"
    if others:
        counts.append(f"{others} for other reasons")
    if counts:
        last += f" ({', '.join(counts)})"
    if missing:
        last += f"; missing here: {', '.join(missing)}"
    return [*lines, last], others


def main(file: Path) -> int:
    texts = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    missing = subprocess.run(MISSING, capture_output=True, text=True, check=True).stdout.split()
    lines, others = summary([str(json.loads(text)["reason"]) for text in texts], missing)
    fails = others > 0 and must_be_complete()
    if fails:
        lines[-1] = f"error: {lines[-1]}; install what these tests need, or list them in {__file__}"
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return int(fails)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
