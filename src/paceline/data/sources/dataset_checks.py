"""What a map-style dataset tells without reading its items (labels, class names), and whether several
threads may read it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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


# `threads_agree`: whether items read by several threads at once are those that one thread reads.
#
# A dataset with one file handle, or one buffer for all items, would give wrong images in silence.
# Races are a matter of chance: the check meets those that occur often.


_THREADS, _READS = 4, 4
# Pauses of a thread between the calls that the dataset makes, or short reads would hardly ever meet.
_PAUSES, _PAUSE_S = 200, 1e-5


def threads_agree(read: Callable[[int], object], items: Sequence[int]) -> bool:
    """`read` returns something comparable that shares no memory with other items. An item that fails,
    or differs between two reads of one thread, is left out: it says nothing about threads."""
    wanted = {}
    for i in items:
        try:
            one, two = read(i), read(i)
        except Exception:  # noqa: BLE001  (the user's code; it fails again where the item is used)
            continue
        if one == two:
            wanted[i] = one
    steady = list(wanted)
    if len(steady) < 2:
        return True
    start = threading.Barrier(_THREADS)

    def agrees(thread: int) -> bool:
        pauses = iter(range(_PAUSES))

        def pause(*_: object) -> None:
            if next(pauses, None) is not None:
                time.sleep(_PAUSE_S)

        start.wait()
        sys.setprofile(pause)  # of this thread alone
        try:
            turns = (steady[(thread + turn) % len(steady)] for turn in range(_READS))
            return all(read(i) == wanted[i] for i in turns)
        except Exception:  # noqa: BLE001  (one thread alone could read it)
            return False
        finally:
            sys.setprofile(None)

    with ThreadPoolExecutor(_THREADS) as threads:
        return all(list(threads.map(agrees, range(_THREADS))))
