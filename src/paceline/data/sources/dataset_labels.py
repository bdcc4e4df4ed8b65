"""Labels and class names that a map-style dataset tells without reading its items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset

LABEL_KEYS = ("label", "labels")
_LABEL_ATTRIBUTES = ("targets", "labels", "samples")


def find(dataset: Any, own: Any) -> Any:
    """What `own` finds of the dataset, or of those that it is a part or a chain of."""
    if isinstance(dataset, Subset):
        whole = find(dataset.dataset, own)
        if whole is None or own is own_classes:
            return whole
        return np.asarray(whole)[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        parts = [find(part, own) for part in dataset.datasets]
        if any(part is None for part in parts):
            return None
        if own is own_classes:
            return parts[0] if all(list(part) == list(parts[0]) for part in parts) else None
        return np.concatenate([np.asarray(part) for part in parts])
    try:
        return own(dataset)
    except Exception:  # noqa: BLE001  (a property of the user's that fails is none)
        return None


def own_labels(dataset: Any) -> Any:
    features = getattr(dataset, "features", None)
    if isinstance(features, Mapping):  # Hugging Face
        key = next((key for key in LABEL_KEYS if key in features), None)
        return None if key is None else list(dataset[key])
    for name in _LABEL_ATTRIBUTES:
        found = getattr(dataset, name, None)
        if found is not None and not callable(found):
            return [label for _, label in found] if name == "samples" else found
    return None


def own_classes(dataset: Any) -> Sequence[str] | None:
    features = getattr(dataset, "features", None)
    if isinstance(features, Mapping):
        key = next((key for key in LABEL_KEYS if key in features), None)
        names = getattr(features.get(key), "names", None)
    else:
        names = getattr(dataset, "classes", None)
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return None
    return names
