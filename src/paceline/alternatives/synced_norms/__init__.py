"""The training strategy `synced_norms`: batch-norm statistics over the micro-batches of several ranks."""
