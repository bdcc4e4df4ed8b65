"""All parsers that are fuzzed."""

from __future__ import annotations

from collections.abc import Sequence

from fuzz.data_targets import data_targets
from fuzz.document_targets import document_targets
from fuzz.hostile_targets import hostile_targets
from fuzz.image_targets import image_targets
from fuzz.target import Target
from fuzz.weight_targets import weight_targets


def all_targets() -> Sequence[Target]:
    return [
        *image_targets(),
        *data_targets(),
        *weight_targets(),
        *document_targets(),
        *hostile_targets(),
    ]
