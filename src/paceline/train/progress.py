"""`Progress`: how far a run has come. Saved with every checkpoint, equal on all ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Progress:
    """Counts of completed work. Times add up over all processes that worked on the run."""

    step: int = 0
    images: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    # Whether the latest step's training loss was finite.
    loss_finite: bool = True
    corrupt_samples: int = 0
    corrupt: list[int] = field(default_factory=list)
    corrupt_val_samples: int = 0
    train_s: float = 0.0
    step_s: float = 0.0
    evaluated_step: int = -1
    top1: float | None = None
    top5: float | None = None
    val_loss: float | None = None
    best_top1: float = -1.0
    best_step: int = -1
    time_to_target_s: float | None = None
    resumes: list[int] = field(default_factory=list)

    def to_table(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_table(cls, table: dict[str, Any]) -> Progress:
        return cls(**table)

    @property
    def images_per_s(self) -> float:
        """Training throughput: evaluation and saving are not in it."""
        return self.images / self.step_s if self.step_s > 0 else 0.0
