"""SGD that begins as RMSprop (Akiba et al. 2017); docs/field/akiba.md has the algorithm."""
