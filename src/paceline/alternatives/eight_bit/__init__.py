"""8-bit wire formats with error feedback; see docs/field/eight-bit-wires.md."""
