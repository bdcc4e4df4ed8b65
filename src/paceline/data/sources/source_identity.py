"""By what a data set is known again: a digest of what a source holds.

In: a source. Out: a short text that changes when its classes, labels or samples do, as far as that can be
told without reading every image: files and shards are known by name, size and time of change. So a copy
that keeps the times has the identity of its original, wherever it lies; one with new times is other data.
"""

from __future__ import annotations

import hashlib
import json
from typing import Protocol, runtime_checkable

from paceline.data.sources.source_protocol import ArraySource, Source


@runtime_checkable
class Identified(Protocol):
    """A source that knows more about its files than their labels."""

    def identity(self) -> bytes: ...


def source_identity(source: Source) -> str:
    digest = hashlib.sha256()
    digest.update(json.dumps(list(source.classes)).encode())
    digest.update(source.labels.tobytes())
    if isinstance(source, Identified):
        digest.update(source.identity())
    elif isinstance(source, ArraySource):
        digest.update(source.pixels.tobytes())
    else:
        for i in range(len(source)):
            digest.update(source.name(i).encode("utf-8", "surrogateescape") + b"\0")
    return digest.hexdigest()[:32]
