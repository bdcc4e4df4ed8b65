"""Measurements for plans: links, all-reduces by size, a profiled step, and the plan file."""
