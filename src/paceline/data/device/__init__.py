"""The input pipeline on the training device: decoders, resident splits, normalization and copies."""
