"""`FusionPlan`: ordered buckets of gradients; `FlatLayout`: the places of tensors in one buffer.

The planner predicts the time of a plan, the communication module executes it, and the checkpoint pins it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from paceline.core.errors import ConfigError

# Besides the gradients, so many fp32 numbers of the step travel, and one for each tensor.
_SIGNALS = 11


@dataclass(frozen=True)
class FusionBucket:
    """Tensors that travel together.

    Attributes:
        tensors: Names of the tensors.
        algorithm: The all-reduce algorithm.
        wire: The wire format; `auto` sends each tensor in its own format.
        beside: The algorithm for the bucket's smaller messages: tensors in a format other than that
            of the largest message, and the signals. If empty, `algorithm` is used.
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
        """Puts all tensors into one bucket, with the backend's own all-reduce."""
        return cls((FusionBucket(tuple(tensors)),))

    @classmethod
    def by_threshold(
        cls,
        tensors: Sequence[tuple[str, int]],
        threshold: int,
        algorithm: str = "native",
        wire: str = "auto",
    ) -> FusionPlan:
        """Fills buckets in the order given, and closes each once it holds `threshold` bytes.

        Args:
            tensors: Pairs of name and bytes.
            threshold: Bytes of a full bucket.
            algorithm: The all-reduce algorithm of all buckets.
            wire: The wire format of all buckets.
        """
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
        """Returns all tensors, in sending order."""
        return tuple(name for bucket in self.buckets for name in bucket.tensors)

    @property
    def fingerprint(self) -> str:
        """Returns a text that identifies the plan; ranks compare it to compare their plans."""
        text = json.dumps(self.to_table(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def check(self, tensors: Sequence[str]) -> None:
        """Raises ConfigError unless the plan contains each of the model's `tensors` exactly once."""
        planned = self.tensors
        empty = [n for n, bucket in enumerate(self.buckets) if not bucket.tensors]
        if not self.buckets or (tensors and empty):
            where = f"bucket {empty[0] + 1} has no tensor" if empty else "has no bucket"
            raise ConfigError("plan", None, where, "make a new plan for this model")
        missing = sorted(set(tensors) - set(planned))
        foreign = sorted(set(planned) - set(tensors))
        twice = sorted(name for name, count in Counter(planned).items() if count > 1)
        for problem, names in (("lacks", missing), ("names unknown", foreign), ("repeats", twice)):
            if names:
                raise ConfigError(
                    "plan",
                    None,
                    f"{problem} {', '.join(names[:3])} ({len(names)} in all)",
                    "make a new plan for this model",
                )

    def to_table(self) -> dict[str, Any]:
        """Returns plain lists and strings, for TOML, JSON and the checkpoint."""
        return {"buffer": [_to_row(bucket) for bucket in self.buckets]}

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> FusionPlan:
        """Builds the plan from the result of `to_table`."""
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
        raise TypeError(
            "a bucket must have tensors (a list of names), algorithm and wire (both texts)"
        )
    return FusionBucket(names, *words)


def padded(elements: Any) -> Any:
    """Returns the number of elements of a tensor in a flat buffer, including padding."""
    return -(-elements // _ALIGN) * _ALIGN


def signal_bytes(tensors: int) -> int:
    """Returns the bytes that the last bucket of a step contains besides gradients."""
    return 4 * (_SIGNALS + tensors)


# 32 elements are 128 bytes of float32 and 64 of the 16-bit formats. Every device reads a tensor that
# starts on such a boundary in full-width vector loads.
_ALIGN = 32


@dataclass(frozen=True)
class TensorSpec:
    """A tensor by name and shape. `dtype` is the name of its format, such as `float32`."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def length(self) -> int:
        """Returns the number of elements; a scalar has one."""
        return math.prod(self.shape)


class Slot(NamedTuple):
    """The place of one tensor: elements `offset` to `stop` of a flat buffer."""

    name: str
    offset: int
    stop: int


@dataclass(frozen=True)
class FlatLayout:
    """Tensors of one number format, each starting on a boundary, and the padded length of the whole."""

    slots: tuple[Slot, ...]
    length: int

    @classmethod
    def build(cls, specs: Sequence[TensorSpec]) -> FlatLayout:
        """Places tensors of one number format in the order given."""
        slots, offset = [], 0
        for spec in specs:
            slots.append(Slot(spec.name, offset, offset + spec.length))
            offset += padded(spec.length)
        return cls(tuple(slots), offset)
