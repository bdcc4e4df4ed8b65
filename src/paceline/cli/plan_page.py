"""The answer of `paceline plan` as rows of cells, for the terminal, and as a page.

The page has the prediction, one step on a time axis, scaling, choices of nodes and batch, and the times
of the buckets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from paceline.core.units import format_duration, markup, plural
from paceline.planner.answer import MAX_RANKS, Answer, node_gbps
from paceline.planner.prediction import BucketScore, Prediction
from paceline.planner.recommend import CORE_IMAGES_PER_S, PACKED_IMAGES_PER_S, Option
from paceline.report.chart import RIGHT, WIDTH, Axis, Chart, Line, tick_text
from paceline.report.html import document, figures, section
from paceline.report.tables import Table

PAGE_NAME = "plan.html"
# The table of buckets has other times than the bars, which begin with the forward pass.
FROM_BACKWARD = "ms from the start of backward"


def plan_page(answer: Answer) -> str:
    now = answer.now
    title = (
        f"{answer.workload.model} on {now.ranks:,} ranks, batch {now.batch:,} each: "
        f"{now.images_per_s:,.0f} images/s, {answer.job.epochs:g} epochs in "
        f"{format_duration(answer.train_s)}"
    )
    return document(
        title,
        [
            f"<header><p>Paceline plan</p>\n<h1>{markup(title)}</h1></header>",
            section("Answer", [Table.of("", ("", ""), fact_rows(answer), {0, 1})]),
            _gantt(answer),
            figures([_efficiency(answer), _speed(answer)]),
            *(section(table.title, [table]) for table in reversed(answer_tables(answer))),
            "<footer>Paceline plan</footer>",
        ],
    )  # fmt: skip


def answer_tables(answer: Answer) -> list[Table]:
    """What follows the facts, in the order of the terminal, which ends with what matters most."""
    cost = ("cost",) if answer.limits.price else ()
    energy = ("kWh",) if answer.job.watts else ()
    buckets = ("bucket", "tensors", "MiB", "algorithm", "ready ms", "start ms", "end ms")
    scaling = ("ranks", "images/s", "efficiency", "exposed ms")
    options = (
        "nodes", "batch", "time with start-up", "GPU-hours", *cost, *energy, "images/s",
        "efficiency", "global batch",
    )  # fmt: skip
    return [
        Table.of(f"Buckets, {FROM_BACKWARD}", buckets, bucket_rows(answer), {3}),
        Table.of("Scaling", scaling, curve_rows(answer), set()),
        Table.of("Nodes and batches", options, option_rows(answer), set()),
    ]


@dataclass(frozen=True)
class Bar:
    """Of a Gantt chart, from `start` to `end`, in row `row`; `text` shows on hover."""

    row: str
    start: float
    end: float
    text: str
    colour: int = 1


# Rows of a Gantt chart: their height, and the width of their names.
_ROW, _NAMES = 26, 92


def gantt_chart(label: str, unit: str, bars: Sequence[Bar]) -> str:
    """One `<svg>` element, a row for each name in the order of the bars, time to the right."""
    rows = list(dict.fromkeys(bar.row for bar in bars))
    axis = Axis.fit([0.0, *(bar.end for bar in bars)], tight=True, target_ticks=5)
    foot, width = 8 + _ROW * len(rows), WIDTH - _NAMES - RIGHT

    def x(value: float) -> float:
        return _NAMES + axis.fraction(value) * width

    parts = []
    for tick, text in zip(axis.ticks, axis.labels(), strict=True):
        parts.append(f'<path class="grid" d="M{x(tick):.1f} 4V{foot}"/>')
        parts.append(tick_text(x(tick), foot + 17, text))
    for place, name in enumerate(rows):
        y = 8 + _ROW * place
        parts.append(f'<text x="{_NAMES - 8}" y="{y + 15}" text-anchor="end">{markup(name)}</text>')
    for bar in bars:
        y = 8 + _ROW * rows.index(bar.row)
        # A bar too short to see is one unit wide.
        wide = max(1.0, x(bar.end) - x(bar.start))
        parts.append(
            f'<rect class="bar c{bar.colour}" x="{x(bar.start):.1f}" y="{y}" width="{wide:.1f}" '
            f'height="{_ROW - 6}"><title>{markup(bar.text)}</title></rect>'
        )
    parts.append(
        f'<text x="{WIDTH - RIGHT}" y="{foot + 33}" text-anchor="end">{markup(unit)}</text>'
    )
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {foot + 38}" role="img" '
        f'aria-label="{markup(label)}">' + "".join(parts) + "</svg>"
    )


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
        bar("backward", forward, forward + stretched, "backward pass, as its exchanges slow it", 2),
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
    drawn = gantt_chart(label, "ms from the start of the step", step_bars(answer))
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


Row = tuple[str, ...]
# More buckets than these are shown as a number.
_MOST_BUFFERS = 12


def fact_rows(answer: Answer) -> list[Row]:
    """What it comes to."""
    now, work = answer.now, answer.workload
    sure = _sure(now.uncertainty)
    picked = ", recommended" if answer.recommended else ""
    if answer.limits.timed_batch is not None:
        picked += (
            f" of at most {answer.limits.timed_batch:,} a GPU: twice the largest that was timed, as "
            "nothing is known of the memory"
        )
    most = "none: one node is below" if answer.most_ranks is None else f"{answer.most_ranks:,}"
    return [
        ("model", f"{work.model}, {work.elements:,} weights; {work.source}"),
        ("cluster", _cluster_words(answer)),
        *_assumed_rows(answer),
        ("batch", f"{now.batch:,} a GPU, {now.batch * now.ranks:,} in all{picked}"),
        ("batch limit", _limit_words(answer)),
        ("step", f"{1e3 * now.step_s:,.2f} ms {sure}: compute {1e3 * now.compute_s:,.2f}, exposed "
                 f"communication {1e3 * now.exposed_comm_s:,.2f}{_slowed(now)}, input "
                 f"{1e3 * now.input_stall_s:,.2f}"),
        ("speed", f"{_few(now.images_per_s)} images/s {sure}, {_few(now.images_per_s_per_gpu)} a GPU"),
        ("efficiency", f"{now.efficiency:.1%} of {now.ranks:,} times one GPU alone"
                       + (", whose input is as slow" if now.input_stall_s else "")),
        ("time", f"{answer.job.epochs:g} epochs of {answer.job.samples:,} images, "
                 f"{now.steps(answer.job.epochs, answer.job.samples):,} steps, in "
                 f"{format_duration(answer.train_s)} {sure}, training alone"),
        *_profile_rows(answer),
        ("start-up", _start_up_words(answer)),
        ("ranks at 90 %", most + _or_more(answer)),
        *_memory_rows(answer),
        ("input", _input_words(answer)),
        *_cost_rows(answer),
        ("verdict", f"bound by {answer.bound_by}"),
    ]  # fmt: skip


def _limit_words(answer: Answer) -> str:
    limits, here = answer.limits, answer.now.batch * answer.now.ranks
    over = "; this batch is larger" if here > limits.global_batch else ""
    flag = limits.set_by[0] if limits.set_by else ""
    if limits.is_an_epoch:
        flag = "--dataset-size"
    elif flag not in ("--max-global-batch", "--noise-scale"):
        flag = "--max-global-batch sets another"
    return f"{limits.global_batch:,} in all: {limits.why} ({flag}){over}"


def _profile_rows(answer: Answer) -> list[Row]:
    """A line where the step is not one of those that were timed."""
    work, batch = answer.workload, answer.now.batch
    if not work.is_extrapolated(batch):
        return []
    ends = sorted({min(work.batches), max(work.batches)})
    timed = " to ".join(f"{size:,}" for size in ends) + (" alone" if len(ends) == 1 else "")
    return [(
        "profile", f"timed at batch {timed}, so that {batch:,} is extrapolated: "
                   f"{_sure(work.spread_at(batch))} for the compute instead of {_sure(work.spread)}; "
                   f"profile with -b {ends[0]} -b {batch}",
    )]  # fmt: skip


# From here on the faster end of a ± would be no time any more.
_WIDE = 0.5


def _sure(spread: float) -> str:
    """
    >>> _sure(0.08), _sure(1.4)
    ('± 8%', 'within a factor of 2.4')
    """
    return f"± {spread:.0%}" if spread < _WIDE else f"within a factor of {1 + spread:.2g}"


def _start_up_words(answer: Answer) -> str:
    took = format_duration(answer.option.startup_s)
    if answer.job.startup_s is not None:
        return f"{took} as given (--startup-s)"
    return f"{took} (--startup-s sets it): {answer.start_up.describe()}"


def _memory_rows(answer: Answer) -> list[Row]:
    memory = answer.memory
    if memory is None:
        return [("memory", "not known: no layers of this model, or no image size in its profile")]
    parts = ", ".join(
        f"{name.replace('_', ' ')} {value / 1e9:.3g}"
        for name, value in asdict(memory).items() if value
    )  # fmt: skip
    room = f" of {answer.memory_bytes / 1e9:,.0f} GB" if answer.memory_bytes else " GB"
    fits = answer.limits.memory_batch
    most = f"; up to {fits:,} images fit" if fits else "; --gpu says whether it fits"
    return [("memory", f"{memory.total / 1e9:.3g}{room} a GPU ({parts}){most}")]


def _input_words(answer: Answer) -> str:
    """Describes the input rate that a node needs, and the cores for it."""
    need = answer.needed_images_per_s
    cores, packed = (math.ceil(need / rate) for rate in (CORE_IMAGES_PER_S, PACKED_IMAGES_PER_S))
    return (
        f"{_few(need)} images/s a node needed: {plural(cores, 'core')} for full-size JPEGs, or "
        f"{packed:,} for packed shards"
    )


def _cost_rows(answer: Answer) -> list[Row]:
    this, limits, watts = answer.option, answer.limits, answer.job.watts
    cost = f", {this.cost:,.2f} at {limits.price:g} a GPU-hour" if limits.price else ""
    energy = (
        f"; {_tenths(this.energy_kwh)} kWh with every GPU at {watts:g} W (an estimate; hosts not counted)"
        if watts
        else "; energy is not known without --gpu"
    )
    rows: list[Row] = [(
        "price", f"{_tenths(this.gpu_hours)} GPU-hours, start-up of {format_duration(this.startup_s)} "
                 f"included{cost}{energy}",
    )]  # fmt: skip
    if limits.minutes or limits.budget:
        wanted = [f"{limits.minutes:g} min"] if limits.minutes else []
        wanted += [f"a budget of {limits.budget:,.2f}"] if limits.budget else []
        rows.append(("target", f"within {' and '.join(wanted)}: {_chosen_words(answer)}"))
    return rows


def _few(value: float) -> str:
    """Whole from 100 on, with three digits below.

    >>> _few(94208.4), _few(0.0241), _few(0.0)
    ('94,208', '0.0241', '0')
    """
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def _tenths(value: float) -> str:
    """One decimal, and two digits of what would be 0.0.

    >>> _tenths(4.76), _tenths(0.0123), _tenths(0.0)
    ('4.8', '0.012', '0.0')
    """
    return f"{value:,.1f}" if value >= 0.095 or not value else f"{value:.2g}"


def _chosen_words(answer: Answer) -> str:
    chosen = answer.chosen
    if chosen is not None:
        cost = f", {chosen.cost:,.2f}" if answer.limits.price else ""
        return (
            f"{plural(chosen.nodes, 'node')}, batch {chosen.batch:,} a GPU: "
            f"{format_duration(chosen.total_s)} with start-up, {_tenths(chosen.gpu_hours)} GPU-hours"
            f"{cost}{_why_chosen(answer, chosen)}"
        )
    if not answer.options:
        return "none of the numbers of nodes has a price"
    nearest = []
    if answer.limits.minutes:
        nearest.append(("fastest", min(answer.options, key=lambda option: option.total_s)))
    if answer.limits.budget:
        nearest.append(("cheapest", min(answer.options, key=lambda option: option.cost)))
    return "not possible: " + "; ".join(
        f"the {what}, {plural(option.nodes, 'node')} with batch {option.batch:,} a GPU, takes "
        f"{format_duration(option.total_s)} with start-up"
        + (f" and {option.cost:,.2f}" if answer.limits.price else "")
        for what, option in nearest
    )


def _why_chosen(answer: Answer, chosen: Option) -> str:
    """Why nodes or batch are not those of the rest of the answer."""
    if (chosen.nodes, chosen.batch) == (answer.cluster.nodes, answer.now.batch):
        return ""
    least = "fewest GPU-hours" if answer.limits.minutes else "shortest time"
    return (
        f"; the {least} within it of all nodes and batches that were tried, where the rest of this "
        f"answer is for {plural(answer.cluster.nodes, 'node')} and batch {answer.now.batch:,}"
    )


def format_gbps(rate: float) -> str:
    """Formats a rate in Gb/s.

    >>> format_gbps(25600), format_gbps(0.016)
    ('25,600 Gb/s', '0.016 Gb/s')
    """
    return f"{rate:,.0f} Gb/s" if rate >= 100 else f"{rate:.3g} Gb/s"


def _slowed(now: Prediction) -> str:
    """Only where it was measured."""
    if not now.hidden_comm_s:
        return ""
    return f", compute slowed by hidden communication {1e3 * now.hidden_comm_s:,.2f}"


def _or_more(answer: Answer) -> str:
    """More than 65,536 ranks are not looked at, nor more nodes without links between them."""
    if not answer.cluster.has_network:
        return ": more nodes are not known"
    step = answer.cluster.ranks_per_node
    capped = answer.most_ranks is not None and answer.most_ranks + step > MAX_RANKS
    return " or more" if capped else ""


def _cluster_words(answer: Answer) -> str:
    c = answer.cluster
    if not c.has_network:
        return f"one node × {c.ranks_per_node:,}; links between nodes were not measured"
    return (
        f"{plural(c.nodes, 'node')} × {c.ranks_per_node:,}, {format_gbps(node_gbps(c))} of payload a "
        f"node, {1e6 * c.inter.alpha_s:.3g} µs a message"
    )


def _assumed_rows(answer: Answer) -> list[Row]:
    words = [f"{text} (--{name.replace('_', '-')})" for name, text in answer.assumed.items()]
    return [("assumed", "; ".join(words))] if words else []


def bucket_rows(answer: Answer) -> list[Row]:
    now = answer.now
    rows: list[Row] = [
        (
            str(number), str(score.tensors), f"{score.bytes / 2**20:.2f}", _way(score),
            f"{1e3 * made.ready_s:,.2f}", f"{1e3 * made.start_s:,.2f}", f"{1e3 * made.end_s:,.2f}",
        )
        for number, (score, made) in enumerate(zip(now.scores, now.exchanges, strict=True), 1)
    ]  # fmt: skip
    if len(rows) <= _MOST_BUFFERS:
        return rows
    half = _MOST_BUFFERS // 2
    gap = ("…", f"{len(rows) - 2 * half} more", "", "", "", "", "")
    return [*rows[:half], gap, *rows[-half:]]


def _way(score: BucketScore) -> str:
    """`ring`, or `ring, float16` where the bucket does not travel as it is held."""
    return score.algorithm + ("" if score.wire == "auto" else f", {score.wire}")


def curve_rows(answer: Answer) -> list[Row]:
    return [
        (f"{p.ranks:,}", _few(p.images_per_s), f"{p.efficiency:.1%}",
         f"{1e3 * p.exposed_comm_s:,.2f}")
        for p in answer.curve
    ]  # fmt: skip


def option_rows(answer: Answer) -> list[Row]:
    return [
        (f"{o.nodes:,}", f"{o.batch:,}", format_duration(o.total_s), _tenths(o.gpu_hours),
         *((f"{o.cost:,.2f}",) if answer.limits.price else ()),
         *((_tenths(o.energy_kwh),) if answer.job.watts else ()), _few(o.images_per_s),
         f"{o.efficiency:.1%}", f"{o.global_batch:,}")
        for o in answer.options
    ]  # fmt: skip
