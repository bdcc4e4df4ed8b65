"""Fused 1 × 1 convolutions of ResNet-50 against separate ones, on one GPU.

    python tools/fused_convolutions_bench.py [--batch 256] [--steps 40] [--fresh]
        [--only shapes|large|steps] [--modes off auto recompute]

Prints one JSON object a line. First every kind of 1 × 1 convolution with its norms, forward and backward:
milliseconds of all forms, the bytes that the fused form has to move and their share of 4.26 TB/s (the
copy bandwidth of an H200), and how far the results are from those of the separate form; `large`: only
those of maps of 14 × 14 and more. Then whole training steps, `run.fused_convolutions` off and auto, and
auto with `run.recompute_norms`, in turn, through the rows of `paceline bench step`. A form or a layer
that fails, or does not end, prints its error, and the next one follows. Kernels are built first, by
several processes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.bench.step import RowProcess, StepRow
from paceline.models import product_choice, products
from paceline.models.fused import statistics
from paceline.models.product_choice import SEPARATE, choices
from paceline.models.products import (
    MASKED,
    MERGED,
    PLAIN,
    Epilogue,
    Gradients,
    Operand,
    backward_product,
    forward_product,
)

COPY_BYTES_PER_S = 4.26e12
BUILDERS = 16
# Longer than any layer takes, kernels built.
LAYER_TIMEOUT_S = 60
SMALLEST_LARGE_SIDE = 14


@dataclass(frozen=True)
class Layer:
    """A kind of convolution, and how often ResNet-50 has it."""

    kind: str
    side: int
    into: int
    out: int
    count: int

    @property
    def name(self) -> str:
        return f"{self.kind} {self.side}x{self.side} {self.into}->{self.out}"


# A `reduce` takes the output of a block with an identity shortcut, a `projected` one of a block with a
# convolution in its shortcut, a `first` one a stored map; a `shortcut` is that convolution.
LAYERS = (
    Layer("first", 56, 64, 64, 1),
    Layer("shortcut", 56, 64, 256, 1),
    Layer("projected", 56, 256, 64, 1),
    Layer("reduce", 56, 256, 64, 1),
    Layer("reduce", 56, 256, 128, 1),
    Layer("projected", 28, 512, 128, 1),
    Layer("reduce", 28, 512, 128, 2),
    Layer("reduce", 28, 512, 256, 1),
    Layer("projected", 14, 1024, 256, 1),
    Layer("reduce", 14, 1024, 256, 4),
    Layer("reduce", 14, 1024, 512, 1),
    Layer("projected", 7, 2048, 512, 1),
    Layer("reduce", 7, 2048, 512, 1),
    Layer("expand", 56, 64, 256, 3),
    Layer("expand", 28, 128, 512, 4),
    Layer("expand", 14, 256, 1024, 6),
    Layer("expand", 7, 512, 2048, 3),
)
JOINING = ("reduce", "projected")
MODES = ("off", "auto", "recompute")


def emit(**values: object) -> None:
    print(json.dumps(values), flush=True)


class Case:
    """A layer on random maps."""

    def __init__(self, layer: Layer, batch: int, dtype: torch.dtype) -> None:
        self.layer, self.dtype, self.batch = layer, dtype, batch
        device = torch.device("cuda")
        torch.manual_seed(0)
        self.weight = torch.randn(layer.out, layer.into, 1, 1, device=device).mul_(
            (2 / layer.out) ** 0.5
        ).to(dtype).contiguous(memory_format=torch.channels_last)  # fmt: skip
        self.norm = nn.BatchNorm2d(layer.out).to(device)
        self.before_norm = nn.BatchNorm2d(layer.into).to(device)
        with torch.no_grad():
            self.before_norm.weight.uniform_(0.5, 1.5)
            self.before_norm.bias.uniform_(-0.3, 0.3)
        self.before = self.map(layer.into)
        self.before_saved = statistics(self.before, self.before_norm)
        self.residual: Tensor | None = None
        self.residual_saved: Tensor | None = None
        if layer.kind in JOINING:
            residual = self.map(layer.into)
            if layer.kind == "projected":
                self.residual = residual
                self.residual_saved = statistics(residual, nn.BatchNorm2d(layer.into).to(device))
            self.operand = Operand.joined(
                self.before, self.before_saved, residual, self.residual_saved
            )
        elif layer.kind == "expand":
            self.operand = Operand.normalized(self.before, self.before_saved)
        else:
            self.operand = Operand(self.before)

    def map(self, channels: int) -> Tensor:
        shape = (self.batch, channels, self.layer.side, self.layer.side)
        made = torch.empty(
            shape, dtype=self.dtype, device="cuda", memory_format=torch.channels_last
        )
        return made.normal_()

    def forward(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return forward_product(
            self.operand, self.weight, self.norm, keep=self.layer.kind in JOINING
        )

    def prepare_backward(self) -> None:
        out, saved, y = self.forward()
        dz = self.map(self.layer.out)
        # So small that no gradient of a weight, a sum over all rows, leaves the range of fp16.
        factors = torch.randn(5, self.layer.out, device="cuda") * (0.1 * 12544 / self.operand.rows)
        relu = self.layer.kind not in ("expand", "shortcut")
        self.gradient = Operand.gradient(dz, out, saved, factors, relu=relu)
        if self.layer.kind in JOINING:
            assert y is not None
            self.inputs = Operand(y)
            self.end = Epilogue(
                MERGED, self.before, self.before_saved, y, self.map(self.layer.into),
                self.residual, self.residual_saved,
            )  # fmt: skip
        elif self.layer.kind == "expand":
            # As a block does: what a separate convolution has stored is kept.
            self.inputs = self.operand if y is None else Operand(y)
            self.end = Epilogue(MASKED, self.before, self.before_saved)
        else:
            self.inputs = self.operand
            self.end = Epilogue(PLAIN, self.before)

    def backward(self) -> Gradients:
        return backward_product(
            self.gradient, self.weight, self.inputs, self.end, wants_weight=True
        )

    def bytes(self, key: str) -> int:
        """What the fused form has to read and write once."""
        rows, into, out = self.operand.rows, self.layer.into, self.layer.out
        operand = into * (3 if self.layer.kind in JOINING else 1)  # two maps read, one written
        after = into * {"reduce": 4, "projected": 5, "expand": 2}.get(self.layer.kind, 1)
        gradient = 2 * out
        parts = {
            "forward": operand + out,
            "input": gradient + after,
            "weight": gradient + into,
            # With few channels, one kernel reads the gradient once, and the input with what is after.
            "backward": gradient * (1 if out * into <= 64 * 256 else 2) + after
            + (0 if out * into <= 64 * 256 else into),
        }  # fmt: skip
        return 2 * rows * parts[key.split()[0]]


def away(ours: Tensor, theirs: Tensor) -> float:
    """Distance over norm, in float32; infinite where only one of the two is finite."""
    ours, theirs = ours.float(), theirs.float()
    finite = theirs.isfinite()
    if not torch.equal(ours.isfinite(), finite):
        return float("inf")
    ours, theirs = ours[finite], theirs[finite]
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-20))


def forward_results(case: Case) -> list[Tensor]:
    out, saved, y = case.forward()
    return [out, saved[0], saved[1], *([y] if y is not None and case.layer.kind in JOINING else [])]


def backward_results(case: Case) -> list[Tensor]:
    found = case.backward()
    assert found.weight is not None
    results = [found.weight]
    if case.end.form == PLAIN:
        return [*results, found.dx]
    assert case.end.saved is not None
    factors = found.factors(case.before_norm.weight, case.end.saved)
    if (
        case.end.form == MERGED
    ):  # separate products leave the ReLU of the others to the norm's kernel
        results.append(found.dx)
    if case.residual_saved is not None:
        others = found.factors(case.before_norm.weight, case.residual_saved, other=True)
        results.append(others[0])
    return [*results, factors[0], factors[1]]


def report(case: Case, keys: list[str], results: Callable[[Case], list[Tensor]]) -> None:
    for key in keys:
        times, best = choices.times[key], choices.chosen[key]
        moved = case.bytes(key)
        line: dict[str, object] = {
            "layer": case.layer.name, "count": case.layer.count, "key": key, "best": best,
            "ms": {name: round(ms, 4) for name, ms in times.items()},
            "fused_bytes": moved,
            "fraction_of_copy": round(
                moved / min(ms for name, ms in times.items() if name != SEPARATE)
                / COPY_BYTES_PER_S * 1e3, 3
            ) if len(times) > (SEPARATE in times) else None,
        }  # fmt: skip
        if SEPARATE in times:
            choices.chosen[key] = SEPARATE
            theirs = results(case)
            line["away"] = {}
            for name in times:
                if name != SEPARATE:
                    choices.chosen[key] = name
                    pairs = zip(results(case), theirs, strict=True)
                    found = [float(f"{away(a, b):.2g}") for a, b in pairs]
                    line["away"][name] = found  # type: ignore[index]
            choices.chosen[key] = best
        emit(**line)


def measure_shapes(batch: int, dtype: torch.dtype, layers: list[Layer]) -> None:
    """Ends at a layer that loses the device."""
    for layer in layers:
        earlier = seen = set(choices.times)
        problems = set(choices.problems)
        emit(layer=layer.name)
        try:
            case = Case(layer, batch, dtype)
            case.forward()
            keys = [key for key in choices.times if key not in seen]
            report(case, keys, forward_results)
            case.prepare_backward()
            seen = set(choices.times)
            case.backward()
            keys = [key for key in choices.times if key not in seen]
            report(case, keys, backward_results)
        except Exception as error:  # noqa: BLE001  (the next layer may work)
            emit(layer=layer.name, error=f"{type(error).__name__}: {str(error)[:500]}")
            if isinstance(error, torch.AcceleratorError):
                return
        saved_ms = 0.0
        for key, times in choices.times.items():
            new = key.startswith(("forward", "backward")) and key not in earlier
            if new and SEPARATE in times:
                saved_ms += layer.count * (times[SEPARATE] - min(times.values()))
        emit(layer=layer.name, saves_ms=round(saved_ms, 4))
        for key in choices.problems.keys() - problems:
            emit(form=key, problem=choices.problems[key])
        # Kept layer by layer, for the steps that follow: `settle` ends the trial.
        product_choice.settle(choices.own())
        choices.open = True
        torch.cuda.empty_cache()


def watch_shapes(given: argparse.Namespace, layers: list[Layer]) -> None:
    """Measures layers in a process of their own. A layer that loses the device, or hangs, is left out."""
    left, saved_ms = list(layers), 0.0
    while left:
        command = [
            sys.executable, __file__, "--batch", str(given.batch), "--dtype", given.dtype, "--layers",
            *(str(LAYERS.index(layer)) for layer in left),
        ]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        reached = -1
        watch = threading.Timer(2 * LAYER_TIMEOUT_S, process.kill)
        watch.start()
        for line in process.stdout:
            print(line, end="", flush=True)
            found = json.loads(line) if line.startswith("{") else {}
            saved_ms += found.get("saves_ms", 0.0)
            if set(found) == {"layer"}:
                reached += 1
                watch.cancel()
                watch = threading.Timer(LAYER_TIMEOUT_S, process.kill)
                watch.start()
        code = process.wait()
        watch.cancel()
        if not code and reached + 1 == len(left):
            break
        lost = left[max(reached, 0)]
        emit(layer=lost.name, error=f"the process ended with {code}")
        left = left[max(reached, 0) + 1 :]
    emit(predicted_ms_less_than_separate=round(saved_ms, 3), batch=given.batch)


def build(part: int, of: int, dtype: torch.dtype, layers: list[Layer]) -> None:
    """Builds the kernels of every `of`th form on small maps; later processes find them on disk."""
    number = -1

    def build_some(key: str, forms: dict[str, Any], device: torch.device) -> str:
        nonlocal number
        fused = {name: call for name, call in forms.items() if name != SEPARATE}
        for name, call in fused.items():
            outer = name == "fused"  # made of products that come here themselves
            number += not outer
            if outer or number % of == part:
                try:
                    call()
                except Exception as error:  # noqa: BLE001  (reported when it is timed)
                    print(type(error).__name__, str(error)[:200], file=sys.stderr)
        if SEPARATE not in forms:  # a result of the right kind, without one more kernel
            gradient, weight = call.args[:2]
            end = call.keywords.get("end")
            sums = torch.zeros(2, 1, weight.shape[1], device=device)
            forms[SEPARATE] = lambda: weight if end is None else (end.x, sums, gradient.x)
        return SEPARATE

    products.choose = build_some  # type: ignore[assignment]
    for layer in layers:
        case = Case(Layer(layer.kind, 16, layer.into, layer.out, 1), 2, dtype)
        case.prepare_backward()
        case.backward()
    torch.cuda.synchronize()


def build_first(given: argparse.Namespace) -> None:
    started = time.perf_counter()
    workers = min(BUILDERS, os.cpu_count() or 1)
    own = [sys.executable, __file__, "--dtype", given.dtype]
    own += ["--only", given.only, "--build"] if given.only else ["--build"]
    made = [subprocess.Popen([*own, str(part), str(workers)]) for part in range(workers)]
    codes = [process.wait() for process in made]
    emit(built_s=round(time.perf_counter() - started, 1), processes=workers, exit_codes=codes)


def measure_steps(batch: int, steps: int, rounds: int, dtype: str, modes: list[str]) -> None:
    """Rows in turn, each in its own process."""
    common = {
        "kind": "ours", "model": "resnet50", "batch_size": batch, "image_size": 224, "classes": 1000,
        "device": "cuda", "steps": steps, "warm_up": 8,
    }  # fmt: skip
    for _ in range(rounds):
        for mode in modes:
            recompute = mode == "recompute"
            switches = {
                "run.fused_convolutions": "auto" if recompute else mode,
                "precision.amp_dtype": dtype, "run.recompute_norms": recompute,
            }  # fmt: skip
            name = f"fused convolutions {'auto recompute' if recompute else mode}"
            row = StepRow(name=name, switches=switches, **common)  # type: ignore[arg-type]
            process = RowProcess(row, 120)
            process.await_ready()
            emit(batch=batch, **process.measure())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--dtype", choices=("fp16", "bf16"), default="fp16")
    parser.add_argument("--only", choices=("shapes", "large", "steps"))
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES, help="of the steps")
    parser.add_argument("--fresh", action="store_true", help="forget earlier choices")
    parser.add_argument("--layers", type=int, nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--build", type=int, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    dtype = torch.float16 if given.dtype == "fp16" else torch.bfloat16
    torch.backends.cudnn.benchmark = True
    large = [layer for layer in LAYERS if layer.side >= SMALLEST_LARGE_SIDE]
    layers = large if given.only == "large" else list(LAYERS)
    if given.build:
        build(*given.build, dtype, layers)
        return
    device = torch.device("cuda", torch.cuda.current_device())
    if given.layers:
        product_choice.begin("auto", device)
        choices.chosen.clear()  # all forms are timed, whatever was chosen before
        measure_shapes(given.batch, dtype, [LAYERS[number] for number in given.layers])
        return
    emit(device=torch.cuda.get_device_name(), torch=torch.__version__, batch=given.batch)
    if given.fresh:
        product_choice.begin("auto", device)
        if choices.path is not None:
            choices.path.unlink(missing_ok=True)
    if given.only != "steps":
        build_first(given)
        watch_shapes(given, layers)
    if given.only in (None, "steps"):
        measure_steps(given.batch, given.steps, given.rounds, given.dtype, given.modes)


if __name__ == "__main__":
    main()
