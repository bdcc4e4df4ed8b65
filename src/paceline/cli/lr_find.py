"""`paceline lr-find`: a learning-rate range test with a suggestion and a plot."""

from __future__ import annotations

import json
import math
import os
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from paceline.cli.failure import report_error
from paceline.cli.options import AsJson, check_at_least
from paceline.cli.signature import take_signature
from paceline.cli.train import FLAGS, parse_flags, resolve, train
from paceline.config import RunConfig
from paceline.core.errors import ConfigError
from paceline.core.topology import Topology
from paceline.core.units import markup
from paceline.report import write_page
from paceline.report.chart import Chart, Line, Marker
from paceline.report.html import definition_list, document, figures
from paceline.train.display import create_display, print_line

if TYPE_CHECKING:
    from paceline.tune.range_test import RangeResult


# A range test does not use these flags of `train`: it has its own rates, schedule and length.
_UNUSED = ("epochs", "lr", "warmup_epochs", "resume", "target_top1")
_FLAGS = {name: setting for name, setting in FLAGS.items() if name not in _UNUSED}
_OWN = ("low", "high", "steps", "as_json")


def _range_flags(
    low: float = typer.Option(1e-5, "--from", help="First rate."),
    high: float = typer.Option(10.0, "--to", help="Last rate."),
    steps: int = typer.Option(100, help="Steps from the first rate to the last."),
    output: str | None = typer.Option(None, help="Run folder. Default: runs/RECIPE-lr-find-NNN."),
    as_json: AsJson = False,
) -> None:
    """Declares the command-line flags of `lr-find` that differ from those of `train`."""


def find_rate(**given: Any) -> int:
    """Find a learning rate: train briefly with a growing rate, and plot the loss."""
    low, high, steps = given["low"], given["high"], given["steps"]
    if not 0 < low < high < math.inf:
        raise ConfigError("--from", low, f"must be above 0 and below --to {high:g}", "try 1e-5")
    if steps < 20:
        raise ConfigError("--steps", steps, "must be at least 20", "try 100")
    ranks = given["nproc_per_node"]
    check_at_least(1, {"--nproc-per-node": ranks})
    # An optimizer class without a default rate needs a rate. The range test replaces it.
    flags = {"optim.lr": high, **parse_flags(given, _FLAGS)}
    config = resolve(given["recipe"], flags, given["settings"], given["trust"])
    config = range_config(config, low, high, steps, ranks)
    if ranks > 1:
        from paceline.cli.launch import launch_ranks
        from paceline.cli.nodes import Node

        node = Node.from_flags(ranks, 1, None, None, given["master_port"], os.environ)
        return launch_ranks(config, node, 0)
    return _run(config, steps, given["as_json"])


_SHARED = ("recipe", *_FLAGS, "nproc_per_node", "master_port", "trust", "settings")
take_signature(find_rate, {*_SHARED, *_OWN}, train, _range_flags)


def range_config(
    config: RunConfig, low: float, high: float, steps: int, ranks: int = 1
) -> RunConfig:
    """Returns the configuration of a learning-rate range test.

    Args:
        config: The configuration of the recipe. Schedule, number of epochs and checkpoints are replaced.
        low: The first learning rate.
        high: The last learning rate.
        steps: The number of steps from the first rate to the last.
        ranks: The number of ranks that this process starts.

    Raises:
        ConfigError: If the recipe resumes a run or is a rehearsal.
    """
    from paceline.data import open_source
    from paceline.train.batch_sizes import resolve_batch_sizes

    if config.run.resume:
        problem = "a range test cannot resume a run"
        raise ConfigError("run.resume", config.run.resume, problem, "leave it out")
    if config.run.strategy == "rehearsal":
        raise ConfigError(
            "run.strategy", "rehearsal", "a range test cannot be a rehearsal",
            "leave it out, and give --global-batch-size",
        )  # fmt: skip
    with closing(open_source(replace(config.data, cache="none"), "train")) as source:
        samples = len(source)
    world = max(ranks, Topology.from_env(os.environ).world_size)
    first = config.optim.batch_growth.first_batch(config.run.global_batch_size)
    batch = resolve_batch_sizes(first, config.run.batch_size, world, samples).global_batch
    epochs = math.ceil(steps * batch / samples)
    return config.with_values({
        "run.name": f"{config.run.name}-lr-find", "run.epochs": epochs,
        "run.global_batch_size": batch, "run.eval_interval_epochs": epochs,
        "run.average_epochs": 0.0, "run.target_top1": None,
        "optim.warmup_epochs": 0.0,
        "optim.batch_schedule": "",
        "optim.scaling": "off",
        "checkpoint.interval_epochs": 0, "checkpoint.interval_steps": 0, "checkpoint.keep": 1,
        "optim.schedule": "exponential", "optim.lr": low, "optim.lr_end": high,
        "optim.decay_over_epochs": (steps - 1) * batch / samples,
    })  # fmt: skip


