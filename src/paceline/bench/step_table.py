"""`paceline bench step`: which rows, and what they say side by side.

In: model, batch and device. Out: our configurations and the plain-PyTorch recipes of {bf16, fp16} ×
{compile default, reduce-overhead, max-autotune}, each measured in a process of its own, one after the
other, and the ratios that matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline.bench.row_process import Result, RowProcess
from paceline.bench.step_row import StepRow
from paceline.core.errors import ConfigError, nearest

_OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours bf16": {"precision.amp_dtype": "bf16"},
    # What runs on many ranks: in a process group, with their plan instead of a lone rank's single
    # buffer, so that hooks send buffers while backward goes on. One rank's all-reduce moves no bytes:
    # it shows the cost of all but the network.
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


def choose_rows(names: Sequence[str], common: dict[str, Any]) -> list[StepRow]:
    """The rows called `names`, or all that make sense on the device."""
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
    rows: Sequence[StepRow], limit_s: float, together: int, tell: Callable[[Result], None]
) -> list[Result]:
    """Each row in a process; `together` of them compile and warm up side by side, then measure one by
    one. A row that fails or is not warm after `limit_s` says so in its place."""
    results = []
    for start in range(0, len(rows), together):
        started = [RowProcess(row, limit_s) for row in rows[start : start + together]]
        for process in started:
            process.await_ready()
        for process in started:
            result = process.measure()
            tell(result)
            results.append(result)
    return results


def ratios(results: Sequence[Result]) -> dict[str, float]:
    """Ours over the fastest plain recipe, and the other comparisons for which rows are there."""
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
