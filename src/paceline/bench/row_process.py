"""`RowProcess`: a row of a benchmark in a process of its own.

In: a row. Out: its result, or an error in words. The process warms up on its own; it measures when told
to, so that several can compile side by side without disturbing a measurement.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

from paceline.bench.step_row import PREFIX, READY, StepRow

Result = dict[str, Any]


class RowProcess:
    """Started at once; ended where it is not ready within `limit_s` seconds."""

    def __init__(self, row: StepRow, limit_s: float) -> None:
        self._row, self._limit_s, self._started = row, limit_s, time.perf_counter()
        # Closed once it was read: a pipe that nobody empties would stop the row.
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "paceline.bench.step_row", row.to_json()],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
        )  # fmt: skip
        self._late = False
        self._timer = threading.Timer(limit_s, self._end)
        self._timer.start()

    def _end(self) -> None:
        self._late = True
        self._process.kill()

    def await_ready(self) -> None:
        """Returns once the row is warm, or has failed."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == READY:
                break
        self._timer.cancel()

    def measure(self) -> Result:
        """Gives the row its turn and takes its result."""
        out, _ = self._process.communicate("go\n")  # also reaps and closes what a failed row left
        with self._errors:
            for line in out.splitlines():
                if line.startswith(PREFIX):
                    found: Result = json.loads(line.removeprefix(PREFIX))
                    return {**found, "total_s": round(time.perf_counter() - self._started, 1)}
            return {"name": self._row.name, "error": self._reason()}

    def _reason(self) -> str:
        if self._late:
            return f"took longer than {self._limit_s:.0f} s to start"
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        return lines[-1][:300] if lines else f"exit code {self._process.returncode}"
