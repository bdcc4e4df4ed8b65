"""`paceline bench step`: our training step and plain PyTorch steps, on synthetic images.

The plain recipes are {bf16, fp16} × {compile default, reduce-overhead, max-autotune}. Each row of the
table has its own process, because compilers, allocators and algorithm caches would carry over from row
to row, and because a compiler that takes too long can be killed: `python -m paceline.bench.step ROW`
measures a `StepRow`, given as JSON, and prints the result as one line of JSON.
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

from paceline.core.errors import ConfigError, nearest
from paceline.models.registry import create_model
from paceline.models.settings import ModelSettings
from paceline.planner.layers import known_network
from paceline.tune.step import StepRow, measure_ours
from paceline.tune.timing import Times, steady_times

PREFIX = "paceline-bench-row "
READY = "paceline-bench-ready"
_AMP = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Steps in flight of the plain loop, which does not synchronize.
_LAG = 2


def measure_plain(row: StepRow, ready: Callable[[], None]) -> tuple[Times, str]:
    """A plain PyTorch step: autocast, torch.compile, channels_last, cudnn.benchmark, fused momentum
    SGD and, for fp16, GradScaler, on normalized images on the device. The model is ours with torch's
    own operators, which is torchvision's architecture."""
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


def measure(row: StepRow, ready: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Builds the step, warms it up, calls `ready` and times it."""
    started, start_s = time.perf_counter(), 0.0

    def warm() -> None:
        nonlocal start_s
        start_s = time.perf_counter() - started
        ready()

    measure_step = measure_ours if row.kind == "ours" else measure_plain
    times, description = measure_step(row, warm)
    low, high = times.spread
    gib = torch.cuda.max_memory_allocated() / 2**30 if row.device == "cuda" else 0.0
    return {
        "name": row.name,
        "step_s": times.median,
        "step_s_p10": low,
        "step_s_p90": high,
        "steps": len(times.seconds),
        "images_per_s": row.batch_size / times.median,
        "memory_gib": round(gib, 2),
        "start_s": round(start_s, 1),
        "what": description,
    }


def _take_turns() -> None:
    """Tells the parent that the row is warm, and waits until it may measure."""
    sys.stdout.write(READY + "\n")
    sys.stdout.flush()
    sys.stdin.readline()


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
    "ours recompute": {"run.accel.recompute_norms": True},
    # `auto`: bottlenecks only; `cudnn`: all residual blocks.
    "ours fused convolutions": {"run.accel.fused_convolutions": "auto"},
    "ours fused by cudnn": {"run.accel.fused_convolutions": "cudnn"},
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
            [sys.executable, "-P", "-m", "paceline.bench.step", row.to_json()],
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


_FUSED = ("ours fused convolutions", "ours fused by cudnn")
# As `accel` describes it.
_NOT_FUSED = "convolutions: off ("


def choose_rows(names: Sequence[str], common: dict[str, Any]) -> list[StepRow]:
    """The rows of the given names, or all that make sense on the device."""
    known = ROW_NAMES if common["device"] == "cuda" else _ON_CPU
    for name in names:
        if name not in ROW_NAMES:
            raise ConfigError("--row", name, "unknown", nearest(name, ROW_NAMES))
    rows = []
    if not names:
        net = known_network(common["model"], common["image_size"], common["classes"])
        if net is None or not net.can_recompute_norms:
            # Neither are there fused norms.
            known = tuple(name for name in known if name != "ours recompute")
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
    result. A row that times forms of convolutions at its start has the GPU for itself: other trainings
    take its choices, too."""
    results = []
    for batch in _batches(rows, together):
        started = [RowProcess(row, limit_s) for row in batch]
        for process in started:
            process.await_ready()
        for process in started:
            result = process.measure()
            on_progress(result)
            results.append(result)
    return results


def _batches(rows: Sequence[StepRow], together: int) -> list[list[StepRow]]:
    batches: list[list[StepRow]] = []
    for row in rows:
        alone = row.name in _FUSED
        room = batches and len(batches[-1]) < together and batches[-1][0].name not in _FUSED
        if alone or not room:
            batches.append([row])
        else:
            batches[-1].append(row)
    return batches


def ratios(results: Sequence[Result]) -> dict[str, float]:
    """Ours over the fastest plain recipe, and other comparisons of the rows that were measured."""
    speed = {r["name"]: r["images_per_s"] for r in results if "images_per_s" in r}
    half = {n: v for n, v in speed.items() if n.startswith(("plain bf16", "plain fp16"))}
    found: dict[str, float] = {}
    # A model without fused forms has measured `ours` again.
    fused = [
        r["name"] for r in results if r["name"] in _FUSED and _NOT_FUSED not in r.get("what", "")
    ]
    for name in ("ours", *fused):
        if name in speed and half:
            fastest = max(half, key=lambda each: half[each])
            words = f"{name} / fastest of {len(half)} plain recipes, {fastest}"
            found[words] = speed[name] / half[fastest]
    for name, below in (
        ("ours / ours fp32", "ours fp32"),
        ("ours / ours tf32", "ours tf32"),
        ("ours / plain fp32", "plain fp32"),
        ("ours / plain tf32 default", "plain tf32 default"),
    ):
        if "ours" in speed and below in speed:
            found[name] = speed["ours"] / speed[below]
    for name in (
        "ours N>1", "ours muon", "ours no graphs", "ours recompute", *fused,
    ):  # fmt: skip
        if "ours" in speed and name in speed:
            found[f"{name} / ours"] = speed[name] / speed["ours"]
    return found


if __name__ == "__main__":
    result = measure(StepRow.from_json(sys.argv[1]), _take_turns)
    sys.stdout.write(PREFIX + json.dumps(result) + "\n")
