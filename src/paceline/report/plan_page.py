"""The page of `paceline plan`: the prediction, charts of efficiency and speed, and the times of the
buckets."""

from __future__ import annotations

from paceline.plan.answer import Answer, advice_rows, bucket_rows, curve_rows, fact_rows
from paceline.report.chart import Chart, Line
from paceline.report.html import document, figures, section
from paceline.report.quantities import markup
from paceline.report.tables import Table

PAGE_NAME = "plan.html"


def plan_page(answer: Answer) -> str:
    now = answer.now
    title = f"{answer.workload.model} on {now.ranks:,} ranks: {now.images_per_s:,.0f} images/s"
    return document(
        title,
        [
            f"<header><p>Paceline plan</p>\n<h1>{markup(title)}</h1></header>",
            section("Answer", [_table("", ("", ""), fact_rows(answer), {0, 1})]),
            figures([_efficiency(answer), _speed(answer), _buckets(answer)]),
            section("What would help", [_table("", ("change", "images/s"), advice_rows(answer))]),
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


def _efficiency(answer: Answer) -> Chart:
    nodes = [(float(p.ranks), 100 * p.efficiency) for p in answer.curve]
    low = [(float(p.ranks), 100 * p.efficiency / (1 + p.uncertainty)) for p in answer.curve]
    return Chart(
        "Efficiency", "ranks",
        [Line("expected, %", nodes), Line("one standard error slower, %", low, 2, dashed=True)],
        from_zero=True,
    )  # fmt: skip


def _speed(answer: Answer) -> Chart:
    seen = [(float(p.ranks), p.images_per_s) for p in answer.curve]
    alone = answer.now.images_per_s / answer.now.efficiency / answer.now.ranks
    linear = [(float(p.ranks), p.ranks * alone) for p in answer.curve]
    return Chart(
        "Speed", "ranks",
        [Line("images/s", seen), Line("linear", linear, 2, dashed=True)], from_zero=True,
    )  # fmt: skip


def _buckets(answer: Answer) -> Chart:
    made = answer.now.exchanges
    number = [float(n) for n in range(1, len(made) + 1)]
    lines = [
        Line(name, [(n, 1e3 * getattr(m, field)) for n, m in zip(number, made, strict=True)], c)
        for c, (name, field) in enumerate(
            (("ready, ms", "ready_s"), ("starts, ms", "start_s"), ("ends, ms", "end_s")), 1
        )
    ]
    return Chart("Buckets, from the start of backward", "bucket", lines, from_zero=True)
