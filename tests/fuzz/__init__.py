"""Mutated inputs for every parser: `make fuzz`, or `python -m fuzz --help` with `tests` on the path."""
