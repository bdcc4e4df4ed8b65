"""The part of the pipeline on the training device: decoders, resident sets, normalization, copies."""
