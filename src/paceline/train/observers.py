"""What a run reports beside its metrics: input stalls, corrupt samples, notes of the loaders, the trace
(`run.traced_steps`), and the server of the live report.

`trace.json` holds the spans of all ranks in the trace-event format of Perfetto (ui.perfetto.dev) and
chrome://tracing (`trace_document`). Each rank is a process with tracks for compute, exchange and, where
it has a GPU, the host. All times are on the clock of rank 0, from 0. The name of a process includes the
uncertainty of its clock offset.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.comm.group import Group
from paceline.comm.progress import BucketInfo, ExchangeObserver, Observers
from paceline.comm.tracing import NoTimeline, Spans, Timeline, TimelineSpan, measure_offsets
from paceline.config import RunSettings
from paceline.core.errors import ConfigError, RunError
from paceline.core.events import CorruptEvent, Event, NoteEvent
from paceline.core.extensions import load_extension
from paceline.data import CorruptSample, allowed_corrupt, divide_wait, mark_stream, sum_by_stage
from paceline.train.checkpoint import write_atomically
from paceline.train.run_state import Progress


class InputWait:
    """Input stall of one step, by cause. A context manager around the wait for each batch.

    On a GPU the host waits for a batch while the device still computes the previous step, so only
    device idle time counts. It is measured with CUDA events up to the batch, or to where the device's
    own work on the batch begins. Idle time beyond the host's wait is attributed to the copy.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: Any = None
        self._started = 0.0
        self._host_s = 0.0
        self._waits: list[tuple[float, Mapping[str, float], Any, Any]] = []
        self._events: tuple[Any, Any] = (None, None)

    def __enter__(self) -> None:
        self._before = mark_stream(self._device)
        self._started = time.perf_counter()

    def __exit__(self, *details: object) -> None:
        self._host_s = time.perf_counter() - self._started
        # Recorded after all work queued so far, which may include the wait for a copy.
        self._events = (self._before, mark_stream(self._device))

    def attribute(self, spent: Mapping[str, float], begun: Any = None) -> None:
        """Attributes the last wait to the time `spent` on its batch by cause; `begun` is the
        batch's."""
        before, after = self._events
        self._waits.append((self._host_s, spent, before, after if begun is None else begun))

    def stall(self) -> dict[str, float]:
        """Seconds by cause. On a GPU the step must have completed."""
        return sum_by_stage(*(_causes(*wait) for wait in self._waits))


def _causes(host_s: float, spent: Mapping[str, float], before: Any, after: Any) -> dict[str, float]:
    if before is None:
        return divide_wait(host_s, spent)
    idle_s = before.elapsed_time(after) / 1e3
    stall = divide_wait(min(idle_s, host_s), spent)
    return sum_by_stage(stall, {"copy": idle_s - host_s}) if idle_s > host_s else stall


@dataclass
class InputReport:
    """Counts corrupt samples over all ranks and resumes, and emits each note and each sample once.

    Writes `progress.corrupt` (sorted indices of training samples) and `progress.corrupt_samples`, its
    length. A loader only knows what it met itself since its process started, and would count a sample
    again on every rank and after every resume. `samples` is the number of training samples, of which the
    share `share` may be corrupt.
    """

    progress: Progress
    samples: int
    share: float
    group: Group
    emit: Callable[[Event], None]
    emitted: set[str] = field(default_factory=set)

    def training(self, here: Sequence[CorruptSample], count: int) -> None:
        """After a step in which all ranks together met `count` corrupt samples, this rank those in
        `here`. Raises RunError, on all ranks, once there are more than allowed."""
        if not count:
            return
        progress, known = self.progress, set(self.progress.corrupt)
        found = torch.zeros(self.samples, dtype=torch.int32, device=self.group.device)
        found[[sample.index for sample in here]] = 1
        self.group.all_reduce_sum(found)
        progress.corrupt = sorted(known | set(found.nonzero().flatten().tolist()))
        progress.corrupt_samples = len(progress.corrupt)
        new = [sample for sample in here if sample.index not in known]
        self._emit_samples(new, "train", elsewhere=count - len(here))
        limit = allowed_corrupt(self.share, self.samples)
        if progress.corrupt_samples > limit:
            raise RunError(
                f"{progress.corrupt_samples} corrupt of {self.samples} samples by step "
                f"{progress.step}, more than data.max_corrupt_share = {self.share:g} "
                f"allows ({limit})",
                "fix the data (metrics*.jsonl names the samples), or raise the share",
            )

    def evaluation(self, here: Sequence[CorruptSample], count: int) -> None:
        """After an evaluation, as for `training`; the limit is checked by `evaluate`."""
        self.progress.corrupt_val_samples = count
        self._emit_samples(here, "val", elsewhere=count - len(here))

    def note(self, text: str) -> None:
        """Emits a loader's note; every evaluation may repeat it."""
        if text and text not in self.emitted:
            self.emitted.add(text)
            self.emit(NoteEvent(text))

    def _emit_samples(
        self, samples: Iterable[CorruptSample], split: str, *, elsewhere: int
    ) -> None:
        """`elsewhere` samples were met by other ranks, whose own records name them."""
        for sample in samples:
            if f"{split} {sample.name}" not in self.emitted:
                self.emitted.add(f"{split} {sample.name}")
                event = CorruptEvent(self.progress.step, sample.name, sample.reason, split)
                self.emit(event)
        if elsewhere > 0 and self.group.rank == 0:
            self.emit(NoteEvent(f"{elsewhere} corrupt on other ranks; see metrics.rank*.jsonl"))


