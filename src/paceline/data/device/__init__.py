"""The input pipeline on the GPU: decoding, augmentation, normalization, copies and cached images."""
