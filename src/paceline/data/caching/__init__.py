"""Samples kept for later epochs."""
