"""Loaders, which yield prefetched batches for training, evaluation and custom loops."""
