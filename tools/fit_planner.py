"""Fits the constants of the planner's step to measured systems, and reports how well they predict.

    python tools/fit_planner.py systems.csv [--write] [--json FILE]

In: a CSV of MLPerf Training results for ResNet-50, one system a row, with the columns `round, gpu,
accelerator, nodes, acc_per_node, N, gbs, step_ms, network, framework`. Out: the constants of
`src/paceline/planner/step_constants.toml` (written with `--write`) and the errors on systems that were
left out of the fit: one at a time, one submitter at a time, and all systems of more than 16 GPUs.

The fit is a Gauss-Newton iteration on the logarithms of step times and constants, with a normal prior
on each constant and Huber's weights, so that few systems do not drag it. Every prediction is
`paceline.plan`'s own. Systems that stay more than 15 % away are named and left out; their errors are
reported.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tomli_w

from paceline.plan.cluster import Cluster
from paceline.plan.fusion_plan import FusionPlan
from paceline.plan.optimizer import best_plan
from paceline.planner.accelerators import (
    Accelerator,
    StepConstants,
    accelerator,
    gpu_cluster,
)
from paceline.planner.analytic_workload import analytic_workload
from paceline.planner.layers import network
from paceline.planner.prediction import predict, step_times
from paceline.planner.workload import Workload

Vector = npt.NDArray[np.float64]
CONSTANTS = Path(__file__).parents[1] / "src" / "paceline" / "planner" / "step_constants.toml"
UNEXPLAINED = 0.15
SMALL_GPUS = 16
# Constant → prior and its relative standard error. Shares and hidden cost: what is usual. Cycles: 2.55 ms
# forward and backward at any batch, measured on one H200 (records/planner), over three
# passes of the layers at 1.83 GHz. Power: between none and the cube root of dynamic power, f·V² ~ f³.
PRIORS = {
    "matrix_share": (0.45, 0.2),
    "memory_share": (0.8, 0.2),
    "layer_cycles": (12_200.0, 0.2),
    "power_exponent": (0.33, 0.5),
    "hidden_cost": (0.5, 0.7),
    "depth_cost": (0.2, 0.7),
    "A100 v0.7": (1.1, 0.15),
    "H100 v2.1": (1.1, 0.15),
}
# Residual that weighs the systems against the priors, and where Huber's weights begin.
_RESIDUAL, _HUBER = 0.04, 1.5
_NET = network("resnet50")


@dataclass(frozen=True)
class System:
    """One row: what ran, where, and how long a step took."""

    name: str
    submitter: str
    gpu: Accelerator
    software: str
    nodes: int
    gpus_per_node: int
    batch: int
    links: int
    link_gbps: float
    seconds: float

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node

    def parts(self, law: StepConstants) -> tuple[Workload, Cluster]:
        work = analytic_workload(_NET, self.gpu, self.software, law)
        place = gpu_cluster(
            self.gpu, self.nodes, self.gpus_per_node, self.links * self.link_gbps,
            links=self.links, constants=law,
        )  # fmt: skip
        return work, place


def read_systems(path: Path) -> list[System]:
    with path.open(newline="") as file:
        return [_system(number, row) for number, row in enumerate(csv.DictReader(file), 1)]


def _system(number: int, row: dict[str, str]) -> System:
    links, gbps = _links(row["network"], row["gpu"])
    nodes, per_node = int(row["nodes"]), int(row["acc_per_node"])
    gpu = _gpu(row["gpu"], row["accelerator"], row["round"])
    batch = round(float(row["gbs"]) / (nodes * per_node))
    # There is no column of submitters; each spells its network and its software in its own way.
    spelling = re.sub(r"[\d.]+", "", row["framework"])
    return System(
        f"{number}: {row['round']} {gpu.name} {nodes}x{per_node}, batch {batch}",
        f"{spelling} | {row['network']}", gpu, row["round"], nodes, per_node, batch, links, gbps,
        float(row["step_ms"]) / 1e3,
    )  # fmt: skip


def _gpu(family: str, described: str, software: str) -> Accelerator:
    """The catalogue's chip, with the board's power limit where the row states it."""
    name = family
    if family == "V100":
        name = "V100" if "450W" in described or described.endswith("-H") else "V100-SXM2"
    elif family == "A100" and "PCI" in described.upper():
        name = "A100-PCIE-40GB" if "40GB" in described else "A100-PCIE-80GB"
    elif family == "A100" and ("40GB" in described or software == "v0.7"):
        name = "A100-SXM-40GB"
    gpu = accelerator(name)
    watts = re.search(r"\((\d+)W\)", described)
    return replace(gpu, watts=float(watts[1])) if watts else gpu


def _links(described: str, family: str) -> tuple[int, float]:
    """Links of a node and Gb/s of each; what is usual with the chip where the row states none."""
    for pattern in (
        r"Compute: (\d)\s*x.*?(\d+)\s?Gb/s",
        r"^(\d)x ConnectX-\d \w+ \w+ (\d+)Gb/s",
        r"(\d)x (\d+)Gbe Infiniband",
    ):
        found = re.search(pattern, described, re.IGNORECASE)
        if found:
            return int(found[1]), float(found[2])
    usual = {"V100": (1, 100.0), "A100": (8, 200.0)}
    return usual.get(family, (8, 400.0))


def law_of(values: Vector, residual: float = _RESIDUAL) -> StepConstants:
    named = dict(zip(PRIORS, (float(value) for value in values), strict=True))
    software: dict[str, dict[str, float]] = {}
    for key in [key for key in named if " " in key]:
        chip, version = key.split()
        software.setdefault(chip, {})[version] = named.pop(key)
    return StepConstants(**named, residual=residual, software=software)


class Fit:
    """Constants in logarithms; plans are made anew in each iteration, not for each difference."""

    def __init__(self, systems: Sequence[System], start: Vector | None = None) -> None:
        self.prior = np.log([value for value, _ in PRIORS.values()])
        self.precision = np.diag([1 / error**2 for _, error in PRIORS.values()])
        self.logs = self.prior.copy() if start is None else start.copy()
        self.systems = list(systems)
        for _ in range(8 if start is None else 4):
            self.logs = self.logs + self._step(*self.linear())

    @property
    def law(self) -> StepConstants:
        return law_of(np.exp(self.logs))

    def linear(self) -> tuple[Vector, Vector]:
        """Residuals and the derivative of the predicted logarithms."""
        plans = [_plan(system, self.law) for system in self.systems]
        base = self._logs(self.logs, plans)
        moved = [self._logs(self.logs + 1e-3 * unit, plans) for unit in np.eye(len(self.logs))]
        measured = np.log([system.seconds for system in self.systems])
        return measured - base, np.stack([(m - base) / 1e-3 for m in moved], axis=1)

    def _logs(self, logs: Vector, plans: Sequence[FusionPlan]) -> Vector:
        law = law_of(np.exp(logs))
        return np.log([_seconds(s, law, p) for s, p in zip(self.systems, plans, strict=True)])

    def _step(self, away: Vector, slopes: Vector) -> Vector:
        return self.solve(away, slopes)[0]

    def solve(self, away: Vector, slopes: Vector) -> tuple[Vector, Vector]:
        """The step towards the optimum, and the covariance there."""
        weights = 1 / np.maximum(1, np.abs(away) / (_HUBER * _RESIDUAL)) / _RESIDUAL**2
        normal = slopes.T @ (slopes * weights[:, None]) + self.precision
        pull = slopes.T @ (weights * away) + self.precision @ (self.prior - self.logs)
        return np.clip(np.linalg.solve(normal, pull), -0.5, 0.5), np.linalg.inv(normal)

    def left_out(self) -> list[StepConstants]:
        """For each system the constants without it: one step from the optimum."""
        away, slopes = self.linear()
        found = []
        for number in range(len(self.systems)):
            kept = np.arange(len(self.systems)) != number
            step, _ = self.solve(away[kept], slopes[kept])
            found.append(law_of(np.exp(self.logs + step)))
        return found


def _plan(system: System, law: StepConstants) -> FusionPlan:
    work, place = system.parts(law)
    return best_plan(work, place, system.batch, ("native",))


def _seconds(system: System, law: StepConstants, plan: FusionPlan) -> float:
    work, place = system.parts(law)
    return step_times(work, place, plan, system.batch)[0].overlapped()


def predicted(system: System, law: StepConstants) -> dict[str, Any]:
    work, place = system.parts(law)
    found = predict(work, place, _plan(system, law), system.batch)
    return {
        "system": system.name, "measured_ms": 1e3 * system.seconds,
        "predicted_ms": 1e3 * found.step_s, "error": found.step_s / system.seconds - 1,
        "uncertainty": found.uncertainty,
    }  # fmt: skip


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Mean and worst error, and the shares of systems within one and two standard errors."""
    away = np.array([abs(row["error"]) for row in rows])
    known = np.array([row["uncertainty"] for row in rows])
    return {
        "systems": len(rows), "mean": float(away.mean()), "median": float(np.median(away)),
        "worst": float(away.max()), "within_1": float((away <= known).mean()),
        "within_2": float((away <= 2 * known).mean()),
    }  # fmt: skip


