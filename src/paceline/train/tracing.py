"""Traces of a run: `trace.json` with the spans of all ranks (`run.trace`), and TensorBoard scalars."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from paceline.comm.group import Group
from paceline.comm.progress import BucketInfo, ExchangeObserver, Observers
from paceline.comm.tracing import NoTimeline, Spans, Timeline, TimelineSpan, measure_offsets
from paceline.config import RunSettings
from paceline.core.errors import ConfigError
from paceline.core.events import EvalEvent, Event, StepEvent
from paceline.report.trace_file import TracedRank, TracedSpan, trace_document
from paceline.train.checkpoint import write_atomically

NAME = "trace.json"


class RunTrace:
    """The spans of all ranks over the steps of `run.trace_steps`. Does nothing without `run.trace`."""

    def __init__(
        self, settings: RunSettings, group: Group, buffers: list[BucketInfo], folder: Path,
        first_step: int = 0,
    ) -> None:  # fmt: skip
        """`first_step`: that of a resumed run, which may be past the window."""
        self._group = group
        self._buffers = buffers
        self.path = folder / NAME
        self.timeline: Timeline | None = None
        if settings.trace and first_step < settings.trace_steps[1]:
            first, last = settings.trace_steps
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


class TensorBoardWriter:
    """An `Observer` that writes scalars to `RUN/tensorboard`."""

    def __init__(self, folder: Path, first_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(
                "run.tensorboard", True, "tensorboard is not installed",
                "pip install 'paceline[tensorboard]', or leave it out",
            ) from None  # fmt: skip
        # Hides steps that a killed process logged after its last checkpoint.
        self._writer = SummaryWriter(str(folder), purge_step=first_step or None)

    def on_event(self, event: Event) -> None:
        names: tuple[str, ...]
        if isinstance(event, StepEvent):
            names, tag = ("loss", "lr", "images_per_s", "epoch"), "train"
        elif isinstance(event, EvalEvent):
            names, tag = ("top1", "top5", "loss"), "val"
        else:
            return
        for name in names:
            self._writer.add_scalar(f"{tag}/{name}", getattr(event, name), event.step)

    def close(self) -> None:
        self._writer.close()
