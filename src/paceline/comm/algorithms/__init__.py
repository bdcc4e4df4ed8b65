"""All-reduce algorithms: one interface, seven ways.

Files from the bottom up: `lane` (messages), `segments` (rounds, pipelined), the building blocks
(`rooted`, `owners`, `ring_rounds`, `halving_rounds`, `flood`), the algorithms made of them, `catalogue`.
"""