def evaluate(systems: Sequence[System]) -> dict[str, Any]:
    first = Fit(systems).law
    odd = [s for s in systems if abs(predicted(s, first)["error"]) > UNEXPLAINED]
    usual = [s for s in systems if s not in odd]
    fit = Fit(usual)
    covariance = fit.solve(*fit.linear())[1]
    without = fit.left_out()
    away = [predicted(s, law)["error"] for s, law in zip(usual, without, strict=True)]
    # What the fit leaves, so that honest intervals come out for systems that were not fitted.
    residual = float(np.sqrt(np.mean(np.square(away))))
    named = [predicted(s, replace(fit.law, residual=residual)) for s in odd]
    held = [
        predicted(s, replace(law, residual=residual)) for s, law in zip(usual, without, strict=True)
    ]
    by_submitter: list[dict[str, Any]] = []
    for name in sorted({s.submitter for s in systems}):
        law = replace(
            Fit([s for s in usual if s.submitter != name], fit.logs).law, residual=residual
        )
        by_submitter += [predicted(s, law) for s in systems if s.submitter == name]
    small = replace(Fit([s for s in usual if s.ranks <= SMALL_GPUS]).law, residual=residual)
    larger = [predicted(s, small) for s in systems if s.ranks > SMALL_GPUS]
    fitted = [predicted(s, replace(fit.law, residual=residual)) for s in usual]
    odd_names = {s.name for s in odd}
    return {
        "constants": dict(zip(PRIORS, np.exp(fit.logs).tolist(), strict=True)),
        "relative_errors": dict(zip(PRIORS, np.sqrt(np.diag(covariance)).tolist(), strict=True)),
        "residual": residual,
        "unexplained": named,
        "summary": {
            "fitted": summary(fitted),
            "leave one out": summary(held),
            "leave one out, unexplained included": summary([*held, *named]),
            "leave one submitter out": summary(by_submitter),
            "<= 16 GPUs -> 32 to 128": summary(larger),
            "<= 16 GPUs -> 32 to 128, explained": summary(
                [row for row in larger if row["system"] not in odd_names]
            ),
        },
        "leave_one_out": held,
        "larger": larger,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("csv", type=Path)
    parser.add_argument("--write", action="store_true", help="write step_constants.toml")
    parser.add_argument("--json", type=Path, help="write everything that was computed")
    asked = parser.parse_args()
    found = evaluate(read_systems(asked.csv))
    for name, value in found["constants"].items():
        print(f"{name:16} {value:10.4g} ± {found['relative_errors'][name]:.0%}")
    print(f"residual {found['residual']:.1%}")
    for row in found["leave_one_out"]:
        times = f"{row['measured_ms']:8.2f} {row['predicted_ms']:8.2f} {row['error']:+7.1%}"
        print(f"{row['system']:48} {times}")
    for row in found["unexplained"]:
        print(f"unexplained: {row['system']}: {row['error']:+.1%}")
    for name, figures in found["summary"].items():
        print(f"{name}: " + ", ".join(f"{key} {value:.3g}" for key, value in figures.items()))
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    if asked.write:
        _write(found)


def _write(found: dict[str, Any]) -> None:
    law = law_of(np.array(list(found["constants"].values())), found["residual"])
    table = {name: _rounded(value) for name, value in vars(law).items() if name != "software"}
    table["software"] = {
        chip: {version: _rounded(value) for version, value in rounds.items()}
        for chip, rounds in law.software.items()
    }
    CONSTANTS.write_text(
        "# Fitted by tools/fit_planner.py (make planner-fit CSV=...), never by hand; what each means is\n"
        "# at StepConstants in cluster.py.\n" + tomli_w.dumps(table)
    )


def _rounded(value: float) -> float:
    digits = 3 - math.floor(math.log10(abs(value))) - 1
    return round(value, digits)


if __name__ == "__main__":
    main()
