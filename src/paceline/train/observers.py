"""Observes a run: input stalls, corrupt samples, the trace of `run.traced_steps`, the live report.

`trace.json` (`run.traced_steps`) has the timelines of all ranks in the trace-event format of Perfetto
(ui.perfetto.dev) and chrome://tracing (`trace_document`). Each rank appears as a process with tracks
for computation, gradient exchange and, on a GPU, the host. All times refer to the clock of rank 0; the
first span starts at 0. The name of a process includes the uncertainty of the rank's clock offset.
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
from paceline.comm.progress import BucketInfo
from paceline.comm.tracing import Timeline, TimelineSpan, measure_offsets
from paceline.config import RunSettings
from paceline.core.errors import ConfigError, RunError
from paceline.core.events import CorruptEvent, Event, NoteEvent
from paceline.core.extensions import load_extension
from paceline.data import CorruptSample, allowed_corrupt, divide_wait, mark_stream, sum_by_stage
from paceline.train.checkpoint import write_atomically
from paceline.train.run_state import Progress


class InputWait:
    """Measures how long the device is idle for lack of input data in one step, by cause.

    A context manager around the wait for a batch. On a GPU, the host waits for a batch while the
    device still computes the previous step, so only the time in which the device is idle counts. CUDA
    events measure this time, which ends when the batch is ready or the device starts to prepare it.
    Idle time beyond the host's wait is attributed to the copy of the images to the device.
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
        # The event follows all work queued so far, which may include the wait for a copy.
        self._events = (self._before, mark_stream(self._device))

    def attribute(self, spent: Mapping[str, float], begun: Any = None) -> None:
        """Divides the last wait for a batch among its causes.

        Args:
            spent: Seconds that the loader spent on the batch, by cause.
            begun: CUDA event at which the device started to prepare the batch, if any.
        """
        before, after = self._events
        self._waits.append((self._host_s, spent, before, after if begun is None else begun))

    def stall(self) -> dict[str, float]:
        """Returns how many seconds the device was idle, by cause. On a GPU, the step must be complete."""
        return sum_by_stage(*(_causes(*wait) for wait in self._waits))


def _causes(host_s: float, spent: Mapping[str, float], before: Any, after: Any) -> dict[str, float]:
    if before is None:
        return divide_wait(host_s, spent)
    idle_s = before.elapsed_time(after) / 1e3
    stall = divide_wait(min(idle_s, host_s), spent)
    return sum_by_stage(stall, {"copy": idle_s - host_s}) if idle_s > host_s else stall


@dataclass
class InputReport:
    """Counts corrupt samples over all ranks and resumes, and reports each of them once.

    Writes the sorted indices of corrupt training samples to `progress.corrupt`, and their number to
    `progress.corrupt_samples`. A loader cannot count corrupt samples: it knows only those that its
    process has read, so it would count a sample again on another rank and after each resume.

    Attributes:
        samples: Number of training samples.
        max_share: Fraction of the training samples that may be corrupt.
    """

    progress: Progress
    samples: int
    max_share: float
    group: Group
    emit: Callable[[Event], None]
    emitted: set[str] = field(default_factory=set)

    def training(self, here: Sequence[CorruptSample], count: int) -> None:
        """Counts the corrupt samples of a step.

        Args:
            here: The corrupt samples that this rank has read.
            count: Number of corrupt samples on all ranks together.

        Raises:
            RunError: On all ranks, if more samples are corrupt than allowed.
        """
        if not count:
            return
        progress, known = self.progress, set(self.progress.corrupt)
        corrupt = torch.zeros(self.samples, dtype=torch.int32, device=self.group.device)
        corrupt[[sample.index for sample in here]] = 1
        self.group.all_reduce_sum(corrupt)
        progress.corrupt = sorted(known | set(corrupt.nonzero().flatten().tolist()))
        progress.corrupt_samples = len(progress.corrupt)
        new = [sample for sample in here if sample.index not in known]
        self._emit_samples(new, "train", elsewhere=count - len(here))
        limit = allowed_corrupt(self.max_share, self.samples)
        if progress.corrupt_samples > limit:
            raise RunError(
                f"{progress.corrupt_samples} corrupt of {self.samples} samples by step "
                f"{progress.step}; data.max_corrupt_share = {self.max_share:g} allows {limit}",
                "fix the data (metrics*.jsonl names the samples), or raise the share",
            )

    def evaluation(self, here: Sequence[CorruptSample], count: int) -> None:
        """Counts the corrupt samples of an evaluation. Their limit is checked by `evaluate`."""
        self.progress.corrupt_val_samples = count
        self._emit_samples(here, "val", elsewhere=count - len(here))

    def note(self, text: str) -> None:
        """Emits a note of a loader, unless the same note was emitted before."""
        if text and text not in self.emitted:
            self.emitted.add(text)
            self.emit(NoteEvent(text))

    def _emit_samples(
        self, samples: Iterable[CorruptSample], split: str, *, elsewhere: int
    ) -> None:
        """Emits an event for each corrupt sample of this rank that has not been reported yet.

        Rank 0 also notes the number of corrupt samples on all other ranks.
        """
        for sample in samples:
            if f"{split} {sample.name}" not in self.emitted:
                self.emitted.add(f"{split} {sample.name}")
                event = CorruptEvent(self.progress.step, sample.name, sample.reason, split)
                self.emit(event)
        if elsewhere > 0 and self.group.rank == 0:
            self.emit(NoteEvent(f"{elsewhere} corrupt on other ranks; see metrics.rank*.jsonl"))


