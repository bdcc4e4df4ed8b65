"""The page of `paceline plan`: the prediction, one step on a time axis, scaling, choices of nodes and
batch, and the times of the buckets."""

from __future__ import annotations

from paceline.core.units import format_duration
from paceline.plan.answer import Answer
from paceline.plan.answer_rows import (
    advice_rows,
    bucket_rows,
    curve_rows,
    fact_rows,
    option_columns,
    option_rows,
)
from paceline.report.chart import Bar, Chart, Line, gantt_chart
from paceline.report.html import document, figures, section
from paceline.report.quantities import markup
from paceline.report.tables import Table

PAGE_NAME = "plan.html"


def plan_page(answer: Answer) -> str:
    now = answer.now
    title = (
        f"{answer.workload.model} on {now.ranks:,} ranks, batch {now.batch:,} each: "
        f"{now.images_per_s:,.0f} images/s, {answer.epochs:g} epochs in "
        f"{format_duration(answer.train_s)}"
    )
    return document(
        title,
        [
            f"<header><p>Paceline plan</p>\n<h1>{markup(title)}</h1></header>",
            section("Answer", [_table("", ("", ""), fact_rows(answer), {0, 1})]),
            _gantt(answer),
            figures([_efficiency(answer), _speed(answer)]),
            section("What would help", [_table("", ("change", "images/s", "price"),
                                               advice_rows(answer), {0, 2})]),
            section("Nodes and batches", [_table("", option_columns(answer), option_rows(answer),
                                                 set())]),
            section("Scaling", [_table("", ("ranks", "images/s", "efficiency", "exposed ms"),
                                       curve_rows(answer), set())]),
            section("Buckets", [_table(
                "", ("bucket", "tensors", "MiB", "algorithm", "ready ms", "start ms", "end ms"),
                bucket_rows(answer), {3})]),
            "<footer>Paceline plan</footer>",
        ],
    )  # fmt: skip


def _table(
    title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]], text: set[int] | None = None
) -> Table:
    return Table.of(title, columns, rows, {0} if text is None else text)


def step_bars(answer: Answer) -> list[Bar]:
    """One step of the slowest rank in milliseconds: compute above, the links below. What hidden
    exchanges cost the backward pass is drawn as part of it, and the exchanges move with it."""
    now = answer.now
    work = answer.workload
    slow = now.compute_s / work.compute_s(now.batch)
    forward = 1e3 * work.forward.at(now.batch) * slow
    backward = 1e3 * work.backward.at(now.batch) * slow
    stretched = backward + 1e3 * now.hidden_comm_s
    over = forward + stretched + 1e3 * now.exposed_comm_s
    update = 1e3 * work.update_s * slow

    def at(seconds: float) -> float:
        """A moment of the backward pass, or behind it, on the axis."""
        inside = min(1e3 * seconds, backward)
        share = inside / backward if backward else 1.0
        return forward + share * stretched + max(0.0, 1e3 * seconds - backward)

    def bar(row: str, start: float, end: float, what: str, colour: int) -> Bar:
        return Bar(row, start, end, f"{what}: {start:,.2f} to {end:,.2f} ms", colour)

    bars = [
        bar("forward", 0.0, forward, "forward pass", 1),
        bar("backward", forward, forward + stretched, "backward pass", 2),
    ]
    for number, (score, made) in enumerate(zip(now.scores, now.exchanges, strict=True), 1):
        if made.end_s > made.start_s:
            what = f"bucket {number}, {score.bytes / 2**20:,.2f} MiB, {score.algorithm}"
            place = at(made.start_s), at(made.end_s)
            bars.append(bar("links", *place, what, 3 + (number - 1) % 2))
    bars.append(bar("update", over, over + update, "weight update", 5))
    if now.input_stall_s:
        end = over + update
        bars.append(bar("input", end, end + 1e3 * now.input_stall_s, "waiting for input", 6))
    return bars


def _gantt(answer: Answer) -> str:
    took = f"{1e3 * answer.now.step_s:,.2f} ms"
    label = f"One step of {took}: forward, backward, buckets on the links"
    drawn = gantt_chart(label, "ms", step_bars(answer))
    return (
        f'<section class="charts"><figure><figcaption>One step <span>{took}</span></figcaption>'
        f"{drawn}</figure></section>"
    )


def _efficiency(answer: Answer) -> Chart:
    nodes = [(float(p.ranks), 100 * p.efficiency) for p in answer.curve]
    low = [(float(p.ranks), 100 * p.efficiency / (1 + p.uncertainty)) for p in answer.curve]
    return Chart(
        "Efficiency", "ranks",
        [Line("expected, %", nodes), Line("one standard error slower, %", low, 2, dashed=True)],
        from_zero=True, log_x=True,
    )  # fmt: skip


def _speed(answer: Answer) -> Chart:
    seen = [(float(p.ranks), p.images_per_s) for p in answer.curve]
    alone = answer.now.images_per_s / answer.now.efficiency / answer.now.ranks
    linear = [(float(p.ranks), p.ranks * alone) for p in answer.curve]
    return Chart(
        "Speed", "ranks",
        [Line("images/s", seen), Line("linear", linear, 2, dashed=True)], log=True, log_x=True,
        show_value=lambda value: f"{value:,.0f}",
    )  # fmt: skip
