"""The trace document: valid events, on one clock, nested on every track."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.tracing import TimelineSpan
from paceline.train.observers import TracedRank, trace_document


def span(name: str, start_s: float, stop_s: float, track: str = "compute") -> TimelineSpan:
    return TimelineSpan(name, track, start_s, stop_s, 3)


def events(document: dict[str, Any], phase: str = "X") -> list[dict[str, Any]]:
    return [event for event in document["traceEvents"] if event["ph"] == phase]


def test_ranks_are_laid_on_rank_0s_clock() -> None:
    """Rank 1's clock is 100 s ahead."""
    document = trace_document(
        [
            TracedRank(0, "a", 0.0, 0.0, [span("x", 5.0, 5.5), span("s", 5.2, 5.2)]),
            TracedRank(1, "b", 100.0, 2e-5, [span("y", 105.25, 105.5, "exchange")]),
        ]
    )
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    x, y = events(document)
    assert (x["pid"], x["ts"], x["dur"], x["args"]) == (0, 0.0, 500_000.0, {"step": 3})
    assert (y["pid"], y["ts"], y["dur"]) == (1, pytest.approx(250_000), pytest.approx(250_000))
    (moment,) = events(document, "i")
    assert (moment["ts"], moment["s"]) == (pytest.approx(200_000), "t")
    names = {
        (event["pid"], event["args"]["name"])
        for event in events(document, "M")
        if event["name"].endswith("_name")
    }
    assert names == {
        (0, "rank 0 on a (clock ± 0 µs)"), (1, "rank 1 on b (clock ± 20 µs)"),
        (0, "compute"), (1, "exchange"),
    }  # fmt: skip
    assert document["otherData"]["clock_residual_us_by_rank"] == {"0": 0.0, "1": 20.0}


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 20), st.sampled_from(["compute", "exchange"])),
        max_size=30,
    )
)
def test_spans_of_one_track_never_overlap(places: list[tuple[int, int, str]]) -> None:
    spans = [span("s", float(at), float(at + length), track) for at, length, track in places]
    document = trace_document([TracedRank(0, "a", 0.0, 0.0, spans)])
    assert len(events(document)) + len(events(document, "i")) == len(spans)
    by_track: dict[int, list[tuple[float, float]]] = {}
    for event in events(document):
        by_track.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
        assert event["ts"] >= 0
    for stretches in by_track.values():
        stretches.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(stretches))
