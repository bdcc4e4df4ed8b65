"""Training steps on synthetic images: ours against plain PyTorch.

    python -m benchmarks.step --model resnet50 -b 256 --row ours --row "plain bf16 max-autotune"

The plain recipes are {bf16, fp16} × {compile default, reduce-overhead, max-autotune}. Each round measures
every row once and starts with another row. Each measurement has its own process, because compilers,
allocators and algorithm caches would carry over from row to row, and because a compiler that takes too
long can be killed. Compilers find their results of the first round in their caches.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

from benchmarks.program import run
from paceline.cli import options
from paceline.cli.bench import measure_step, print_steps, report_progress, step_result
from paceline.cli.measure import chosen_device, environment, print_json
from paceline.cli.options import check_at_least
from paceline.core.errors import ConfigError, nearest
from paceline.models.registry import create_model
from paceline.models.settings import ModelSettings, check_model_name
from paceline.planner.layers import known_network
from paceline.tune.step import StepRow
from paceline.tune.timing import steady_times

Result = dict[str, Any]
_PREFIX = "paceline-bench-row "
_AMP = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Steps in flight of the plain loop, which does not synchronize.
_LAG = 2

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
_FUSED = ("ours fused convolutions", "ours fused by cudnn")
# The words of `accel` for a model whose convolutions it does not fuse.
_NOT_FUSED = "convolutions: off ("


def measure_plain(row: StepRow) -> Result:
    """Times a plain PyTorch step: autocast, torch.compile, channels_last, cudnn.benchmark, fused momentum
    SGD and, for fp16, GradScaler, on normalized images on the device. The model is ours with torch's own
    operators, which is torchvision's architecture."""
    started, start_s = time.perf_counter(), 0.0
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

    def ready() -> None:
        nonlocal start_s
        start_s = time.perf_counter() - started

    times = steady_times(
        launch, wait, lag=_LAG, repeats=row.steps, warm_up=row.warm_up, ready=ready
    )
    what = f"{kind}, compile {how}, {'NHWC' if nhwc else 'NCHW'}, fused SGD"
    return step_result(row, times, what, start_s)


def measure_in_process(row: StepRow, limit_s: float) -> Result:
    """Measures a row in a new process.

    Args:
        row: The step.
        limit_s: Seconds after which the process is killed.

    Returns:
        The `step_result`, or `name` and `error` if the row failed.
    """
    command = [sys.executable, "-m", "benchmarks.step", "--measure", json.dumps(asdict(row))]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False,
            timeout=limit_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"name": row.name, "error": f"took longer than {limit_s:.0f} s"}
    for line in done.stdout.splitlines():
        if line.startswith(_PREFIX):
            return dict(json.loads(line.removeprefix(_PREFIX)))
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return {"name": row.name, "error": lines[-1][:300] if lines else f"exit code {done.returncode}"}


def choose_rows(names: Sequence[str], common: dict[str, Any]) -> list[StepRow]:
    """Returns the rows of the given names, or by default all that make sense on the device."""
    known = ROW_NAMES if common["device"] == "cuda" else _ON_CPU
    for name in names:
        if name not in ROW_NAMES:
            raise ConfigError("--row", name, "unknown", nearest(name, ROW_NAMES))
    if not names:
        net = known_network(common["model"], common["image_size"], common["classes"])
        if net is None or not net.can_recompute_norms:
            # The model has no fused norms either.
            known = tuple(name for name in known if name != "ours recompute")
    return [
        StepRow(
            name=name, kind="ours" if name in _OURS else "plain",
            switches=dict((_OURS | _PLAIN)[name]), group=name == "ours N>1", **common,
        )
        for name in dict.fromkeys(names) or known
    ]  # fmt: skip


