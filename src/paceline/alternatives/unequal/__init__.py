"""The training strategy `unequal`: divides the global batch in proportion to the speed of ranks."""
