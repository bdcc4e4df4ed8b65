"""Shows the predictions of `paceline plan` as tables for the terminal and as an HTML page.

The page shows the prediction, the scaling, further numbers of nodes and batches, and the bucket times.
"""

from __future__ import annotations

import math
from dataclasses import asdict

from paceline.core.units import format_duration, markup, plural
from paceline.planner.answer import MAX_RANKS, Answer, node_gbps
from paceline.planner.prediction import BucketScore, Prediction
from paceline.planner.recommend import CORE_IMAGES_PER_S, PACKED_IMAGES_PER_S
from paceline.report.chart import Chart, Line
from paceline.report.html import document, figures, section
from paceline.report.tables import Table

PAGE_NAME = "plan.html"
FROM_BACKWARD = "ms from the start of backward"


def plan_page(answer: Answer) -> str:
    """Returns the predictions as an HTML page."""
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
            figures([_speed(answer)]),
            *(section(table.title, [table]) for table in reversed(answer_tables(answer))),
            "<footer>Paceline plan</footer>",
        ],
    )  # fmt: skip


def answer_tables(answer: Answer) -> list[Table]:
    """Returns the tables to print below the facts, the main table last."""
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
# The number of listed buckets. Further buckets are only counted.
_MAX_BUCKETS = 12


