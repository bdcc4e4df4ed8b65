"""SGD that begins as RMSprop (Akiba et al. 2017); docs/alternatives.md has the algorithm."""
