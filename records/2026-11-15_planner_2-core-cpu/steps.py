"""Predicts whole training steps on emulated clusters, then takes them (root, iproute2, a quiet machine).

    python steps.py OUTPUT.json [CLUSTER …]

For each number of ranks the model is profiled by as many processes at once, as `paceline profile` does
it, because ranks share this machine's cores. For each cluster `paceline tune` measures it, `paceline
plan` predicts the step from the two files and writes its plan, and `paceline train` runs that plan, with
`comm.overlap` on or off. The step is the median time from one step's end to the next, the first eight
left out. Nothing is fitted to any step. Off, nothing is hidden: the prediction is compute and all
exchanges. On, what is hidden slows the compute as far as `paceline tune` found it to: here the same
cores compute and send.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.bench.cluster import EmulatedCluster
from paceline.plan.profile_fit import fit_workload
from paceline.plan.workload import Affine, Workload

MODEL = ["--model", "resnet_tiny"]
CLUSTERS = ("2x1-100", "2x1-400", "2x2-200", "4x1-100")
# The profile knows 8 and 32; 20 lies between.
PROFILED, TRAINED = (8, 32), ((8, "on"), (20, "on"), (20, "off"))
STEPS, SKIPPED = 40, 8
CLASSES, EDGE = 10, 32


def paceline(*flags: str) -> list[str]:
    return [sys.executable, "-m", "paceline", *flags]


def profile(ranks: int, folder: Path) -> Path:
    """The mean of `ranks` processes that profile side by side, one thread each."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    together = context.Barrier(ranks)
    files = [folder / f"profile-{ranks}-{number}.toml" for number in range(ranks)]
    processes = [context.Process(target=profile_one, args=(together, file)) for file in files]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode != 0:
            raise SystemExit(f"a profile ended with {process.exitcode}")
    target = folder / f"profile-{ranks}.toml"
    mean([Workload.read(file) for file in files]).write(target)
    return target


def profile_one(together: Any, file: Path) -> None:
    """As `paceline profile`, but every measurement begins when all the others are ready for it."""
    from paceline.bench.our_step import measure
    from paceline.bench.step_row import StepRow

    from paceline.bench.profile import take_apart

    row = StepRow("profile", "ours", MODEL[1], 0, EDGE, CLASSES, "cpu", 40, 8, {})
    steps = [
        (batch, measure(replace(row, batch_size=batch), together.wait)[0].median)
        for batch in PROFILED
    ]
    together.wait()
    anatomy = take_apart(replace(row, batch_size=PROFILED[-1]))
    fit_workload(MODEL[1], steps, anatomy, "side by side").write(file)


