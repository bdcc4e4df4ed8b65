"""Asynchronous SGD with bounded staleness: the strategy `asynchronous`."""
