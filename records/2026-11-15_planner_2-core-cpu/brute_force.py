"""The planner's plan against plans by brute force, on an emulated cluster (root, iproute2).

    python brute_force.py SIZES.toml OUTPUT.json

ResNet-18's whole exchange with near-zero compute, 2 hosts x 4 ranks, 1 Gbit/s: the plan that the planner
makes from `paceline tune`'s file, every threshold with every algorithm, and DDP's default buckets, each
in a run of `paceline bench exchange`; the plan's own run comes first and last. Compared by their ratio to
DDP in the same run.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from paceline.models.registry import create_model
from paceline.models.settings import ModelSettings
from paceline.plan.choose_plan import best_plan
from paceline.plan.cluster_file import read_cluster
from paceline.plan.plan_file import ClusterFacts, ModelFacts, PlanFile
from paceline.plan.workload import Affine, Gradient, Workload

PLACE = ["--hosts", "2", "--ranks-per-host", "4", "--link-mbit", "1000"]


def bench(*flags: str) -> dict[str, float]:
    command = [sys.executable, "-m", "paceline", "bench", "exchange", "--model", "resnet18", *PLACE]
    command += ["--iterations", "7", "--json", *flags]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    rows = {row["way"]: row for row in json.loads(done.stdout)["rows"]}
    ours = rows.get("ours, by plan") or rows["ours float32"]
    return {"seconds": ours["s"], "against_ddp": ours["speed_against_ddp"]}


def make_plan(sizes: Path, target: Path) -> int:
    cluster = read_cluster(sizes)
    model = create_model(ModelSettings(name="resnet18"), num_classes=1000)
    names = [(name, p.numel()) for name, p in reversed(list(model.named_parameters()))]
    gradients = tuple(
        Gradient(name, size, half=False, ready=(i + 1) / len(names))
        for i, (name, size) in enumerate(names)
    )
    work = Workload("resnet18", gradients, Affine(0, 1e-9), Affine(0.02, 0), 0.0)
    assert cluster.probed is not None
    plan = best_plan(work, cluster, 1, cluster.probed.algorithms)
    PlanFile(plan, ModelFacts.of(names), ClusterFacts(cluster.ranks, cluster.nodes)).write(target)
    return len(plan.buffers)


def main() -> None:
    sizes, output = Path(sys.argv[1]), Path(sys.argv[2])
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.toml"
        print("buffers of the plan:", make_plan(sizes, plan), flush=True)
        found["plan, first"] = bench("--plan", str(plan))
        print(found, flush=True)
        for algorithm in ("native", "hierarchical", "torus2d"):
            for mib in (4, 16, 64):
                name = f"{algorithm}, {mib} MiB"
                found[name] = bench("--algorithm", algorithm, "--fusion-mib", str(mib))
                print(name, found[name], flush=True)
        found["plan, last"] = bench("--plan", str(plan))
    ours = statistics.mean(v["against_ddp"] for k, v in found.items() if k.startswith("plan"))
    rivals = {k: v["against_ddp"] for k, v in found.items() if not k.startswith("plan")}
    best = max(rivals, key=lambda name: rivals[name])
    share = ours / rivals[best]
    words = f"best of {len(rivals)}: {best}, {rivals[best]:.3f}"
    print(f"plan {ours:.3f} x DDP; {words}: {share:.3f}")
    output.write_text(json.dumps({"rows": found, "best": best, "share": share}, indent=1) + "\n")


if __name__ == "__main__":
    main()
