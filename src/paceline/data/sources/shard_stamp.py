"""`ShardStamp`: by what a shard is known to be the one that was indexed.

In: a shard. Out: its size, its time of change, and a hash of some of its bytes; two shards that differ
in none of them are taken for one.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

_PROBE_BYTES = 1024


@dataclass(frozen=True)
class ShardStamp:
    """`probe` tells apart what a copying tool gave equal size and time."""

    size: int
    mtime_ns: int
    probe: bytes

    @classmethod
    def of(cls, path: Path) -> ShardStamp:
        """OSError where it cannot be read."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            middle = found.st_size // 2 // 512 * 512
            probed = b"".join(os.pread(descriptor, _PROBE_BYTES, at) for at in (0, middle))
        finally:
            os.close(descriptor)
        return cls(found.st_size, found.st_mtime_ns, hashlib.sha256(probed).digest())

    def fits(self, found: os.stat_result) -> bool:
        """Whether `found` may still be the same file, as far as a look from outside can tell."""
        return found.st_size == self.size and found.st_mtime_ns == self.mtime_ns
