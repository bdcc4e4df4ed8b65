"""Whole training steps on several ranks, ours and DistributedDataParallel.

    torchrun --nproc-per-node 2 -m benchmarks.ddp --model resnet_tiny --image-size 32 -b 4

Every way trains the same network on synthetic images on the device. DDP runs with fp16 autocast and
GradScaler (bf16 without), channels_last, cudnn.benchmark, fused SGD and gradients as bucket views;
with and without its fp16 hook, `static_graph` and torch.compile. The ways take turns, a block of
steps each, so that other load on the machine affects all alike. "compute only" is the same step on
every rank at the same time without communication; the difference to it is a way's exposed
communication.

Where ranks share a GPU, DDP's batch norms use torch's own kernels, because it hangs with cuDNN's
(`norm`; see `models/resnet.py`).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.program import check_launched, run, show_ranks
from paceline.cli import options
from paceline.cli.measure import check_settings
from paceline.cli.options import check_at_least
from paceline.comm.group import Group
from paceline.config import RunConfig
from paceline.core.errors import ConfigError, nearest
from paceline.core.topology import Topology
from paceline.models.registry import create_model
from paceline.models.settings import ModelSettings, check_model_name
from paceline.models.synced_norm import use_torch_norms
from paceline.tune.step import StepRow, build_step
from paceline.tune.timing import RankGroup, Times, interleaved

Way = Callable[[], None]
OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours, graphs off": {"run.cuda_graphs": "off"},
    "ours, no overlap": {"comm.overlap": "off"},
    "ours, hybrid": {"comm.algorithm": "hybrid", "comm.hybrid.sizes": "1024"},
}
DDP: dict[str, tuple[str, ...]] = {
    "ddp": (),
    "ddp fp16 hook": ("hook",),
    "ddp static": ("static",),
    "ddp static fp16 hook": ("static", "hook"),
    "ddp compiled": ("compile",),
    "ddp compiled fp16 hook": ("compile", "hook"),
}
OURS_ALONE, DDP_ALONE = "ours, compute only", "ddp, compute only"
NAMES = (*OURS, OURS_ALONE, *DDP, DDP_ALONE)


@dataclass(frozen=True)
class DdpJob:
    """`block` steps make one sample; `batch_size` is per rank. `norm` selects the batch-norm kernels
    of DDP if it is not compiled."""

    model: str = "resnet50"
    batch_size: int = 64
    image_size: int = 224
    classes: int = 1000
    block: int = 10
    iterations: int = 7
    names: Sequence[str] = NAMES
    norm: str = "cudnn"


class DdpBench:
    """Builds and warms up all ways, one after the other."""

    def __init__(self, ranks: RankGroup, job: DdpJob) -> None:
        self._ranks, self._job = ranks, job
        self.about: dict[str, str] = {}
        self._closing: list[Callable[[], None]] = []
        device = ranks.device
        torch.backends.cudnn.benchmark = True
        torch.manual_seed(ranks.rank)
        shape = (job.batch_size, 3, job.image_size, job.image_size)
        self._images = torch.randn(shape, device=device).to(memory_format=torch.channels_last)
        self._labels = torch.randint(0, job.classes, (job.batch_size,), device=device)
        self._alone = Group(Topology(), RunConfig().comm, device)
        self._ways: dict[str, Way] = {}
        for name in job.names:
            self._ways[name] = self._built(name)
            self._meet(f"{name} is built")
            self._ways[name]()
            ranks.synchronize()
            self._meet(f"{name} is warm")

    def _meet(self, phase: str) -> None:
        """A barrier over the store, not by a collective: a rank may compile for minutes."""
        self._ranks.synchronize()
        self._ranks.group.agree(phase)
        if self._ranks.rank == 0:
            sys.stderr.write(f"{phase}\n")

    def _built(self, name: str) -> Way:
        if name in OURS or name == OURS_ALONE:
            return self._ours(name)
        return self._ddp(name)

    def _ours(self, name: str) -> Way:
        job, group = self._job, self._alone if name == OURS_ALONE else self._ranks.group
        group.begin_run(name)
        row = StepRow(
            name=name, kind="ours", model=job.model, batch_size=job.batch_size,
            image_size=job.image_size, classes=job.classes, device=self._ranks.device.type,
            steps=job.block * (job.iterations + 2), warm_up=0,
            switches={"comm.share_gpus": self._ranks.share_gpus, **OURS.get(name, {})},
        )  # fmt: skip
        step, self.about[name] = build_step(row, group)
        self._closing += [step.release, step.exchange.close]
        number = 0

        def run() -> None:
            nonlocal number
            for _ in range(job.block):
                step.launch(number, 0.1)
                number += 1
                if step.under_way > step.lag:
                    step.collect()
            while step.under_way:
                step.collect()

        return run

    def _ddp(self, name: str) -> Way:
        job, ranks, switches = self._job, self._ranks, DDP.get(name, ())
        torch.manual_seed(0)
        net = create_model(
            ModelSettings(name=job.model), num_classes=job.classes, image_size=job.image_size
        )
        net = net.to(ranks.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if job.norm == "torch" and "compile" not in switches:
            use_torch_norms(net)
        norm = "compiled" if "compile" in switches else job.norm
        self.about[name] = (
            f"autocast {self._amp}, NHWC, fused SGD, norms {norm}, {', '.join(switches) or 'plain'}"
        )
        if name == DDP_ALONE:
            return self._stepping(net, net)
        return self._stepping(self._wrapped(net, switches), net)

    def _wrapped(self, net: nn.Module, switches: Sequence[str]) -> nn.Module:
        device = self._ranks.device
        model = DistributedDataParallel(
            net, device_ids=[device.index] if device.type == "cuda" else None,
            static_graph="static" in switches, gradient_as_bucket_view=True,
        )  # fmt: skip
        if "hook" in switches:
            model.register_comm_hook(dist.group.WORLD, fp16_compress_hook)
        if "compile" in switches:
            # Around DDP: the backward graph is then split at the ends of buckets, and communication
            # overlaps.
            return cast(nn.Module, torch.compile(model, dynamic=False))
        return model

    def _stepping(self, forward: nn.Module, net: nn.Module) -> Way:
        optimizer = torch.optim.SGD(
            net.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-5,
            fused=True if self._ranks.device.type == "cuda" else None,
        )  # fmt: skip
        scaler = torch.amp.GradScaler(self._ranks.device.type, enabled=self._amp == torch.float16)

        def run() -> None:
            for _ in range(self._job.block):
                optimizer.zero_grad(set_to_none=True)
                with torch.autocast(self._ranks.device.type, self._amp):
                    outputs = forward(self._images)
                    loss = F.cross_entropy(outputs, self._labels, label_smoothing=0.1)
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                scaler.step(optimizer)
                scaler.update()

        return run

    @property
    def _amp(self) -> torch.dtype:
        return torch.float16 if self._ranks.device.type == "cuda" else torch.bfloat16

    def measure(self) -> list[dict[str, Any]]:
        job, size = self._job, self._ranks.size
        samples = interleaved(self._ranks, self._ways, iterations=job.iterations, warm_up=1)
        rows = []
        for name, seconds in samples.items():
            taken = Times(tuple(s / job.block for s in seconds))
            rows.append({
                "way": name, **taken.to_row("step_s"),
                "images_per_s": size * job.batch_size / taken.median, "samples_s": taken.seconds,
                "about": self.about[name],
            })  # fmt: skip
        return with_ratios(rows)

    def close(self) -> None:
        self._ways.clear()
        gc.collect()
        for close in self._closing:
            close()


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds the exposed communication of each way and its speed relative to the fastest DDP."""
    step_s = {row["way"]: row["step_s"] for row in rows}
    fastest = min((step_s[name] for name in DDP if name in step_s), default=None)
    for row in rows:
        alone = OURS_ALONE if row["way"] in OURS else DDP_ALONE
        compiled = "compile" in DDP.get(row["way"], ())  # computes differently from "compute only"
        exchanges = row["way"] not in (OURS_ALONE, DDP_ALONE)
        if alone in step_s and exchanges and not compiled:
            row["exposed_s"] = row["step_s"] - step_s[alone]
        if fastest is not None:
            row["speed_against_ddp"] = fastest / row["step_s"]
    return rows