def measure_rounds(
    rows: Sequence[StepRow], rounds: int, measure: Callable[[StepRow], Result]
) -> list[Result]:
    """Measures each row once per round.

    Returns:
        For each row the result of the round with the median speed, with the images/s of all rounds as
        `rounds`; a row that failed has an `error` instead and is not measured again.
    """
    samples: dict[str, list[Result]] = {row.name: [] for row in rows}
    failed: dict[str, Result] = {}
    for turn in range(rounds):
        for place in range(len(rows)):
            row = rows[(turn + place) % len(rows)]
            if row.name in failed:
                continue
            result = measure(row)
            if "error" in result:
                failed[row.name] = result
                report_progress(f"round {turn + 1}: {row.name}: {result['error']}")
                continue
            samples[row.name].append(result)
            report_progress(f"round {turn + 1}: {row.name}: {result['images_per_s']:,.0f} images/s")
    return [failed.get(row.name) or _summary(samples[row.name]) for row in rows]


def _summary(samples: Sequence[Result]) -> Result:
    speeds = [sample["images_per_s"] for sample in samples]
    median = samples[speeds.index(statistics.median_low(speeds))]
    return {**median, "rounds": speeds}


def ratios(results: Sequence[Result]) -> dict[str, float]:
    """Returns ours over the fastest plain recipe, and other ratios of rows: medians over rounds."""
    rates = {r["name"]: r["rounds"] for r in results if "rounds" in r}
    half = [name for name in rates if name.startswith(("plain bf16", "plain fp16"))]
    # A model without fused convolutions has measured `ours` again.
    fused = [
        r["name"] for r in results if r["name"] in _FUSED and _NOT_FUSED not in r.get("what", "")
    ]
    pairs = {}
    if half:
        fastest = max(half, key=lambda name: statistics.median(rates[name]))
        for name in ("ours", *fused):
            pairs[f"{name} / fastest of {len(half)} plain recipes, {fastest}"] = name, fastest
    for below in ("ours fp32", "ours tf32", "plain fp32", "plain tf32 default"):
        pairs[f"ours / {below}"] = "ours", below
    for name in ("ours N>1", "ours muon", "ours no graphs", "ours recompute", *fused):
        pairs[f"{name} / ours"] = name, "ours"
    return {
        words: statistics.median(a / b for a, b in zip(rates[above], rates[below], strict=True))
        for words, (above, below) in pairs.items()
        if above in rates and below in rates
    }


def main(
    model: options.Model = "resnet50",
    batch_size: int = typer.Option(256, "--batch-size", "-b", help="Of one process."),
    image_size: options.ImageSize = 224,
    classes: options.Classes = 1000,
    rounds: int = typer.Option(3, help="Each measures every row once; the median counts."),
    steps: int = typer.Option(50, help="Steps to time in a round; the median counts."),
    warm_up: int = typer.Option(20, help="Steps before."),
    rows: list[str] = typer.Option([], "--row", help="Only this row; may be repeated."),
    row_limit_s: float = typer.Option(900.0, help="Limit for one measurement of a row."),
    device: options.Device = "auto",
    measured: str = typer.Option("", "--measure", hidden=True),
    as_json: options.AsJson = False,
) -> None:
    """Training steps on synthetic images: ours against plain PyTorch."""
    if measured:
        row = StepRow(**json.loads(measured))
        result = measure_step(row) if row.kind == "ours" else measure_plain(row)
        sys.stdout.write(_PREFIX + json.dumps(result) + "\n")
        return
    check_model_name(model)
    counts = {"--batch-size": batch_size, "--steps": steps, "--warm-up": warm_up}
    check_at_least(1, counts | {"--classes": classes, "--rounds": rounds})
    chosen = chosen_device(device)
    common = {
        "model": model, "batch_size": batch_size, "image_size": image_size, "classes": classes,
        "device": chosen, "steps": steps, "warm_up": warm_up,
    }  # fmt: skip
    results = measure_rounds(
        choose_rows(rows, common), rounds, lambda row: measure_in_process(row, row_limit_s)
    )
    compared = ratios(results)
    if as_json:
        print_json({
            "settings": common, "rows": results, "ratios": compared, **environment(chosen),
        })  # fmt: skip
    else:
        print_steps(results)
        for name, value in compared.items():
            sys.stdout.write(f"{name}: {value:.3f} ×\n")
    sys.exit(any("error" in result for result in results))


if __name__ == "__main__":
    run(main)
