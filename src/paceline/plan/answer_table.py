"""The planner's answer in words: rows of cells for the terminal and the page."""

from __future__ import annotations

from paceline.plan.answer import Answer
from paceline.plan.plan_score import BufferScore
from paceline.plan.prediction import Prediction
from paceline.plan.scaling import MOST_RANKS

Row = tuple[str, ...]
# Buffers beyond these are told as a number.
_MOST_BUFFERS = 12


def fact_rows(answer: Answer) -> list[Row]:
    """What it comes to."""
    now, work = answer.now, answer.workload
    sure = f"± {now.uncertainty:.0%}"
    most = "none: one node is below" if answer.most_ranks is None else f"{answer.most_ranks:,}"
    return [
        ("model", f"{work.model}, {work.elements:,} weights; {work.source}"),
        ("cluster", _cluster_words(answer)),
        ("batch", f"{now.batch} a GPU, {now.batch * now.ranks:,} in all"),
        ("step", f"{1e3 * now.step_s:.2f} ms {sure}: compute {1e3 * now.compute_s:.2f}, exposed "
                 f"communication {1e3 * now.exposed_comm_s:.2f}{_slowed(now)}, input "
                 f"{1e3 * now.input_stall_s:.2f}"),
        ("speed", f"{now.images_per_s:,.0f} images/s {sure}, {now.images_per_s_per_gpu:,.0f} a GPU"),
        ("efficiency", f"{now.efficiency:.1%} of {now.ranks:,} times one GPU alone"),
        ("time", f"{answer.epochs:g} epochs of {answer.samples:,} images in "
                 f"{duration(answer.train_s)} {sure}"),
        ("ranks at 90 %", most + _or_more(answer)),
        ("verdict", f"bound by {answer.bound_by}"),
    ]  # fmt: skip


def _slowed(now: Prediction) -> str:
    """Only where it was measured."""
    if not now.hidden_comm_s:
        return ""
    return f", compute slowed by hidden communication {1e3 * now.hidden_comm_s:.2f}"


def _or_more(answer: Answer) -> str:
    """More than 65,536 ranks are not looked at."""
    step = answer.cluster.ranks_per_node
    capped = answer.most_ranks is not None and answer.most_ranks + step > MOST_RANKS
    return " or more" if capped else ""


def _cluster_words(answer: Answer) -> str:
    c = answer.cluster
    inter = c.links * 8e-9 / c.inter.beta_s if c.inter.beta_s else float("inf")
    return (
        f"{c.nodes:,} nodes × {c.ranks_per_node}, {inter:,.3g} Gb/s of payload a node, "
        f"{1e6 * c.inter.alpha_s:.3g} µs a message"
    )


def buffer_rows(answer: Answer) -> list[Row]:
    now = answer.now
    rows: list[Row] = [
        (
            str(number), str(score.tensors), f"{score.bytes / 2**20:.2f}", _way(score),
            f"{1e3 * made.ready_s:.2f}", f"{1e3 * made.start_s:.2f}", f"{1e3 * made.end_s:.2f}",
        )
        for number, (score, made) in enumerate(zip(now.scores, now.exchanges, strict=True), 1)
    ]  # fmt: skip
    if len(rows) <= _MOST_BUFFERS:
        return rows
    half = _MOST_BUFFERS // 2
    gap = ("…", f"{len(rows) - 2 * half} more", "", "", "", "", "")
    return [*rows[:half], gap, *rows[-half:]]


def _way(score: BufferScore) -> str:
    """`ring`, or `ring, float16` where the buffer does not travel as it is held."""
    return score.algorithm + ("" if score.wire == "auto" else f", {score.wire}")


def curve_rows(answer: Answer) -> list[Row]:
    return [
        (f"{p.ranks:,}", f"{p.images_per_s:,.0f}", f"{p.efficiency:.1%}",
         f"{1e3 * p.exposed_comm_s:.2f}")
        for p in answer.curve
    ]  # fmt: skip


def advice_rows(answer: Answer) -> list[Row]:
    return [(advice.change, f"{advice.gain:+.1%}") for advice in answer.advice]


def duration(seconds: float) -> str:
    """2 h 5 min, 8 min 42 s, 12.3 s."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    return (
        f"{int(seconds // 60)} min {int(seconds % 60)} s" if seconds >= 60 else f"{seconds:.1f} s"
    )