def main(
    model: options.Model = "resnet50",
    batch_size: int = typer.Option(64, "--batch-size", "-b", help="Of one rank."),
    image_size: options.ImageSize = 224,
    classes: options.Classes = 1000,
    ways: list[str] = typer.Option([], "--way", help="Only this way; may be repeated."),
    block: int = typer.Option(10, help="Steps of one sample."),
    iterations: int = typer.Option(7, help="Samples of each; the median counts."),
    norm: str = typer.Option(
        "auto", help="DDP's batch-norm kernels: cudnn or torch; auto: torch if GPUs are shared."
    ),
    device: options.Device = "auto",
    backend: options.Backend = "auto",
    share_gpus: options.ShareGpus = False,
    as_json: options.AsJson = False,
) -> None:
    """Whole training steps on several ranks: ours against DistributedDataParallel."""
    check_settings(device, backend)
    check_model_name(model)
    check_at_least(1, {"--iterations": iterations, "--batch-size": batch_size, "--block": block})
    if norm not in ("auto", "cudnn", "torch"):
        raise ConfigError("--norm", norm, "unknown", "use auto, cudnn or torch")

    if norm == "auto":
        norm = "torch" if share_gpus else "cudnn"
    for name in ways:
        if name not in NAMES:
            raise ConfigError("--way", name, "unknown", nearest(name, NAMES))
    check_launched()
    chosen = tuple(dict.fromkeys(ways)) or NAMES
    job = DdpJob(model, batch_size, image_size, classes, block, iterations, chosen, norm)
    with RankGroup(backend=backend, device=device, share_gpus=share_gpus) as joined:
        measuring = DdpBench(joined, job)
        rows = measuring.measure()
        measuring.close()  # after an error the group releases the CUDA graphs itself
        show_ranks(joined, {"settings": vars(job), "rows": rows}, as_json, _table)


def _table(report: dict[str, Any]) -> str:
    head = f"{'way':<24}{'images/s':>10}{'ms a step':>11}{'p10':>8}{'p90':>8}{'exposed':>9}{'× ddp':>7}"
    lines = [head]
    for row in report["rows"]:
        exposed = f"{1e3 * row['exposed_s']:.2f}" if "exposed_s" in row else "–"
        ratio = f"{row['speed_against_ddp']:.3f}" if "speed_against_ddp" in row else "–"
        lines.append(
            f"{row['way']:<24}{row['images_per_s']:>10,.0f}{1e3 * row['step_s']:>11.2f}"
            f"{1e3 * row['step_s_p10']:>8.2f}{1e3 * row['step_s_p90']:>8.2f}{exposed:>9}{ratio:>7}"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    run(main)
