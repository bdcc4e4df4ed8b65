"""Predicts times and memory of jobs on clusters that need not exist, and recommends batch and nodes.

The package works without torch.
"""
