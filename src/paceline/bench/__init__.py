"""Measures one machine: its training step, input pipeline and all-reduces (`paceline bench`)."""
