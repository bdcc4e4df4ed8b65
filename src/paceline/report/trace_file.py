"""The trace of a run, for Perfetto (ui.perfetto.dev) and chrome://tracing.

In: each rank's spans in seconds of its own clock, and its clock's offset to rank 0's. Out: one JSON
document in the trace-event format: a process for each rank, in it tracks for compute, exchange and,
beside a GPU, the host; all on rank 0's clock, from 0. A process's name tells its clock's residual.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_TRACKS = ("compute", "host", "exchange")
# Tracks of one kind, where spans overlap: viewers want what is on one track to nest.
_WIDTH = 100


@dataclass(frozen=True)
class TracedSpan:
    """`start_s` and `stop_s` are equal for a moment, such as a buffer's sending."""

    name: str
    track: str
    start_s: float
    stop_s: float
    details: Mapping[str, Any]


@dataclass(frozen=True)
class TracedRank:
    rank: int
    host: str
    offset_s: float
    residual_s: float
    spans: Sequence[TracedSpan]


def trace_document(ranks: Sequence[TracedRank]) -> dict[str, Any]:
    """The whole file's content."""
    starts = [span.start_s - rank.offset_s for rank in ranks for span in rank.spans]
    zero_s = min(starts, default=0.0)
    events: list[dict[str, Any]] = []
    for rank in ranks:
        events += _rank_events(rank, zero_s)
    residuals = {str(rank.rank): round(rank.residual_s * 1e6, 3) for rank in ranks}
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"clock": "rank 0's", "clock_residual_us_by_rank": residuals},
    }


def _rank_events(rank: TracedRank, zero_s: float) -> list[dict[str, Any]]:
    place = f"rank {rank.rank} on {rank.host} (clock ± {rank.residual_s * 1e6:.0f} µs)"
    events = [_named(rank.rank, "process_name", 0, {"name": place})]
    events.append(_named(rank.rank, "process_sort_index", 0, {"sort_index": rank.rank}))
    known = [track for track in _TRACKS if any(span.track == track for span in rank.spans)]
    for number, track in enumerate(known):
        of_track = sorted(
            (span for span in rank.spans if span.track == track),
            key=lambda span: (span.start_s, -span.stop_s),
        )
        lanes: list[float] = []
        for span in of_track:
            lane = _lane(span, lanes)
            tid = number * _WIDTH + lane
            events.append(_event(rank, span, tid, zero_s))
        for lane in range(max(1, len(lanes))):
            name = track if lane == 0 else f"{track} {lane + 1}"
            tid = number * _WIDTH + lane
            events.append(_named(rank.rank, "thread_name", tid, {"name": name}))
            events.append(_named(rank.rank, "thread_sort_index", tid, {"sort_index": tid}))
    return events


def _lane(span: TracedSpan, lanes: list[float]) -> int:
    """The first on which nothing is under way; `lanes` has the time when each gets free."""
    if span.start_s == span.stop_s:
        return 0
    for number, free_s in enumerate(lanes):
        if free_s <= span.start_s:
            lanes[number] = span.stop_s
            return number
    lanes.append(span.stop_s)
    return len(lanes) - 1


def _event(rank: TracedRank, span: TracedSpan, tid: int, zero_s: float) -> dict[str, Any]:
    begin_us = (span.start_s - rank.offset_s - zero_s) * 1e6
    event = {
        "name": span.name,
        "cat": span.track,
        "pid": rank.rank,
        "tid": tid,
        "ts": round(begin_us, 3),
        "args": dict(span.details),
    }
    if span.start_s == span.stop_s:
        return {**event, "ph": "i", "s": "t"}
    return {**event, "ph": "X", "dur": round(max(0.0, span.stop_s - span.start_s) * 1e6, 3)}


def _named(pid: int, what: str, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": args}
