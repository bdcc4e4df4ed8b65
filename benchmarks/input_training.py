"""Training from real images compared with training from synthetic ones.

    python -m benchmarks.input_training --data-dir shards --model resnet50

One step, captured and warmed up once, serves both inputs. Rounds measure them in turn. Rates come from
sums of times, not from medians, so that a stall counts in full.
"""

from __future__ import annotations

import gc
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any, cast

import torch
import typer

from benchmarks.program import run
from paceline.bench.input_rows import InputRow, create_loader, open_repeated
from paceline.cli import options
from paceline.cli.bench import input_rows, parse_switches, report_progress
from paceline.cli.measure import chosen_device, environment, print_json
from paceline.cli.options import check_at_least
from paceline.comm.group import Group
from paceline.config import RunConfig
from paceline.core.errors import RunError
from paceline.core.topology import Topology
from paceline.core.units import format_percent
from paceline.data import sum_by_stage
from paceline.data.loaders.loader import PREFETCH_BATCHES
from paceline.models.settings import check_model_name
from paceline.train.step import TrainStep
from paceline.train.step_time import SyntheticBatches
from paceline.tune.step import StepRow, build_step
from paceline.tune.timing import steady_times

if TYPE_CHECKING:
    from paceline.data import TrainBatches

# Warm-up steps of each turn, in addition to those with prefetched batches.
_EXTRA_WARM_UP = 8


def measure_training(
    model: str, row: InputRow, switches: Mapping[str, Any], *, rounds: int, steps: int, warm_up: int
) -> dict[str, Any]:
    """Returns images/s of the training step with batches of the pipeline and with synthetic ones.

    Args:
        model: Name of the model.
        row: The pipeline.
        switches: Settings of the step.
        rounds: Number of rounds; each measures both inputs.
        steps: Steps of each input in a round.
        warm_up: Steps before the first round.
    """
    settings = replace(row.settings, workers=row.workers)
    row = replace(row, settings=settings)
    stored = PREFETCH_BATCHES + _EXTRA_WARM_UP
    total = warm_up + 2 * rounds * (steps + 2 * stored + 8)
    device = torch.device(row.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    source = open_repeated(settings, "train")
    step_row = StepRow(
        "training", "ours", model, row.batch_size, settings.image_size, len(source.classes),
        row.device, total, 1, dict(switches),
    )  # fmt: skip
    try:
        with (
            Group(Topology(), RunConfig().comm, device) as group,
            create_loader(row, source) as real,
        ):
            step, words = build_step(step_row, group)
            synthetic = SyntheticBatches(
                step_row.batch_size, step_row.image_size, step_row.classes, device
            )
            turns = _Turns(step, row.batch_size)
            step.loader = synthetic
            gc.collect()  # garbage of earlier rows must not be freed during a graph capture
            turns.measure(warm_up, 1)
            rates: dict[str, list[float]] = {"synthetic": [], "input": []}
            stalls: dict[str, list[dict[str, float]]] = {"synthetic": [], "input": []}
            for turn in range(rounds):
                for name in ("synthetic", "input") if turn % 2 else ("input", "synthetic"):
                    step.loader = synthetic if name == "synthetic" else cast("TrainBatches", real)
                    rate, stall = turns.measure(steps, stored)
                    rates[name].append(rate)
                    stalls[name].append(stall)
                    report_progress(
                        f"round {turn + 1}: training, {name}: {rates[name][-1]:,.0f} images/s"
                    )
            described, remark = real.describe(), real.note()
    finally:
        source.close()
    return {
        "model": model, "batch_size": row.batch_size, "input": described, "remark": remark,
        "what": words,
        "synthetic_images_per_s": statistics.median(rates["synthetic"]),
        "input_images_per_s": statistics.median(rates["input"]),
        "share": statistics.median(
            a / b for a, b in zip(rates["input"], rates["synthetic"], strict=True)
        ),
        "input_stall_s_of_a_step": median_stall(stalls["input"]),
        "rounds": rates,
    }  # fmt: skip


def median_stall(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the median over all rounds by cause; a missing cause counts as 0."""
    causes = dict.fromkeys(cause for stall in rounds for cause in stall)
    return {c: statistics.median(stall.get(c, 0.0) for stall in rounds) for c in causes}


class _Turns:
    """Runs a `TrainStep` with step numbers that increase from turn to turn."""

    def __init__(self, step: TrainStep, batch: int) -> None:
        self._step, self._batch = step, batch
        self._numbers = count()
        self._stalls: list[dict[str, float]] = []

    def measure(self, steps: int, warm_up: int) -> tuple[float, dict[str, float]]:
        """Returns images/s and the stall per step by cause over `steps` steps."""
        self._stalls, lag = [], self._step.lag
        times = steady_times(self._launch, self._collect, lag=lag, repeats=steps, warm_up=warm_up)
        last = len(self._stalls) - lag  # later ones only drain the queue
        timed = self._stalls[last - steps : last]
        stall = {cause: seconds / len(timed) for cause, seconds in sum_by_stage(*timed).items()}
        return self._batch * len(times.seconds) / sum(times.seconds), stall

    def _launch(self, _: int) -> None:
        self._step.launch(next(self._numbers), 0.1)

    def _collect(self) -> None:
        outcome = self._step.collect()
        self._stalls.append(outcome.stall)
        if not math.isfinite(outcome.loss):
            raise RunError(f"the loss is {outcome.loss} at step {outcome.number}")


def main(
    data_dir: str = typer.Option("", help="Images: shards or class folders (docs/data.md)."),
    model: options.Model = "resnet50",
    batch_size: int = typer.Option(64, "--batch-size", "-b", help="Images of a batch."),
    image_size: options.ImageSize = 224,
    workers: int = typer.Option(2, help="Threads that decode."),
    rounds: int = typer.Option(5, help="Each measures both inputs; the median counts."),
    steps: int = typer.Option(50, help="Steps of each input in a round."),
    warm_up: int = typer.Option(20, help="Steps before the first round."),
    settings: list[str] = typer.Option([], "--set", help="section.key=value, as in training."),
    device: options.Device = "auto",
    as_json: options.AsJson = False,
) -> None:
    """Training from real images compared with training from synthetic ones."""
    check_at_least(
        1, {"--batch-size": batch_size, "--workers": workers, "--rounds": rounds, "--steps": steps,
            "--warm-up": warm_up},
    )  # fmt: skip
    check_model_name(model)
    changed = parse_switches(settings)
    of_data = {name: value for name, value in changed.items() if name.startswith("data.")}
    switches = {name: value for name, value in changed.items() if name not in of_data}
    RunConfig().with_values({"model.name": model, **switches})
    chosen = chosen_device(device)
    rows = input_rows("ours", [workers], data_dir, "train", batch_size, image_size, chosen, of_data)
    result = measure_training(model, rows[0], switches, rounds=rounds, steps=steps, warm_up=warm_up)
    if as_json:
        print_json({"training": result, **environment(chosen)})
        return
    sys.stdout.write(
        f"training {model} from these images: {result['input_images_per_s']:,.0f} images/s, "
        f"{format_percent(100 * result['share'], 1)} of "
        f"{result['synthetic_images_per_s']:,.0f} synthetic\n"
    )


if __name__ == "__main__":
    run(main)
