"""Exposed communication with overlap against without: four hosts of one rank, links of 200 Mbit/s.

    python overlap.py OUTPUT.json      (root, iproute2)

ResNet-18 on images of 32 pixels, whose backward is about as long as its exchange here. Runs take turns.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from paceline.bench.cluster import EmulatedCluster

TURNS, STEPS, LEFT_OUT, BATCH = 2, 8, 2, 160


def run(cluster: EmulatedCluster, folder: Path, overlap: str) -> dict[str, float]:
    settings = {
        "comm.overlap": overlap, "comm.fusion_mib": 2, "comm.algorithm": "hierarchical",
        "data.source": "synthetic", "data.synthetic_samples": 8 * BATCH, "data.synthetic_classes": 10,
        "data.workers": 1, "run.epochs": 1, "run.global_batch_size": BATCH, "optim.warmup_epochs": 0,
        "run.cutmix": 0,
    }  # fmt: skip
    flags = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = ["-m", "paceline", "train", "cifar10-resnet18", "--output", str(folder), *flags]
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    ended = cluster.torchrun(command, ranks=1, env=env).wait(300)
    if not ended.ok:
        raise SystemExit(ended.explain())
    found: dict[str, list[float]] = {"exposed_comm_s": [], "step_s": []}
    for file in sorted(folder.glob("metrics*.jsonl")):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        steps = [row for row in rows if row["event"] == "step"][LEFT_OUT:STEPS]
        for name, values in found.items():
            values += [row[name] for row in steps]
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    rows = []
    with EmulatedCluster(4, rate="200mbit") as cluster:
        for turn in range(TURNS):
            for overlap in ("on", "off"):
                with tempfile.TemporaryDirectory() as folder:
                    found = run(cluster, Path(folder) / "run", overlap)
                rows.append({"turn": turn, "overlap": overlap, **found})
                print(rows[-1], flush=True)
    exposed = {
        way: statistics.median(r["exposed_comm_s"] for r in rows if r["overlap"] == way)
        for way in ("on", "off")
    }
    share = exposed["on"] / exposed["off"]
    print(
        f"exposed: {exposed['on']:.4f} s with overlap, {exposed['off']:.4f} s without: {share:.2f}"
    )
    found = {"rows": rows, "exposed_s": exposed, "share": share}
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
