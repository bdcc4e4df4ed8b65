"""`RunTrace`: the spans of all ranks over a window of steps, in one file of the run's folder.

In: the settings `run.trace` and `run.trace_steps`, the group and the exchange. Out: `trace.json`, written
by rank 0 as soon as the window is over, or at the run's end. All ranks take part.
"""

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
    """Without `run.trace` it does nothing."""

    def __init__(
        self, settings: RunSettings, group: Group, buffers: list[BucketInfo], folder: Path,
        first_step: int = 0,
    ) -> None:  # fmt: skip
        """`first_step`: where a resumed run begins; past the window there is nothing to trace."""
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
        """What the step tells its spans to."""
        return self.timeline or NoTimeline()

    def beside(self, observer: ExchangeObserver) -> ExchangeObserver:
        """Both look on at the exchange."""
        return Observers([observer, self.timeline]) if self.timeline else observer

    def is_due(self, step: int) -> bool:
        """Whether `step` steps are done and the window with them."""
        return self.timeline is not None and step >= self.timeline.last

    def write(self) -> str:
        """Gathers and writes; a line about it, empty where there is nothing (more) to write."""
        if self.timeline is None:
            return ""
        spans, self.timeline = self.timeline.spans(), None
        offsets = measure_offsets(self._group)
        mine = json.dumps({"host": socket.gethostname(), "spans": spans}).encode()
        said = self._group.gather_bytes(mine)
        if said is None or offsets is None:
            return ""
        ranks = []
        for rank, (data, offset) in enumerate(zip(said, offsets, strict=True)):
            word = json.loads(data)
            traced = [self._traced(TimelineSpan(*span)) for span in word["spans"]]
            ranks.append(TracedRank(rank, word["host"], *offset, traced))
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


# TensorBoard, for those who have it (`pip install paceline[tensorboard]`).
#
# In: the run's events. Out: scalars under `RUN/tensorboard`.


class TensorBoardWriter:
    """An `Observer`."""

    def __init__(self, folder: Path, first_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(
                "run.tensorboard", True, "tensorboard is not installed",
                "pip install 'paceline[tensorboard]', or leave it out",
            ) from None  # fmt: skip
        # Steps that a killed process logged after its last checkpoint are hidden again.
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
