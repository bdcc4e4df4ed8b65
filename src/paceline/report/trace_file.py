"""The trace of a run in the trace-event format of Perfetto (ui.perfetto.dev) and chrome://tracing.

Each rank is a process with tracks for compute, exchange and, where it has a GPU, the host. All times
are on the clock of rank 0, from 0. The name of a process includes the uncertainty of its clock offset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_TRACKS = ("compute", "host", "exchange")
# Thread ids of one kind of track. Overlapping spans need several: viewers expect the spans of one to
# nest.
_TIDS_PER_TRACK = 100


@dataclass(frozen=True)
class TracedSpan:
    """`start_s` and `stop_s` are equal for an instant event, such as sending a bucket."""

    name: str
    track: str
    start_s: float
    stop_s: float
    details: Mapping[str, Any]


@dataclass(frozen=True)
class TracedRank:
    """Spans in seconds of the rank's own clock, which is `offset_s` ahead of rank 0's, ± `residual_s`."""

    rank: int
    host: str
    offset_s: float
    residual_s: float
    spans: Sequence[TracedSpan]


def trace_document(ranks: Sequence[TracedRank]) -> dict[str, Any]:
    """The content of the file."""
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
    process = f"rank {rank.rank} on {rank.host} (clock ± {rank.residual_s * 1e6:.0f} µs)"
    events = [_metadata(rank.rank, "process_name", 0, {"name": process})]
    events.append(_metadata(rank.rank, "process_sort_index", 0, {"sort_index": rank.rank}))
    known = [track for track in _TRACKS if any(span.track == track for span in rank.spans)]
    for number, track in enumerate(known):
        of_track = sorted(
            (span for span in rank.spans if span.track == track),
            key=lambda span: (span.start_s, -span.stop_s),
        )
        lanes: list[float] = []
        for span in of_track:
            tid = number * _TIDS_PER_TRACK + _lane(span, lanes)
            events.append(_event(rank, span, tid, zero_s))
        for lane in range(max(1, len(lanes))):
            name = track if lane == 0 else f"{track} {lane + 1}"
            tid = number * _TIDS_PER_TRACK + lane
            events.append(_metadata(rank.rank, "thread_name", tid, {"name": name}))
            events.append(_metadata(rank.rank, "thread_sort_index", tid, {"sort_index": tid}))
    return events


def _lane(span: TracedSpan, lanes: list[float]) -> int:
    """The first free lane; `lanes` has the end of the last span on each."""
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


def _metadata(pid: int, name: str, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": args}
