"""The options for several ranks, one after the other, in one job: a program for every rank.

    python -m benchmarks.one_gpu --ranks 2 -- tests/nccl/options.py --results FOLDER

Ranks start once. First the sum of an 8-bit format is compared with exact numbers, then every option of
`OPTIONS` trains a small net for a few steps, as `paceline train` does. Each rank writes what its runs
ended with to `rankN.json`, which the test compares.

With `--backend gloo --device cpu` it runs anywhere, which is how it is tried without a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from paceline.alternatives.eight_bit.wires import ALL_TO_ALL
from paceline.comm.group import Group
from paceline.comm.settings import CommSettings
from paceline.comm.transport import Piece, create_transport
from paceline.core.topology import Topology
from paceline.plan.fusion_plan import FusionBucket, FusionPlan
from paceline.train.machine import choose_device
from paceline.train.run import run_training
from small_runs import Silent, small_config

BLOCK = 256
# Small buckets, so that several are under way at once.
OPTIONS: dict[str, dict[str, Any]] = {
    "int8": {"comm__wire": "int8", "comm__fusion_mib": 0.1},
    "fp8": {"comm__wire": "float8_e4m3", "comm__overlap": "off"},
    "central": {"comm__algorithm": "central", "comm__fusion_mib": 0.1},
    # The servers' loss scale would have to be agreed in every step.
    "asynchronous": {"run__strategy": "asynchronous", "precision__amp_dtype": "bf16"},
    "norm-group": {"run__strategy": "synced_norms"},
    "shares": {"run__strategy": "unequal", "run__unequal__shares": "3:1"},
}  # fmt: skip
# What the run must say that it has chosen.
CHOSEN = {
    "int8": ("exchange", "all_to_all, int8 wire"),
    "fp8": ("exchange", "all_to_all, float8_e4m3 wire, after backward"),
    "central": ("exchange", "central"),
    "asynchronous": ("exchange", "asynchronous, 2 parameter server(s)"),
    "norm-group": ("synced norms", "statistics over 1 group(s) of 2 ranks"),
    "shares": ("shares", "(given)"),
}


def exact_sum(group: Group, settings: CommSettings) -> list[str]:
    """Whole numbers whose sums 8 bits hold: every block has 127 on all ranks, so that the step of its
    sums is the number of ranks. Three sums, the last of which would show residuals of the others."""
    plan = FusionPlan((FusionBucket(("all",), ALL_TO_ALL, "int8", "native"),))
    transport = create_transport(group, settings, plan)
    draw = torch.Generator().manual_seed(5)
    numbers = torch.randint(-127, 128, (8 * BLOCK + 40,), generator=draw).float()
    numbers[::BLOCK] = 127
    numbers = numbers.to(group.device)
    buffer, problems = torch.empty_like(numbers), []
    for turn in range(3):
        buffer.copy_(numbers)
        transport.send([Piece(buffer, ALL_TO_ALL, "int8")], lambda: None, lambda: None)()
        if not torch.equal(buffer, numbers * group.world_size):
            worst = float((buffer - numbers * group.world_size).abs().max())
            problems.append(f"sum {turn} is off by up to {worst:g}")
    transport.close()
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--backend", default="nccl", choices=["nccl", "gloo"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options = parser.parse_args()
    place = {
        "run__device": options.device, "comm__backend": options.backend, "comm__timeout_s": 60.0,
        "comm__share_gpus": options.backend == "nccl", "data__image_size": 28,
    }  # fmt: skip
    topology = Topology.from_env(os.environ)
    config = small_config(options.results / "none", **place, comm__wire="int8")
    with Group(topology, config.comm, choose_device(config, topology)) as group:
        found: dict[str, Any] = {"exact sum": exact_sum(group, config.comm)}
    for name, values in OPTIONS.items():
        gc.collect()  # CUDA graphs of the run before must not be freed during a capture
        run = small_config(options.results / name, **place, **values)
        found[name] = run_training(run, Silent).summary
        if topology.is_main:
            sys.stdout.write(f"{name}: {found[name]['chosen']['exchange']}\n")
            sys.stdout.flush()
    (options.results / f"rank{topology.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
