"""Mutation tests: deliberate bugs in the parts that decide what is trained, each killed by some test."""
