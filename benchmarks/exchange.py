"""One exchange of all gradients of a model, ours and DDP's.

    torchrun --nproc-per-node 2 -m benchmarks.exchange --model resnet_tiny

Ways are DDP with its default buckets, DDP with its fp16 compression hook, and our exchange with each
algorithm and wire format, all with the same backward that computes nothing. Results are checked in the
warm-up. `auto` measures the ranks first, as a run does at its start (`paceline.comm.exchange_probe`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.program import check_launched, run, show_ranks
from paceline.cli import options
from paceline.cli.measure import check_settings
from paceline.cli.options import check_at_least
from paceline.comm.exchange import GradientExchange, Signals
from paceline.comm.exchange_probe import find_constants
from paceline.comm.plan_choice import PlanChoice
from paceline.comm.settings import CommSettings, HybridSettings
from paceline.comm.transport import create_transport
from paceline.core.errors import CommError, ConfigError
from paceline.models.registry import create_model
from paceline.models.settings import ModelSettings, check_model_name
from paceline.plan.fusion_plan import TensorSpec
from paceline.plan.plan_file import ClusterFacts, PlanFile
from paceline.plan.size_table import SizeTable
from paceline.tune.timing import RankGroup, Times, interleaved

DDP = "ddp"
DDP_FP16 = "ddp fp16 hook"
ALONE = "backward alone"
Way = Callable[[], None]


@dataclass(frozen=True)
class ExchangeJob:
    """There is a row for each of `comms`, which determine our buckets and algorithms, and of `wires`."""

    model: str
    comms: tuple[CommSettings, ...]
    wires: tuple[str, ...] = ("float32", "float16")
    iterations: int = 10
    warm_up: int = 2


class ExchangeBench:
    """Builds all ways. Their parameters share memory, their gradients do not."""

    def __init__(self, ranks: RankGroup, job: ExchangeJob) -> None:
        self._ranks, self._job = ranks, job
        self._weights = model_weights(job.model, ranks.device)
        self.bytes = sum(weight.nbytes for _, weight in self._weights)
        self._models: dict[str, tuple[FilledModel, float]] = {}
        self.about: dict[str, str] = {}
        self._closing: list[Callable[[], None]] = []
        # The seconds and the result of the measurement for `auto`.
        self.probe: dict[str, Any] = {}
        self._ways: dict[str, Way] = {DDP: self._ddp(DDP)}
        if "float16" in job.wires:
            self._ways[DDP_FP16] = self._ddp(DDP_FP16)
        for comm in job.comms:
            constants = self._constants(comm)
            for wire in ("",) if comm.plan else job.wires:
                name = f"{comm.algorithm} {wire}" if wire else "by plan"
                self._ways[name] = self._ours(name, replace(comm, wire=wire or "auto"), constants)
        self._ways[ALONE] = self._alone()

    def _constants(self, comm: CommSettings) -> PlanFile | None:
        ranks = self._ranks
        if comm.algorithm != "auto" or comm.plan:
            return None
        ranks.barrier()  # the ranks have not left DDP's broadcast together
        begun = time.perf_counter()
        found = find_constants(ranks.group, comm, None)
        self.probe = {"s": time.perf_counter() - begun, "note": found.note,
                      **(found.file.constants() if found.file is not None else {})}  # fmt: skip
        return found.file

    def _filled(self, name: str, expected: float) -> FilledModel:
        """Gradients of rank r are r + 1; `expected` is the result of the exchange."""
        model = FilledModel(self._weights, float(self._ranks.rank + 1))
        self._models[name] = (model, expected)
        return model

    def _ddp(self, name: str) -> Way:
        size = self._ranks.size
        model = self._filled(name, (size + 1) / 2)
        ddp = DistributedDataParallel(model)
        if name == DDP_FP16:
            ddp.register_comm_hook(dist.group.WORLD, fp16_compress_hook)
        self.about[name] = "buckets of 25 MiB, the first 1 MiB" + (
            ", fp16 on the wire" if name == DDP_FP16 else ""
        )

        def run() -> None:
            ddp.zero_grad(set_to_none=True)
            ddp().backward()

        return run

    def _ours(self, name: str, comm: CommSettings, constants: PlanFile | None) -> Way:
        size, ranks = self._ranks.size, self._ranks
        model = self._filled(name, size * (size + 1) / 2)
        # With the model's own parameter names, which a plan file uses.
        named = list(zip((n for n, _ in self._weights), model.parameters(), strict=True))
        specs = [
            TensorSpec(n, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for n, p in named
        ]
        choice = PlanChoice.read(comm, specs, ClusterFacts(size, len(ranks.nodes)), constants)
        plan = choice.plan([spec.name for spec in reversed(specs)])
        transport = create_transport(ranks.group, comm, plan)
        self._closing.append(transport.close)
        exchange = GradientExchange(named, ranks.group, plan, transport=transport)
        algorithms = ", ".join(dict.fromkeys(b.algorithm for b in plan.buckets))
        self.about[name] = f"{len(plan.buckets)} buffers, {algorithms}"

        def run() -> None:
            exchange.begin()
            exchange.arm()
            loss = model()
            loss.backward()
            exchange.gather()
            exchange.reduce(loss.detach(), Signals())

        return run

    def _alone(self) -> Way:
        """The part of all ways that is not exchange."""
        model = FilledModel(self._weights, 1.0)
        self.about[ALONE] = "part of every row"

        def run() -> None:
            model.zero_grad(set_to_none=True)
            model().backward()

        return run

    def measure(self) -> list[dict[str, Any]]:
        job = self._job
        for name, way in self._ways.items():
            way()
            self._check(name)
        samples = interleaved(
            self._ranks, self._ways, iterations=job.iterations, warm_up=job.warm_up
        )
        times = {name: Times(tuple(seconds)) for name, seconds in samples.items()}
        rows = []
        fp16 = times.get(DDP_FP16)
        for name, taken in times.items():
            rows.append({
                "way": name, **taken.to_row("s"),
                "speed_against_ddp": times[DDP].median / taken.median,
                "speed_against_ddp_fp16": fp16.median / taken.median if fp16 else None,
                "about": self.about[name], "samples_s": list(taken.seconds),
            })  # fmt: skip
        return rows

    def _check(self, name: str) -> None:
        """Small integers are exact in fp16."""
        if name not in self._models:
            return
        model, expected = self._models[name]
        limit = 1e-3 * expected
        off = [
            n
            for n, p in model.named_parameters()
            if p.grad is None or bool(((p.grad - expected).abs() > limit).any())
        ]
        if self._ranks.agree_max(float(len(off))) > 0:
            raise CommError(
                f"the exchange '{name}' is wrong for {len(off)} tensors on rank {self._ranks.rank}",
                "please report this with the command line",
            )

    def close(self) -> None:
        for close in self._closing:
            close()


class _Fill(torch.autograd.Function):
    """Passes a number on; the parameter's gradient is `value` everywhere."""

    @staticmethod
    def forward(ctx: Any, carried: Tensor, parameter: Tensor, value: float) -> Tensor:
        ctx.like, ctx.value = parameter.detach(), value
        return carried.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, torch.full_like(ctx.like, ctx.value), None


