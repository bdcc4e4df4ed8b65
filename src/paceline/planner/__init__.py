"""Predictions for jobs on clusters that are not there: times, memory, recommendations. Without torch."""
