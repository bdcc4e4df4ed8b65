"""HALP, SVRG and plain low precision on a strongly convex problem: results and the plot of the docs.

    python tools/halp_convex.py FOLDER

Writes `results.json` and `halp.svg` into FOLDER and prints a table. The problem is ℓ2-regularized
logistic regression in fp64, whose strong convexity μ is the regularization; its weights are several
tensors. The optimizers are `paceline.optim.SVRG`.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from paceline.optim import SVRG
from paceline.report import chart_document
from paceline.report.chart import HEIGHT, WIDTH, Chart, Line

Float = npt.NDArray[np.float64]
SAMPLES, DECAY, BATCH = 1000, 0.03, 20
TENSORS = (1, 9, 40)
DIMENSIONS = sum(TENSORS)
CENTERINGS, STEPS, LR = 30, 400, 0.2
SEEDS = (0, 1, 2)
SPAN = 4.0  # of the fixed grid: no weight of the solution is larger
RUNS = (
    ("SVRG, fp64", "svrg", 8), ("HALP, 16 bits", "halp", 16), ("HALP, 8 bits", "halp", 8),
    ("low-precision SVRG, 16 bits", "lp_svrg", 16), ("low-precision SVRG, 8 bits", "lp_svrg", 8),
    ("low-precision SGD, 16 bits", "lp_sgd", 16), ("low-precision SGD, 8 bits", "lp_sgd", 8),
)  # fmt: skip


class Logistic:
    """f(w) = mean log(1 + exp(−y·xw)) + DECAY/2·‖w‖²."""

    def __init__(self, seed: int) -> None:
        chance = np.random.default_rng(seed)
        self.x = chance.standard_normal((SAMPLES, DIMENSIONS)) / math.sqrt(2)
        noise = 0.5 * chance.standard_normal(SAMPLES)
        self.y = np.sign(self.x @ chance.standard_normal(DIMENSIONS) + noise)
        curvature = float(np.linalg.eigvalsh(self.x.T @ self.x / SAMPLES).max()) / 4
        self.condition = (curvature + DECAY) / DECAY

    def gradient(self, w: Float, rows: npt.NDArray[np.int64] | slice = slice(None)) -> Float:
        """Of the mean over `rows`, without the regularization."""
        x, y = self.x[rows], self.y[rows]
        found: Float = -(x * (y / (1 + np.exp(y * (x @ w))))[:, None]).mean(0)
        return found


def train(problem: Logistic, form: str, bits: int, seed: int) -> tuple[list[float], float]:
    """‖∇f‖ at each centering, relative to the first, and the share of integers at a bound before it."""
    parameters = [nn.Parameter(torch.zeros(size, dtype=torch.float64)) for size in TENSORS]
    optimizer = SVRG(
        parameters, lr=LR, weight_decay=DECAY, form=form, bits=bits, mu=DECAY, span=SPAN, seed=seed
    )
    chance = np.random.default_rng(seed)
    limit = 2 ** (bits - 1)

    def weights() -> Float:
        return np.concatenate([p.detach().numpy() for p in parameters])

    def put(gradient: Float) -> None:
        for p, part in zip(parameters, torch.from_numpy(gradient).split(TENSORS), strict=True):
            p.grad = part

    def norm() -> float:
        return float(np.linalg.norm(problem.gradient(weights()) + DECAY * weights()))

    norms, at_bound = [norm()], 0
    for _ in range(CENTERINGS):
        put(problem.gradient(weights()))
        optimizer.center()
        for _ in range(STEPS):
            rows = chance.integers(0, SAMPLES, BATCH)
            there = np.zeros(DIMENSIONS)
            if optimizer.anchored:
                with optimizer.at_anchor():
                    there = problem.gradient(weights(), rows)
            put(problem.gradient(weights(), rows) - there)
            optimizer.step()
        norms.append(norm())
        if form != "svrg":
            integers = torch.cat([optimizer.state[p]["offset"] for p in parameters])
            at_bound += int(((integers == -limit) | (integers == limit - 1)).sum())
    return [value / norms[0] for value in norms], at_bound / CENTERINGS / DIMENSIONS


def main(folder: Path) -> None:
    problems = {seed: Logistic(seed) for seed in SEEDS}
    conditions = [round(problem.condition, 2) for problem in problems.values()]
    print(f"condition numbers {conditions}, mu {DECAY}, d {DIMENSIONS}, n {SAMPLES}")
    found: dict[str, list[list[float]]] = {}
    print(
        "| optimizer | after 5 | after 10 | after 20 | after 30 centerings | lowest | at a bound |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, form, bits in RUNS:
        both = [train(problem, form, bits, seed) for seed, problem in problems.items()]
        found[name] = [norms for norms, _ in both]
        middle = np.median(found[name], 0)
        share = 100 * float(np.mean([at_bound for _, at_bound in both]))
        cells = " | ".join(f"{middle[n]:.1e}" for n in (5, 10, 20, CENTERINGS))
        print(f"| {name} | {cells} | {middle.min():.1e} | {share:.1f} % |", flush=True)
    settings = {
        "samples": SAMPLES, "tensors": TENSORS, "mu": DECAY, "batch": BATCH, "lr": LR,
        "steps_per_centering": STEPS, "span": SPAN, "seeds": SEEDS, "conditions": conditions,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps({"settings": settings, "norms": found}) + "\n")
    (folder / "halp.svg").write_text(plot(found))


def plot(found: dict[str, list[list[float]]]) -> str:
    """Medians over the seeds, with the legend below the plot: it has too many lines for the one above."""
    lines = [
        Line(name, list(enumerate(np.median(runs, 0).tolist())), colour)
        for colour, (name, runs) in enumerate(found.items(), start=1)
    ]
    chart = Chart(
        "Gradient norm, relative to the start", "centering", lines, log=True, legend=False
    )
    entries = []
    for number, line in enumerate(lines):
        x, y = 20 + number % 2 * 250, HEIGHT + 14 + number // 2 * 18
        entries.append(f'<path class="{line.css_class}" d="M{x} {y - 4}h18"/>')
        entries.append(f'<text class="legend" x="{x + 26}" y="{y}">{line.name}</text>')
    height = HEIGHT + 24 + (len(lines) + 1) // 2 * 18
    drawn = chart_document(chart).replace(f"0 0 {WIDTH} {HEIGHT}", f"0 0 {WIDTH} {height}", 1)
    return drawn.replace("</svg>", "".join(entries) + "</svg>")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
