"""Shares of the global batch by the speed of ranks: the strategy `unequal`."""