NAME = "trace.json"
# Seconds in which the server may answer pending requests before it must end.
_SERVER_END_S = 5.0


class RunTrace:
    """Records timelines of all ranks in the steps of `run.traced_steps`; writes `trace.json`."""

    def __init__(
        self, settings: RunSettings, group: Group, buffers: list[BucketInfo], folder: Path,
        first_step: int = 0,
    ) -> None:  # fmt: skip
        """Creates the timeline of this rank.

        Args:
            settings: The section `[run]`, which names the traced steps.
            group: The ranks.
            buffers: The gradient buckets.
            folder: The run folder.
            first_step: The first step that this process runs.
        """
        self._group = group
        self._buffers = buffers
        self.path = folder / NAME
        first, last = settings.traced_steps or (1, 0)
        self.timeline = Timeline(
            first, last, group.device, device_exchanges=group.backend == "nccl"
        )
        # False if there is nothing to write, or the trace has been written.
        self._unwritten = first_step < last

    def is_due(self, step: int) -> bool:
        """Returns True if the trace is still unwritten and `step` is past the last traced step."""
        return self._unwritten and step >= self.timeline.last

    def drop(self) -> None:
        """Discards the trace of the steps so far, because the ranks have changed."""
        self._unwritten = False

    def write(self) -> str:
        """Gathers the timelines of all ranks and writes them on rank 0.

        Returns:
            A note for the user, or "" if nothing was written.
        """
        if not self._unwritten:
            return ""
        self._unwritten = False
        spans = self.timeline.spans()
        offsets = measure_offsets(self._group)
        mine = json.dumps({"host": socket.gethostname(), "spans": spans}).encode()
        gathered = self._group.gather_bytes(mine)
        if gathered is None or offsets is None:
            return ""
        ranks = []
        for rank, (data, offset) in enumerate(zip(gathered, offsets, strict=True)):
            sent = json.loads(data)
            spans = [TimelineSpan(*span) for span in sent["spans"]]
            ranks.append(TracedRank(rank, sent["host"], *offset, spans))
        document = trace_document(ranks, self._buffers)
        write_atomically(self.path, json.dumps(document).encode())
        worst_us = max(offset.residual_s for offset in offsets) * 1e6
        return f"trace of {len(ranks)} ranks in {self.path}, clocks aligned to ± {worst_us:.0f} µs"


class WatchProcess:
    """An `Observer` that serves the live report of the run (`run.report_port`) from another process.

    In a separate process, creating pages does not block the Python interpreter of the training. The
    server process ends together with the training process.
    """

    def __init__(self, folder: Path, port: int) -> None:
        """Starts the server.

        Args:
            folder: The run folder.
            port: TCP port on which the server listens.

        Raises:
            ConfigError: If the port cannot be used, or the package `report` is not installed.
        """
        self._process: subprocess.Popen[bytes] | None = None
        server = load_extension("report.server", "run.report_port", True)
        opened = server.open_socket(server.LOOPBACK, port)
        with opened:
            self.url: str = server.url_of(opened)
            descriptor = opened.fileno()
            # -P: import no module from the current directory.
            command = [sys.executable, "-P", "-m", "paceline.report.server"]
            command += [str(descriptor), str(folder)]
            # The server ends when its standard input closes, and so even after `kill -9` of this process.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, pass_fds=[descriptor], start_new_session=True
            )

    def on_event(self, event: Event) -> None:
        """Does nothing: the server reads the records."""

    def close(self) -> None:
        """Ends the server."""
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
    """Starts the live report and emits a note with its address, or with the reason why it failed."""
    try:
        server = WatchProcess(folder, port)
    except (ConfigError, OSError) as error:
        emit(NoteEvent(f"no live report: {error}"))
        return []
    emit(NoteEvent(f"live report at {server.url}"))
    return [server]


