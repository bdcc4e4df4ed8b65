"""`FusionPlan`: ordered buckets, each with its tensors, its algorithm and its wire format; and
`FlatLayout`: where tensors lie in one contiguous buffer.

In: the tensors' names in the order in which backward makes them ready. Out: the one object that the
simulator scores, the communication module executes and the checkpoint pins.

A layout is made of the tensors' names, shapes and number format, in the order in which they shall lie:
for each its offset and length in elements, and the padded length of the whole.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import ConfigError

# Beside the gradients travel, in fp32, six numbers of the step and one for each tensor.
_SIGNALS = 11


@dataclass(frozen=True)
class FusionBucket:
    """Tensors that travel together.

    `wire` is the format that travels; `auto` leaves each tensor in its own. `beside` is the algorithm for
    the small messages beside the bulk: tensors in another format, and the signals; empty, the same.
    """

    tensors: tuple[str, ...]
    algorithm: str = "native"
    wire: str = "auto"
    beside: str = ""

    @property
    def beside_algorithm(self) -> str:
        return self.beside or self.algorithm


@dataclass(frozen=True)
class FusionPlan:
    """Buckets in the order in which they are sent."""

    buckets: tuple[FusionBucket, ...]

    @classmethod
    def single(cls, tensors: Sequence[str]) -> FusionPlan:
        """Everything in one bucket, by the backend's own all-reduce."""
        return cls((FusionBucket(tuple(tensors)),))

    @classmethod
    def by_threshold(
        cls,
        tensors: Sequence[tuple[str, int]],
        threshold: int,
        algorithm: str = "native",
        wire: str = "auto",
    ) -> FusionPlan:
        """Pools (name, bytes) in the order given; a pool is closed once it holds `threshold` bytes."""
        pools: list[list[str]] = [[]]
        filled = 0
        for name, size in tensors:
            if pools[-1] and filled >= threshold:
                pools.append([])
                filled = 0
            pools[-1].append(name)
            filled += size
        return cls(tuple(FusionBucket(tuple(pool), algorithm, wire) for pool in pools))

    @property
    def tensors(self) -> tuple[str, ...]:
        """All tensors, in sending order."""
        return tuple(name for bucket in self.buckets for name in bucket.tensors)

    @property
    def fingerprint(self) -> str:
        """Equal on two ranks exactly where their plans are equal."""
        text = json.dumps(self.to_table(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def check(self, tensors: Sequence[str]) -> None:
        """Fails unless the plan carries each of the model's `tensors` exactly once."""
        planned = self.tensors
        empty = [n for n, bucket in enumerate(self.buckets) if not bucket.tensors]
        if not self.buckets or (tensors and empty):
            where = f"bucket {empty[0] + 1} has no tensor" if empty else "has no bucket"
            raise ConfigError("plan", None, where, "make the plan for this very model")
        missing = sorted(set(tensors) - set(planned))
        foreign = sorted(set(planned) - set(tensors))
        twice = sorted(name for name, count in Counter(planned).items() if count > 1)
        for problem, names in (("lacks", missing), ("names unknown", foreign), ("repeats", twice)):
            if names:
                raise ConfigError(
                    "plan",
                    None,
                    f"{problem} {', '.join(names[:3])} ({len(names)} in all)",
                    "make the plan for this very model",
                )

    def to_table(self) -> dict[str, Any]:
        """Plain lists and strings, for TOML, JSON and the checkpoint."""
        return {"buffer": [_to_row(bucket) for bucket in self.buckets]}

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> FusionPlan:
        """The inverse of `to_table`."""
        try:
            return cls(tuple(_from_row(row) for row in table["buffer"]))
        except (KeyError, TypeError) as error:
            raise ConfigError(
                "plan", None, f"not a fusion plan ({error})", "make it anew"
            ) from None


def _to_row(bucket: FusionBucket) -> dict[str, Any]:
    row = {"tensors": list(bucket.tensors), "algorithm": bucket.algorithm, "wire": bucket.wire}
    return row | ({"beside": bucket.beside} if bucket.beside else {})


def _from_row(row: Mapping[str, Any]) -> FusionBucket:
    names = tuple(row["tensors"])
    words = (row["algorithm"], row["wire"], row.get("beside", ""))
    if isinstance(row["tensors"], str) or not all(isinstance(w, str) for w in (*names, *words)):
        raise TypeError("a bucket has tensors, a list of names, and algorithm and wire, texts")
    return FusionBucket(names, *words)


def padded(elements: Any) -> Any:
    """What tensors take in the flat buffers: each one begins on a boundary."""
    return -(-elements // DEFAULT_ALIGN) * DEFAULT_ALIGN


def signal_bytes(tensors: int) -> int:
    """Of what a step's last bucket carries besides gradients."""
    return 4 * (_SIGNALS + tensors)


# 32 elements are 128 bytes of float32 and 64 of the 16-bit formats; a tensor that starts on such a
# boundary is read in full-width vector loads on every device.
DEFAULT_ALIGN = 32


@dataclass(frozen=True)
class TensorSpec:
    """A tensor by name and shape. `dtype` is the format's plain name, such as `float32`."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.shape):
            raise ValueError(f"tensor {self.name!r}: shape {self.shape} has a negative size")

    @property
    def length(self) -> int:
        """Number of elements; a scalar has one."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Slot:
    """The place of one tensor: elements `offset` to `offset + length`."""

    spec: TensorSpec
    offset: int

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def length(self) -> int:
        return self.spec.length

    @property
    def stop(self) -> int:
        return self.offset + self.spec.length


@dataclass(frozen=True)
class FlatLayout:
    """Tensors of one number format laid end to end, each start aligned, the whole padded."""

    slots: tuple[Slot, ...]
    dtype: str
    length: int
    align: int

    @classmethod
    def build(cls, specs: Sequence[TensorSpec], *, align: int = DEFAULT_ALIGN) -> FlatLayout:
        """Lays `specs` out in the order given. All must have one format, and names must differ."""
        if align < 1:
            raise ValueError(f"align = {align}: must be at least 1")
        formats = {spec.dtype for spec in specs}
        if len(formats) > 1:
            raise ValueError(f"one layout has one number format, not {sorted(formats)}")
        names = [spec.name for spec in specs]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"tensor names must differ; repeated: {twice}")
        slots, offset = [], 0
        for spec in specs:
            slots.append(Slot(spec, offset))
            offset += -(-spec.length // align) * align
        return cls(tuple(slots), next(iter(formats), "float32"), offset, align)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots)

    def __len__(self) -> int:
        return len(self.slots)