def _run(config: RunConfig, steps: int, as_json: bool) -> int:
    from paceline.train.components import Components
    from paceline.trainer import Trainer
    from paceline.tune.range_test import RangeTest

    test = RangeTest(steps)
    console = Console(stderr=as_json)
    outcome = Trainer.from_config(config, Components(callbacks=(test,))).run(
        lambda: create_display(console, config.run.log_interval),
        report_error,
    )
    if outcome.result.stop_signal is not None:
        return 128 + int(outcome.result.stop_signal)
    if outcome.rank != 0:
        return 0
    result = test.result()
    chart, rows = range_chart(result), _rows(result)
    head = f"<header><p>{markup(config.run.name)}</p><h1>{markup(chart.title)}</h1></header>"
    page = document(config.run.name, [head, definition_list(rows, "facts"), figures([chart])])
    plot = write_page(page, outcome.folder / "lr_find.html", "")
    if as_json:
        typer.echo(json.dumps(result.to_table()))
        return 0
    for label, value in rows:
        print_line(console, f"{label}: {value}")
    print_line(console, f"plot: {plot}")
    return 0


def range_chart(result: RangeResult) -> Chart:
    """Returns a chart of the loss over the decimal logarithm of the learning rate."""
    powers = [math.log10(rate) for rate in result.rates]
    # Cut off very high losses, which would flatten the rest of the curve.
    top = 2.0 * max(result.smoothed[: len(result.smoothed) // 2 + 1])
    losses, smoothed = (
        [(x, min(y, top)) for x, y in zip(powers, values, strict=True)]
        for values in (result.losses, result.smoothed)
    )
    markers = [Marker(math.log10(result.largest), f"lowest loss: {result.largest:.3g}")]
    suggestion = "no clear descent"
    if result.suggested is not None:
        suggestion = f"suggested {result.suggested:.3g}"
        markers.insert(
            0, Marker(math.log10(result.suggested), f"suggested: {result.suggested:.3g}")
        )
    return Chart(
        "Learning-rate range test", "learning rate, as a power of ten",
        [Line("loss", losses, 1, True), Line("smoothed", smoothed, 1)], markers=markers,
        note=f"{suggestion}, lowest loss at {result.largest:.3g}",
    )  # fmt: skip


def _rows(result: RangeResult) -> list[tuple[str, str]]:
    end = f"the loss did not explode up to {result.rates[-1]:.3g}: try a higher --to"
    if result.exploded:
        end = f"the loss exploded or was not finite after {result.rates[-1]:.3g}"
    suggestion = (
        f"none: no clear descent, the loss falls by {result.fall:.1f} times its noise from step to "
        "step; try more --steps, a larger batch, or another range"
    )
    if result.suggested is not None:
        suggestion = f"{result.suggested:.3g}, the rate at which the loss falls fastest"
    largest = (
        f"{result.largest:.3g}, the rate with the lowest loss; the peak of a cycle is below it"
    )
    return [
        ("suggested --lr", suggestion),
        ("largest", largest),
        ("range", f"{len(result.rates)} steps from {result.rates[0]:.3g}; {end}"),
    ]
