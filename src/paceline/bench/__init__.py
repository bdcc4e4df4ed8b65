"""Measurements against peers, each in the same run on the same machine."""
