"""Trains as a cluster would: the predicted times of the cluster that a run stands for."""
