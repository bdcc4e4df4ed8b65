"""`paceline pack`: any source as tar shards."""
