"""`paceline bench step`: the rows of the table, each measured in its own process, and their ratios.

Rows are our configurations and plain PyTorch recipes: {bf16, fp16} × {compile default, reduce-overhead,
max-autotune}.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from paceline.bench.step import PREFIX, READY, StepRow
from paceline.core.errors import ConfigError, nearest

Result = dict[str, Any]
_OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours bf16": {"precision.amp_dtype": "bf16"},
    # What runs on many ranks: a process group and its plan instead of the single bucket of one rank, so
    # that hooks send buckets during backward. The all-reduce of one rank moves no bytes: the row shows
    # the cost of everything but the network.
    "ours N>1": {"comm.algorithm": "native"},
    "ours muon": {"optim.name": "muon"},
    "ours no graphs": {"run.cuda_graphs": "off"},
    "ours tf32": {"precision.amp_dtype": "fp32"},
    "ours fp32": {"precision.amp_dtype": "fp32", "precision.tf32": False},
}
_MODES = ("default", "reduce-overhead", "max-autotune")
_PLAIN: dict[str, dict[str, Any]] = {
    **{
        f"plain {dtype} {mode}": {"dtype": dtype, "compile": mode}
        for dtype in ("bf16", "fp16")
        for mode in _MODES
    },
    "plain tf32 default": {"dtype": "tf32", "compile": "default"},
    "plain fp32": {"dtype": "fp32", "compile": "off", "channels_last": False},
}
ROW_NAMES = (*_OURS, *_PLAIN)
_ON_CPU = ("ours", "plain fp32")


class RowProcess:
    """Measures a row in a new process, which is killed if it is not ready within `limit_s` seconds.

    It warms up on its own and waits for `measure`, so that several rows can compile at the same time
    without disturbing a measurement.
    """

    def __init__(self, row: StepRow, limit_s: float) -> None:
        self._row, self._limit_s, self._started = row, limit_s, time.perf_counter()
        # A file, closed after reading: a full pipe would block the row.
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "paceline.bench.step", row.to_json()],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
        )  # fmt: skip
        self._late = False
        self._timer = threading.Timer(limit_s, self._end)
        self._timer.start()

    def _end(self) -> None:
        self._late = True
        self._process.kill()

    def await_ready(self) -> None:
        """Returns when the row is warm or has failed."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == READY:
                break
        self._timer.cancel()

    def measure(self) -> Result:
        """Lets the row measure; its result, or a table with the key `error`."""
        out, _ = self._process.communicate("go\n")  # also reaps a failed row
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


def choose_rows(names: Sequence[str], common: dict[str, Any]) -> list[StepRow]:
    """The rows of the given names, or all that make sense on the device."""
    known = ROW_NAMES if common["device"] == "cuda" else _ON_CPU
    for name in names:
        if name not in ROW_NAMES:
            raise ConfigError("--row", name, "unknown", nearest(name, ROW_NAMES))
    rows = []
    for name in names or known:
        kind = "ours" if name in _OURS else "plain"
        switches = dict(_OURS[name] if name in _OURS else _PLAIN[name])
        group = name == "ours N>1"
        rows.append(StepRow(name=name, kind=kind, switches=switches, group=group, **common))
    return rows


def measure_rows(
    rows: Sequence[StepRow], limit_s: float, together: int, on_progress: Callable[[Result], None]
) -> list[Result]:
    """`together` rows compile and warm up at the same time, then measure one by one. A row that fails
    or is not warm after `limit_s` seconds has an `error` instead of a result. `on_progress` gets each
    result."""
    results = []
    for start in range(0, len(rows), together):
        started = [RowProcess(row, limit_s) for row in rows[start : start + together]]
        for process in started:
            process.await_ready()
        for process in started:
            result = process.measure()
            on_progress(result)
            results.append(result)
    return results


def ratios(results: Sequence[Result]) -> dict[str, float]:
    """Ours over the fastest plain recipe, and other comparisons of the rows that were measured."""
    speed = {r["name"]: r["images_per_s"] for r in results if "images_per_s" in r}
    half = {n: v for n, v in speed.items() if n.startswith(("plain bf16", "plain fp16"))}
    found: dict[str, float] = {}
    if "ours" in speed and half:
        fastest = max(half, key=lambda name: half[name])
        found[f"ours / fastest of {len(half)} plain recipes, {fastest}"] = (
            speed["ours"] / half[fastest]
        )
    for name, below in (
        ("ours / ours fp32", "ours fp32"),
        ("ours / ours tf32", "ours tf32"),
        ("ours / plain fp32", "plain fp32"),
        ("ours / plain tf32 default", "plain tf32 default"),
    ):
        if "ours" in speed and below in speed:
            found[name] = speed["ours"] / speed[below]
    for name in ("ours N>1", "ours muon", "ours no graphs"):
        if "ours" in speed and name in speed:
            found[f"{name} / ours"] = speed[name] / speed["ours"]
    return found
