"""8-bit wire formats with error feedback; see docs/alternatives.md."""