class FilledModel(nn.Module):
    """Parameters in the order of the model's layers, sharing the memory of `weights`."""

    def __init__(self, weights: Sequence[tuple[str, Tensor]], value: float) -> None:
        super().__init__()
        self._value = value
        self._device = weights[0][1].device
        self.names = [name.replace(".", "/") for name, _ in weights]
        for name, (_, weight) in zip(self.names, weights, strict=True):
            self.register_parameter(name, nn.Parameter(weight))

    def forward(self) -> Tensor:
        carried = torch.zeros((), device=self._device, requires_grad=True)
        for parameter in self.parameters():
            carried = _Fill.apply(carried, parameter, self._value)  # type: ignore[no-untyped-call]
        return carried


def model_weights(name: str, device: torch.device) -> list[tuple[str, Tensor]]:
    """Names and tensors of all that is trained; never changed, so that all may share them."""
    model = create_model(ModelSettings(name=name), num_classes=1000)
    return [(n, p.detach().to(device)) for n, p in model.named_parameters() if p.requires_grad]


def main(
    model: str = typer.Option("resnet50", help="Whose gradients (docs/models.md)."),
    algorithm: str = typer.Option("auto", help="All-reduce algorithms, with commas."),
    sizes: Path | None = typer.Option(None, help="A size table (paceline tune)."),
    plan: Path | None = typer.Option(None, help="A plan file, which decides everything."),
    fusion_mib: float = typer.Option(16.0, help="Size at which a bucket is closed."),
    wires: str = typer.Option("float32,float16", help="Wire formats, with commas."),
    group_size: options.GroupSize = 0,
    iterations: int = typer.Option(10, help="Samples of each; the median counts."),
    warm_up: int = typer.Option(2, help="Samples before."),
    device: options.Device = "auto",
    backend: options.Backend = "auto",
    share_gpus: options.ShareGpus = False,
    as_json: options.AsJson = False,
) -> None:
    """One whole gradient exchange of a model: ours against DDP's."""
    check_settings(device, backend, group_size)
    check_model_name(model)
    check_at_least(1, {"--iterations": iterations})
    check_at_least(0, {"--warm-up": warm_up})
    if sizes is not None and plan is not None:
        raise ConfigError("--sizes", None, "cannot be given with --plan", "leave out one")
    buckets = CommSettings(fusion_mib=fusion_mib, group_size=group_size)
    comms = [replace(buckets, algorithm=name) for name in algorithm.split(",") if name]
    if plan is not None:
        PlanFile.read(plan)
        comms = [CommSettings(plan=str(plan), group_size=group_size)]
    elif sizes is not None:
        SizeTable.read(sizes)
        owned = {"hybrid": HybridSettings(sizes=str(sizes))}
        comms = [replace(buckets, algorithm="hybrid", owned=owned)]
    formats = tuple(wires.split(","))
    for name in formats:
        replace(buckets, wire=name)
    check_launched()
    job = ExchangeJob(model, tuple(comms), formats, iterations, warm_up)
    with RankGroup(
        backend=backend, device=device, group_size=group_size or None, share_gpus=share_gpus
    ) as joined:
        measuring = ExchangeBench(joined, job)
        rows = measuring.measure()
        measuring.close()
        settings = {**vars(job), "comms": [vars(comm) for comm in comms]}
        report = {"settings": settings, "rows": rows, "bytes": measuring.bytes,
                  "probe": measuring.probe}  # fmt: skip
        show_ranks(joined, report, as_json, _table)


def _table(report: dict[str, Any]) -> str:
    head = f"{'way':<24}{'time ms':>10}{'p10':>10}{'p90':>10}{'× ddp':>8}{'× ddp fp16':>12}  what"
    lines = [
        f"{row['way']:<24}{1e3 * row['s']:>10.1f}{1e3 * row['s_p10']:>10.1f}"
        f"{1e3 * row['s_p90']:>10.1f}{row['speed_against_ddp']:>8.2f}"
        f"{row['speed_against_ddp_fp16'] or math.nan:>12.2f}  {row['about']}"
        for row in report["rows"]
    ]
    if note := report["probe"].get("note"):
        lines.append(f"auto: {note}")
    model = report["settings"]["model"]
    end = (
        f"{model}: {report['bytes'] / 1e6:,.1f} MB of gradients, {report['cluster']['ranks']} ranks"
    )
    return "\n".join([head, *lines, end]) + "\n"


if __name__ == "__main__":
    run(main)
