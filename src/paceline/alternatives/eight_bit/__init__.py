"""8-bit wire formats with error feedback; docs/field/eight-bit-wires.md has the algorithm."""
