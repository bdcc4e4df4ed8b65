"""Wire formats: the number formats in which gradients are sent, and their cost.

The built-in formats are number formats of the backends, which every all-reduce algorithm can sum.
`register_wire` adds further formats; each of them brings its own all-reduce. Functions that take
numbers of elements accept integers or NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError
from paceline.core.extensions import Registry

if TYPE_CHECKING:
    from paceline.plan.cost import Cost

AUTO = "auto"


@dataclass(frozen=True)
class Wire:
    """A number format in which gradients are sent; `auto` keeps each gradient's own format.

    Attributes:
        name: The name in `comm.wire` and in plans.
        bits: Bits of an element; 0 for `auto`.
        short: A shorter name that flags and arguments also accept.
        block: Number of elements in a block with common metadata, such as a scale.
        block_bytes: Bytes of metadata that are sent with each block.
        roundoff: The largest relative error of one rounding, for formats with their own all-reduce.
        algorithm: The name of the format's own all-reduce; empty if every algorithm can sum the format.
        cost: Function that predicts the seconds of the format's own all-reduce.
        small_range: True if typical gradients underflow in the format, as in float16. Losses are then
            scaled.
        casts: Time to encode and decode an element, relative to a cast from 32 to 16 bits and back.
        create: Function that makes the `WireCarrier` (`comm/planned_transport`), which executes the
            format's own all-reduce; or the import path of this function.
    """

    name: str
    bits: int = 0
    short: str = ""
    block: int = 1
    block_bytes: int = 0
    roundoff: float = 0.0
    algorithm: str = ""
    cost: Cost | None = None
    small_range: bool = False
    casts: float = 0.0
    create: Callable[..., Any] | str = ""

    @property
    def width(self) -> float:
        """The mean bytes per element, including its part of the block's metadata."""
        return self.bits / 8 + self.block_bytes / self.block


# The most exact format comes first: if two formats end the exchange equally soon, the planner takes the
# earlier one. float32 comes after auto, because 16-bit gradients gain little from a wider sum, which
# doubles their bytes.
_OWN = (
    Wire(AUTO), Wire("float32", 32, "fp32"), Wire("float16", 16, "fp16", small_range=True),
    Wire("bfloat16", 16, "bf16"),
)  # fmt: skip
WIRES: Registry[Wire] = Registry("wires", {wire.name: wire for wire in _OWN})
SHORT_WIRES = {wire.short: wire.name for wire in _OWN if wire.short}


def register_wire(wire: Wire) -> None:
    """Makes `wire` a wire format of this process. A second call replaces the first.

    Args:
        wire: The format, with its own all-reduce.

    Raises:
        ConfigError: If an installed format already has this name, or if `bits`, `algorithm`, `cost`
            or `create` is missing.

    Example:
        >>> wire = Wire("tenths", bits=16, algorithm="sum_of_tenths", cost=cost, create=Tenths)
        >>> pl.register_wire(wire)
    """
    if wire.bits < 1:
        raise ConfigError(f"{wire.name}.bits", wire.bits, "must be at least 1", "try 16")
    for name in ("algorithm", "cost", "create"):
        if not getattr(wire, name):
            problem = "is missing: a registered format needs its own all-reduce"
            raise ConfigError(f"{wire.name}.{name}", None, problem, f"give Wire(…, {name}=…)")
    WIRES.register(wire.name, wire)


def wire_format(name: str, field: str = "comm.wire") -> Wire:
    """Returns the format with the full name `name`. Raises ConfigError if there is none."""
    return WIRES.get(name, field)


def wire_names(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the full names of `names` without duplicates, the most exact format first.

    Raises ConfigError for an unknown name.
    """
    full = {_full_name(name) for name in names}
    return tuple(name for name in WIRES.names() if name in full)


def _full_name(name: str) -> str:
    if name in SHORT_WIRES or name in WIRES:
        return SHORT_WIRES.get(name, name)
    short = {wire_format(other, "--wire").short: other for other in WIRES.names() if name}
    return short.get(name) or wire_format(name, "--wire").name


def own_algorithm(wire: str) -> str:
    """Returns the name of the all-reduce that only this format uses, or "" if there is none."""
    return wire_format(wire).algorithm


def travelling(half: Any, full: Any, wire: str) -> tuple[Any, Any, Any]:
    """Returns how many bytes a bucket sends, and how many of its elements are cast.

    Args:
        half: Number of the bucket's elements that are stored in 16 bits.
        full: Number of the bucket's elements that are stored in 32 bits.
        wire: The wire format of the bucket.

    Returns:
        Bytes of the message with the 16-bit elements, bytes of the message with the 32-bit elements,
        and the number of elements that are cast to the wire format and back.
    """
    own = wire_format(wire)
    if own.algorithm:
        return half * own.width, full * own.width, (half + full) * own.casts
    cast = half * (own.bits == 32) + full * (own.bits == 16)
    return half * (own.width or 2), full * (own.width or 4), cast


def wire_bytes(elements: int, dtype: str, wire: str) -> int:
    """Returns the bytes that `elements` numbers of type `dtype` take in the format `wire`.

    The result includes the metadata of the blocks, such as scales.
    """
    own = wire_format(wire)
    # The name of a dtype ends with its number of bits.
    bits = own.bits or int("".join(c for c in dtype if c.isdigit()))
    return elements * bits // 8 + own.block_bytes * -(-elements // own.block)


def wide_is_bulk(half: Any, full: Any, wire: str) -> Any:
    """Returns True if a bucket's 32-bit elements are a larger (or equal) message than its 16-bit ones.

    The bucket's algorithm sums the larger of the two messages. The sizes do not include loss and
    flags.

    Args:
        half: Number of 16-bit elements, including padding.
        full: Number of 32-bit elements, including padding.
        wire: The wire format of the bucket.
    """
    narrow, wide, _ = travelling(half, full, wire)
    return wide >= narrow


def keeps_float32(wire: str) -> bool:
    """Returns True if 32-bit elements are sent in 32 bits.

    The loss and flags, which are always sent in fp32, can then be part of the same message.
    """
    return wire in (AUTO, "float32")
