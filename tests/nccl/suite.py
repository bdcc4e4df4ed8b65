"""The exchange of gradients case by case, on the ranks of one layout: a program for every rank.

    python -m benchmarks.one_gpu --ranks 2,2 -- tests/nccl/suite.py --results FILE

Ranks start once and run every case of `cases.py`. Each case trains a small net for a few steps through
the same parts as `paceline train` and checks, on every rank:

1. all ranks hold bit-identical weights;
2. they equal those of one process on the union of the batches, within the rounding of the formats;
3. the sum of random gradients equals Gloo's sum of the same numbers, within the wire's rounding;
4. a step with a non-finite gradient on one rank was skipped by all, and no other step was.

With `--backend gloo --device cpu` it runs anywhere, which is how it is tried without a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from nccl.cases import Case, covering_cases, describe
from paceline.comm.exchange import Signals
from paceline.comm.group import Group
from paceline.config import RunConfig
from paceline.core.topology import Topology
from paceline.data import Batch, BatchPlan
from paceline.train.machine import choose_device
from paceline.train.step import TrainStep
from paceline.train.step_parts import create_parts, create_step
from paceline.train.stop_signals import StopSignals
from paceline.train.weights import master_weights

MICRO, FULL_STEPS, SIZE, WIDTH, CLASSES = 4, 6, 16, 128, 8
RATE = 0.02
# Of the update's norm: ranks add in another order, a narrow wire rounds every sum.
BOUNDS = {"fp32": 2e-4, "fp16": 3e-2, "float16": 2e-2, "bfloat16": 6e-2}
# Relative to the largest sum; the fp16 gradients of a half-precision net are summed in fp16.
WIRE_BOUNDS = {torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Net(nn.Module):
    """Without batch norm, whose statistics differ between one process and many. `poison` lies on the
    device, so that a replayed CUDA graph reads it too."""

    def __init__(self, special: str, rank: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.wide = nn.Linear(8 * SIZE * SIZE, WIDTH)
        self.spare = nn.Linear(WIDTH, WIDTH) if special in ("unused", "partial") else None
        self.fc = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("poison", torch.zeros(()))
        self._uses_spare = special == "partial" and rank == 0

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.wide(self.conv(images).relu().flatten(1)).relu()
        if self.spare is not None and self._uses_spare:
            hidden = hidden + self.spare(hidden)
        return self.fc(hidden) + self.poison  # type: ignore[no-any-return]


class Slices:
    """The plan's own stretches of a fixed set of images, for one rank."""

    def __init__(self, plan: BatchPlan, rank: int, device: torch.device) -> None:
        draw = torch.Generator().manual_seed(11)
        shape = (plan.total_samples, SIZE, SIZE, 3)
        self._images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=draw).to(device)
        labels = torch.randint(0, CLASSES, (plan.total_samples,), generator=draw)
        self._labels = labels.to(device)
        self._batches = self._all(plan, rank)

    def _all(self, plan: BatchPlan, rank: int) -> Iterator[Batch]:
        for step in range(plan.total_steps):
            for start, stop in plan.micro_batches(step, rank):
                yield Batch(self._images[start:stop], self._labels[start:stop])

    def describe(self) -> str:
        return "slices"

    def note(self) -> str:
        return ""

    def __iter__(self) -> Slices:
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    def close(self) -> None:
        """Nothing is held."""


def configuration(case: Case, device: torch.device) -> RunConfig:
    values: dict[str, Any] = {
        "comm.algorithm": case["algorithm"], "comm.wire": case["wire"],
        "comm.overlap": case["overlap"], "comm.fusion_mib": case["fusion_mib"],
        "run.cuda_graphs": case["graphs"] if device.type == "cuda" else "off",
        "precision.amp_dtype": case["dtype"], "precision.tf32": False, "run.accel.compile": "off",
        "data.image_size": SIZE, "data.eval_resize": 0, "optim.name": "sgd", "optim.lr": RATE,
        "optim.weight_decay": 0.0, "optim.warmup_epochs": 0.0,
    }  # fmt: skip
    if case["algorithm"] == "hybrid":
        values["comm.hybrid.sizes"] = "64"
    return RunConfig().with_values(values)


