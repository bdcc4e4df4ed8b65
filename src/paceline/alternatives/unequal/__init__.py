"""The strategy `unequal`: parts of the global batch in proportion to the speed of ranks."""