_TRACKS = ("compute", "host", "exchange")
# Number of thread ids per kind of track. Overlapping spans need several threads, because viewers expect
# the spans of one thread to nest.
_TIDS_PER_TRACK = 100


@dataclass(frozen=True)
class TracedRank:
    """The timeline of a rank, on the clock of this rank.

    This clock is `offset_s` ± `residual_s` seconds ahead of the clock of rank 0.
    """

    rank: int
    host: str
    offset_s: float
    residual_s: float
    spans: Sequence[TimelineSpan]


def trace_document(
    ranks: Sequence[TracedRank], buckets: Sequence[BucketInfo] = ()
) -> dict[str, Any]:
    """Returns the content of `trace.json`."""
    starts = [span.start_s - rank.offset_s for rank in ranks for span in rank.spans]
    zero_s = min(starts, default=0.0)
    residuals = {str(rank.rank): round(rank.residual_s * 1e6, 3) for rank in ranks}
    return {
        "traceEvents": [event for rank in ranks for event in _rank_events(rank, zero_s, buckets)],
        "displayTimeUnit": "ms",
        "otherData": {"clock": "rank 0's", "clock_residual_us_by_rank": residuals},
    }


def _rank_events(
    rank: TracedRank, zero_s: float, buckets: Sequence[BucketInfo]
) -> list[dict[str, Any]]:
    process = f"rank {rank.rank} on {rank.host} (clock ± {rank.residual_s * 1e6:.0f} µs)"
    events = [_metadata(rank.rank, "process_name", 0, process)]
    known = [track for track in _TRACKS if any(span.track == track for span in rank.spans)]
    for number, track in enumerate(known):
        spans = [span for span in rank.spans if span.track == track]
        lanes: list[float] = []
        for span in sorted(spans, key=lambda span: (span.start_s, -span.stop_s)):
            event: dict[str, Any] = {
                "name": span.name,
                "cat": track,
                "pid": rank.rank,
                "tid": number * _TIDS_PER_TRACK + _lane(span, lanes),
                "ts": round((span.start_s - rank.offset_s - zero_s) * 1e6, 3),
                "args": {"step": span.step},
            }
            if 0 <= span.bucket < len(buckets):
                bucket = buckets[span.bucket]
                label = bucket.label(span.bucket + 1)
                event["name"] = f"sent {label}" if span.name == "sent" else label
                event["args"] |= {
                    "buffer": span.bucket,
                    "bytes": bucket.bytes, "algorithm": bucket.algorithm, "wire": bucket.wire,
                    "tensors": len(bucket.tensors), "first": bucket.tensors[0],
                }  # fmt: skip
            # An instant event, such as sending a bucket.
            if span.start_s == span.stop_s:
                event |= {"ph": "i", "s": "t"}
            else:
                event |= {"ph": "X", "dur": round(max(0.0, span.stop_s - span.start_s) * 1e6, 3)}
            events.append(event)
        for lane in range(max(1, len(lanes))):
            name = track if lane == 0 else f"{track} {lane + 1}"
            events.append(
                _metadata(rank.rank, "thread_name", number * _TIDS_PER_TRACK + lane, name)
            )
    return events


def _lane(span: TimelineSpan, lanes: list[float]) -> int:
    """Returns the row of the trace in which a span does not overlap earlier ones.

    `lanes` has the end of the last span in each row.
    """
    if span.start_s == span.stop_s:
        return 0
    for number, free_s in enumerate(lanes):
        if free_s <= span.start_s:
            lanes[number] = span.stop_s
            return number
    lanes.append(span.stop_s)
    return len(lanes) - 1


def _metadata(pid: int, kind: str, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}