def mean(found: list[Workload]) -> Workload:
    """Times are the means; the gradients' shares are those of the process in the middle."""
    found = sorted(found, key=lambda work: work.compute_s(PROFILED[-1]))

    def affine(name: str) -> Affine:
        parts = [getattr(work, name) for work in found]
        return Affine(statistics.mean(p.fixed_s for p in parts),
                      statistics.mean(p.per_image_s for p in parts))  # fmt: skip

    return replace(
        found[len(found) // 2], forward=affine("forward"), backward=affine("backward"),
        update_s=statistics.mean(work.update_s for work in found),
        source=f"mean of {len(found)} profiles side by side",
    )  # fmt: skip


def tune(hosts: int, ranks: int, mbit: int, target: Path) -> None:
    subprocess.run(
        paceline("tune", "--hosts", str(hosts), "--ranks-per-host", str(ranks), "--link-mbit", str(mbit),
                 "--max-bytes", "4MiB", "--limit-s", "15", "--output", str(target)),
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip


def predict(work: Path, cluster: Path, batch: int, plan: Path) -> dict[str, Any]:
    done = subprocess.run(
        paceline("plan", "--profile", str(work), "--cluster", str(cluster), "-b", str(batch),
                 "--plan-out", str(plan), "--json"),
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def train(
    hosts: int, ranks: int, mbit: int, batch: int, overlap: str, plan: Path, run: Path
) -> dict[str, float]:
    settings = {
        "data.source": "synthetic", "data.synthetic_samples": STEPS * batch * hosts * ranks,
        "data.synthetic_classes": CLASSES, "data.image_size": EDGE, "data.eval_resize": 0,
        "data.augment": "none", "data.workers": 1, "run.threads": 1, "run.device": "cpu",
        "comm.plan": plan, "comm.overlap": overlap, "optim.name": "lars", "optim.lr": 0.1,
    }  # fmt: skip
    flags = [text for key, value in settings.items() for text in ("--set", f"{key}={value}")]
    command = [
        "-m",
        "paceline",
        "train",
        *MODEL,
        "-b",
        str(batch),
        "--epochs",
        "1",
        "--output",
        str(run),
    ]
    with EmulatedCluster(hosts, f"{mbit}mbit") as cluster:
        ended = cluster.ranks([*command, *flags], ranks).wait(timeout_s=120)
    if not ended.ok:
        raise SystemExit(ended.explain())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    ends = [line["time"] for line in steps]
    apart = [b - a for a, b in itertools.pairwise(ends)][SKIPPED:]
    waits = [line["exposed_comm_s"] for line in steps[SKIPPED:]]
    return {"step_s": statistics.median(apart), "exposed_comm_s": statistics.median(waits)}


def row(name: str, batch: int, overlap: str, work: Path, folder: Path) -> dict[str, Any]:
    hosts, ranks, mbit = (int(part) for part in name.replace("x", "-").split("-"))
    place = folder / f"{name}.toml"
    if not place.exists():
        tune(hosts, ranks, mbit, place)
    plan = folder / f"plan-{name}-{batch}.toml"
    said = predict(work, place, batch, plan)
    run = folder / f"run-{name}-{batch}-{overlap}"
    measured = train(hosts, ranks, mbit, batch, overlap, plan, run)
    exchanges = sum(buffer["cost_s"] for buffer in said["buffers"])
    exposed = said["exposed_comm_s"] if overlap == "on" else exchanges
    predicted = said["compute_s"] + exposed + (said["hidden_comm_s"] if overlap == "on" else 0.0)
    return {
        "cluster": name, "batch": batch, "overlap": overlap, "buffers": len(said["buffers"]),
        "predicted_s": predicted, "measured_s": measured["step_s"],
        "predicted_exposed_s": exposed, "measured_exposed_s": measured["exposed_comm_s"],
        "compute_s": said["compute_s"], "exchanges_s": exchanges,
        "hidden_comm_s": said["hidden_comm_s"], "hidden_cost": said["cluster"]["hidden_cost"],
        "uncertainty": said["uncertainty"], "error": predicted / measured["step_s"] - 1,
    }  # fmt: skip


def words(found: dict[str, Any]) -> str:
    times = [f"{1e3 * found[f'{who}_s']:6.1f} ms (exposed {1e3 * found[f'{who}_exposed_s']:6.1f})"
             for who in ("predicted", "measured")]  # fmt: skip
    what = f"{found['cluster']:8} batch {found['batch']:3}, overlap {found['overlap']:3}"
    return f"{what}: predicted {times[0]}, measured {times[1]}, {found['error']:+.1%}"


def main() -> None:
    began, rows = time.perf_counter(), []
    clusters = sys.argv[2:] or CLUSTERS
    with tempfile.TemporaryDirectory() as folder:
        profiles: dict[int, Path] = {}
        for name in clusters:
            hosts, rest = name.split("x")
            count = int(hosts) * int(rest.split("-")[0])
            if count not in profiles:
                profiles[count] = profile(count, Path(folder))
            for batch, overlap in TRAINED:
                found = row(name, batch, overlap, profiles[count], Path(folder))
                rows.append(found)
                print(words(found), flush=True)
    for overlap in ("on", "off"):
        away = [abs(found["error"]) for found in rows if found["overlap"] == overlap]
        middle = statistics.median(away)
        print(f"overlap {overlap}: median {middle:.1%}, worst {max(away):.1%} of {len(away)}")
    print(f"{time.perf_counter() - began:.0f} s")
    Path(sys.argv[1]).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
