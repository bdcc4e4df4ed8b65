"""Loaders: prefetched batches for training, evaluation and custom loops."""
