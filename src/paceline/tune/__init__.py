"""Measures links, all-reduces and a model's training step, from which `paceline tune` makes plans."""
