"""`paceline bench step`: which rows, and what they say side by side.

In: model, batch and device. Out: our configurations and the plain-PyTorch recipes of {bf16, fp16} ×
{compile default, reduce-overhead, max-autotune}, each measured in a process of its own, one after the
other, and the ratios that matter.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.bench.step import PREFIX, READY, StepRow
from paceline.bench.timing import Times, steady_times
from paceline.core.errors import ConfigError, nearest
from paceline.models.registry import create_model
from paceline.models.settings import ModelSettings

# A training step as people write it in plain PyTorch: the peer.
#
# In: a row with number format and compile mode. Out: the time of autocast, torch.compile,
# channels_last, cudnn.benchmark, fused momentum SGD and, for fp16, torch's GradScaler, on
# normalised images that lie on the device. The model is ours with torch's own operators:
# torchvision's architecture and keys.


_AMP = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Steps that a loop without synchronisation may run ahead; its own limit is the launch queue.
_LAG = 2


def measure(row: StepRow, ready: Callable[[], None]) -> tuple[Times, str]:
    """`switches`: dtype, compile, channels_last."""
    device, kind = torch.device(row.device), row.switches["dtype"]
    how, nhwc = row.switches.get("compile", "off"), row.switches.get("channels_last", True)
    strict = kind == "fp32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = not strict
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    settings = ModelSettings(name=row.model)
    model = create_model(settings, num_classes=row.classes, image_size=row.image_size).to(device)
    images = torch.randn(row.batch_size, 3, row.image_size, row.image_size, device=device)
    if nhwc:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(0, row.classes, (row.batch_size,), device=device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-5,
        fused=True if device.type == "cuda" else None,
    )  # fmt: skip
    forward: Callable[[Tensor], Tensor] = model
    if how != "off":
        forward = torch.compile(model, mode=None if how == "default" else how)
    scaler = torch.amp.GradScaler(device.type, enabled=kind == "fp16")
    amp = _AMP.get(kind)
    done: list[torch.cuda.Event] = []

    def launch(number: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, amp) if amp else nullcontext():
            loss = F.cross_entropy(forward(images), labels, label_smoothing=0.1)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        if device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            done.append(event)

    def wait() -> None:
        if done:
            done.pop(0).synchronize()

    times = steady_times(
        launch, wait, lag=_LAG, repeats=row.steps, warm_up=row.warm_up, ready=ready
    )
    return times, f"{kind}, compile {how}, {'NHWC' if nhwc else 'NCHW'}, fused SGD"


# `RowProcess`: a row of a benchmark in a process of its own.
#
# In: a row. Out: its result, or an error in words. The process warms up on its own; it measures
# when told to, so that several can compile side by side without disturbing a measurement.


Result = dict[str, Any]


class RowProcess:
    """Started at once; ended where it is not ready within `limit_s` seconds."""

    def __init__(self, row: StepRow, limit_s: float) -> None:
        self._row, self._limit_s, self._started = row, limit_s, time.perf_counter()
        # Closed once it was read: a pipe that nobody empties would stop the row.
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
