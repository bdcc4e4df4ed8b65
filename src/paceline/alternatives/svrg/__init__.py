"""SVRG and HALP, variance reduction in full and low precision; see docs/alternatives.md."""
