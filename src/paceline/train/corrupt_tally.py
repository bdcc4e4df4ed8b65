"""`CorruptTally`: which training samples were found corrupt, by all ranks and over all resumes.

In: what each rank's loader reports. Out: a set in the run's progress that is equal on all ranks, and
an error once it is larger than the share that the user allows. A loader knows only what it met itself
since its process began, and would count a sample again on every rank and after every resume.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.comm.group import Group
from paceline.core.errors import RunError
from paceline.data.corrupt import CorruptSample, allowed_corrupt
from paceline.train.progress import Progress


class CorruptTally:
    """Writes `progress.corrupt` (indices, rising) and its length, `progress.corrupt_samples`."""

    def __init__(self, progress: Progress, samples: int, share: float, group: Group) -> None:
        self._progress = progress
        self._samples = samples
        self._share = share
        self._limit = allowed_corrupt(share, samples)
        self._group = group

    def add(self, here: Sequence[CorruptSample]) -> list[CorruptSample]:
        """All ranks call it once one of them met corrupt samples; returns this rank's new ones."""
        known = set(self._progress.corrupt)
        found = torch.zeros(self._samples, dtype=torch.int32, device=self._group.device)
        found[[sample.index for sample in here]] = 1
        self._group.all_reduce_sum(found)
        self._progress.corrupt = sorted(known | set(found.nonzero().flatten().tolist()))
        self._progress.corrupt_samples = len(self._progress.corrupt)
        return [sample for sample in here if sample.index not in known]

    def check(self) -> None:
        """Raises, on all ranks alike, once there are more than allowed."""
        if self._progress.corrupt_samples > self._limit:
            raise RunError(
                f"{self._progress.corrupt_samples} corrupt of {self._samples} samples by step "
                f"{self._progress.step}, more than data.max_corrupt_share = {self._share:g} "
                f"allows ({self._limit})",
                "mend the data (metrics*.jsonl names the samples), or raise the share",
            )