def fact_rows(answer: Answer) -> list[Row]:
    """Returns the main predictions as (name, value) pairs."""
    now, work = answer.now, answer.workload
    sure = _sure(now.uncertainty)
    picked = ", recommended" if answer.recommended else ""
    if answer.limits.timed_batch is not None:
        picked += (
            f" of at most {answer.limits.timed_batch:,} a GPU, twice the largest timed batch, because "
            "the memory is unknown"
        )
    assumed = [f"{text} (--{name.replace('_', '-')})" for name, text in answer.assumed.items()]
    most = "none: one node is below" if answer.most_ranks is None else f"{answer.most_ranks:,}"
    return [
        ("model", f"{work.model}, {work.elements:,} weights; {work.source}"),
        ("cluster", _cluster_words(answer)),
        *([("assumed", "; ".join(assumed))] if assumed else []),
        ("batch", f"{now.batch:,} a GPU, {now.batch * now.ranks:,} in all{picked}"),
        ("batch limit", _limit_words(answer)),
        ("step", f"{1e3 * now.step_s:,.2f} ms {sure}: compute {1e3 * now.compute_s:,.2f}, exposed "
                 f"communication {1e3 * now.exposed_comm_s:,.2f}{_slowdown(now)}, input "
                 f"{1e3 * now.input_stall_s:,.2f}"),
        ("speed", f"{_few(now.images_per_s)} images/s {sure}, {_few(now.images_per_s_per_gpu)} a GPU"),
        ("efficiency", f"{now.efficiency:.1%} of {now.ranks:,} times one GPU alone"
                       + (" with the same input" if now.input_stall_s else "")),
        ("time", f"{answer.job.epochs:g} epochs of {answer.job.samples:,} images, "
                 f"{now.steps(answer.job.epochs, answer.job.samples):,} steps, in "
                 f"{format_duration(answer.train_s)} {sure}, without start-up and evaluation"),
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
    if not limits.is_an_epoch and flag != "--noise-scale":  # --max-global-batch lifts other limits
        flag = "--max-global-batch"
    return f"{limits.global_batch:,} in all: {limits.why} ({flag}){over}"


# For a larger relative uncertainty, "±" would make no sense, because its lower end is near zero.
_WIDE = 0.5


def _sure(spread: float) -> str:
    """Formats a relative uncertainty.

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
        return [("memory", "unknown: the layers of the model or its image size are not known")]
    parts = ", ".join(
        f"{name.replace('_', ' ')} {value / 1e9:.3g}"
        for name, value in asdict(memory).items() if value
    )  # fmt: skip
    room = f" of {answer.memory_bytes / 1e9:,.0f} GB" if answer.memory_bytes else " GB"
    fits = answer.limits.memory_batch
    most = f"; up to {fits:,} images fit" if fits else "; use --gpu to check if it fits"
    return [("memory", f"{memory.total / 1e9:.3g}{room} a GPU ({parts}){most}")]


def _input_words(answer: Answer) -> str:
    """Describes how many images/s a node needs, and how many CPU cores decode them."""
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
        f"; {_few(this.energy_kwh)} kWh with every GPU at {watts:g} W (an estimate; hosts not counted)"
        if watts
        else "; energy is unknown without --gpu"
    )
    rows: list[Row] = [(
        "price", f"{_few(this.gpu_hours)} GPU-hours, start-up of {format_duration(this.startup_s)} "
                 f"included{cost}{energy}",
    )]  # fmt: skip
    if limits.minutes or limits.budget:
        wanted = [f"{limits.minutes:g} min"] if limits.minutes else []
        wanted += [f"a budget of {limits.budget:,.2f}"] if limits.budget else []
        rows.append(("target", f"within {' and '.join(wanted)}: {_chosen_words(answer)}"))
    return rows


def _few(value: float) -> str:
    """Formats a number with three digits, without decimals from 100 on.

    >>> _few(94208.4), _few(0.0241), _few(0.0)
    ('94,208', '0.0241', '0')
    """
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def _chosen_words(answer: Answer) -> str:
    chosen = answer.chosen
    if chosen is not None:
        cost = f", {chosen.cost:,.2f}" if answer.limits.price else ""
        return (
            f"{plural(chosen.nodes, 'node')}, batch {chosen.batch:,} a GPU: "
            f"{format_duration(chosen.total_s)} with start-up, {_few(chosen.gpu_hours)} GPU-hours"
            f"{cost}"
        )
    if not answer.options:
        return "no number of nodes has a price"
    fastest = min(answer.options, key=lambda option: option.total_s)
    cheapest = min(answer.options, key=lambda option: option.cost)
    best, adjective = (fastest, "fastest") if answer.limits.minutes else (cheapest, "cheapest")
    cost = f" and costs {best.cost:,.2f}" if answer.limits.price else ""
    return (
        f"not possible: the {adjective}, {plural(best.nodes, 'node')} with batch {best.batch:,} a GPU, "
        f"takes {format_duration(best.total_s)} with start-up{cost}"
    )


def format_gbps(rate: float) -> str:
    """Formats a rate in Gb/s.

    >>> format_gbps(25600), format_gbps(0.016)
    ('25,600 Gb/s', '0.016 Gb/s')
    """
    return f"{rate:,.0f} Gb/s" if rate >= 100 else f"{rate:.3g} Gb/s"


def _slowdown(now: Prediction) -> str:
    """Describes how much concurrent communication slows compute; empty if it does not."""
    if not now.hidden_comm_s:
        return ""
    return f", compute slowed by hidden communication {1e3 * now.hidden_comm_s:,.2f}"


def _or_more(answer: Answer) -> str:
    """Returns a suffix such as ` or more` for the largest number of ranks, if the search was limited."""
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


def bucket_rows(answer: Answer) -> list[Row]:
    now = answer.now
    rows: list[Row] = [
        (
            str(number), str(score.tensors), f"{score.bytes / 2**20:.2f}", _exchange(score),
            f"{1e3 * made.ready_s:,.2f}", f"{1e3 * made.start_s:,.2f}", f"{1e3 * made.end_s:,.2f}",
        )
        for number, (score, made) in enumerate(zip(now.scores, now.exchanges, strict=True), 1)
    ]  # fmt: skip
    if len(rows) <= _MAX_BUCKETS:
        return rows
    half = _MAX_BUCKETS // 2
    gap = ("…", f"{len(rows) - 2 * half} more", "", "", "", "", "")
    return [*rows[:half], gap, *rows[-half:]]


def _exchange(score: BucketScore) -> str:
    """Returns the algorithm of a bucket, such as `ring`, and the wire format unless it is `auto`."""
    return score.algorithm + ("" if score.wire == "auto" else f", {score.wire}")


def curve_rows(answer: Answer) -> list[Row]:
    return [
        (f"{p.ranks:,}", _few(p.images_per_s), f"{p.efficiency:.1%}",
         f"{1e3 * p.exposed_comm_s:,.2f}")
        for p in answer.curve
    ]  # fmt: skip


def option_rows(answer: Answer) -> list[Row]:
    return [
        (f"{o.nodes:,}", f"{o.batch:,}", format_duration(o.total_s), _few(o.gpu_hours),
         *((f"{o.cost:,.2f}",) if answer.limits.price else ()),
         *((_few(o.energy_kwh),) if answer.job.watts else ()), _few(o.images_per_s),
         f"{o.efficiency:.1%}", f"{o.global_batch:,}")
        for o in answer.options
    ]  # fmt: skip
