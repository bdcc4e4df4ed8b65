"""Packs data sets into shards, and inspects them."""
