"""8-bit wire formats with error feedback (docs/alternatives.md)."""