NAME = "trace.json"
# The server answers requests that have begun.
_SERVER_END_S = 5.0


class RunTrace:
    """The spans of all ranks over the steps of `run.traced_steps`, if any."""

    def __init__(
        self, settings: RunSettings, group: Group, buffers: list[BucketInfo], folder: Path,
        first_step: int = 0,
    ) -> None:  # fmt: skip
        """`first_step`: that of a resumed run, which may be past the window."""
        self._group = group
        self._buffers = buffers
        self.path = folder / NAME
        self.timeline: Timeline | None = None
        if settings.traced_steps and first_step < settings.traced_steps[1]:
            first, last = settings.traced_steps
            self.timeline = Timeline(
                first, last, group.device, device_exchanges=group.backend == "nccl"
            )

    @property
    def spans(self) -> Spans:
        return self.timeline or NoTimeline()

    def beside(self, observer: ExchangeObserver) -> ExchangeObserver:
        """An observer of the exchange that passes everything to `observer` and to the trace."""
        return Observers([observer, self.timeline]) if self.timeline else observer

    def is_due(self, step: int) -> bool:
        """Whether the window is complete after `step` steps."""
        return self.timeline is not None and step >= self.timeline.last

    def write(self) -> str:
        """Gathers the spans of all ranks; rank 0 writes them. Returns a note, or "" if there is
        nothing to write."""
        if self.timeline is None:
            return ""
        spans, self.timeline = self.timeline.spans(), None
        offsets = measure_offsets(self._group)
        mine = json.dumps({"host": socket.gethostname(), "spans": spans}).encode()
        gathered = self._group.gather_bytes(mine)
        if gathered is None or offsets is None:
            return ""
        ranks = []
        for rank, (data, offset) in enumerate(zip(gathered, offsets, strict=True)):
            sent = json.loads(data)
            traced = [self._traced(TimelineSpan(*span)) for span in sent["spans"]]
            ranks.append(TracedRank(rank, sent["host"], *offset, traced))
        document = trace_document(ranks)
        write_atomically(self.path, json.dumps(document).encode())
        worst_us = max(offset.residual_s for offset in offsets) * 1e6
        return f"trace of {len(ranks)} ranks in {self.path}, clocks aligned to ± {worst_us:.0f} µs"

    def _traced(self, span: TimelineSpan) -> TracedSpan:
        details: dict[str, Any] = {"step": span.step}
        name = span.name
        if 0 <= span.bucket < len(self._buffers):
            buffer = self._buffers[span.bucket]
            name = buffer.label(span.bucket + 1)
            details |= {
                "buffer": span.bucket,
                "bytes": buffer.bytes,
                "algorithm": buffer.algorithm,
                "wire": buffer.wire,
                "tensors": len(buffer.tensors),
                "first": buffer.tensors[0],
            }
            name = f"sent {name}" if span.name == "sent" else name
        return TracedSpan(name, span.track, span.start_s, span.stop_s, details)


class WatchProcess:
    """An `Observer` that serves the live report of the run (`run.report_port`) from its own process, so
    that making pages does not hold up the training's interpreter. The process ends with this one."""

    def __init__(self, folder: Path, port: int) -> None:
        """Raises ConfigError if the port cannot be had, or the package `report` was removed."""
        self._process: subprocess.Popen[bytes] | None = None
        server = load_extension("report.server", "run.report_port", True)
        opened = server.open_socket(server.LOOPBACK, port)
        with opened:
            self.url: str = server.url_of(opened)
            descriptor = opened.fileno()
            # -P: no module comes from the current directory.
            command = [sys.executable, "-P", "-m", "paceline.report.server"]
            command += [str(descriptor), str(folder)]
            # It lives as long as its standard input, also after `kill -9` of this process.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, pass_fds=[descriptor], start_new_session=True
            )

    def on_event(self, event: Event) -> None:
        """The process reads the records itself."""

    def close(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_SERVER_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


def watch_run(folder: Path, port: int, emit: Callable[[Event], None]) -> list[WatchProcess]:
    """The server, and a note of its address; without it training goes on, and a note says why."""
    try:
        server = WatchProcess(folder, port)
    except (ConfigError, OSError) as error:
        emit(NoteEvent(f"no live report: {error}"))
        return []
    emit(NoteEvent(f"live report at {server.url}"))
    return [server]


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
