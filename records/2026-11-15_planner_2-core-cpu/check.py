"""Holds the planner against measured systems, the paper, and the clock.

python check.py
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from paceline.report.html_document import document, figures
from paceline.report.svg_chart import Chart, Line

from paceline.plan import straggler
from paceline.plan.accelerator import accelerator
from paceline.plan.analytic_workload import analytic_workload
from paceline.plan.choose_plan import ALGORITHMS, best_plan
from paceline.plan.gpu_cluster import gpu_cluster
from paceline.plan.network import network
from paceline.plan.prediction import Prediction, predict
from paceline.plan.techniques import TECHNIQUES, techniques

# GPU, nodes, GPUs a node, batch a GPU, measured images/s a GPU, links a node, Gb/s a link.
SYSTEMS = [
    ("H100", 8, 8, 50, 4603, 8, 400),
    ("H100", 2, 8, 200, 6295, 8, 400),
    ("A100", 8, 8, 51, 2618, 8, 200),
    ("A100", 8, 8, 204, 3102, 8, 200),
    ("A100-PCIE-40GB", 8, 4, 408, 2851, 1, 100),
    ("V100", 32, 16, 65, 1239, 8, 100),
]
ONE_NODE = {"H100": 7002, "A100": 3371, "A100-PCIE-40GB": 3371, "V100": 1538}
EPOCH = 1_281_167


def speed(system: tuple, spread: float) -> float:
    name, nodes, gpus, batch, _, links, gbps = system
    gpu = accelerator(name)
    work = analytic_workload(network("resnet50"), gpu)
    cluster = gpu_cluster(gpu, nodes, gpus, links * gbps, links=links)
    plan = best_plan(work, cluster, batch, ("native",))
    return predict(work, cluster, plan, batch, spread).images_per_s_per_gpu


def systems() -> list[dict]:
    rows = []
    for number, system in enumerate(SYSTEMS):
        others = [s for i, s in enumerate(SYSTEMS) if i != number]
        spreads = [0.005 * n for n in range(13)]
        fitted = min(spreads, key=lambda x: sum(abs(speed(s, x) / s[4] - 1) for s in others))
        rows.append({
            "gpu": system[0], "nodes": system[1], "gpus": system[2], "batch": system[3],
            "measured": system[4],
            "predicted": round(speed(system, straggler.RANK_SPREAD)),
            "error": speed(system, straggler.RANK_SPREAD) / system[4] - 1,
            "line_error": ONE_NODE[system[0]] / system[4] - 1,
            "left_out_spread": fitted, "left_out_error": speed(system, fitted) / system[4] - 1,
        })  # fmt: skip
    return rows


def paper() -> dict:
    found = {}
    gpu = accelerator("P40")
    for model, epochs in (("resnet50", 90), ("alexnet_bn", 95)):
        for ranks in (1024, 2048):
            batch = 65536 // ranks
            work = analytic_workload(network(model), gpu)
            cluster = gpu_cluster(gpu, ranks // 8, 8, 100)
            made = techniques(work, cluster, batch)
            found[f"{model} {ranks}"] = {
                name: {
                    "images_per_s": p.images_per_s, "efficiency": p.efficiency,
                    "buffers": len(p.scores), "minutes": p.epochs_s(epochs, EPOCH) / 60,
                }
                for name, p in made.items()
            }  # fmt: skip
            even = predict(work, cluster, best_plan(work, cluster, batch, ALGORITHMS), batch, 0.0)
            found[f"{model} {ranks}"]["best plan, equal GPUs"] = _short(even, epochs)
    return found


def _short(p: Prediction, epochs: float) -> dict:
    return {"images_per_s": p.images_per_s, "efficiency": p.efficiency, "buffers": len(p.scores),
            "minutes": p.epochs_s(epochs, EPOCH) / 60}  # fmt: skip


def clock() -> dict:
    gpu = accelerator("P40")
    work, cluster = analytic_workload(network("resnet50"), gpu), gpu_cluster(gpu, 256, 8, 100)
    plans = []
    for _ in range(5):
        started = time.perf_counter()
        best_plan(work, cluster, 32)
        plans.append(time.perf_counter() - started)
    command = [
        sys.executable,
        "-m",
        "paceline",
        "plan",
        "--gpu",
        "P40",
        "--nodes",
        "256",
        "-b",
        "32",
    ]
    whole = []
    for flags in (["--json"], ["--help"]):
        times = []
        for _ in range(5):
            started = time.perf_counter()
            subprocess.run([*command, *flags], check=True, capture_output=True)
            times.append(time.perf_counter() - started)
        whole.append(statistics.median(times))
    return {"best_plan_s": statistics.median(plans), "paceline_plan_2048_s": whole[0],
            "paceline_plan_help_s": whole[1]}  # fmt: skip


def page(found: dict) -> str:
    charts = []
    for number, (name, rows) in enumerate(found.items()):
        base = rows["none"]["images_per_s"]
        points = [(float(i), rows[t]["images_per_s"] / base) for i, t in enumerate(TECHNIQUES)]
        claim = 11.0 if name.startswith("resnet50") else 3.0
        lines = [Line("predicted, × none", points),
                 Line("the paper's claim", [(0.0, claim), (4.0, claim)], 2, dashed=True)]  # fmt: skip
        note = ", ".join(f"{i} {t}" for i, t in enumerate(TECHNIQUES)) if number == 0 else ""
        charts.append(Chart(f"{name.split()[0]} on {name.split()[1]} P40", "technique", lines,
                            from_zero=True, note=note))  # fmt: skip
    title = "The gain of each technique, predicted"
    return document(title, [f"<header><h1>{title}</h1></header>", figures(charts)])


def main() -> None:
    here = Path(__file__).parent
    found = {"systems": systems(), "paper": paper(), "clock": clock()}
    (here / "check.json").write_text(json.dumps(found, indent=1) + "\n")
    (here / "techniques.html").write_text(page(found["paper"]))
    for row in found["systems"]:
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
    for key in ("error", "line_error", "left_out_error"):
        values = [abs(row[key]) for row in found["systems"]]
        print(key, f"mean {statistics.mean(values):.1%} worst {max(values):.1%}")
    for name, rows in found["paper"].items():
        print(name, {k: (round(v["images_per_s"]), round(v["efficiency"], 3), round(v["minutes"], 2),
                         v["buffers"]) for k, v in rows.items()})  # fmt: skip
    print(found["clock"])


if __name__ == "__main__":
    main()
