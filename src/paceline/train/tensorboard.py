"""TensorBoard, for those who have it (`pip install paceline[tensorboard]`).

In: the run's events. Out: scalars under `RUN/tensorboard`.
"""

from __future__ import annotations

from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.core.events import EvalEvent, Event, StepEvent


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
