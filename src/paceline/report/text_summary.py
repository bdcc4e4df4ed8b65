"""The run in a few plain rows, for the end of `paceline train` and for `paceline report`.

In: a `RunFiles`. Out: one line of verdict and rows of (label, value), without markup or control
characters; how they are set is the command line's business.
"""

from __future__ import annotations

from paceline.report.expectation import bound_by, expectation_table
from paceline.report.input_stall import InputStall
from paceline.report.outcome import Outcome
from paceline.report.quantities import count, duration, many, percent, rate
from paceline.report.run_files import RunFiles
from paceline.report.tables import result_rows


def summary_rows(run: RunFiles) -> list[tuple[str, str]]:
    """The result table, with the recipe's name on top."""
    rows = [("run", Outcome.of(run).name), *result_rows(run)]
    verdict = bound_by(run)
    stall = InputStall.of(run)
    rows += [("waiting for the input", stall.describe())] if stall.steps else []
    rows += [("bound by", verdict)] if verdict else []
    for part, predicted, measured, apart in expectation_table(run).rows:
        rows.append((f"{part}, predicted", f"{predicted} ms; measured {measured} ms ({apart})"))
    return rows


def verdict(run: RunFiles) -> str:
    """`quickstart: 90.3 % top-1 in 101 s, 1,430 images/s on 1 rank`, or how far the run has come."""
    outcome = Outcome.of(run)
    result = _result(outcome)
    if outcome.state == "finished":
        target = "target reached, " if outcome.stopped_by == "target" else ""
        return f"{outcome.name}: {target}{result or 'finished without an evaluation'}"
    where = f"at step {count(outcome.steps)}"
    if outcome.total_steps:
        share = 100 * outcome.steps / outcome.total_steps
        where += f" of {count(outcome.total_steps)} ({percent(share, 0)})"
    if outcome.state == "stopped":
        state = f"stopped by {outcome.stopped_by} {where}"
    elif outcome.steps:
        state = f"unfinished, {where}"
    else:
        state = "unfinished, no step recorded yet"
    return f"{outcome.name}: {state}" + (f"; so far {result}" if result else "")


def _result(outcome: Outcome) -> str:
    """Accuracy, time, speed and ranks, as far as they are known."""
    accuracy = None if outcome.top1 is None else f"{percent(outcome.top1, 1)} top-1"
    time = None if outcome.train_s is None or not outcome.steps else duration(outcome.train_s)
    parts = []
    if accuracy or time:
        parts.append(" in ".join(part for part in (accuracy, time) if part))
    if outcome.images_per_s is not None:
        ranks = f" on {many(outcome.world_size, 'rank')}" if outcome.world_size else ""
        parts.append(f"{rate(outcome.images_per_s)} images/s{ranks}")
    return ", ".join(parts)
