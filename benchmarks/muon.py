"""Time of Muon's update on a GPU, against LARS and against products by torch.

    python -m benchmarks.muon [--models resnet50,resnet18,alexnet_bn] [--tilings] [--out FILE]

Prints one JSON line per row. Each update is captured in a CUDA graph; times are medians of 50 replays
between CUDA events. Rows of a model: LARS; Muon; Muon with directions computed by torch (`torch`, what
GPUs without bf16 tensor cores use). Of Muon also the products alone, the remaining passes, the products
by kernel with their rate, and the relative difference of its step to the one by torch. `--tilings` times
the products of the first model with other tile sizes.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from paceline.models import ModelSettings, create_model, parameter_groups
from paceline.optim import LARS, MasterOptimizer, Muon, fused_muon
from paceline.optim.fused_muon import MuonStep, Tiling
from paceline.optim.orthogonal import ITERATIONS

REPEATS = 50
# Square tiles of the first two products, height and width of the third's, depth, warps, stages.
TILINGS = [
    Tiling(128, 128, 128, 64, 8, 3),
    Tiling(128, 128, 128, 64, 8, 4),
    Tiling(128, 128, 128, 64, 4, 3),
    Tiling(64, 128, 64, 64, 4, 4),
    Tiling(64, 64, 128, 64, 4, 3),
    Tiling(64, 64, 64, 64, 4, 4),
    Tiling(128, 128, 256, 64, 8, 3),
    Tiling(64, 128, 128, 64, 8, 3),
]


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    small = name == "resnet18"
    settings = ModelSettings(name=name, stem="small") if small else ModelSettings(name=name)
    model = create_model(settings, num_classes=10 if small else 1000).cuda()
    return cast(nn.Module, model.to(memory_format=torch.channels_last))  # type: ignore[call-overload]


TORCH_MUON = partial(Muon, products="torch")


def optimizer_of(name: str, of: Callable[..., LARS | Muon]) -> tuple[MasterOptimizer, nn.Module]:
    """Creates fp16 weights with gradients of a fixed seed."""
    model = model_of(name)
    draw = torch.Generator(device="cuda").manual_seed(1)
    for p in model.parameters():
        if p.dim() > 1:
            p.data = p.data.half()
        p.grad = torch.empty_like(p)
        p.grad.copy_(torch.randn(p.shape, generator=draw, device="cuda") * 1e-3)
    optimizer = of(parameter_groups(model, 5e-5), 0.1)
    optimizer.grad_scale = torch.tensor(1.0, device="cuda")
    return optimizer, model


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def median_ms(work: Callable[[], object]) -> float:
    """Times a captured graph; the host has a head start, so that its launch does not count."""
    graph = captured(work)
    for _ in range(5):
        graph.replay()
    pairs = []
    for _ in range(REPEATS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(100_000)  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        stop.record()
        pairs.append((start, stop))
    torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(stop) for start, stop in pairs))


def engine_of(optimizer: MasterOptimizer) -> tuple[MuonStep, Any]:
    engine = optimizer.engine
    assert isinstance(engine, MuonStep)
    assert engine._matrices is not None
    return engine, engine._matrices


def floating_point_operations(made: Any) -> dict[str, float]:
    """Returns the operations of one iteration with the padded sides, without use of symmetry."""
    counts = {"gram": 0.0, "polynomial": 0.0, "apply": 0.0}
    for rows, columns in zip(made.table[4].tolist(), made.table[5].tolist(), strict=True):
        low, high = min(rows, columns), max(rows, columns)
        counts["gram"] += 2 * low * low * high
        counts["polynomial"] += 2 * low**3
        counts["apply"] += 2 * low * low * high
    return counts


def by_kernel(made: Any) -> dict[str, Any]:
    """Microseconds of one launch of each product, and the rate without use of symmetry."""
    from paceline.optim import muon_kernels as kernels
    from paceline.optim.kernels import KINDS

    tiling, count = made.tiling, made.table.shape[1]
    common: dict[str, Any] = {
        "KIND": KINDS[made.results.dtype], "DEPTH": tiling.depth, "num_warps": tiling.warps,
        "num_stages": made.stages,
    }  # fmt: skip
    sides = {"HEIGHT": tiling.height, "WIDTH": tiling.width}
    launches: dict[str, Callable[[], object]] = {
        "gram": lambda: kernels.gram[(len(made.gram_tiles),)](
            made.table, made.gram_tiles, made.numbers, 0, 1, count, TILE=tiling.square, **common
        ),
        "polynomial": lambda: kernels.polynomial[(len(made.polynomial_tiles),)](
            made.table, made.polynomial_tiles, count, TILE=tiling.square, **common
        ),
        "apply": lambda: kernels.apply[(len(made.apply_tiles),)](
            made.table, made.apply_tiles, made.numbers, 0, 1, 1, count, **sides, **common
        ),
    }
    found: dict[str, Any] = {}
    operations = floating_point_operations(made)
    for name, launch in launches.items():

        def repeated(launch: Callable[[], object] = launch) -> None:
            for _ in range(10):
                launch()

        us = median_ms(repeated) * 100
        found[name] = {"us": round(us, 1), "tflops": round(operations[name] / us / 1e6)}
    return found


def difference(name: str) -> dict[str, float]:
    """Returns the relative difference of the change of the master weights, kernels against torch."""
    changes = []
    for of in (Muon, TORCH_MUON):
        optimizer, _ = optimizer_of(name, of)
        before = [master.clone() for master in optimizer.masters()]
        optimizer.step()
        pairs = zip(optimizer.masters(), before, optimizer.parameters(), strict=True)
        changes.append([after - old for after, old, p in pairs if p.dim() == 4])
    worst = [float((a - b).norm() / b.norm()) for a, b in zip(*changes, strict=True)]
    return {"largest": max(worst), "median": statistics.median(worst)}


def measure(name: str, emit: Callable[[dict[str, Any]], None]) -> None:
    times: dict[str, float] = {}
    for row, of in (("lars", LARS), ("muon", Muon), ("muon, torch", TORCH_MUON)):
        started = time.perf_counter()
        optimizer, _ = optimizer_of(name, of)
        optimizer.prepare()
        torch.cuda.synchronize()
        ready = time.perf_counter() - started
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        times[row] = median_ms(optimizer.step)
        line = {"model": name, "row": row, "ms": times[row], "prepared_s": round(ready, 2)}
        line["mib_in_step"] = (torch.cuda.max_memory_allocated() - held) / 2**20
        emit(line)
        if of is not Muon:
            continue
        engine, made = engine_of(optimizer)
        products = median_ms(lambda engine=engine, made=made: engine._multiply(made))  # type: ignore[misc]
        teraflop = ITERATIONS * sum(floating_point_operations(made).values()) / 1e12
        emit(
            {
                "model": name,
                "row": "muon, split",
                "products_ms": products,
                "passes_ms": times[row] - products,
                "over_lars_ms": times[row] - times["lars"],
                "products_tflops": teraflop / products * 1e3,
                "kernels": by_kernel(made),
                "matrices": made.table.shape[1],
                "tiling": list(made.tiling),
                "stages": made.stages,
            }
        )
    saved = times["muon, torch"] - times["muon"]
    emit({"model": name, "row": "difference to torch", "saved_ms": saved, **difference(name)})


def measure_tilings(name: str, emit: Callable[[dict[str, Any]], None]) -> None:
    for tiling in TILINGS:
        fused_muon.TILING = tiling
        try:
            optimizer, _ = optimizer_of(name, Muon)
            optimizer.prepare()
            engine, made = engine_of(optimizer)
            products = median_ms(lambda engine=engine, made=made: engine._multiply(made))  # type: ignore[misc]
            line = {"products_ms": products, "stages": made.stages, "kernels": by_kernel(made)}
        except Exception as error:  # noqa: BLE001 - one tiling that does not fit must not end the rest
            line = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
        emit({"model": name, "row": "tiling", "tiling": list(tiling), **line})


def compile_tilings(name: str) -> None:
    """Compiles the kernels of all tilings in several processes, into Triton's cache."""

    def compile_one(place: int) -> None:
        command = [sys.executable, __file__, "--models", name, "--compile", str(place)]
        subprocess.run(command, capture_output=True, timeout=120, check=False)

    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(compile_one, range(len(TILINGS))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="resnet50,resnet18,alexnet_bn")
    parser.add_argument("--tilings", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.muon needs a CUDA device")
    names = options.models.split(",")
    if options.compile is not None:
        fused_muon.TILING = TILINGS[options.compile]
        optimizer_of(names[0], Muon)[0].prepare()
        return

    def emit(line: dict[str, Any]) -> None:
        text = json.dumps(line)
        print(text, flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(text + "\n")

    device = torch.cuda.get_device_name()
    emit({"device": device, "torch": torch.__version__, "triton": fused_version()})
    for name in names:
        measure(name, emit)
    if options.tilings:
        compile_tilings(names[0])
        measure_tilings(names[0], emit)


def fused_version() -> str:
    import triton

    return str(triton.__version__)


if __name__ == "__main__":
    main()
