"""Wire formats: the number formats in which gradients travel, and what they cost.

The core has those of the backends, which every all-reduce can sum. `register_wire` adds others, which
bring an all-reduce of their own. Numbers of elements may be integers or arrays.
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
    """A number format in which gradients travel; `auto` leaves each gradient in its own.

    Attributes:
        name: The name in `comm.wire` and in plans.
        bits: Size of a number; 0 for `auto`.
        short: Another name, for flags and arguments.
        block: How many numbers share what `block_bytes` contains, such as a scale.
        block_bytes: Bytes that travel with each block.
        roundoff: The largest relative error of one rounding, for formats with an own all-reduce.
        algorithm: The name of the format's own all-reduce; empty if every algorithm can sum the format.
        cost: Seconds of that all-reduce.
        small_range: True if numbers of usual gradients fall below the smallest of the format, as in
            float16: losses are then scaled.
        casts: Time to encode and decode a number, in casts from 32 to 16 bits and back.
        create: Makes the `WireCarrier` (`comm/planned_transport`) that executes it, or its place.
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
        """Bytes of a number, with its part of the block's."""
        return self.bits / 8 + self.block_bytes / self.block


# The more exact first: of two that end as soon, the earlier one is taken. float32 comes after auto,
# because what is computed in 16 bits gains little from a wider sum and takes twice the bytes.
_OWN = (
    Wire(AUTO), Wire("float32", 32, "fp32"), Wire("float16", 16, "fp16", small_range=True),
    Wire("bfloat16", 16, "bf16"),
)  # fmt: skip
WIRES: Registry[Wire] = Registry("wires", {wire.name: wire for wire in _OWN})
SHORT_WIRES = {wire.short: wire.name for wire in _OWN if wire.short}


def register_wire(wire: Wire) -> None:
    """Makes `wire` a wire format of this process. A second call replaces the first. Raises ConfigError
    for a name that is installed, and for a format without size or all-reduce."""
    if wire.bits < 1:
        raise ConfigError(f"{wire.name}.bits", wire.bits, "must be at least 1", "try 16")
    for name in ("algorithm", "cost", "create"):
        if not getattr(wire, name):
            problem = "is missing: a format from outside has an all-reduce of its own"
            raise ConfigError(f"{wire.name}.{name}", None, problem, f"give Wire(…, {name}=…)")
    WIRES.register(wire.name, wire)


def wire_format(name: str, field: str = "comm.wire") -> Wire:
    """Returns the format of this full name; ConfigError if there is none."""
    return WIRES.get(name, field)


def wire_names(names: Sequence[str]) -> tuple[str, ...]:
    """Full names, each once, the most exact first; ConfigError for others."""
    full = {_full_name(name) for name in names}
    return tuple(name for name in WIRES.names() if name in full)


def _full_name(name: str) -> str:
    if name in SHORT_WIRES or name in WIRES:
        return SHORT_WIRES.get(name, name)
    short = {wire_format(other, "--wire").short: other for other in WIRES.names() if name}
    return short.get(name) or wire_format(name, "--wire").name


def own_algorithm(wire: str) -> str:
    """The all-reduce that belongs to a format; empty if the format has none."""
    return wire_format(wire).algorithm


def travelling(half: Any, full: Any, wire: str) -> tuple[Any, Any, Any]:
    """Bytes of the message with what is held in 16 bits and of that with the rest, and the elements
    that are cast there and back."""
    form = wire_format(wire)
    if form.algorithm:
        return half * form.width, full * form.width, (half + full) * form.casts
    cast = half * (form.bits == 32) + full * (form.bits == 16)
    return half * (form.width or 2), full * (form.width or 4), cast


def wire_bytes(elements: int, dtype: str, wire: str) -> int:
    """Bytes of `elements` numbers of the format `dtype` on the wire, scales included."""
    form = wire_format(wire)
    # A format's name ends with its bits.
    bits = form.bits or int("".join(c for c in dtype if c.isdigit()))
    return elements * bits // 8 + form.block_bytes * -(-elements // form.block)


def wide_is_bulk(half: Any, full: Any, wire: str) -> Any:
    """Returns True if the bucket's algorithm is for what is held in 32 bits, and the one beside it for
    what is held in 16; from padded elements. As the communication module has it: before the signals are
    added, and of two as large the 32 bits."""
    narrow, wide, _ = travelling(half, full, wire)
    return wide >= narrow


def keeps_float32(wire: str) -> bool:
    """Returns True if what is held in 32 bits travels in 32 bits, so that the signals may ride along."""
    return wire in (AUTO, "float32")
