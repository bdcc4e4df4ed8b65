"""Fused convolutions of ResNet-50 against separate ones, on one GPU.

    python -m benchmarks.fused_convolutions [--batch 256] [--steps 40] [--fresh]
        [--only shapes|large|steps|profile] [--modes off auto cudnn recompute cudnn-recompute]

Prints one JSON object a line. First every kind of convolution with its norms, forward and backward:
milliseconds of all forms, the bytes that the fused form has to move and their share of 4.26 TB/s (the
copy bandwidth of an H200), and how far the results are from those of the separate form; `large`: only
those of maps of 14 × 14 and more. Then whole training steps, `run.accel.fused_convolutions` off and
auto, and auto with `recompute_norms`, in turn, through `benchmarks.step`, with the forms
that they chose; `profile`: milliseconds of such a step by kind of kernel. With the mode `cudnn`, the
forms of cuDNN take part, and its steps are measured; `cudnn-recompute` are those with `recompute_norms`.
A form or a layer that fails, or does not end, prints its error, and the next one follows. Kernels are
built first, by several processes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor, nn

from benchmarks.step import measure_in_process
from paceline.accel.fused import join_moments, moments
from paceline.accel.fused_convolutions import backward_convolution, forward_convolution
from paceline.accel.implementation_choice import CUDNN, SEPARATE, Choices
from paceline.accel.operands import MERGED, PLAIN, Epilogue, Gradients, NormedMap, Operand
from paceline.train.step import TrainStep
from paceline.tune.step import StepRow, measure_ours

PROGRAM = (sys.executable, "-m", "benchmarks.fused_convolutions")
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
    kernel: int = 1
    stride: int = 1

    @property
    def name(self) -> str:
        window = "" if self.kernel == self.stride == 1 else f" {self.kernel}/{self.stride}"
        return f"{self.kind} {self.side}x{self.side} {self.into}->{self.out}{window}"

    @property
    def out_side(self) -> int:
        return -(-self.side // self.stride)


# A `reduce` takes the output of a block with an identity shortcut, a `projected` one of a block with a
# convolution in its shortcut, a `first` one a stored map; a `shortcut` is that convolution. `expand` and
# `middle` take what a norm and a ReLU make of a convolution's output.
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
    Layer("middle", 56, 64, 64, 3, 3),
    Layer("middle", 56, 128, 128, 1, 3, 2),
    Layer("middle", 28, 128, 128, 3, 3),
    Layer("middle", 28, 256, 256, 1, 3, 2),
    Layer("middle", 14, 256, 256, 5, 3),
    Layer("middle", 14, 512, 512, 1, 3, 2),
    Layer("middle", 7, 512, 512, 2, 3),
    Layer("shortcut", 56, 256, 512, 1, 1, 2),
    Layer("shortcut", 28, 512, 1024, 1, 1, 2),
    Layer("shortcut", 14, 1024, 2048, 1, 1, 2),
)
JOINING = ("reduce", "projected")
NORMED = ("expand", "middle")
MODES = ("off", "auto", "recompute")
# Modes with `run.accel.recompute_norms`, and their `run.accel.fused_convolutions`.
RECOMPUTED = {"recompute": "auto", f"{CUDNN}-recompute": CUDNN}
# Kinds of kernels, by their names.
KERNELS = {
    "products of Triton": r"product|weight_gradient|both_gradients",
    "norms": r"^(moments|statistics|centred_statistics|apply|backward_|pool_)",
    # Those of cuBLAS are 1 × 1 convolutions that cuDNN gives to it; the last layer is less than 0.1 %.
    "convolutions of cuDNN": r"conv|cudnn|xmma|implicit|fprop|dgrad|wgrad|cutlass|nhwc|nvjet|splitK",
    "copies and fills": r"memcpy|memset|copy|fill",
}


def emit(**values: object) -> None:
    print(json.dumps(values), flush=True)


class Case:
    """A layer on random maps."""

    def __init__(self, layer: Layer, batch: int, dtype: torch.dtype, choices: Choices) -> None:
        self.choices = choices
        self.layer, self.dtype, self.batch = layer, dtype, batch
        device = torch.device("cuda")
        torch.manual_seed(0)
        size = (layer.out, layer.into, layer.kernel, layer.kernel)
        self.weight = torch.randn(size, device=device).mul_(
            (2 / layer.out) ** 0.5 / layer.kernel
        ).to(dtype).contiguous(memory_format=torch.channels_last)  # fmt: skip
        self.norm = nn.BatchNorm2d(layer.out).to(device)
        self.before_norm = nn.BatchNorm2d(layer.into).to(device)
        with torch.no_grad():
            self.before_norm.weight.uniform_(0.5, 1.5)
            self.before_norm.bias.uniform_(-0.3, 0.3)
        self.before = self.map(layer.into)
        self.before_saved = self.statistics(self.before, self.before_norm)
        self.shortcut: Tensor | NormedMap | None = None
        if layer.kind in JOINING:
            residual, saved = self.map(layer.into), None
            self.shortcut = residual
            if layer.kind == "projected":
                norm = nn.BatchNorm2d(layer.into).to(device)
                saved = self.statistics(residual, norm)
                self.shortcut = NormedMap(residual, saved, norm.weight, norm.bias)
            self.operand = Operand.joined(self.before, self.before_saved, residual, saved)
        elif layer.kind in NORMED:
            self.operand = Operand.normalized(self.before, self.before_saved)
        else:
            self.operand = Operand(self.before)

    def statistics(self, x: Tensor, norm: nn.BatchNorm2d) -> Tensor:
        halves = self.choices.mode == CUDNN and self.dtype == torch.float16
        return join_moments(moments(x), norm, halves=halves)

    def map(self, channels: int, side: int = 0) -> Tensor:
        side = side or self.layer.side
        shape = (self.batch, channels, side, side)
        made = torch.empty(
            shape, dtype=self.dtype, device="cuda", memory_format=torch.channels_last
        )
        return made.normal_()

    def forward(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return forward_convolution(
            self.choices,
            self.operand,
            self.weight,
            self.norm,
            self.layer.stride,
            keep=self.layer.kind in JOINING,
        )

    def prepare_backward(self) -> None:
        out, saved, y = self.forward()
        dz = self.map(self.layer.out, self.layer.out_side)
        # So small that no gradient of a weight, a sum over all rows, leaves the range of fp16.
        factors = torch.randn(5, self.layer.out, device="cuda") * (0.1 * 12544 / self.operand.rows)
        relu = self.layer.kind not in ("expand", "shortcut")
        branch = NormedMap(
            self.before, self.before_saved, self.before_norm.weight, self.before_norm.bias
        )
        self.gradient = Operand.gradient(dz, out, saved, factors, relu=relu)
        if self.layer.kind in JOINING:
            assert y is not None
            self.inputs = Operand(y)
            assert self.shortcut is not None
            self.end = Epilogue.merged(branch, y, self.map(self.layer.into), self.shortcut)
        elif self.layer.kind in NORMED:
            # As a block does: what a separate convolution has stored is kept.
            self.inputs = self.operand if y is None else Operand(y)
            self.end = Epilogue.masked(branch)
        else:
            self.inputs = self.operand
            self.end = Epilogue.plain(self.before)

    def backward(self) -> Gradients:
        return backward_convolution(
            self.choices,
            self.gradient,
            self.weight,
            self.inputs,
            self.end,
            self.layer.stride,
            wants_weight=True,
        )

    def bytes(self, key: str) -> int:
        """Returns the bytes that the fused form has to read and write once."""
        rows, into, out = self.operand.rows, self.layer.into, self.layer.out
        operand = into * (3 if self.layer.kind in JOINING else 1)  # two maps read, one written
        after = into * {"reduce": 4, "projected": 5, "expand": 2, "middle": 2}.get(
            self.layer.kind, 1
        )
        out //= self.layer.stride**2
        gradient = 2 * out
        parts = {
            "forward": operand + out,
            "input": gradient + after,
            "weight": gradient + into,
            # With few channels, one kernel reads the gradient once, and the input with what is after.
            "backward": gradient * (1 if out * into <= 64 * 256 else 2) + after
            + (0 if out * into <= 64 * 256 else into),
        }  # fmt: skip
        return 2 * rows * parts[key.removeprefix(f"{CUDNN} ").split()[0]]


def away(ours: Tensor, theirs: Tensor) -> float:
    """Distance over norm, in float32; infinite if only one of the two is finite."""
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
    # Separate products leave the ReLU of the others to the norm's kernel.
    if case.end.form in (PLAIN, MERGED):
        results.append(found.dx)
    for norm in (case.end.branch, case.end.shortcut):
        if norm is not None:
            factors = found.factors(norm, int(norm is case.end.shortcut))
            results += [factors[0], factors[1]]
    return results


def report(case: Case, keys: list[str], results: Callable[[Case], list[Tensor]]) -> None:
    choices = case.choices
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
            kinds = {
                name.split(" engine")[0]: name for name in times
            }  # of cuDNN's, one of each form
            for name in kinds.values():
                if name != SEPARATE:
                    choices.chosen[key] = name
                    pairs = zip(results(case), theirs, strict=True)
                    found = [float(f"{away(a, b):.2g}") for a, b in pairs]
                    line["away"][name] = found  # type: ignore[index]
            choices.chosen[key] = best
        emit(**line)


def measure_shapes(batch: int, dtype: torch.dtype, layers: list[Layer], choices: Choices) -> None:
    """Ends at a layer that loses the device."""
    for layer in layers:
        earlier = seen = set(choices.times)
        problems = set(choices.problems)
        emit(layer=layer.name)
        try:
            case = Case(layer, batch, dtype, choices)
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
        # Kept layer by layer, for the steps that follow: `adopt` ends the trial.
        choices.adopt(choices.own())
        choices.open = True
        torch.cuda.empty_cache()


def watch_shapes(given: argparse.Namespace, layers: list[Layer]) -> None:
    """Measures layers in another process; skips a layer that loses the device or hangs."""
    left, saved_ms = list(layers), 0.0
    while left:
        command = [
            *PROGRAM, "--batch", str(given.batch), "--dtype", given.dtype,
            "--modes", *given.modes, "--layers", *(str(LAYERS.index(layer)) for layer in left),
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

    class BuildSome(Choices):
        def choose(self, key: str, forms: Any, device: torch.device, then: object = None) -> str:
            return build_some(forms, device)

    def build_some(forms: dict[str, Any], device: torch.device) -> str:
        nonlocal number
        fused = {
            name: call for name, call in forms.items() if name.split()[0] not in (SEPARATE, "cudnn")
        }
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
            sums = torch.zeros(4, 1, weight.shape[1], device=device)
            forms[SEPARATE] = lambda: weight if end is None else (end.like, sums, gradient.x)
        return SEPARATE

    for layer in layers:
        if layer.kernel > 1 or layer.stride > 1:
            continue  # no kernels of Triton
        case = Case(Layer(layer.kind, 16, layer.into, layer.out, 1), 2, dtype, BuildSome())
        case.prepare_backward()
        case.backward()
    torch.cuda.synchronize()


def build_first(given: argparse.Namespace) -> None:
    started = time.perf_counter()
    workers = min(BUILDERS, os.cpu_count() or 1)
    own = [*PROGRAM, "--dtype", given.dtype]
    own += ["--only", given.only, "--build"] if given.only else ["--build"]
    made = [subprocess.Popen([*own, str(part), str(workers)]) for part in range(workers)]
    codes = [process.wait() for process in made]
    emit(built_s=round(time.perf_counter() - started, 1), processes=workers, exit_codes=codes)


def measure_steps(batch: int, steps: int, rounds: int, dtype: str, modes: list[str]) -> None:
    """Rows in turn, each in its own process."""
    for _ in range(rounds):
        for mode in modes:
            emit(batch=batch, **measure_in_process(step_row(mode, batch, steps, dtype), 300))
    for mode in modes:
        if mode in ("auto", CUDNN):
            choices = Choices.begin(mode, torch.device("cuda", torch.cuda.current_device()))
            emit(mode=mode, file=str(choices.path), chosen=choices.chosen)


def step_row(mode: str, batch: int, steps: int, dtype: str) -> StepRow:
    recompute = mode in RECOMPUTED
    fused = RECOMPUTED.get(mode, mode)
    switches = {
        "run.accel.fused_convolutions": fused, "run.accel.recompute_norms": recompute,
        "precision.amp_dtype": dtype,
    }  # fmt: skip
    return StepRow(
        name=f"fused convolutions {fused}{' recompute' if recompute else ''}", switches=switches,
        kind="ours", model="resnet50", batch_size=batch, image_size=224, classes=1000, device="cuda",
        steps=steps, warm_up=8,
    )  # fmt: skip


def profile_step(mode: str, batch: int, dtype: str) -> None:
    """Profiles steps in this process; their times are those of `measure_steps`, without the profiler."""
    from torch.profiler import ProfilerActivity, profile

    row = step_row(mode, batch, 10, dtype)
    with profile(activities=[ProfilerActivity.CUDA]):  # before graphs are captured
        torch.zeros(1, device="cuda")
    found = profile(activities=[ProfilerActivity.CUDA], acc_events=True)
    launch, steps = TrainStep.launch, 0

    def counted(step: TrainStep, *given: Any) -> Any:
        nonlocal steps
        steps += 1
        return launch(step, *given)

    def ready() -> None:
        nonlocal steps
        torch.cuda.synchronize()
        found.start()
        steps = 0  # more follow than `row.steps`: the rest of the warm-up, and those in flight

    TrainStep.launch = counted  # type: ignore[method-assign, assignment]
    times, _ = measure_ours(row, ready)
    torch.cuda.synchronize()
    found.stop()
    milliseconds: dict[str, float] = {}
    kernels: dict[str, float] = {}
    for event in found.key_averages():
        ms = event.self_device_time_total / 1e3 / steps
        kind = next(
            (kind for kind, pattern in KERNELS.items() if re.search(pattern, event.key, re.I)),
            "others",
        )
        milliseconds[kind] = milliseconds.get(kind, 0.0) + ms
        kernels[f"{event.key[:100]} ×{event.count / steps:g}"] = ms
    heaviest = sorted(kernels, key=lambda name: -kernels[name])[:40]
    emit(
        profile=mode, batch=batch, images_per_s=batch / times.median, steps=steps,
        ms={kind: round(ms, 3) for kind, ms in milliseconds.items()},
        kernels={name: round(kernels[name], 4) for name in heaviest},
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--dtype", choices=("fp16", "bf16"), default="fp16")
    parser.add_argument("--only", choices=("shapes", "large", "steps", "profile"))
    parser.add_argument(
        "--modes", nargs="+", default=MODES, choices=(*MODES, CUDNN, f"{CUDNN}-recompute"),
        help="of the steps; with cudnn, its forms are timed too",
    )  # fmt: skip
    parser.add_argument("--fresh", action="store_true", help="forget earlier choices")
    parser.add_argument("--layers", type=int, nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--build", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--profiled", help=argparse.SUPPRESS)
    given = parser.parse_args()
    dtype = torch.float16 if given.dtype == "fp16" else torch.bfloat16
    torch.backends.cudnn.benchmark = True
    large = [layer for layer in LAYERS if layer.side >= SMALLEST_LARGE_SIDE]
    layers = large if given.only == "large" else list(LAYERS)
    if given.build:
        part, of = given.build
        build(part, of, dtype, layers)
        return
    if given.profiled:
        profile_step(given.profiled, given.batch, given.dtype)
        return
    device = torch.device("cuda", torch.cuda.current_device())
    mode = CUDNN if CUDNN in given.modes else "auto"
    if given.layers:
        choices = Choices.begin(mode, device)
        choices.chosen.clear()  # all forms are timed, whatever was chosen before
        measure_shapes(given.batch, dtype, [LAYERS[number] for number in given.layers], choices)
        return
    emit(
        device=torch.cuda.get_device_name(), torch=torch.__version__, triton=triton.__version__,
        cudnn=torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        batch=given.batch, modes=given.modes,
    )  # fmt: skip
    if given.fresh:
        for each in {"auto", mode}:
            choices = Choices.begin(each, device)
            if choices.path is not None:
                choices.path.unlink(missing_ok=True)
    if given.only not in ("steps", "profile"):
        build_first(given)
        watch_shapes(given, layers)
    if given.only in (None, "steps"):
        measure_steps(given.batch, given.steps, given.rounds, given.dtype, given.modes)
    if given.only == "profile":
        for each in given.modes:
            own = [
                sys.executable,
                "-m",
                "benchmarks.fused_convolutions",
                "--batch",
                str(given.batch),
                "--dtype",
                given.dtype,
            ]
            code = subprocess.run([*own, "--profiled", each], check=False).returncode
            if code:
                emit(profile=each, error=f"the process ended with {code}")


if __name__ == "__main__":
    main()
