"""Data sets as a whole: opened split by split, packed into shards, and inspected."""
