"""Optimizers and schedules; torch is imported only by what needs it."""
