"""Decoders on the host."""
