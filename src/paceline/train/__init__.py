"""The only wiring: build a run from its configuration, step, loop, evaluate, checkpoint."""
