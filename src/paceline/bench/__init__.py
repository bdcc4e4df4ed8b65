"""Measurements of one machine: training step, input pipeline, all-reduce."""
