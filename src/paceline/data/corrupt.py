"""`CorruptLog`: which samples could not be decoded, and how many may be.

In: samples found corrupt, by any thread, in any order. Out: each reported once, in the order of the
stream; a `DataError` once there are more than the share that the user allows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.core.errors import DataError


@dataclass(frozen=True)
class CorruptSample:
    """A sample that was replaced (training) or left out (evaluation)."""

    index: int
    name: str
    reason: str


def allowed_corrupt(share: float, samples: int) -> int:
    """How many of `samples` may be corrupt: their share, yet one always, unless `share` is 0."""
    return max(1, int(share * samples)) if share > 0 else 0


class CorruptLog:
    """One a loader. Threads add to what is known; only the consumer reports."""

    def __init__(self, samples: int, share: float) -> None:
        """`share` of `samples` may be corrupt, yet one always, unless `share` is 0."""
        self.limit = allowed_corrupt(share, samples)
        self._samples = samples
        self._known: dict[int, CorruptSample] = {}
        self._reported: dict[int, CorruptSample] = {}

    def known(self, index: int) -> CorruptSample | None:
        return self._known.get(index)

    def add(self, sample: CorruptSample) -> None:
        self._known.setdefault(sample.index, sample)

    def report(self, met: Iterable[CorruptSample]) -> tuple[CorruptSample, ...]:
        """Those of `met` not reported before. Prefetching order does not show: the consumer asks
        batch by batch."""
        new = {s.index: s for s in met if s.index not in self._reported}
        self._reported.update(new)
        if len(self._reported) > self.limit or len(self._reported) == self._samples:
            raise self.error(self._reported.values())
        return tuple(new.values())

    @property
    def reported(self) -> tuple[CorruptSample, ...]:
        return tuple(self._reported.values())

    def error(self, samples: Iterable[CorruptSample]) -> DataError:
        """Names the first of `samples`; the count tells a stray file from a broken data set."""
        found = list(samples)
        return DataError(
            f"{len(found)} corrupt of {self._samples} samples (allowed: {self.limit}); the first: "
            f"{found[0].name}: {found[0].reason}",
            "mend the data, or raise data.max_corrupt_share",
        )
