"""Faster forms of parts of a model: fused norms and convolutions, recomputed norms, torch.compile."""
