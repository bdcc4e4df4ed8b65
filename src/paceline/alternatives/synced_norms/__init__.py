"""Batch norm over the micro-batches of several ranks: the strategy `synced_norms`."""
