"""`paceline lr-find`: a learning-rate range test of a recipe, with a suggestion and a plot."""

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
from paceline.core.errors import ConfigError, DataError
from paceline.core.files import whole_file
from paceline.core.topology import Topology
from paceline.core.units import markup
from paceline.report import write_page
from paceline.report.chart import Chart, Line, Marker, line_chart
from paceline.report.html import definition_list, document, figures, style
from paceline.train.display import create_display, print_line

if TYPE_CHECKING:
    from paceline.tune.range_test import RangeResult


# Flags of `train` without meaning here: the range has its own rates, schedule and length.
_OTHER = ("epochs", "lr", "warmup_epochs", "resume", "target_top1")
_FLAGS = {name: setting for name, setting in FLAGS.items() if name not in _OTHER}
_OWN = ("low", "high", "steps", "as_json")


def _range_flags(
    low: float = typer.Option(1e-5, "--from", help="First rate."),
    high: float = typer.Option(10.0, "--to", help="Last rate."),
    steps: int = typer.Option(100, help="Steps from the first rate to the last."),
    output: str | None = typer.Option(None, help="Run folder. Default: runs/RECIPE-lr-find-NNN."),
    as_json: AsJson = False,
) -> None:
    """The flags that `lr-find` has beside those of `train`, or in their place."""


def find_rate(**given: Any) -> int:
    """Find a learning rate: train briefly with a growing rate, and plot the loss."""
    low, high, steps = given["low"], given["high"], given["steps"]
    if not 0 < low < high < math.inf:
        raise ConfigError("--from", low, f"must be above 0 and below --to {high:g}", "try 1e-5")
    if steps < 20:
        raise ConfigError("--steps", steps, "must be at least 20: slopes need losses", "try 100")
    ranks = given["nproc_per_node"]
    check_at_least(1, {"--nproc-per-node": ranks})
    # A class without a default rate needs one; the range replaces it.
    flags = {"optim.lr": high, **parse_flags(given, _FLAGS)}
    config = resolve(given["recipe"], flags, given["settings"], given["trust"])
    config = range_config(config, low, high, steps, ranks)
    if ranks > 1:
        from paceline.cli.launch import launch_ranks

        return launch_ranks(config, ranks, given["master_port"], 0)
    return _run(config, steps, given["as_json"])


_SHARED = ("recipe", *_FLAGS, "nproc_per_node", "master_port", "trust", "settings")
take_signature(find_rate, {*_SHARED, *_OWN}, train, _range_flags)


def range_config(
    config: RunConfig, low: float, high: float, steps: int, ranks: int = 1
) -> RunConfig:
    """The configuration of a range test: the recipe's own, but for schedule, length and records."""
    from paceline.data import open_source
    from paceline.train.batch_sizes import resolve_batch_sizes

    if config.run.resume:
        raise ConfigError(
            "run.resume", config.run.resume, "a range test starts afresh", "leave it out"
        )
    if config.run.strategy == "rehearsal":
        raise ConfigError(
            "run.strategy", "rehearsal", "a range test is not rehearsed",
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
        "optim.batch_schedule": "", "optim.schedule_free": 0.0,
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
    found = test.result()
    folder, chart = outcome.folder, range_chart(found)
    write_page(chart_document(chart), folder / "lr_find.svg", "lr_find.svg")
    write_page(range_page(config.run.name, chart, _rows(found)), folder / "lr_find.html", "")
    try:
        with whole_file(folder / "lr_find.json") as file:
            file.write(json.dumps(found.to_table()).encode() + b"\n")
    except OSError as error:
        raise DataError(
            f"lr_find.json cannot be written: {error.strerror}", "free space"
        ) from error
    if as_json:
        typer.echo(json.dumps(found.to_table()))
        return 0
    for label, value in _rows(found):
        print_line(console, f"{label}: {value}")
    print_line(console, f"plot: {folder / 'lr_find.svg'} and lr_find.html")
    return 0


def range_chart(found: RangeResult) -> Chart:
    """Loss by the decimal logarithm of the rate."""
    powers = [math.log10(rate) for rate in found.rates]
    # Losses far above the lowest one would flatten all others.
    top = 2.0 * max(found.smoothed[: len(found.smoothed) // 2 + 1])
    lines = [
        Line("loss", [(x, min(y, top)) for x, y in zip(powers, found.losses, strict=True)], 1, True),
        Line("smoothed", [(x, min(y, top)) for x, y in zip(powers, found.smoothed, strict=True)], 1),
    ]  # fmt: skip
    markers = [Marker(math.log10(found.largest), f"lowest loss: {found.largest:.3g}")]
    suggestion = "no clear descent"
    if found.suggested is not None:
        suggestion = f"suggested {found.suggested:.3g}"
        markers.insert(0, Marker(math.log10(found.suggested), f"suggested: {found.suggested:.3g}"))
    return Chart(
        "Learning-rate range test", "learning rate, as a power of ten", lines, markers=markers,
        note=f"{suggestion}, lowest loss at {found.largest:.3g}",
    )  # fmt: skip


def chart_document(chart: Chart) -> str:
    """A chart as an SVG file of its own, with the colours of the pages."""
    drawn = line_chart(chart)
    opening, _, rest = drawn.partition(">")
    opening = opening.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    back = '<rect width="100%" height="100%" fill="var(--card)"/>'
    text = ".chart text { font-family: system-ui, sans-serif; }"
    title = f"<title>{markup(chart.title)}</title>"
    return f"{opening}>{title}<style>{style()}{text}</style>{back}{rest}\n"


def range_page(name: str, chart: Chart, rows: list[tuple[str, str]]) -> str:
    """The page of a learning-rate range test."""
    head = f"<header><p>{markup(name)}</p><h1>{markup(chart.title)}</h1></header>"
    return document(name, [head, definition_list(rows, "facts"), figures([chart])])


def _rows(found: RangeResult) -> list[tuple[str, str]]:
    if found.exploded:
        end = f"loss exploded or was not finite after {found.rates[-1]:.3g}"
    else:
        end = f"loss did not explode up to {found.rates[-1]:.3g}: try a higher --to"
    if found.suggested is not None:
        suggestion = f"{found.suggested:.3g}, where the loss falls fastest"
    else:
        suggestion = (
            f"none: no clear descent, the loss falls by {found.fall:.1f} times its noise from step to "
            "step; try more --steps, a larger batch, or another range"
        )
    return [
        ("suggested --lr", suggestion),
        (
            "largest",
            f"{found.largest:.3g}, where the loss is lowest; the peak of a cycle lies below",
        ),
        ("range", f"{len(found.rates)} steps from {found.rates[0]:.3g}; {end}"),
    ]