def batch_plan(case: Case, world_size: int, ranks: int) -> BatchPlan:
    """`ranks` share out the batch that `world_size` ranks take."""
    batch = MICRO * world_size * case["accumulation"]
    last = {"full": 0, "short": max(world_size, batch // 2 + 1), "one": 1}[case["last"]]
    return BatchPlan(FULL_STEPS * batch + last, 1, batch, MICRO, ranks)


def trained(
    case: Case, group: Group, world_size: int, rank: int
) -> tuple[Tensor, list[int], TrainStep]:
    """All steps of the case: masters, skipped steps, and the step itself, still open."""
    config, device = configuration(case, group.device), group.device
    torch.manual_seed(3)
    model = Net(case["special"], rank).to(device, memory_format=torch.channels_last)
    plan = batch_plan(case, world_size, group.world_size)
    parts = create_parts(
        config, model, group, rate=RATE, micro_batch=MICRO, accumulate=plan.accumulation > 1
    )
    step = create_step(
        config,
        parts,
        Slices(plan, group.rank, device),
        plan,
        group,
        StopSignals(),  # type: ignore[arg-type]
    )
    poisoned = case["special"] == "overflow" and group.rank == group.world_size - 1
    skipped = []
    for number in range(plan.total_steps):
        model.poison.fill_(float("inf") if poisoned and number == 1 else 0.0)
        outcome = step.run(number, RATE)
        skipped += [number] if outcome.skipped else []
    masters = master_weights(step.model, step.optimizer)
    return torch.cat([m.flatten() for m in masters.values()]).float().cpu(), skipped, step


class Suite:
    """`alone` is a group of one, for the reference; `side` a Gloo group of all ranks."""

    def __init__(self, group: Group, alone: Group) -> None:
        self.group, self.alone = group, alone
        self.side = dist.new_group(backend="gloo")
        self._references: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def run(self, number: int, case: Case) -> list[str]:
        """What is wrong, on any rank."""
        # The reference first: it compiles the kernels, which takes ranks a different time each.
        self._make_reference(case)
        self.group.begin_run(f"case {number}")
        found, skipped, step = trained(case, self.group, self.group.world_size, self.group.rank)
        problems = self._check_sums(step, case)
        step.release()
        step.exchange.close()
        wanted = [1] if case["special"] == "overflow" else []
        if skipped != wanted:
            problems.append(f"skipped steps {skipped}, not {wanted}")
        if not bool(torch.isfinite(found).all()):
            problems.append("weights are not finite")
        digest = hashlib.sha256(found.numpy().tobytes()).hexdigest()
        if len(set(self._gathered(digest))) > 1:
            problems.append("ranks hold different weights")
        if case["special"] != "partial":  # one process has no rank that leaves a parameter out
            problems += self._check_reference(case, found)
        return [f"rank {r}: {p}" for r, said in enumerate(self._gathered(problems)) for p in said]

    def _gathered(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.group.world_size
        dist.all_gather_object(values, value, group=self.side)
        return values

    def _make_reference(self, case: Case) -> None:
        key = _reference_key(case)
        if key not in self._references:
            plain = {**case, "algorithm": "auto", "wire": "auto", "graphs": "off"}
            torch.manual_seed(3)
            start = torch.cat([p.detach().flatten() for p in Net(case["special"], 1).parameters()])
            end, _, _ = trained(plain, self.alone, self.group.world_size, 1)
            self._references[key] = (start.float(), end)

    def _check_reference(self, case: Case, found: Tensor) -> list[str]:
        start, expected = self._references[_reference_key(case)]
        off = float((found - expected).norm() / (expected - start).norm())
        wire = case["wire"] if case["wire"] in BOUNDS else case["dtype"]
        bound = max(BOUNDS[case["dtype"]], BOUNDS[wire])
        return [] if off <= bound else [f"off the single process by {off:.2g}, bound {bound:g}"]

    def _check_sums(self, step: TrainStep, case: Case) -> list[str]:
        """Random gradients through the case's own exchange, against Gloo's sum of the same numbers."""
        exchange = step.exchange
        draw = torch.Generator().manual_seed(100 + self.group.rank)
        named = [(name, p) for name, p in step.model.named_parameters() if p.requires_grad]
        sent = {}
        exchange.begin(0)
        for name, parameter in named:
            values = torch.rand(parameter.shape, generator=draw).sub_(0.5).to(parameter.dtype)
            sent[name] = values.double()
            parameter.grad = torch.empty_like(parameter).copy_(values)
        exchange.gather()
        exchange.reduce(torch.zeros((), device=self.group.device), Signals())
        problems = []
        for name, parameter in named:
            dist.all_reduce(sent[name], group=self.side)
            formats = [parameter.dtype, getattr(torch, case["wire"], torch.float32)]
            bound = max(WIRE_BOUNDS[kind] for kind in formats)
            wanted, got = sent[name], parameter.grad.double().cpu()
            off = float((got - wanted).abs().max() / wanted.abs().max())
            if not off <= bound:
                problems.append(f"sum of {name} off Gloo's by {off:.2g}, bound {bound:g}")
        return problems


def _reference_key(case: Case) -> tuple[Any, ...]:
    return tuple(case[name] for name in ("dtype", "accumulation", "last", "special"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="nccl", choices=["nccl", "gloo"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--most", type=int, default=10_000, help="stop after so many cases")
    options = parser.parse_args()
    topology = Topology.from_env(os.environ)
    config = RunConfig().with_values({
        "run.device": options.device, "comm.backend": options.backend, "comm.timeout_s": 60.0,
        "comm.share_gpus": options.backend == "nccl",
    })  # fmt: skip
    device = choose_device(config, topology)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    rows, started = [], time.perf_counter()
    with Group(topology, config.comm, device) as group:
        suite = Suite(group, Group(Topology(), config.comm, device))
        for number, case in enumerate(covering_cases(options.seed)[: options.most]):
            before = time.perf_counter()
            problems = suite.run(number, case)
            rows.append({"case": case, "problems": problems, "s": time.perf_counter() - before})
            if group.rank == 0:
                verdict = "; ".join(problems) or "ok"
                sys.stdout.write(f"{number} {describe(case)}: {verdict} ({rows[-1]['s']:.1f} s)\n")
                sys.stdout.flush()
    if topology.is_main:
        bad = sum(bool(row["problems"]) for row in rows)
        sys.stdout.write(f"{len(rows)} cases, {bad} wrong, {time.perf_counter() - started:.0f} s\n")
        options.results.write_text(json.dumps(rows), encoding="utf-8")
    return 1 if any(row["problems"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
