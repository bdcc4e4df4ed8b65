"""`FusionPlan`: ordered buckets of gradients; `FlatLayout`: the offsets of tensors in a flat buffer.

The planner predicts the time of a plan, and `paceline.comm` executes the plan. A checkpoint stores the
plan, so that a resumed run uses the same plan.
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

# Number of fp32 values that each step sends besides the gradients and one value for each tensor.
_SIGNALS = 11


@dataclass(frozen=True)
class FusionBucket:
    """A bucket: gradients that are all-reduced together, and how.

    Attributes:
        tensors: Names of the tensors.
        algorithm: The all-reduce algorithm for the bucket's largest message.
        wire: The number format in which gradients are sent; `auto` sends each tensor in its own
            dtype.
        beside: The algorithm for the bucket's smaller messages. They contain the tensors of another
            dtype than the largest message, and the loss and flags that ranks share in each step. If
            empty, `algorithm` is used.
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
    """Describes the gradient all-reduce: buckets in the order in which they are sent."""

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
        """Fills buckets with tensors in the order given; closes a bucket once it has `threshold` bytes.

        Args:
            tensors: For each tensor its name and its size in bytes.
            threshold: Bytes from which on a bucket is full.
            algorithm: The all-reduce algorithm of all buckets.
            wire: The number format in which all buckets are sent.
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
        """The names of all tensors, in the order in which the plan sends them."""
        return tuple(name for bucket in self.buckets for name in bucket.tensors)

    @property
    def fingerprint(self) -> str:
        """A hash of the plan, by which ranks check that they have the same plan."""
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
        """Returns the plan as plain lists, dicts and strings, for TOML, JSON and checkpoints."""
        return {"buffer": [_to_row(bucket) for bucket in self.buckets]}

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> FusionPlan:
        """Builds a plan from the result of `to_table`. Raises ConfigError if `table` is invalid."""
        try:
            return cls(tuple(_from_row(row) for row in table["buffer"]))
        except (KeyError, TypeError) as error:
            raise ConfigError(
                "plan", None, f"not a plan with buckets ({error})", "make a new plan"
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
    """Returns the number of elements that a tensor takes in a flat buffer, including padding."""
    return -(-elements // _ALIGN) * _ALIGN


def signal_bytes(tensors: int) -> int:
    """Returns how many bytes the last bucket of a step contains in addition to gradients.

    Args:
        tensors: Number of tensors of the plan.
    """
    return 4 * (_SIGNALS + tensors)


# 32 elements are 128 bytes of float32 and 64 of the 16-bit formats. Every device reads a tensor that
# starts on such a boundary in full-width vector loads.
_ALIGN = 32


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and number format of a tensor. `dtype` is a name such as `float32`."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def length(self) -> int:
        """The number of elements; a scalar has one."""
        return math.prod(self.shape)


class Slot(NamedTuple):
    """The position of a tensor in a flat buffer: elements `offset` to `stop` − 1."""

    name: str
    offset: int
    stop: int


@dataclass(frozen=True)
class FlatLayout:
    """The positions of tensors of one dtype in a flat buffer.

    Each tensor starts at an aligned offset. `length` is the number of elements including padding.
    """

    slots: tuple[Slot, ...]
    length: int

    @classmethod
    def build(cls, specs: Sequence[TensorSpec]) -> FlatLayout:
        """Computes the positions of tensors of one dtype, in the order given."""
        slots, offset = [], 0
        for spec in specs:
            slots.append(Slot(spec.name, offset, offset + spec.length))
            offset += padded(spec.length)
        return cls(tuple(slots), offset)
